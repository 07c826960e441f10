"""What an engine's KV state is: its base namespace, and the reasons why a model is not served."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kmesh.errors import ConfigError, UnsupportedError
from kmesh.keys import Namespace
from kmesh.layout import DTYPE_BYTES, SpanGeometry
from kmesh_vllm import blockorder, compat
from kmesh_vllm.blockorder import BlockOrder
from kmesh_vllm.config import Settings
from kmesh_vllm.content import files_digest, model_files
from kmesh_vllm.sharding import Sharding

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

#: Fields of a model's config that decide the rotary embedding.
_ROPE_FIELDS = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
_ENGINE_CONTEXT = "kmesh 2026-11 vllm engine v1"


@dataclass(frozen=True, slots=True)
class Identity:
    """What both halves of the connector know of their engine.

    Attributes:
        namespace: of requests without adapter and salt.
        sharding: how the engine's ranks cut the KV heads.
        block_tokens: tokens of one block of the scheduler.
        num_blocks: blocks of the scheduler's pool.
        order: where K and V lie in a block; None: a token's K lies before its V.
    """

    namespace: Namespace
    sharding: Sharding
    block_tokens: int
    num_blocks: int
    order: BlockOrder | None = None

    def geometry(self, heads: int) -> SpanGeometry:
        """Sizes of a span that holds ``heads`` heads of every layer."""
        names = self.namespace
        return SpanGeometry(names.layers, heads, names.head_dim, DTYPE_BYTES[names.dtype])


def identify(config: VllmConfig, kv_cache: KVCacheConfig, settings: Settings) -> Identity:
    """Reads an engine's configuration.

    Raises:
        UnsupportedError: KMesh does not serve this model or setup; the message says why.
        ConfigError: the weights cannot be identified without ``weights_digest``.
    """
    refuse_setup(config)
    spec = single_spec(kv_cache)
    model = config.model_config
    heads, layers = model.get_total_num_kv_heads(), model.get_total_num_hidden_layers()
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"KV state of type {dtype} is not served: {', '.join(DTYPE_BYTES)}")
    found = sum(len(group.layer_names) for group in kv_cache.kv_cache_groups)
    if found != layers:
        raise UnsupportedError(
            f"{found} layers with KV state in a model of {layers} layers are not served"
            " (draft models, shared KV and layers without attention are not)"
        )
    try:
        sharding = Sharding(layers, heads, config.parallel_config.tensor_parallel_size)
    except ValueError as wrong:
        raise UnsupportedError(str(wrong)) from None
    if spec.num_kv_heads != sharding.part_heads:
        raise UnsupportedError(
            f"a rank holds {spec.num_kv_heads} KV heads, not {sharding.part_heads}"
        )
    order, pages = block_order(config, spec)
    namespace = Namespace(
        model=_architecture(model),
        weights=weights_digest(config, settings),
        dtype=dtype,
        layers=layers,
        kv_heads=heads,
        head_dim=spec.head_size,
        rope=rope_json(model.hf_text_config),
        pages=pages,
    )
    return Identity(namespace, sharding, spec.block_size, kv_cache.num_blocks, order)


def _architecture(model: Any) -> str:
    """What kind of model it is. Which one the weights say, wherever they lie and whatever their
    folder or repository is called."""
    return "+".join(model.hf_config.architectures or [model.hf_config.model_type])


def block_order(config: VllmConfig, spec: Any) -> tuple[BlockOrder | None, str]:
    """Where K and V lie in blocks, and, if that is not known, a name for it; else empty.

    What lies in an unknown way is moved as whole blocks, so only engines that agree on all that it
    may depend on share it.
    """
    if config.device_config.device_type != "cpu":
        return None, ""
    try:
        return blockorder.find(
            config.model_config.dtype,
            spec.dtype,
            spec.block_size,
            spec.head_size,
            str(config.cache_config.cache_dtype),
        ), ""
    except UnsupportedError as unknown:
        pages = f"vLLM {compat.vllm_version()} on a CPU, blocks of {spec.block_size}"
        _log_once(f"{pages}: {unknown}; state is shared with engines like that alone")
        return None, pages


@functools.cache
def _log_once(message: str) -> None:
    logger.warning("%s", message)


def refuse_setup(config: VllmConfig) -> None:
    """Raises UnsupportedError for what KMesh does not serve."""
    model, parallel = config.model_config, config.parallel_config
    reasons = {
        "multi-head latent attention (MLA)": model.use_mla,
        "hybrid models (Mamba, linear attention)": model.is_hybrid,
        "models without attention": model.is_attention_free,
        "encoder-decoder models": model.is_encoder_decoder,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
    }
    for what, is_so in reasons.items():
        if is_so:
            raise UnsupportedError(f"KMesh does not serve {what} in this version")


def single_spec(kv_cache: KVCacheConfig) -> Any:
    """The KV cache spec that all layers share.

    Raises:
        UnsupportedError: there are several, or it is not plain full attention.
    """
    groups = kv_cache.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedError(
            f"KMesh does not serve models with {len(groups)} groups of KV caches (hybrid,"
            " sliding-window) in this version"
        )
    spec: Any = groups[0].kv_cache_spec
    # By name: the classes are not the same in every version.
    if type(spec).__name__ != "FullAttentionSpec":
        raise UnsupportedError(f"KMesh does not serve KV caches of kind {type(spec).__name__}")
    quantised = getattr(spec, "kv_quant_mode", None)
    reasons = {
        "sliding-window attention": spec.sliding_window is not None,
        "chunked local attention": spec.attention_chunk_size is not None,
        "attention that is not causal": bool(getattr(spec, "non_causal", False)),
        "quantised KV state": bool(quantised),
        "K and V of different sizes": spec.head_size_v != spec.head_size,
        "packed KV state": getattr(spec, "state_content_bytes", None) is not None
        or getattr(spec, "num_head_slots", None) not in (None, spec.num_kv_heads)
        or getattr(spec, "tokens_per_state", 1) != 1,
    }
    for what, is_so in reasons.items():
        if is_so:
            raise UnsupportedError(f"KMesh does not serve {what} in this version")
    return spec


def rope_json(hf_config: Any) -> str:
    """Rotary embedding parameters of a model, as canonical JSON."""
    values = {
        name: getattr(hf_config, name)
        for name in _ROPE_FIELDS
        if getattr(hf_config, name, None) is not None
    }
    return json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)


def weights_digest(config: VllmConfig, settings: Settings) -> str:
    """What the engine computes with: its files, and what changes them as they are loaded.

    Raises:
        ConfigError: set ``weights_digest``, the weights do not lie in local files.
    """
    model = config.model_config
    if settings.weights_digest:
        files = settings.weights_digest
    elif str(config.load_config.load_format).removeprefix("LoadFormat.").lower() == "dummy":
        raise ConfigError("dummy weights have no content: set weights_digest")
    elif callable(model.hf_overrides):
        raise ConfigError("hf_overrides is a function, which has no content: set weights_digest")
    else:
        files = files_digest(model_files(_local_path(config)))
    rest: Mapping[str, Any] = {
        "files": files,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "overrides": {} if callable(model.hf_overrides) else model.hf_overrides,
    }
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), default=str)
    return blake3(text.encode(), derive_key_context=_ENGINE_CONTEXT).hexdigest()


def _local_path(config: VllmConfig) -> Path:
    model = config.model_config
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        # The engine has loaded it, so it lies in the cache.
        return Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except (OSError, ValueError) as wrong:
        raise ConfigError(
            f"the weights of {model.model} are not found in local files ({wrong});"
            " set weights_digest in kv_connector_extra_config"
        ) from None
