"""What a key is to the families of its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kmesh_spand.core.family import Family, Owner


@dataclass(frozen=True, slots=True)
class Place:
    """What a key is to a family: a span of the member of that name, or of the base (None)."""

    family: Family
    member: str | None


class FamilyKeys:
    """All keys that families name, each with one place in each of them."""

    def __init__(self) -> None:
        self._places: dict[Owner, dict[bytes, list[Place]]] = {}

    def of(self, owner: Owner) -> Mapping[bytes, Sequence[Place]]:
        """An owner's keys."""
        return self._places.get(owner, {})

    def names(self, family: Family, key: bytes) -> bool:
        """Whether a key is a family's already."""
        return any(place.family is family for place in self.of(family.owner).get(key, ()))

    def is_base(self, owner: Owner, key: bytes) -> bool:
        """Whether a key is of the base of any of an owner's families."""
        return any(place.member is None for place in self.of(owner).get(key, ()))

    def add(self, key: bytes, family: Family, member: str | None) -> bool:
        """A key is a family's; False if it was. What is of the base is no member's."""
        places = self._places.setdefault(family.owner, {}).setdefault(key, [])
        for number, place in enumerate(places):
            if place.family is family:
                if member is None and place.member is not None:
                    places[number] = Place(family, None)
                return False
        places.append(Place(family, None if key in family.base else member))
        return True

    def forget(self, family: Family) -> None:
        """All keys of a family are its no more."""
        places = self._places[family.owner]
        keys = {key for member in family.members.values() for key in member.keys}
        for key in keys | family.base.keys():
            left = [place for place in places[key] if place.family is not family]
            if left:
                places[key] = left
            else:
                del places[key]
        if not places:
            del self._places[family.owner]
