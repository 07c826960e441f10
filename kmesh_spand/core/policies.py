"""Orders of eviction by their names."""

from __future__ import annotations

from collections.abc import Callable

from kmesh_spand.core.batch import Batch
from kmesh_spand.core.policy import LRU, Policy
from kmesh_spand.core.s3fifo import S3FIFO

POLICIES: dict[str, Callable[[int, Batch | None], Policy]] = {"lru": LRU, "s3-fifo": S3FIFO}


def make_policy(name: str, max_rows: int, batch: Batch | None = None) -> Policy:
    """An empty order.

    Args:
        name: of ``POLICIES``. max_rows: highest row.

    Raises:
        KeyError: there is no such policy.
    """
    return POLICIES[name](max_rows, batch)
