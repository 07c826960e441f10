"""How a model rotates its keys, as far as cached keys can be rotated further.

Two rotations in a row are one by the sum of the angles, so a key that was cached at one position
is turned to another by the distance alone. That holds where an angle is position times a
frequency that does not depend on the request; what else there is, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kmesh.errors import UnsupportedError

#: Elements that keys may be made of where they are rotated, with the kernels' number of each.
ELEMENTS = {"bfloat16": 1, "float16": 2, "float32": 3}

_SERVED = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Rotary:
    """One way of rotating.

    Attributes:
        frequencies: radians a position, for each pair of elements, as float64.
        interleaved: pairs are elements (2i, 2i + 1); otherwise (i, i + pairs), as in NeoX.
        dtype: of the keys, one of ``ELEMENTS``.
    """

    frequencies: tuple[float, ...]
    interleaved: bool
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENTS:
            raise UnsupportedError(
                f"keys of {self.dtype} can't be rotated: their scale is not known here"
            )
        if not self.frequencies:
            raise ValueError("a rotation without frequencies")

    @property
    def dim(self) -> int:
        """Elements of a head that are rotated, the first ones."""
        return 2 * len(self.frequencies)

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, Any], *, head_dim: int, interleaved: bool, dtype: str
    ) -> Rotary:
        """As a model's configuration describes it.

        Args:
            parameters: ``rope_theta`` and, where they are there, ``rope_type`` (or ``type``),
                ``partial_rotary_factor``, ``factor`` and what ``llama3`` needs besides.

        Raises:
            UnsupportedError: this way of scaling can't be undone from a distance alone, or is
                not known; says which it is.
            ValueError: a parameter is missing or makes no sense.
        """
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in _SERVED:
            raise UnsupportedError(
                f"rotary embeddings of type {kind!r} are not served: only {', '.join(_SERVED)} have"
                " angles that depend on nothing but the distance"
            )
        theta = _positive(parameters, "rope_theta")
        dim = int(head_dim * float(parameters.get("partial_rotary_factor", 1.0)))
        if not 0 < dim <= head_dim or dim % 2:
            raise ValueError(f"{dim} of {head_dim} elements can't be rotated in pairs")
        plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
        if kind == "linear":
            factor = _positive(parameters, "factor")
            plain = [f / factor for f in plain]
        elif kind == "llama3":
            plain = [_llama3(f, parameters) for f in plain]
        return cls(tuple(plain), interleaved, dtype)


def _llama3(frequency: float, parameters: Mapping[str, Any]) -> float:
    """Long waves are stretched by ``factor``, short ones left, those between are mixed."""
    factor = _positive(parameters, "factor")
    low = _positive(parameters, "low_freq_factor")
    high = _positive(parameters, "high_freq_factor")
    turns = _positive(parameters, "original_max_position_embeddings") * frequency / (2 * math.pi)
    if high <= low:
        raise ValueError("high_freq_factor is not above low_freq_factor")
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    share = (turns - low) / (high - low)
    return (1 - share) * frequency / factor + share * frequency


def _positive(parameters: Mapping[str, Any], name: str) -> float:
    value = parameters.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}, not a positive number")
    return float(value)


@lru_cache(maxsize=256)
def turns(rotary: Rotary, delta: int) -> bytes:
    """Cosine and sine as float32 for each pair, side by side, of a rotation by ``delta`` positions.

    Kernels and reference take both from here: they are computed in float64 and rounded once.
    """
    import numpy as np

    angles = [math.fmod(delta * f, 2 * math.pi) for f in rotary.frequencies]
    table = np.array([(math.cos(a), math.sin(a)) for a in angles], dtype=np.float64)
    return table.astype(np.float32).tobytes()
