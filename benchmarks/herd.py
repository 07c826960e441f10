"""A herd: engines that are asked for one new document at the same moment, by many requests."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.engines import Engine, Run
from benchmarks.results import Row, unavailable
from benchmarks.spand import Spand

ENGINES, EACH = 4, 8
DOCUMENT, OWN = 4096, 64
VOCABULARY = 40_000
#: Counters of the daemon that say what became of a herd's requests.
FLIGHTS = ("flight_leads", "flight_joins", "flight_leaves", "flight_shared_tokens")


class Unfit(Exception):
    """A round says nothing: what it compares with was not what it should have been."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round came to; times are seconds from the moment at which requests come.

    Attributes:
        documents: how often the document was computed, by all requests together.
        leader: first token of the request that computed the herd's document.
        worst: the last of all first tokens in the herd.
        waiting: of the other engines the one that used most processor time: cores, from its first
            step's end to the leader's first token. None if that was no more than a step.
        alone: first token of the leading engine for another new document, as long and without a
            tail, while the other engines have nothing to do.
        tails: median of the first tokens of eight requests with tails of their own, in the same
            engine, whose own cache has that document.
        restored: the same in an engine that restores it.
        crowd: the same in all engines at once, whose own caches have the herd's document.
        added: what of ``leader`` the engine was given its eight requests in, before its first step;
            added_alone: of ``alone``, its one.
        flights: what the herd added to each of ``FLIGHTS``.
    """

    documents: float
    leader: float
    worst: float
    waiting: float | None
    alone: float
    tails: float
    restored: float
    crowd: float
    added: float
    added_alone: float
    flights: tuple[int, ...]


class Herd:
    """The engines, all of one daemon, and what is asked of them.

    Args:
        lead: seconds from an order to the moment at which requests come; an engine reads them
            meanwhile.
        wait: seconds that an engine may take for its requests.
    """

    def __init__(
        self, spand: Spand, engines: Sequence[Engine], *, lead: float, wait: float
    ) -> None:
        self._spand = spand
        self._engines = engines
        self._lead, self._wait = lead, wait
        self._rng = random.Random(17)

    def warm(self, tokens: int) -> None:
        """Each engine computes, restores and goes on from its own cache once, then a herd comes."""
        for number in range(len(self._engines)):
            with suppress(Unfit):
                self._compared(number, self._new(tokens))
        with suppress(Unfit):
            self.round(tokens)

    def round(self, tokens: int = DOCUMENT) -> Round:
        """One round, with documents of so many tokens.

        Raises:
            Unfit: it says nothing.
            RuntimeError: an engine gave no answer.
        """
        document = self._new(tokens)
        before = self._counters()
        runs = self._tails(range(len(self._engines)), document)
        flights = [now - then for now, then in zip(self._counters(), before, strict=True)]
        leading, leader = leads(runs)
        others = [run for number, run in enumerate(runs) if number != leading]
        cores = [used for run in others if (used := busy(run.ends, leader)) is not None]
        alone, tails, restored = self._compared(leading, self._new(tokens))
        crowd = self._tails(range(len(self._engines)), document)
        _whole(crowd, tokens)
        return Round(
            documents=computed(runs, tokens),
            leader=leader,
            worst=max(first for run in runs for first in run.firsts),
            waiting=max(cores, default=None),
            alone=alone.firsts[0],
            tails=tails,
            restored=restored,
            crowd=statistics.median(first for run in crowd for first in run.firsts),
            added=runs[leading].added,
            added_alone=alone.added,
            flights=tuple(flights),
        )

    def _counters(self) -> list[int]:
        counters = self._spand.status().counters
        return [counters[name] for name in FLIGHTS]

    def _compared(self, number: int, document: list[int]) -> tuple[Run, float, float]:
        """The run alone, ``tails`` and ``restored`` of ``Round``."""
        self._spand.settle()
        (alone,) = self._run([number], [[document]])
        if alone.cached:
            raise Unfit(f"{alone.cached} tokens of a new document were cached")
        tails = self._tails([number], document)
        self._spand.settle()
        restored = self._tails([(number + 1) % len(self._engines)], document)
        _whole(tails + restored, len(document))
        self._spand.settle()
        return (
            alone,
            statistics.median(tails[0].firsts),
            statistics.median(restored[0].firsts),
        )

    def _tails(self, numbers: Sequence[int], document: list[int]) -> list[Run]:
        """Each of these engines gets the document with tails that nobody has seen."""
        return self._run(
            numbers, [[document + self._new(OWN) for _ in range(EACH)] for _ in numbers]
        )

    def _run(self, numbers: Sequence[int], prompts: Sequence[list[list[int]]]) -> list[Run]:
        at = time.monotonic() + self._lead
        for number, mine in zip(numbers, prompts, strict=True):
            self._engines[number].order(mine, at=at)
        return [self._engines[number].answer(self._wait) for number in numbers]

    def _new(self, tokens: int) -> list[int]:
        return [self._rng.randrange(100, VOCABULARY) for _ in range(tokens)]


def leads(runs: Sequence[Run]) -> tuple[int, float]:
    """The engine that computed most of the document, and that request's first token."""
    _, number, first = min(
        (share, number, first)
        for number, run in enumerate(runs)
        for share, first in zip(run.shares, run.firsts, strict=True)
    )
    return number, first


