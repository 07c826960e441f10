"""Who an engine's KV state is: weights by content, adapters by content, and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kmesh.errors import ConfigError, UnsupportedError
from kmesh.keys import Namespace
from kmesh_vllm import blockorder, compat, content
from kmesh_vllm.adapters import Adapters
from kmesh_vllm.blockorder import BlockOrder
from kmesh_vllm.config import Settings
from kmesh_vllm.identity import Identity, identify, rope_json
from kmesh_vllm.paged import PagedCache, layer_order

SETTINGS = Settings(socket_dir="-")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class FullAttentionSpec(SimpleNamespace):
    """Has the name that vLLM gives it."""


class MLAAttentionSpec(SimpleNamespace):
    pass


def spec(kind: type = FullAttentionSpec, **fields: Any) -> Any:
    values: dict[str, Any] = {
        "block_size": 32,
        "num_kv_heads": 2,
        "head_size": 64,
        "head_size_v": 64,
        "dtype": torch.bfloat16,
        "sliding_window": None,
        "attention_chunk_size": None,
    }
    return kind(**(values | fields))


def kv_cache(*specs: Any, layers: int = 4) -> Any:
    groups = [
        SimpleNamespace(kv_cache_spec=s, layer_names=[f"l.{i}" for i in range(layers)])
        for s in specs or (spec(),)
    ]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=100)


def config(
    path: Path, *, parallel: dict[str, Any] | None = None, device: str = "cuda", **model: Any
) -> Any:
    hf = SimpleNamespace(rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    values: dict[str, Any] = {
        "model": str(path),
        "revision": None,
        "dtype": torch.bfloat16,
        "quantization": None,
        "hf_overrides": {},
        "hf_text_config": hf,
        "hf_config": SimpleNamespace(architectures=["TinyForCausalLM"]),
        "use_mla": False,
        "is_hybrid": False,
        "is_attention_free": False,
        "is_encoder_decoder": False,
        "get_total_num_kv_heads": lambda: 2,
        "get_total_num_hidden_layers": lambda: 4,
    }
    sizes = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**(values | model)),
        parallel_config=SimpleNamespace(**(sizes | (parallel or {}))),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "model-1.safetensors").write_bytes(b"one" * 1000)
    (path / "model-2.safetensors").write_bytes(b"two" * 1000)
    (path / "config.json").write_text("{}")
    (path / "README.md").write_text("words")
    return path


def test_an_engine_is_identified(checkpoint: Path) -> None:
    identity = identify(config(checkpoint), kv_cache(), SETTINGS)
    namespace = identity.namespace
    assert (namespace.dtype, namespace.layers, namespace.kv_heads) == ("bfloat16", 4, 2)
    assert namespace.head_dim == 64
    assert '"rope_theta":1000000.0' in namespace.rope
    assert len(namespace.weights) == 64
    assert (identity.block_tokens, identity.num_blocks) == (32, 100)


def test_the_same_model_may_lie_anywhere(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "of another name"
    shutil.copytree(checkpoint, other)
    one, same = (identify(config(path), kv_cache(), SETTINGS) for path in (checkpoint, other))
    assert one.namespace == same.namespace
    assert one.namespace.model == "TinyForCausalLM"


def test_blocks_of_any_size_are_shared(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(device: str, block: int) -> Identity:
        cache = kv_cache(spec(block_size=block))
        return identify(config(checkpoint, device=device), cache, SETTINGS)

    asked = []

    def found(*sizes: Any) -> BlockOrder:
        asked.append(sizes)
        return BlockOrder("some", 0, 1, 2, None, None)

    monkeypatch.setattr(blockorder, "find", found)
    small, large = identity("cpu", 32), identity("cpu", 64)
    assert small.namespace == large.namespace == identity("cuda", 16).namespace
    assert not small.namespace.pages
    assert small.order is not None
    assert identity("cuda", 16).order is None
    both = torch.bfloat16, torch.bfloat16
    assert asked == [(*both, 32, 64, "auto"), (*both, 64, 64, "auto")]


def test_blocks_of_unknown_order_are_shared_only_as_they_lie(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def namespace(block: int) -> Namespace:
        cache = kv_cache(spec(block_size=block))
        return identify(config(checkpoint, device="cpu"), cache, SETTINGS).namespace

    def unknown(*sizes: Any) -> BlockOrder:
        raise UnsupportedError("nobody knows")

    monkeypatch.setattr(blockorder, "find", unknown)
    small, large = namespace(32), namespace(64)
    assert small.differing(large) == ["pages"]
    assert "blocks of 32" in small.pages
    assert small == namespace(32)


def test_weights_are_known_by_content(checkpoint: Path) -> None:
    def weights(**model: Any) -> str:
        return identify(config(checkpoint, **model), kv_cache(), SETTINGS).namespace.weights

    first = weights()
    (checkpoint / "README.md").write_text("other words")
    assert weights() == first
    assert weights(quantization="fp8") != first
    assert weights(dtype=torch.float16) != first
    assert weights(hf_overrides={"rms_norm_eps": 1.0}) != first
    (checkpoint / "model-2.safetensors").write_bytes(b"six" * 1000)
    second = weights()
    assert second != first
    (checkpoint / "config.json").write_text('{"a": 1}')
    assert weights() not in (first, second)


def test_digests_are_kept_and_files_read_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = content.model_files(checkpoint)
    assert [f.name for f in files] == ["config.json", "model-1.safetensors", "model-2.safetensors"]
    first = content.files_digest(files)
    assert oct(content.cache_path().stat().st_mode & 0o777) == "0o600"
    monkeypatch.setattr(content, "_file_digest", None)
    assert content.files_digest(files) == first
    monkeypatch.undo()
    # A file of the same size whose time was set back is seen by its inode.
    old = files[1].stat()
    replacement = checkpoint / "new"
    replacement.write_bytes(b"eno" * 1000)
    os.utime(replacement, ns=(old.st_atime_ns, old.st_mtime_ns))
    replacement.rename(files[1])
    assert content.files_digest(files) != first


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 3}', '{"a": "nothex"}'])
def test_a_broken_file_of_digests_is_read_as_none(checkpoint: Path, text: str) -> None:
    path = content.cache_path()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    digest = content.files_digest(content.model_files(checkpoint))
    assert len(digest) == 64


def test_digests_need_no_place_to_be_kept(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = content.model_files(checkpoint)
    kept = content.files_digest(files)
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert content.files_digest(files) == kept


def test_weights_that_do_not_lie_in_files_need_a_setting(tmp_path: Path, checkpoint: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="weights_digest"):
        identify(config(empty), kv_cache(), SETTINGS)
    dummy = config(checkpoint)
    dummy.load_config.load_format = "dummy"
    with pytest.raises(ConfigError, match="dummy weights"):
        identify(dummy, kv_cache(), SETTINGS)
    with pytest.raises(ConfigError, match="hf_overrides is a function"):
        identify(config(checkpoint, hf_overrides=lambda c: c), kv_cache(), SETTINGS)
    named = Settings(socket_dir="-", weights_digest="mine")
    assert identify(dummy, kv_cache(), named).namespace.weights
    assert (
        identify(config(empty), kv_cache(), named).namespace.weights
        == identify(dummy, kv_cache(), named).namespace.weights
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "MLA"),
        ({"is_hybrid": True}, "hybrid"),
        ({"is_attention_free": True}, "without attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode context"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill context"),
        ({"get_total_num_hidden_layers": lambda: 5}, "4 layers with KV state in a model of 5"),
        ({"get_total_num_kv_heads": lambda: 4}, "a rank holds 2 KV heads, not 4"),
        (
            {"get_total_num_kv_heads": lambda: 3, "parallel": {"tensor_parallel_size": 2}},
            "cannot be cut",
        ),
    ],
)
def test_setups_that_are_refused(checkpoint: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        identify(config(checkpoint, **changes), kv_cache(), SETTINGS)


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([spec(), spec()], "2 groups"),
        ([spec(MLAAttentionSpec)], "MLAAttentionSpec"),
        ([spec(sliding_window=4096)], "sliding-window"),
        ([spec(attention_chunk_size=8192)], "chunked local"),
        ([spec(non_causal=True)], "not causal"),
        ([spec(kv_quant_mode=3)], "quantised"),
        ([spec(head_size_v=128)], "K and V of different sizes"),
        ([spec(state_content_bytes=100)], "packed"),
        ([spec(tokens_per_state=4)], "packed"),
        ([spec(dtype=torch.float8_e4m3fn)], "float8_e4m3fn"),
        ([spec(dtype=torch.uint8)], "uint8"),
    ],
)
def test_kv_caches_that_are_refused(checkpoint: Path, specs: list[Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        identify(config(checkpoint), kv_cache(*specs), SETTINGS)


def test_rope_is_canonical() -> None:
    one = rope_json(SimpleNamespace(rope_scaling={"type": "yarn", "factor": 4}, rope_theta=1e4))
    two = rope_json(SimpleNamespace(rope_theta=1e4, rope_scaling={"factor": 4, "type": "yarn"}))
    other = rope_json(SimpleNamespace(rope_theta=1e4, rope_scaling={"factor": 8, "type": "yarn"}))
    assert one == two != other
    assert rope_json(SimpleNamespace(hidden_size=3)) == "{}"


def adapter(path: Path, weights: bytes) -> str:
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_text("{}")
    return str(path)


def test_adapters_are_known_by_content(tmp_path: Path) -> None:
    one, copy = adapter(tmp_path / "a", b"1"), adapter(tmp_path / "b", b"1")
    other = adapter(tmp_path / "c", b"2")
    adapters = Adapters()
    first = adapters.digest(1, one)
    assert first is not None
    assert adapters.digest(2, copy) == first
    assert adapters.digest(3, other) not in (None, first)
    assert Adapters().digest(7, one) == first


def test_an_adapter_that_changes_after_it_was_loaded_is_not_cached(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", b"1")
    adapters = Adapters()
    first = adapters.digest(1, path)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"22")
    assert adapters.digest(1, path) is None
    assert adapters.digest(1, path) is None
    # Loaded again, under a new id or in place, its content is known again.
    second = adapters.digest(2, path)
    assert second not in (None, first)
    assert adapters.digest(1, path, reloaded=True) == second
    assert adapters.digest(1, path) == second


def test_an_adapter_that_is_not_there_is_not_cached(tmp_path: Path) -> None:
    assert Adapters().digest(1, str(tmp_path / "nowhere")) is None
    assert Adapters().digest(1, "hub/name") is None


def tensors(shape: tuple[int, ...] = (10, 2, 32, 16), **kinds: Any) -> dict[str, torch.Tensor]:
    return {f"model.layers.{i}.attn": torch.zeros(shape, **kinds) for i in range(3)}


def cache(found: dict[str, torch.Tensor], **changes: Any) -> PagedCache:
    values: dict[str, Any] = {
        "layers": 3,
        "heads": 2,
        "head_dim": 8,
        "element_bytes": 4,
        "block_tokens": 32,
        "num_blocks": 10,
    }
    return PagedCache(found, **(values | changes))


@pytest.mark.parametrize(
    ("found", "changes", "reason"),
    [
        (tensors(device="meta"), {}, "on meta is not served"),
        (tensors((2, 10, 32, 2, 8)), {}, "shape"),
        (tensors((10, 4, 32, 16)), {}, "shape"),
        (tensors((10, 2, 32, 8)), {}, "shape"),
        (tensors(dtype=torch.float16), {}, "elements"),
        (
            {k: v.transpose(2, 3).contiguous().transpose(2, 3) for k, v in tensors().items()},
            {},
            "side by side",
        ),
        (tensors(), {"layers": 4}, "3 KV caches for 4 layers"),
        (tensors(), {"num_blocks": 11}, "do not fit"),
        (tensors(), {"block_tokens": 48}, "do not fit"),
    ],
)
def test_pages_that_are_refused(
    found: dict[str, torch.Tensor], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        cache(found, **changes)


def test_layers_are_ordered_by_number() -> None:
    names = {f"model.layers.{i}.self_attn.attn": None for i in (10, 2, 0, 1, *range(3, 10))}
    assert layer_order(names)[2] == "model.layers.2.self_attn.attn"
    assert layer_order(names)[10] == "model.layers.10.self_attn.attn"
    with pytest.raises(UnsupportedError, match="from 0 to 1"):
        layer_order({"a.1": None, "a.2": None})
    with pytest.raises(UnsupportedError, match="numbered one by one"):
        layer_order({"a.1.x": None, "b.1.x": None})


def test_a_request_of_embeddings_is_not_cached() -> None:
    request = SimpleNamespace(prompt_token_ids=[1], prompt_embeds=None, resumable=False)
    assert compat.cacheable(request)
    for changes in (
        {"prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"prompt_is_token_ids": [True]},
        {"resumable": True},
    ):
        assert not compat.cacheable(SimpleNamespace(**(vars(request) | changes)))


def test_items_of_a_request_have_place_and_identity() -> None:
    def feature(kind: str, name: str, offset: int) -> Any:
        place = SimpleNamespace(offset=offset, length=9)
        return SimpleNamespace(modality=kind, identifier="i", mm_hash=name, mm_position=place)

    request = SimpleNamespace(mm_features=[feature("image", "h", 4), feature("audio", "h", 30)])
    assert compat.items(request) == [(4, 9, b"image\0h"), (30, 9, b"audio\0h")]
    assert compat.items(SimpleNamespace()) == []
