"""Numbers of the wire contract that the core speaks; equal to ``kmesh.v1`` by a test."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Why a whole call was refused (the part of ``kmesh.v1.Code`` that the core uses)."""

    INVALID_ARGUMENT = 1
    NOT_FOUND = 2
    UNAUTHENTICATED = 4
    EXHAUSTED = 7
    TOO_LARGE = 8
    DRAINING = 10


class Reason(IntEnum):
    """What happened to one span of a batch (``kmesh.v1.Reason``)."""

    OK = 0
    MISS = 1
    PENDING = 2
    CORRUPT = 3
    EXISTS = 4
    POOL_FULL = 5
    NOT_READY = 6
    TOO_LARGE = 7
    STALE = 8
    COPY_FAILED = 9
    ABORTED = 10
    CATALOG_FULL = 11
    QUOTA = 12
