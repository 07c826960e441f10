"""A lease on its way to a load plan, and what is left of it after a load."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from kmesh import _host
from kmesh.errors import KMeshError
from kmesh.keys import KEY_BYTES
from kmesh.lease import Lease
from kmesh_vllm.metadata import BASE_RECORD, MIRROR_RECORD, LoadPlan, packed_ids
from kmesh_vllm.requests import RequestState, Restore

logger = logging.getLogger("kmesh_vllm")


def load_plan(state: RequestState, restore: Restore, lease: Lease, blocks: list[int]) -> LoadPlan:
    """The leased spans that hold tokens of [restore.begin, restore.end), and where they go."""
    span = restore.session.welcome.span_tokens
    keys = min(lease.hits, -(-restore.end // span) - restore.first)
    # The engine's own cache may have grown since the lease was asked for.
    skipped = max(restore.begin // span - restore.first, 0)
    at = restore.first, skipped, keys
    packed = restore.held.packed.get(at)
    if packed is None:
        packed = restore.held.packed[at] = _packed(lease, skipped, keys, restore.first, span)
    spans, mirrors, bases = packed
    return LoadPlan(
        request=state.request_id,
        epoch=restore.session.epoch,
        tp=restore.hit.sharding.tp,
        spans=spans,
        begin=restore.begin,
        end=restore.end,
        blocks=packed_ids(blocks),
        mirrors=mirrors,
        bases=bases,
        namespace=state.namespace,
    )


def _packed(
    lease: Lease, skipped: int, keys: int, first: int, span: int
) -> tuple[bytes, bytes, bytes]:
    """Spans, mirrors and bases of a plan for the first keys of a lease but ``skipped`` of them."""
    shards = len(lease.shards)
    begin, end = skipped * shards, keys * shards
    spans = _host.leased_spans(
        lease.slab, lease.offset, lease.length, lease.root, lease.tokens, end, shards, first, span
    )
    if begin:
        spans = spans[len(spans) // end * begin :]
    return spans, _mirrors(lease, begin, end), _bases(lease)


def _mirrors(lease: Lease, begin: int, end: int) -> bytes:
    """Which of those entries of a lease are recipes, counted from the first of them."""
    if not lease.bases:
        return b""
    lengths = np.asarray(lease.dense_length[begin:end], np.uint64)
    numbers = np.flatnonzero(lengths)
    mirrors = np.zeros(len(numbers), MIRROR_RECORD)
    mirrors["record"], mirrors["dense_length"] = numbers, lengths[numbers]
    mirrors["dense_root"] = np.asarray(lease.dense_root[begin:end], np.uint64)[numbers]
    return mirrors.tobytes()


def _bases(lease: Lease) -> bytes:
    """What those refer to."""
    if not lease.bases:
        return b""
    bases = np.zeros(len(lease.bases), BASE_RECORD)
    for record, ((part, key), place) in zip(bases, lease.bases.items(), strict=True):
        record["key"], record["part"] = np.frombuffer(key, np.uint8), part
        for name in ("slab", "offset", "length", "root", "generation", "tokens", "position"):
            record[name] = getattr(place, name)
    return bases.tobytes()


def failed_keys(
    restore: Restore, lease: Lease, corrupt: Sequence[int], failed: int | None
) -> set[bytes]:
    """Keys of the lease behind corrupt entries, and behind the position of a failure."""
    numbers = {entry // len(lease.shards) for entry in corrupt}
    if failed is not None:
        span = restore.session.welcome.span_tokens
        numbers.add(max(failed // span - restore.first, 0))
    keys = {lease.keys[n * KEY_BYTES : (n + 1) * KEY_BYTES] for n in numbers}
    return {key for key in keys if key}


def report_corrupt(restore: Restore, entries: Sequence[int]) -> None:
    """Tells the daemon which entries of a lease held wrong bytes, then gives it back."""
    assert restore.lease is not None
    try:
        restore.session.report_corrupt(restore.lease, entries)
    except KMeshError as wrong:
        logger.warning("could not report corrupt spans: %s", str(wrong))
    finally:
        restore.drop()