def computed(runs: Sequence[Run], tokens: int) -> float:
    """How often requests computed the document of so many tokens: what none found in a cache."""
    return sum(max(tokens - share, 0) for run in runs for share in run.shares) / tokens


def busy(ends: Sequence[tuple[float, float]], until: float) -> float | None:
    """Cores that an engine used between its first step's end and the last one before ``until``.

    Args:
        ends: as in ``Run``.
    """
    inside = [(at, used) for at, used in ends if at <= until]
    if len(inside) < 2:
        return None
    (begin, before), (end, after) = inside[0], inside[-1]
    return (after - before) / (end - begin)


def _whole(runs: Sequence[Run], tokens: int) -> None:
    shares = [share for run in runs for share in run.shares]
    if min(shares) < tokens:
        raise Unfit(f"{min(shares)} of {tokens} tokens were there for tails")


def rows(rounds: Sequence[Round], what: str, tokens: int = DOCUMENT) -> Iterator[Row]:
    """What is written down, of one or more rounds with documents of so many tokens."""
    herd = f"{what}: {ENGINES} engines of one daemon, {EACH} requests each at one moment,"
    herd += f" one new document of {tokens} tokens, {OWN} tokens of each request's own"
    bound = [one.alone + one.tails for one in rounds]
    parts = {"alone": [one.alone for one in rounds], "tails": [one.tails for one in rounds]}
    worst = [one.worst for one in rounds]
    tails = f"median of the first tokens of {EACH} requests with tails of their own at one moment"
    yield Row(
        "herd_computed", "documents", "max",
        {
            "computed": [one.documents for one in rounds],
            **{
                name: [float(one.flights[number]) for one in rounds]
                for number, name in enumerate(FLIGHTS)
            },
        },
        f"{herd}; prompt tokens of the document that no cache had, by vLLM's count of each"
        " request; beside it what the daemon counted",
    )  # fmt: skip
    yield Row(
        "herd_worst", "ratio", "median of a/b",
        {"worst": worst, "alone + tails": bound, **parts},
        f"{herd}; worst first token of all {ENGINES * EACH}, against alone + tails of the same"
        " round. alone: first token of the engine that led, for another new document as long,"
        f" without a tail, the others idle. tails: {tails}, in that engine just behind it, its own"
        " prefix cache has the document",
    )  # fmt: skip
    yield Row(
        "herd_worst_max", "ratio", "max",
        {"worst / (alone + tails)": [a / b for a, b in zip(worst, bound, strict=True)]},
        "the same, the worst round",
    )  # fmt: skip
    yield Row(
        "herd_worst_restored", "ratio", "median of a/b",
        {
            "worst": worst,
            "alone + restored": [one.alone + one.restored for one in rounds],
            "restored": [one.restored for one in rounds],
        },
        f"the same, against alone + restored. restored: {tails}, in an engine that restores the"
        " document from the daemon first",
    )  # fmt: skip
    yield Row(
        "herd_worst_crowd", "ratio", "median of a/b",
        {
            "worst": worst,
            "alone + crowd": [one.alone + one.crowd for one in rounds],
            "crowd": [one.crowd for one in rounds],
        },
        f"the same, against alone + crowd. crowd: {tails}, in each of the {ENGINES} engines at"
        " that moment, their own prefix caches have the document",
    )  # fmt: skip
    for name, key, added in (
        ("herd_worst_led", "tails", parts["tails"]),
        ("herd_worst_led_crowd", "crowd", [one.crowd for one in rounds]),
    ):
        leads = [one.leader + one_added for one, one_added in zip(rounds, added, strict=True)]
        yield Row(
            name, "ratio", "median of a/b", {"worst": worst, f"leader + {key}": leads},
            f"the same, against the leader's own first token in the same round + {key}",
        )  # fmt: skip
    yield Row(
        "herd_leader", "ratio", "median of a/b",
        {
            "in the herd": [one.leader for one in rounds],
            "alone": parts["alone"],
            "added": [one.added for one in rounds],
            "added alone": [one.added_alone for one in rounds],
        },
        f"first token of the request that computes the document and its own {OWN} tokens in the"
        f" herd, against alone; what of that its engine took to be given {EACH} requests and one",
    )  # fmt: skip
    if waiting := [one.waiting for one in rounds if one.waiting is not None]:
        yield Row(
            "herd_waiting_cpu", "cores", "median", {"waiting": waiting},
            f"processor time of an engine that waits with {EACH} requests, between its first"
            " step's end and the leader's first token; of the engines that wait the busiest",
        )  # fmt: skip
    else:
        yield unavailable("herd_waiting_cpu", "cores", "no engine waited for two steps")
    for name, seconds in (("worst", worst), ("alone", parts["alone"]), ("tails", parts["tails"])):
        yield Row(
            f"herd_{name}_time", "ms", "median", {name: [one * 1e3 for one in seconds]},
            f"as in herd_worst: {name}",
        )  # fmt: skip
