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


class Verdict(IntEnum):
    """What has become of one key (``kmesh.v1.Verdict``)."""

    SERVED = 1
    WRITING = 2
    UNVERIFIED = 3
    SUSPECT = 4
    ENDED = 5
    NEVER = 6
    UNKNOWN = 7
    ON_DISK = 8


class Cause(IntEnum):
    """By what a key ended (``kmesh.v1.Cause``)."""

    PRESSURE = 1
    OPERATOR = 2
    CORRUPT = 3
    RECOVERY = 4
    ABORTED = 5
    COPY_FAILED = 6
    DISK = 7


class Standing(IntEnum):
    """What a Claim found (``kmesh.v1.Standing``)."""

    LEAD = 1
    COMPUTING = 2
    STORED = 3
    NONE = 4


class Arrival(IntEnum):
    """How an Await ended (``kmesh.v1.Arrival``)."""

    LANDED = 1
    LEAD = 2
    ENDED = 3


class FlightCause(IntEnum):
    """Why a flight, or a wait for one, ended (``kmesh.v1.FlightCause``)."""

    DONE = 1
    ABORTED = 2
    PREEMPTED = 3
    NOT_STORED = 4
    CLOSED = 5
    BACK_OFF = 6
    DRAINING = 7
    LEFT = 8


class Trouble(IntEnum):
    """What went wrong with a file.

    BAD: it is not what it should hold, or is not there. FULL: no room for it. IO: the disk refused.
    LOST: the range was given away before it was read, or whoever did the job is gone.
    """

    BAD = 1
    FULL = 2
    IO = 3
    LOST = 4


class MirrorFate(IntEnum):
    """What becomes of a dissolved family's mirrors (``kmesh.v1.MirrorFate``)."""

    DENSE = 1
    DENSE_OR_DROP = 2
    KEEP = 3
