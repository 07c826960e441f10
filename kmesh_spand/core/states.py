"""The states of a span, and every way from one to another. ``docs/states.md`` explains them."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class State(IntEnum):
    """What a catalog slot is. ``kmesh ls`` shows the names in lower case."""

    FREE = 0
    RESERVED = 1
    COPYING = 2
    ORPHANED = 3
    RECOVERED = 4
    VERIFYING = 5
    COMMITTED = 6
    SUSPECT = 7
    DOOMED = 8
    ALIAS = 9
    DRAFT = 10
    RETIRED = 11


class Trigger(StrEnum):
    """What moves a slot from one state to another."""

    RESERVE = "reserve"
    COMMIT = "commit"
    ABORT = "abort"
    COPIED = "copied"
    FAILED = "failed"
    RECOVER = "recover"
    VERIFY = "verify"
    GOOD = "good"
    BAD = "bad"
    BAD_LEASED = "bad, leased"
    LOST = "lost"
    REPORT = "report"
    EVICT = "evict"
    RELEASED = "released"
    NAME = "name"
    UNNAME = "unname"
    DRAFT = "draft"
    TAKE_OVER = "take over"
    RETIRE = "retire"
    RETIRE_LEASED = "retire, leased"


S, T = State, Trigger

TRANSITIONS: dict[tuple[int, Trigger], State] = {
    (S.FREE, T.RESERVE): S.RESERVED,
    (S.FREE, T.RECOVER): S.RECOVERED,
    (S.FREE, T.NAME): S.ALIAS,
    (S.RESERVED, T.COMMIT): S.COPYING,
    (S.RESERVED, T.ABORT): S.FREE,
    (S.COPYING, T.COPIED): S.COMMITTED,
    (S.COPYING, T.FAILED): S.FREE,
    (S.COPYING, T.ABORT): S.ORPHANED,
    (S.ORPHANED, T.COPIED): S.FREE,
    (S.ORPHANED, T.FAILED): S.FREE,
    (S.RECOVERED, T.VERIFY): S.VERIFYING,
    (S.RECOVERED, T.EVICT): S.FREE,
    (S.RECOVERED, T.BAD): S.FREE,
    (S.VERIFYING, T.GOOD): S.COMMITTED,
    (S.VERIFYING, T.BAD): S.FREE,
    (S.VERIFYING, T.BAD_LEASED): S.DOOMED,
    (S.VERIFYING, T.LOST): S.RECOVERED,
    (S.COMMITTED, T.REPORT): S.SUSPECT,
    (S.COMMITTED, T.EVICT): S.FREE,
    (S.COMMITTED, T.BAD): S.FREE,
    (S.COMMITTED, T.BAD_LEASED): S.DOOMED,
    (S.COMMITTED, T.RETIRE): S.FREE,
    (S.COMMITTED, T.RETIRE_LEASED): S.RETIRED,
    (S.SUSPECT, T.GOOD): S.COMMITTED,
    (S.SUSPECT, T.BAD): S.FREE,
    (S.SUSPECT, T.BAD_LEASED): S.DOOMED,
    (S.SUSPECT, T.LOST): S.SUSPECT,
    (S.DOOMED, T.RELEASED): S.FREE,
    (S.ALIAS, T.UNNAME): S.FREE,
    (S.FREE, T.DRAFT): S.DRAFT,
    (S.DRAFT, T.TAKE_OVER): S.COMMITTED,
    (S.DRAFT, T.FAILED): S.FREE,
    (S.RETIRED, T.RELEASED): S.FREE,
}

#: Has a catalog record, and a key.
STORED = frozenset({S.RECOVERED, S.VERIFYING, S.COMMITTED, S.SUSPECT})
#: Is found by its key.
KEYED = STORED | {S.RESERVED, S.COPYING}
#: One row hands its names on to another.
HANDED_ON = frozenset({T.TAKE_OVER, T.RETIRE, T.RETIRE_LEASED})
#: May be evicted while nobody leases or holds it.
EVICTABLE = frozenset({S.RECOVERED, S.COMMITTED})
