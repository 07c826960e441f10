"""Jobs of the store worker and of device workers, and how they end."""

from __future__ import annotations

import msgspec

from kmesh_spand.messages import Message


class Staging(Message, frozen=True):
    """To the worker: a session's staging, with its fd."""

    session: int
    size: int


class DropStaging(Message, frozen=True):
    """To the worker: forget a session's staging."""

    session: int


class Copy(Message, frozen=True):
    """To the worker: answered by CopyDone or Failed."""

    job: int
    session: int
    staging_offset: int
    slab: int
    offset: int
    length: int
    request: int = 0


class Verify(Message, frozen=True):
    """To the worker: answered by Verified or Failed. ``recipe``: with what the recipe says."""

    job: int
    slab: int
    offset: int
    length: int
    root: int
    recipe: bool = False


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """A stored span; fields as of ``core.effects.Payload``."""

    key: bytes
    slab: int
    offset: int
    length: int
    generation: int
    root: int
    tokens: int
    position: int


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """A span as a recipe names it; fields as of ``core.mirrors.BaseFact``."""

    key: bytes
    generation: int
    root: int
    tokens: int
    position: int


class Encode(Message, frozen=True):
    """To the worker: answered by Encoded, NotEncoded, EncodeSpoiled or Failed. Fields as of the
    core's effect; a piece is (token, tokens, number of the base, token there)."""

    job: int
    span: Payload
    namespace: bytes
    dtype: str
    head_dim: int
    shard: int
    bases: list[Payload]
    frequencies: list[float]
    interleaved: bool
    pieces: list[tuple[int, int, int, int]]


class Encoded(Message, frozen=True):
    """From the worker: a recipe of so many bytes, which it keeps; numbers of bases in it."""

    job: int
    length: int
    used: list[int]


class NotEncoded(Message, frozen=True):
    """From the worker: a payload is not worth a recipe, or can't have one."""

    job: int
    why: str


class EncodeSpoiled(Message, frozen=True):
    """From the worker: bytes are not those that were stored; of the span, or of these bases."""

    job: int
    span: bool
    bases: list[int]


class KeepRecipe(Message, frozen=True):
    """To the worker: write what was encoded; answered by RecipeKept or Failed."""

    job: int
    slab: int
    offset: int
    length: int


class RecipeKept(Message, frozen=True):
    job: int
    root: int


class ForgetRecipe(Message, frozen=True):
    """To the worker: what was encoded is not wanted."""

    job: int


class Densify(Message, frozen=True):
    """To the worker: answered by Densified or Failed. Fields as of the core's effect."""

    job: int
    mirror: Payload
    bases: list[Payload]
    slab: int
    offset: int
    length: int
    root: int


class Densified(Message, frozen=True):
    job: int
    good: bool


class Wipe(Message, frozen=True):
    """To the worker: write zeros over a slab; answered by Wiped or Failed."""

    job: int
    slab: int


class Export(Message, frozen=True):
    """To the worker: make a DMA-BUF of whole pages; answered by Exported or NotExported."""

    job: int
    slab: int
    offset: int
    length: int


class Exported(Message, frozen=True):
    """From the worker: a DMA-BUF, with its fd."""

    job: int


class NotExported(Message, frozen=True):
    """From the worker: why there is none; ``refusal`` is a ``HandleRefusal``."""

    job: int
    refusal: int
    error: str


class Wiped(Message, frozen=True):
    job: int


class CopyDone(Message, frozen=True):
    """``seconds`` that the copy itself took."""

    job: int
    root: int
    seconds: float


class Verified(Message, frozen=True):
    """``length`` and ``root`` of the payload that a good recipe gives, and its base."""

    job: int
    good: bool
    length: int = 0
    root: int = 0
    bases: list[Fact] | None = None


class Failed(Message, frozen=True):
    """From the worker: a job could not be done, although the worker itself is well.

    ``unloadable``: nor can others of its kind, until another process loads what they need.
    """

    job: int
    error: str
    unloadable: bool = False


JobMessage = (
    Staging
    | DropStaging
    | Copy
    | Verify
    | Encode
    | Encoded
    | NotEncoded
    | EncodeSpoiled
    | KeepRecipe
    | RecipeKept
    | ForgetRecipe
    | Densify
    | Densified
    | Wipe
    | Export
    | Exported
    | NotExported
    | Wiped
    | CopyDone
    | Verified
    | Failed
)
