"""Where K and V lie in a block of vLLM's CPU backend: found by letting it write numbers.

It depends on vLLM's version, the CPU, the element type and the block's size, and nothing says it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kmesh.errors import UnsupportedError
from kmesh.kernels.host import PlaneOrder
from kmesh_vllm import compat

_Offsets = npt.NDArray[np.int64]

#: Digits from 1 to this are exact in every element type that is served.
_BASE = 128


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """Where K and V of one head lie in a block; bytes, counted from the head's first.

    Attributes:
        isa: vLLM's word for the kernels that this holds for.
        k_offset, v_offset: of token 0.
        k_order, v_order: None: tokens are rows, ``token_stride`` apart.
    """

    isa: str
    k_offset: int
    v_offset: int
    token_stride: int
    k_order: PlaneOrder | None
    v_order: PlaneOrder | None

    def check(self, isas: Collection[str]) -> None:
        """Raises UnsupportedError if layers use kernels for which this may not hold."""
        if others := sorted(set(isas) - {self.isa}):
            raise UnsupportedError(
                f"layers use the CPU kernels {', '.join(others)}, not {self.isa}, so it is not"
                " known how their KV state lies"
            )


def find(model_dtype: Any, dtype: Any, block_tokens: int, head_dim: int, cached: str) -> BlockOrder:
    """Lets vLLM write a block of two heads, and looks where everything went.

    Args:
        model_dtype, dtype: of the model, and of what is cached (torch's).
        cached: vLLM's ``cache_dtype``.

    Raises:
        UnsupportedError: it could not be found, or is nothing that can be described.
    """
    try:
        isa = compat.cpu_attention_isa(model_dtype, block_tokens, head_dim, cached)
        places = _places(isa, dtype, block_tokens, head_dim, cached)
    # What another version of vLLM may do with calls that were made for those that are known.
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as wrong:
        raise UnsupportedError(f"its CPU backend wrote no block: {wrong!r}") from None
    (k_offset, k_stride, k_order), (v_offset, v_stride, v_order) = (
        describe(one, dtype.itemsize) for one in places
    )
    strides = {s for s, order in ((k_stride, k_order), (v_stride, v_order)) if order is None}
    if len(strides) > 1:
        raise UnsupportedError("rows of K and V are not equally far apart")
    stride = strides.pop() if strides else head_dim * dtype.itemsize
    return BlockOrder(isa, k_offset, v_offset, stride, k_order, v_order)


def _places(isa: str, dtype: Any, tokens: int, dim: int, cached: str) -> _Offsets:
    """[K and V, token, element]: the element of the head's part of a block where each one is."""
    import torch

    count = 2 * 2 * tokens * dim
    numbers = torch.arange(count).view(2, 2, tokens, dim)
    found = torch.zeros((2, count), dtype=torch.int64)
    power = 1
    while power < count:
        digits = (numbers // power % _BASE + 1).to(dtype).transpose(1, 2).contiguous()
        cache = torch.zeros((2, 2, tokens, 2 * dim), dtype=dtype)
        # The second of two blocks, so that what is written elsewhere is noticed.
        slots = torch.arange(tokens, 2 * tokens)
        compat.write_cpu_cache(isa, cached, digits[0], digits[1], cache, slots)
        found += (cache.view(2, count).to(torch.int64) - 1) * power
        power *= _BASE
    before, block = found.numpy()
    if (before >= 0).any() or not np.array_equal(np.sort(block), np.arange(count)):
        raise UnsupportedError("its CPU backend does not write a block as a whole")
    places = np.argsort(block).reshape(2, 2, tokens, dim)
    first, second = places[:, 0], places[:, 1] - 2 * tokens * dim
    if not np.array_equal(first, second):
        raise UnsupportedError("its CPU backend mixes heads")
    return first


def describe(places: _Offsets, element_bytes: int) -> tuple[int, int, PlaneOrder | None]:
    """Offset of token 0, and either the stride of rows or an order, in bytes.

    Args:
        places: [token, element], counted in elements.

    Raises:
        UnsupportedError: it is neither rows nor an order.
    """
    base, inside = int(places[0, 0]), places - places[0, 0]
    tokens, elements = inside.shape
    stride = int(inside[1, 0]) if tokens > 1 else elements
    if np.array_equal(inside, _line(tokens, stride)[:, None] + np.arange(elements)):
        return base * element_bytes, stride * element_bytes, None
    for several in (2, 1):
        if several * element_bytes > 4 or elements % several:
            continue
        atoms, left = np.divmod(inside[:, ::several], several)
        together = inside.reshape(tokens, -1, several) - inside[:, ::several, None]
        if left.any() or (together != np.arange(several)).any():
            continue
        order = _order(atoms, several * element_bytes)
        if order is not None:
            return base * element_bytes, 0, order
    raise UnsupportedError("its CPU backend has an order of its own")


def _order(atoms: _Offsets, atom_bytes: int) -> PlaneOrder | None:
    """``atoms``: [token, atom], counted in atoms."""
    tokens, count = atoms.shape
    tile, tile_stride = _steps(atoms[:, 0], 1)
    atom_stride = int(atoms[0, 1]) if count > 1 else 0
    group, group_stride = _steps(atoms[0], atom_stride)
    if tokens % tile or count % group or min(tile_stride, group_stride, atom_stride) < 0:
        return None
    t, a = np.arange(tokens)[:, None], np.arange(count)
    expected = (
        t // tile * tile_stride + t % tile + a // group * group_stride + a % group * atom_stride
    )
    if not np.array_equal(atoms, expected):
        return None
    strides = (tile_stride, group_stride, atom_stride)
    tile_bytes, group_bytes, each = (s * atom_bytes for s in strides)
    return PlaneOrder(atom_bytes, tile, tile_bytes, group, group_bytes, each)


def _steps(line: _Offsets, step: int) -> tuple[int, int]:
    """How many go up by ``step``, and where the next of those begin; 0 if there are none."""
    other = np.flatnonzero(line != _line(len(line), step))
    return (int(other[0]), int(line[other[0]])) if len(other) else (len(line), 0)


def _line(count: int, step: int) -> _Offsets:
    return np.arange(count, dtype=np.int64) * step
