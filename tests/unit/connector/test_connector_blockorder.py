"""How a block of the CPU backend lies is seen from what it writes, and never assumed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kmesh.errors import UnsupportedError
from kmesh.kernels.host import PlaneOrder
from kmesh_vllm import blockorder, compat
from kmesh_vllm.blockorder import BlockOrder
from kmesh_vllm.identity import block_order
from kmesh_vllm.paged import PagedCache

TOKENS, DIM = 32, 64

#: [token, element]: where each lies, in elements of the plane.
ROWS = np.arange(TOKENS * DIM).reshape(TOKENS, DIM)
TRANSPOSED = np.arange(TOKENS * DIM).reshape(DIM, TOKENS).T


def tiled_keys() -> np.ndarray:
    """Pairs of elements, in tiles of 16 tokens."""
    places = np.arange(TOKENS * DIM).reshape(TOKENS // 16, DIM // 2, 16, 2)
    return places.transpose(0, 2, 1, 3).reshape(TOKENS, DIM)


def tiled_values() -> np.ndarray:
    """Pairs of tokens, in groups of 16 elements."""
    places = np.arange(TOKENS * DIM).reshape(DIM // 16, TOKENS // 2, 16, 2)
    return places.transpose(1, 3, 0, 2).reshape(TOKENS, DIM)


class Backend:
    """Stands for vLLM's, which is not needed here: puts K and V where it is told to."""

    def __init__(self, key: np.ndarray, value: np.ndarray, *, heads_apart: bool = True) -> None:
        self._places = torch.from_numpy(key.copy()), torch.from_numpy(value.copy())
        self._heads_apart = heads_apart

    def write(
        self,
        isa: str,
        cached: str,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        blocks, heads, tokens, _ = cache.shape
        if not self._heads_apart:
            key = key.flip(1)
        flat = cache.view(blocks, heads, -1)
        for given, places in zip((key, value), self._places, strict=True):
            for token, slot in enumerate(slots.tolist()):
                flat[slot // tokens, :, places[slot % tokens]] = given[token]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(key: np.ndarray, value: np.ndarray, **how: bool) -> None:
        monkeypatch.setattr(compat, "cpu_attention_isa", lambda *sizes: "some")
        monkeypatch.setattr(compat, "write_cpu_cache", Backend(key, value, **how).write)

    return use


def find(dtype: torch.dtype = torch.float32) -> BlockOrder:
    return blockorder.find(dtype, dtype, TOKENS, DIM, "auto")


def test_transposed_keys_before_rows_of_values(backend: Any) -> None:
    backend(TRANSPOSED, ROWS + ROWS.size)
    keys = PlaneOrder(4, TOKENS, 0, DIM, 0, 4 * TOKENS)
    assert find() == BlockOrder("some", 0, 4 * ROWS.size, 4 * DIM, keys, None)
    keys = PlaneOrder(2, TOKENS, 0, DIM, 0, 2 * TOKENS)
    assert find(torch.bfloat16) == BlockOrder("some", 0, 2 * ROWS.size, 2 * DIM, keys, None)


def test_tiles_of_pairs(backend: Any) -> None:
    backend(tiled_keys(), tiled_values() + ROWS.size)
    keys = PlaneOrder(4, 16, 16 * 2 * DIM, DIM // 2, 0, 64)
    values = PlaneOrder(2, 2, 64, 16, 16 * TOKENS * 2, 4)
    assert find(torch.bfloat16) == BlockOrder("some", 0, 2 * ROWS.size, 2 * DIM, keys, values)


def test_rows_of_k_and_v(backend: Any) -> None:
    """As pages on a GPU are."""
    packed = np.arange(TOKENS)[:, None] * 2 * DIM + np.arange(DIM)
    backend(packed, packed + DIM)
    assert find() == BlockOrder("some", 0, 4 * DIM, 8 * DIM, None, None)
    backend(ROWS, packed + DIM)
    with pytest.raises(UnsupportedError, match="as a whole"):
        find()


def shuffled() -> np.ndarray:
    return np.random.default_rng(1).permutation(ROWS.size).reshape(TOKENS, DIM)


def test_what_is_no_order_is_refused(backend: Any) -> None:
    backend(shuffled(), ROWS + ROWS.size)
    with pytest.raises(UnsupportedError, match="order of its own"):
        find()
    backend(TRANSPOSED, ROWS + ROWS.size, heads_apart=False)
    with pytest.raises(UnsupportedError, match="mixes heads"):
        find()
    # All goes to the other half, and nothing to this.
    backend(TRANSPOSED, ROWS)
    with pytest.raises(UnsupportedError, match="as a whole"):
        find()
    # One place differs from an order.
    moved = TRANSPOSED.copy()
    moved[[3, 4], 7] = moved[[4, 3], 7]
    backend(moved, ROWS + ROWS.size)
    with pytest.raises(UnsupportedError, match="order of its own"):
        find()


def test_layers_must_use_the_same_kernels(backend: Any) -> None:
    backend(TRANSPOSED, ROWS + ROWS.size)
    order = find()
    order.check({"some"})
    order.check(set())
    with pytest.raises(UnsupportedError, match="other"):
        order.check({"some", "other"})


def test_layers_say_which_kernels_they_use() -> None:
    layers = {
        "a": SimpleNamespace(isa="one"),
        "b": SimpleNamespace(impl=SimpleNamespace(isa="two")),
        "c": SimpleNamespace(),
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert compat.attention_isas(config, layers) == {"one", "two"}
    assert compat.attention_isas(config, ["c", "d"]) == set()


def config(device: str) -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(dtype=torch.float32),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def spec(block: int = TOKENS) -> Any:
    return SimpleNamespace(dtype=torch.float32, block_size=block, head_size=DIM)


def test_an_order_that_is_known_sets_nobody_apart(backend: Any) -> None:
    backend(TRANSPOSED, ROWS + ROWS.size)
    assert block_order(config("cpu"), spec()) == (find(), "")
    assert block_order(config("cuda"), spec()) == (None, "")


def test_an_order_that_is_not_known_does_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "9.9")
    backend(shuffled(), ROWS + ROWS.size)
    with caplog.at_level(logging.WARNING):
        found = [block_order(config("cpu"), spec()) for _ in range(2)]
    assert found == [(None, f"vLLM 9.9 on a CPU, blocks of {TOKENS}")] * 2
    assert len(caplog.records) == 1
    assert "order of its own" in caplog.text


@pytest.mark.parametrize(
    "wrong", [ImportError("x"), AttributeError("x"), TypeError("x"), RuntimeError("x")]
)
def test_a_backend_that_can_not_be_asked_is_not_known(
    monkeypatch: pytest.MonkeyPatch, backend: Any, wrong: Exception
) -> None:
    def fails(*arguments: object) -> None:
        raise wrong

    backend(TRANSPOSED, ROWS + ROWS.size)
    monkeypatch.setattr(compat, "write_cpu_cache", fails)
    order, pages = block_order(config("cpu"), spec(block=64))
    assert order is None
    assert pages.endswith("blocks of 64")


def cache(order: BlockOrder | None, shape: tuple[int, ...], **changes: int) -> PagedCache:
    tensors = {f"l.{i}": torch.zeros(shape) for i in range(2)}
    sizes = {"layers": 2, "heads": 3, "head_dim": DIM, "element_bytes": 4, "num_blocks": 5}
    return PagedCache(tensors, order=order, **{"block_tokens": TOKENS, **sizes, **changes})


def test_pages_have_the_order_of_their_blocks(backend: Any) -> None:
    backend(TRANSPOSED, ROWS + ROWS.size)
    order = find()
    layout = cache(order, (5, 3, TOKENS, 2 * DIM)).layout
    assert (layout.k_order, layout.v_order) == (order.k_order, None)
    assert layout.v_base[1] - layout.k_base[1] == 4 * ROWS.size
    assert layout.token_stride == 4 * DIM
    packed = cache(None, (5, 3, TOKENS, 2 * DIM)).layout
    assert (packed.k_order, packed.token_stride) == (None, 8 * DIM)


def test_pages_of_other_blocks_than_were_looked_at(backend: Any) -> None:
    backend(TRANSPOSED, ROWS + ROWS.size)
    with pytest.raises(UnsupportedError, match="whole blocks of 64"):
        cache(find(), (10, 3, TOKENS, 2 * DIM), block_tokens=2 * TOKENS)
    tensors = {"l.0": torch.zeros(5, TOKENS, 3, 2 * DIM).transpose(1, 2)}
    with pytest.raises(UnsupportedError, match="strides"):
        PagedCache(
            tensors,
            layers=1,
            heads=3,
            head_dim=DIM,
            element_bytes=4,
            block_tokens=TOKENS,
            num_blocks=5,
            order=find(),
        )
