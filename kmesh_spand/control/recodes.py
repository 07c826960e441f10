"""Recipes as control sees them being made: jobs of the store worker that are on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import NamedTuple

from kmesh_spand import ipc, jobmessages
from kmesh_spand.core import effects, events
from kmesh_spand.core.mirrors import BaseFact, RecipeFacts

Recode = effects.Encode | effects.KeepRecipe | effects.Densify
#: Bytes a second that an encoding manages on the slowest machine that is served.
_SLOWEST = 20e6
#: For a job with which something is loaded first.
_FIRST_SECONDS = 30.0
#: What that is: the codec, for all of them; for encodings by provenance a GPU's kernels, compiled.
_CODEC, _KERNELS = 1, 2


class _Work(NamedTuple):
    """What a job takes: ``size`` bytes that it is about, and what has to be loaded for it."""

    size: int
    loads: int


class Recodes:
    """Sends jobs, turns answers into events, and fails those that a worker leaves behind.

    Jobs that a worker was not told yet are told the next one. A recipe that was made and not
    written is lost with its worker.

    Args:
        event: where events for the core go.
    """

    def __init__(self, event: Callable[[events.Event], None]) -> None:
        self._event = event
        self._untold: dict[int, tuple[ipc.AnyMessage, _Work]] = {}
        self._told: dict[int, _Work] = {}
        self._made: set[int] = set()
        # By the present worker, as its answers show.
        self._loaded = 0

    def __len__(self) -> int:
        """Answers that are owed."""
        return len(self._told) + len(self._untold)

    @property
    def told(self) -> bool:
        """Whether the present worker has a job of ours."""
        return bool(self._told)

    @property
    def seconds(self) -> float:
        """What its jobs may take, beside others."""
        told = self._told.values()
        first = _FIRST_SECONDS if any(work.loads > self._loaded for work in told) else 0.0
        return first + sum(work.size for work in told) / _SLOWEST

    def begin(self, job: Recode, send: Callable[[ipc.AnyMessage], None] | None) -> None:
        """A job of the core's; ``send`` is None while there is no worker that takes it."""
        message, size = _message(job)
        work = _Work(size, _KERNELS if isinstance(job, effects.Encode) and job.pieces else _CODEC)
        self._made.discard(job.job)
        if send is None:
            self._untold[job.job] = message, work
        else:
            self._told[job.job] = work
            send(message)

    def forget(self, job: int, send: Callable[[ipc.AnyMessage], None] | None) -> None:
        """What was made is not wanted."""
        self._made.discard(job)
        if send is not None:
            send(jobmessages.ForgetRecipe(job))

    def started(self, send: Callable[[ipc.AnyMessage], None]) -> None:
        """A worker takes jobs: it gets those that wait."""
        untold, self._untold = self._untold, {}
        for job, (message, work) in untold.items():
            self._told[job] = work
            send(message)

    def gone(self) -> None:
        """The worker is gone, with what it was doing and what it had made."""
        self._loaded = 0
        lost = [*self._told, *self._made]
        self._told.clear()
        self._made.clear()
        for job in lost:
            self._event(events.RecodeFailed(job))

    def failed(self, job: int) -> bool:
        """A job could not be done; False if it is none of ours."""
        if self._told.pop(job, None) is None:
            return False
        self._event(events.RecodeFailed(job))
        return True

    def hear(self, message: ipc.AnyMessage) -> bool:
        """Takes an answer; False if it is none to us."""
        match message:
            case jobmessages.Encoded():
                if self._answered(message.job):
                    self._made.add(message.job)
                    self._event(events.Encoded(message.job, message.length, message.used))
            case jobmessages.NotEncoded():
                if self._answered(message.job):
                    self._event(events.NotEncoded(message.job, message.why))
            case jobmessages.EncodeSpoiled():
                if self._answered(message.job):
                    self._event(events.EncodeSpoiled(message.job, message.span, message.bases))
            case jobmessages.RecipeKept():
                if self._answered(message.job):
                    self._event(events.RecipeKept(message.job, message.root))
            case jobmessages.Densified():
                if self._answered(message.job):
                    self._event(events.Densified(message.job, message.good))
            case _:
                return False
        return True

    def _answered(self, job: int) -> bool:
        work = self._told.pop(job, None)
        if work is None:
            return False
        self._loaded = max(self._loaded, work.loads)
        return True


def facts(message: jobmessages.Verified) -> RecipeFacts | None:
    """What was read in a recipe."""
    if not message.bases:
        return None
    bases = [
        BaseFact(fact.key, fact.generation, fact.root, fact.tokens, fact.position)
        for fact in message.bases
    ]
    return RecipeFacts(message.length, message.root, bases)


def _message(job: Recode) -> tuple[ipc.AnyMessage, int]:
    """As it is sent, and the bytes that it is about."""
    match job:
        case effects.Encode():
            encode = jobmessages.Encode(
                job.job,
                _payload(job.span),
                job.namespace,
                job.dtype,
                job.head_dim,
                job.shard,
                _payloads(job.bases),
                list(job.frequencies),
                job.interleaved,
                [(piece.token, piece.tokens, piece.base, piece.source) for piece in job.pieces],
            )
            # Without provenance all of the base is searched.
            return encode, job.span.length + sum(base.length for base in job.bases)
        case effects.KeepRecipe():
            return jobmessages.KeepRecipe(job.job, job.slab, job.offset, job.length), job.length
        case effects.Densify():
            densify = jobmessages.Densify(
                job.job,
                _payload(job.mirror),
                _payloads(job.bases),
                job.slab,
                job.offset,
                job.length,
                job.root,
            )
            return densify, job.length


def _payload(place: effects.Payload) -> jobmessages.Payload:
    return jobmessages.Payload(*astuple(place))


def _payloads(places: Sequence[effects.Payload]) -> list[jobmessages.Payload]:
    return [_payload(place) for place in places]
