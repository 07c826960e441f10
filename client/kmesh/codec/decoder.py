"""Members out of recipes, bit for bit."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.codec.memory import Bytes, root_of
from kmesh.codec.recipe import Recipe, raise_wrong
from kmesh.codec.segments import Base, Segment, check_shared
from kmesh.errors import RecipeChecksumError, RecipeMismatch

#: A recipe of few bytes may describe many: more than this must be asked for.
MAX_PAYLOAD_BYTES = 1 << 32


class DecodePlan:
    """A recipe beside the memory that it refers to: addresses and op records, nothing else.

    Args:
        recipe: what is to be done.
        base: must hold the recipe's segments, as they were when it was made.
        max_bytes: of the payload, and of the literals; checked before either is allocated.

    Raises:
        RecipeMismatch: a segment is not there or is another one, or the payload is too large.
        RecipeFormatError: compressed literals are not what their chunks say.
    """

    def __init__(self, recipe: Recipe, base: Base, max_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.recipe = recipe
        size = recipe.description.payload_bytes
        for field, amount in (("tokens", size), ("literal_bytes", recipe.head["literal_bytes"])):
            if amount > max_bytes:
                raise RecipeMismatch(f"{amount} bytes are more than {max_bytes}", field=field)
        self.segments = [match(recipe, number, base) for number in range(len(recipe.segments))]
        pairs = [(one.address, one.rows.nbytes) for one in self.segments]
        self.addresses = array("Q", [word for pair in pairs for word in pair])
        self.literals = recipe.literals()

    def run(self, begin: int, end: int, out: npt.NDArray[np.uint8]) -> None:
        """Runs [begin, end) to ``out``, which has exactly their bytes.

        Raises:
            RecipeFormatError: a difference contradicts itself.
            ValueError: ``out`` has another size.
        """
        wrong = _host.recipe_decode(
            self.recipe.file.data, self.literals.data, self.addresses, begin, end, out.data
        )
        if wrong is not None:
            raise_wrong(*wrong)


def match(recipe: Recipe, number: int, base: Base) -> Segment:
    """The base's segment that a recipe's segment record names, if it is the same still."""
    record = recipe.segments[number]
    segment = base.find(record["key"].tobytes())
    if segment is None:
        raise RecipeMismatch("is not in the base", field="segments.key", record=number)
    check_shared(segment.description, recipe.description, "segments", number)
    for name in ("tokens", "position", "generation"):
        have, want = getattr(segment.description, name), int(record[name])
        if have != want:
            raise RecipeMismatch(
                f"{want} is named, the base has {have}", field=f"segments.{name}", record=number
            )
    if segment.root != int(record["root"]):
        raise RecipeMismatch("the base has other bytes", field="segments.root", record=number)
    if segment.digest != record["digest"].tobytes():
        raise RecipeMismatch("the base has other bytes", field="segments.digest", record=number)
    return segment


def decode(
    recipe: Recipe | Bytes, base: Base | None = None, *, max_bytes: int = MAX_PAYLOAD_BYTES
) -> npt.NDArray[np.uint8]:
    """A member's payload, verified.

    Args:
        recipe: parsed, or its bytes.
        base: what it refers to; none for a recipe that refers to nothing.
        max_bytes: the most that is allocated for the payload, and for literals.

    Raises:
        RecipeFormatError: this is no recipe.
        RecipeMismatch: the base is not the one that the recipe names, or the payload too large.
        RecipeChecksumError: the recipe was changed, or gave other bytes than it should.
    """
    parsed = recipe if isinstance(recipe, Recipe) else Recipe(recipe)
    plan = DecodePlan(parsed, base or Base(), max_bytes)
    out = np.empty(parsed.description.payload_bytes, dtype=np.uint8)
    plan.run(0, parsed.description.runs, out)
    if root_of(out) != parsed.head["payload_root"]:
        raise RecipeChecksumError("other bytes came out", field="payload_root")
    return out
