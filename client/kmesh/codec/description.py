"""What a span of a family is, as far as a recipe says it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kmesh.errors import RecipeError
from kmesh.keys import KEY_BYTES
from kmesh.layout import DTYPE_BYTES, Shard

#: Positions and tokens are less than this, so that a distance fits in 32 bits.
POSITIONS = 2**31 - 1
HEAD_DIM_MAX = 8192


@dataclass(frozen=True, slots=True)
class SpanDescription:
    """One member's or one segment's identity, form and place.

    Attributes:
        key: 32 bytes, of the span.
        namespace: 32 bytes, digest of the namespace.
        dtype: of the elements, a key of ``layout.DTYPE_BYTES``.
        shard: layers and KV heads.
        head_dim: elements of one head's K (and of its V).
        tokens: that the payload holds, at least 1.
        position: of the first token, in the frame in which the payload's keys are.
        generation: of the payload, as whoever keeps it counts.
    """

    key: bytes
    namespace: bytes
    dtype: str
    shard: Shard
    head_dim: int
    tokens: int
    position: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        for name in ("key", "namespace"):
            if len(getattr(self, name)) != KEY_BYTES:
                raise RecipeError(f"not {KEY_BYTES} bytes", field=name)
        if self.dtype not in DTYPE_BYTES:
            raise RecipeError(f"{self.dtype!r} is none of {', '.join(DTYPE_BYTES)}", field="dtype")
        if not 1 <= self.head_dim <= HEAD_DIM_MAX:
            raise RecipeError(f"{self.head_dim} is not served", field="head_dim")
        if not 1 <= self.tokens <= POSITIONS:
            raise RecipeError(f"a span of {self.tokens} tokens", field="tokens")
        if not 0 <= self.position <= POSITIONS - self.tokens:
            raise RecipeError(f"{self.position} is not served", field="position")
        if not 0 <= self.generation < 2**64:
            raise RecipeError(f"{self.generation} has no 64 bits", field="generation")

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """One token of one head, K or V."""
        return self.head_dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """One token of one run: all heads, K or V, of one layer."""
        return self.shard.heads * self.row_bytes

    @property
    def runs(self) -> int:
        """Planes of all layers: run 2·layer is K, run 2·layer + 1 is V."""
        return 2 * self.shard.layers

    @property
    def run_bytes(self) -> int:
        return self.tokens * self.token_bytes

    @property
    def payload_bytes(self) -> int:
        return self.runs * self.run_bytes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the payload as bytes: runs, heads, tokens, row_bytes."""
        return self.runs, self.shard.heads, self.tokens, self.row_bytes

    def differing(self, other: SpanDescription, *names: str) -> list[str]:
        """Which fields are not those of ``other``; all of them are compared if none are named."""
        fields = names or tuple(field.name for field in dataclasses.fields(self))
        return [name for name in fields if getattr(self, name) != getattr(other, name)]


def beside(
    like: SpanDescription, key: bytes, tokens: int, position: int, generation: int
) -> SpanDescription:
    """Another span of the same family."""
    return dataclasses.replace(
        like, key=key, tokens=tokens, position=position, generation=generation
    )
