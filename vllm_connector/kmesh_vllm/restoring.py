"""A lease on its way to a load plan, and what is left of it after a load."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from kmesh.errors import KMeshError
from kmesh.keys import KEY_BYTES
from kmesh.lease import Lease
from kmesh.session import Session
from kmesh_vllm.metadata import SPAN_RECORD, LoadPlan, packed_ids
from kmesh_vllm.requests import RequestState, Restore

logger = logging.getLogger("kmesh_vllm")


def load_plan(state: RequestState, restore: Restore, lease: Lease, blocks: list[int]) -> LoadPlan:
    """The leased spans that hold tokens of [restore.begin, restore.end), and where they go."""
    span = restore.session.welcome.span_tokens
    shards = len(lease.shards)
    keys = min(lease.hits, -(-restore.end // span) - restore.first)
    records = np.zeros(keys * shards, SPAN_RECORD)
    for name in ("slab", "offset", "length", "root", "tokens"):
        records[name] = getattr(lease, name)[: len(records)]
    entries = np.arange(len(records))
    records["entry"] = entries
    records["part"] = entries % shards
    records["start"] = (restore.first + entries // shards) * span
    return LoadPlan(
        request=state.request_id,
        epoch=restore.session.epoch,
        tp=restore.hit.sharding.tp,
        spans=records.tobytes(),
        begin=restore.begin,
        end=restore.end,
        blocks=packed_ids(blocks),
    )


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


def report_corrupt(session: Session, lease: Lease, entries: Sequence[int]) -> None:
    """Tells the daemon which entries of a lease held wrong bytes, then gives it back."""
    try:
        with lease:
            session.report_corrupt(lease, entries)
    except KMeshError as wrong:
        logger.warning("could not report corrupt spans: %s", str(wrong))
