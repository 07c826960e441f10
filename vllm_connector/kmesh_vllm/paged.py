"""vLLM's KV cache tensors as memory: addresses and strides, never assumed shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kmesh.errors import UnsupportedError
from kmesh.kernels.host import PagedLayout
from kmesh_vllm.blockorder import BlockOrder
from kmesh_vllm.movers import Ids

if TYPE_CHECKING:
    import torch

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def layer_order(names: Mapping[str, object]) -> list[str]:
    """Names of layers, by the first number in each.

    Raises:
        UnsupportedError: the numbers are not 0, 1, 2 …
    """
    numbers: dict[int, str] = {}
    for name in names:
        match = _NUMBER.search(name)
        if match is None or int(match[1]) in numbers:
            raise UnsupportedError(f"the layers are not numbered one by one: {name}")
        numbers[int(match[1])] = name
    if sorted(numbers) != list(range(len(numbers))):
        raise UnsupportedError(f"the layers are not numbered from 0 to {len(numbers) - 1}")
    return [numbers[i] for i in range(len(numbers))]


class PagedCache:
    """The KV cache of one worker.

    Every tensor must have the logical shape [blocks, heads, tokens, 2 * head_dim] and lie in host
    memory or all of them on one GPU. How it lies there is up to its strides, with K before V in the
    last dimension, unless an order says where K and V are in the last two.

    Attributes:
        layout: addresses are the device's.
        device: ordinal of the GPU, as the engine counts; None for host memory.

    Args:
        tensors: vLLM's KV cache tensors by layer name; kept alive.
        layers, heads, head_dim: as the rank holds them.
        element_bytes: bytes of one element.
        block_tokens, num_blocks: of the scheduler's blocks, which may be several of a tensor's.
        order: as the identity has it.

    Raises:
        UnsupportedError: memory or shape is not served; says what was found.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        layers: int,
        heads: int,
        head_dim: int,
        element_bytes: int,
        block_tokens: int,
        num_blocks: int,
        order: BlockOrder | None = None,
    ) -> None:
        names = layer_order(tensors)
        if len(names) != layers:
            raise UnsupportedError(f"{len(names)} KV caches for {layers} layers are not served")
        self._tensors = [tensors[name] for name in names]
        first = self._tensors[0]
        for name, tensor in zip(names, self._tensors, strict=True):
            if tensor.device != first.device or tensor.device.type not in ("cpu", "cuda"):
                raise UnsupportedError(
                    f"{name}: KV state on {tensor.device} is not served, only in host memory or"
                    " on one GPU"
                )
            shape = tuple(tensor.shape)
            if len(shape) != 4 or shape[1] != heads or shape[3] != 2 * head_dim:
                raise UnsupportedError(
                    f"{name}: a KV cache of shape {shape} is not served, only"
                    f" [blocks, {heads}, tokens, {2 * head_dim}]"
                )
            if tensor.element_size() != element_bytes or tensor.stride(3) != 1:
                raise UnsupportedError(f"{name}: elements of K and V do not lie side by side")
            if shape != tuple(first.shape) or tensor.stride() != first.stride():
                raise UnsupportedError(f"{name}: layers are laid out in different ways")
        tokens = int(first.shape[2])
        self.device = int(first.device.index or 0) if first.device.type == "cuda" else None
        self._ratio = block_tokens // tokens
        if self._ratio * tokens != block_tokens or first.shape[0] < num_blocks * self._ratio:
            raise UnsupportedError(
                f"{num_blocks} blocks of {block_tokens} tokens do not fit a KV cache of"
                f" {first.shape[0]} blocks of {tokens}"
            )
        if order is not None and (first.stride(2) != 2 * head_dim or self._ratio != 1):
            raise UnsupportedError(
                f"blocks of {tokens} tokens with strides {first.stride()} are not served: their"
                f" order is known for whole blocks of {block_tokens}"
            )
        strides = [stride * element_bytes for stride in first.stride()]
        row_bytes = head_dim * element_bytes
        bases = [tensor.data_ptr() for tensor in self._tensors]
        k_offset, v_offset = (order.k_offset, order.v_offset) if order else (0, row_bytes)
        self.layout = PagedLayout(
            k_base=tuple(base + k_offset for base in bases),
            v_base=tuple(base + v_offset for base in bases),
            block_stride=strides[0],
            head_stride=strides[1],
            token_stride=order.token_stride if order else strides[2],
            block_tokens=tokens,
            num_blocks=int(first.shape[0]),
            heads=heads,
            row_bytes=row_bytes,
            k_order=order.k_order if order else None,
            v_order=order.v_order if order else None,
        )

    def expand(self, blocks: Ids) -> Ids:
        """The tensors' block numbers for the scheduler's, each of which may be several.

        -1 stands for no block, and stays so.
        """
        if self._ratio == 1:
            return blocks
        parts = np.arange(self._ratio, dtype=np.int64)
        several = np.where(blocks[:, None] >= 0, blocks[:, None] * self._ratio + parts, -1)
        return np.ascontiguousarray(several.reshape(-1))
