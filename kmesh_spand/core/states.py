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
    FETCHING = 12


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
    FETCH = "fetch"
    FETCHED = "fetched"


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
    (S.FREE, T.FETCH): S.FETCHING,
    (S.FETCHING, T.FETCHED): S.COMMITTED,
    (S.FETCHING, T.FAILED): S.FREE,
}

#: Has a catalog record, and a key.
STORED = frozenset({S.RECOVERED, S.VERIFYING, S.COMMITTED, S.SUSPECT})
#: Is found by its key.
KEYED = STORED | {S.RESERVED, S.COPYING, S.FETCHING}
#: One row hands its names on to another.
HANDED_ON = frozenset({T.TAKE_OVER, T.RETIRE, T.RETIRE_LEASED})
#: May be evicted while nobody leases or holds it.
EVICTABLE = frozenset({S.RECOVERED, S.COMMITTED})


class FileState(IntEnum):
    """What is known of one file of the disk tier."""

    GONE = 0
    WRITING = 1
    ABANDONED = 2
    KEPT = 3
    WANTED = 4
    READING = 5
    HELD = 6
    REMOVING = 7
    ALIAS = 8


class FileTrigger(StrEnum):
    """What moves a file from one state to another."""

    SPILL = "spill"
    FIND = "find"
    WRITTEN = "written"
    FAILED = "failed"
    ABANDON = "abandon"
    WANT = "want"
    LEAVE = "leave"
    FETCH = "fetch"
    FETCHED = "fetched"
    REFUSED = "refused"
    RETRY = "retry"
    BAD = "bad"
    EVICT = "evict"
    REMOVED = "removed"
    NAME = "name"
    UNNAME = "unname"


F, G = FileState, FileTrigger

FILE_TRANSITIONS: dict[tuple[int, FileTrigger], FileState] = {
    (F.GONE, G.SPILL): F.WRITING,
    (F.GONE, G.FIND): F.KEPT,
    (F.GONE, G.NAME): F.ALIAS,
    (F.WRITING, G.WRITTEN): F.KEPT,
    (F.WRITING, G.FAILED): F.GONE,
    (F.WRITING, G.ABANDON): F.ABANDONED,
    (F.ABANDONED, G.WRITTEN): F.REMOVING,
    (F.ABANDONED, G.FAILED): F.GONE,
    (F.KEPT, G.WANT): F.WANTED,
    (F.KEPT, G.EVICT): F.REMOVING,
    (F.WANTED, G.LEAVE): F.KEPT,
    (F.WANTED, G.FETCH): F.READING,
    (F.WANTED, G.REFUSED): F.HELD,
    (F.READING, G.FETCHED): F.KEPT,
    (F.READING, G.REFUSED): F.HELD,
    (F.READING, G.BAD): F.REMOVING,
    (F.HELD, G.RETRY): F.KEPT,
    (F.HELD, G.EVICT): F.REMOVING,
    (F.REMOVING, G.REMOVED): F.GONE,
    (F.ALIAS, G.UNNAME): F.GONE,
}

#: A file that is found by its key, once it is written.
FILE_KEYED = frozenset({F.WRITING, F.KEPT, F.WANTED, F.READING, F.HELD})
#: Its key may be in the index.
FILE_SHOWN = frozenset({F.KEPT, F.WANTED, F.READING})
#: Whole, and not to go.
FILE_STORED = FILE_SHOWN | {F.HELD}
#: May be removed to make room.
FILE_EVICTABLE = frozenset({F.KEPT, F.HELD})
#: Something is on its way that may leave room.
FILE_BUSY = frozenset({F.WRITING, F.ABANDONED, F.WANTED, F.READING, F.REMOVING})
