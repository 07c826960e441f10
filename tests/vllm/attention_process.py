"""vLLM's own CPU kernels and KMesh's on the same blocks, in a process of its own.

Prints what was compared, one line of JSON for each kind of block: warnings of vLLM's imports are
none of the tests'.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from vllm import _custom_ops as ops

from kmesh import _host
from kmesh.kernels.host import SpanPart, gather, scatter
from kmesh.layout import tiles
from kmesh_vllm import blockorder, compat
from kmesh_vllm.paged import PagedCache

HEADS, GROUP, BLOCKS, POSITION, TOKENS = 2, 2, 9, 16, 272
Tensor = torch.Tensor


def numbered(dtype: torch.dtype, dim: int) -> Tensor:
    """[K and V, token, head, element], whose bits are all different as far as there are some."""
    count = 2 * TOKENS * HEADS * dim
    values = (torch.arange(count) * 2654435761 % 65521).to(torch.float64) / 65521 - 0.5
    return values.view(2, TOKENS, HEADS, dim).to(dtype)


def paged(cache: Tensor, order: blockorder.BlockOrder) -> PagedCache:
    return PagedCache(
        {"l.0": cache},
        layers=1,
        heads=HEADS,
        head_dim=cache.shape[3] // 2,
        element_bytes=cache.element_size(),
        block_tokens=cache.shape[2],
        num_blocks=BLOCKS,
        order=order,
    )


def part(payload: Tensor, sums: Tensor) -> SpanPart:
    address, length = payload.data_ptr(), payload.nbytes
    return SpanPart(
        address=address,
        sums_address=sums.data_ptr(),
        root=_host.tile_sums(address, length, sums.data_ptr()),
        length=length,
        tokens=TOKENS,
        token_begin=0,
        token_end=TOKENS,
        position=POSITION,
        src_heads=HEADS,
        src_head_begin=0,
        dst_head_begin=0,
        heads=HEADS,
        src_layers=1,
        src_layer_begin=0,
        dst_layer_begin=0,
        layers=1,
    )


def attend(isa: str, query: Tensor, cache: Tensor, ids: list[int], seen: int) -> Tensor:
    """What vLLM's kernel makes of ``seen`` tokens in these blocks, for the last of them."""
    _, heads, block, twice = cache.shape
    key, value = cache.view(BLOCKS, heads, 2 * block, twice // 2).chunk(2, dim=2)
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [seen]))
    output = torch.zeros_like(query)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=heads * GROUP,
        num_kv_heads=heads,
        head_dim=twice // 2,
        seq_lens=lengths,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=False,
    )
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key,
        value_cache=value,
        output=output,
        query_start_loc=starts,
        seq_lens=lengths,
        scale=1.0,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.tensor([ids], dtype=torch.int32),
        softcap=0.0,
        scheduler_metadata=metadata,
        s_aux=None,
    )
    return output


def softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same by its definition; key and value: [head, token, element]."""
    queries = query.double().view(HEADS, GROUP, -1)
    weights = torch.softmax(queries @ key.double().transpose(1, 2), dim=-1)
    return (weights @ value.double()).view(1, HEADS * GROUP, -1)


def compare(isa: str, dtype: torch.dtype, block: int, dim: int, runs: bool) -> dict[str, Any]:
    compat.cpu_attention_isa = lambda *sizes: isa  # type: ignore[assignment]
    order = blockorder.find(dtype, dtype, block, dim, "auto")
    both = numbered(dtype, dim)
    # [plane, head, token, element], as docs/layout.md has it.
    documented = both.transpose(1, 2).contiguous()
    at = torch.arange(POSITION, POSITION + TOKENS)
    ids = [7, 2, 8, 0, 5, 1, 4, 3, 6][: -(-(POSITION + TOKENS) // block)]
    slots = torch.tensor(ids)[at // block] * block + at % block
    theirs = torch.zeros(BLOCKS, HEADS, block, 2 * dim, dtype=dtype)
    compat.write_cpu_cache(isa, "auto", both[0], both[1], theirs, slots)

    payload = torch.zeros_like(documented)
    sums = torch.zeros(tiles(payload.nbytes), dtype=torch.int64)
    status = gather(paged(theirs, order).layout, [part(payload, sums)], ids)
    gathered = status == b"\0" and torch.equal(payload, documented)

    ours = torch.zeros_like(theirs)
    status = scatter(paged(ours, order).layout, [part(documented, sums)], ids)
    said = {
        "kernels": [isa, str(dtype), block, dim],
        "gathered": gathered,
        "scattered": status == b"\0" and torch.equal(ours, theirs),
    }
    if runs:
        query = (torch.arange(HEADS * GROUP * dim) % 7 / 7 - 0.4).to(dtype).view(1, -1, dim)
        # Tokens before the span are K and V that are zero.
        before = torch.zeros(2, HEADS, POSITION, dim, dtype=dtype)
        wanted = softmax(query, *torch.cat([before, documented], dim=2))
        attended = attend(isa, query, ours, ids, POSITION + TOKENS)
        said["off"] = float((attended.double() - wanted).abs().max())
        said["size"] = float(wanted.abs().max())
    return said


def main() -> None:
    tiled = torch.cpu._is_amx_tile_supported()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for block in (32, 64, 96):
            for dim in (32, 64, 128):
                print(json.dumps(compare("vec", dtype, block, dim, True)), flush=True)
        print(json.dumps(compare("vec16", dtype, 64, 80, True)), flush=True)
    for block in (32, 64):
        # It writes on every CPU; what attends to that needs one with tiles.
        print(json.dumps(compare("amx", torch.bfloat16, block, 64, tiled)), flush=True)


if __name__ == "__main__":
    main()
