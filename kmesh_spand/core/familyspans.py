"""Where a family's spans are, tier by tier."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from kmesh_spand.core.batch import Rows
from kmesh_spand.core.family import Family, Owner
from kmesh_spand.core.states import STORED, State
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tags import scope
from kmesh_spand.core.tenants import Tenant


class FamilySpans:
    """Looks, changes nothing."""

    def __init__(self, store: SpanStore) -> None:
        self._store = store

    def tenants(self, owner: Owner) -> list[Tenant]:
        """Whose a family's spans are: one tenant in each tier."""
        store = self._store
        each = (store.tenants.find(*owner, tier) for tier in sorted(store.tiers))
        return [tenant for tenant in each if tenant is not None]

    def found(self, family: Family, key: bytes) -> Iterator[tuple[int, int]]:
        """(shard, row) of all spans of a key; row 0 is none."""
        store = self._store
        for tenant, shard in itertools.product(self.tenants(family.owner), family.shards):
            yield shard, store.resolve(store.table.find(key, scope(tenant.number, shard)))

    def tiers(self, family: Family) -> list[int]:
        """Where its tenant has, or had, something."""
        return [tenant.tier for tenant in self.tenants(family.owner)]

    def there(self, family: Family, tier: int) -> bool:
        """Whether anything of a family is stored in a tier."""
        keys = dict.fromkeys(family.base)
        keys |= {key: 0 for member in family.members.values() for key in member.keys}
        return next(self.stored(family, list(keys), tier), None) is not None

    def rows(
        self, family: Family, keys: Sequence[bytes] | None = None, tier: int | None = None
    ) -> list[int]:
        """Stored spans of a family, or of some of its keys, each once; the base's left out.

        Args:
            tier: only there.
        """
        if keys is None:
            keys = list({key: None for m in family.members.values() for key in m.keys})
        own = [key for key in keys if key not in family.base]
        return list(dict.fromkeys(row for _, _, row in self.stored(family, own, tier)))

    def base_rows(
        self, family: Family, keys: Sequence[bytes] | None = None, tier: int | None = None
    ) -> list[int]:
        """Stored spans of a family's base, or of some of its keys, each once; as ``rows``."""
        keys = list(family.base) if keys is None else keys
        return list(dict.fromkeys(row for _, _, row in self.stored(family, keys, tier)))

    def stored(
        self, family: Family, keys: Sequence[bytes], tier: int | None = None
    ) -> Iterator[tuple[bytes, int, int]]:
        """(key, shard, row) of every stored span of these keys, by their own or a further name."""
        store, table = self._store, self._store.table
        if not keys:
            return
        packed = b"".join(keys)
        for tenant, shard in itertools.product(self.tenants(family.owner), family.shards):
            if tier not in (None, tenant.tier):
                continue
            rows = table.find_all(packed, scope(tenant.number, shard))[0]
            for key, found in zip(keys, rows, strict=True):
                row = store.resolve(found)
                if table.state[row] in STORED:
                    yield key, shard, row

    def base(self, family: Family, shard: int, tier: int) -> Rows | None:
        """Rows of a family's base in a shard and a tier, by number; None unless all of it is
        served, dense."""
        store, table = self._store, self._store.table
        tenant = store.tenants.find(*family.owner, tier)
        if tenant is None:
            return None
        rows, _ = table.find_all(family.base_keys, scope(tenant.number, shard))
        states = table.batch.gather_bytes(rows, table.state)
        if states.count(State.COMMITTED) < len(family.base) or store.mirrors.among(rows):
            return None
        return rows

    def whole(self, family: Family, row: int) -> bool:
        """Whether the base is all there in a row's shard and tier."""
        shard, tier = self._store.shard(row), self._store.tier_of(row)
        return shard in family.shards and self.base(family, shard, tier) is not None
