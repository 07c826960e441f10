"""Reservations of a step's spans, and the staging that they are written to."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kmesh.errors import Exhausted, KMeshError, RequestError
from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Session, Staging
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.identity import Identity
from kmesh_vllm.metadata import StorePlan
from kmesh_vllm.movers import Mover
from kmesh_vllm.staging import StagingRing

logger = logging.getLogger("kmesh_vllm")

_STAGING = 64 << 20
#: Seconds after which a daemon that had no staging left is asked again.
_ASK_AGAIN = 5.0
#: Names of kmesh.v1.Reason numbers that have a counter of their own.
_EXISTS, _PENDING = 4, 2
_FULL = (5, 6, 11, 12)


@dataclass(frozen=True, slots=True)
class Held:
    """A reserved span."""

    reservation: int
    tokens: int
    length: int
    position: int  # of its first token, in the step's list of blocks


@dataclass(eq=False, slots=True)
class Step:
    """What a step stores."""

    session: Session
    staging: Staging
    ring: StagingRing
    blocks: list[int]
    held: list[Held]


class Reserver:
    """Asks the daemon for room, in one thread of ours; whatever it does may wait for the daemon.

    Args:
        mover: that will write to the staging.
        mine: the heads that this rank holds.
        device: UUID of the GPU in whose memory is stored, or empty: in host memory.
        later: has another thread of ours do something, in its time; OSError: there is none.
    """

    def __init__(
        self,
        mover: Mover,
        identity: Identity,
        mine: Shard,
        current: Callable[[], Session | None],
        settings: Settings,
        counts: Counts,
        device: str,
        later: Callable[[Callable[[], None]], object],
    ) -> None:
        self._mover = mover
        self._identity = identity
        self._mine = mine
        self._geometry = identity.geometry(mine.heads)
        self._current = current
        self._settings = settings
        self._counts = counts
        self._device = device
        self._later = later
        self._given: tuple[Session, Staging] | None = None
        self._staging: tuple[Session, Staging | None, StagingRing] | None = None
        self._ask_at = 0.0
        self._lock = threading.Lock()
        self._reserved: dict[str, set[int]] = {}

    def reserved(self) -> dict[str, set[int]]:
        """First tokens of spans that others had reserved, by request, since the last call."""
        if not self._reserved:
            return {}
        with self._lock:
            found, self._reserved = self._reserved, {}
        return found

    def close(self) -> None:
        """Lets go of the staging."""
        self._given = self._staging = None

    def reserve(self, plans: Sequence[StorePlan]) -> Step | None:
        """The spans of a step that may be stored; None: none of them, which is counted."""
        session = self._current()
        spans = sum(len(plan.tokens) for plan in plans)
        if session is None:
            self._counts.add("store_skipped_error", spans)
            return None
        staging, ring = self._attached(session)
        if staging is None:
            self._counts.add("store_skipped_staging", spans)
            return None
        step = Step(session, staging, ring, [], [])
        try:
            for plan in plans:
                self._reserve_plan(step, plan)
        except BaseException:
            abort(session, step.held)
            raise
        return step

    def _reserve_plan(self, step: Step, plan: StorePlan) -> None:
        lengths = [self._geometry.payload_bytes(tokens) for tokens in plan.tokens]
        batch = ReserveBatch(
            namespace=plan.namespace,
            shard=self._mine,
            keys=plan.keys,
            tokens=plan.tokens,
            start=plan.start,
            length=lengths,
            sub_keys=plan.sub_keys,
            salt=plan.salt,
            device=self._device,
        )
        answer = step.session.reserve(batch)
        base = len(step.blocks) * self._identity.block_tokens - plan.first
        step.blocks.extend(plan.block_ids().tolist())
        for i, reason in enumerate(answer.reason):
            if reason == 0:
                step.held.append(
                    Held(answer.reservation[i], plan.tokens[i], lengths[i], base + plan.start[i])
                )
        held = {plan.start[i] for i, reason in enumerate(answer.reason) if reason == _PENDING}
        if held and plan.request:
            with self._lock:
                self._reserved.setdefault(plan.request, set()).update(held)
        for reason, count in Counter(r for r in answer.reason if r).items():
            if reason in (_EXISTS, _PENDING):
                self._counts.add("store_skipped_exists", count)
            elif reason in _FULL:
                self._counts.add("store_skipped_full", count)
            else:
                self._counts.add("store_skipped_error", count)

    def _attached(self, session: Session) -> tuple[Staging | None, StagingRing]:
        """The session's staging; None if it gave none, for a while."""
        now = time.monotonic()
        if (
            self._staging is None
            or self._staging[0] is not session
            or (self._staging[1] is None and now >= self._ask_at)
        ):
            staging = self._attach(session)
            self._ask_at = now + _ASK_AGAIN
            ring = StagingRing(staging.size if staging is not None else 0)
            self._staging = session, staging, ring
        return self._staging[1], self._staging[2]

    def _attach(self, session: Session) -> Staging | None:
        # A session gives it once, so it is kept when the mover can't have it yet.
        if self._given is None or self._given[0] is not session:
            staging = self._ask(session)
            if staging is None:
                return None
            self._given = session, staging
        staging = self._given[1]
        try:
            self._mover.prepare_staging(staging)
        except (KMeshError, OSError) as wrong:
            logger.warning("nothing is stored yet: staging memory: %s", str(wrong))
            return None
        # A first store of a few spans does not wait for all of it. None is too late for the end.
        with contextlib.suppress(OSError):
            self._later(lambda: self._mover.touch_staging(staging))
        return staging

    def _ask(self, session: Session) -> Staging | None:
        largest = session.welcome.max_staging_bytes
        size = min(self._settings.staging_bytes or min(largest // 4, _STAGING), largest)
        while True:
            try:
                return session.staging(size)
            except Exhausted as wrong:
                # Others have most of it; a little is better than nothing.
                size //= 2
                if size < self._geometry.payload_bytes(session.welcome.span_tokens):
                    logger.warning("nothing is stored: no staging memory: %s", str(wrong))
                    return None
            except (RequestError, OSError) as wrong:
                logger.warning("nothing is stored: no staging memory: %s", str(wrong))
                return None


def give_back(future: Future[Step | None]) -> None:
    """Ends reservations that came too late. Waits for the daemon, so not in the engine's thread."""
    if not future.cancelled() and future.exception() is None:
        step = future.result()
        if step is not None:
            abort(step.session, step.held)


def abort(session: Session, held: Sequence[Held]) -> None:
    """Ends reservations that nothing will be written for."""
    if held:
        try:
            session.abort([h.reservation for h in held])
        except KMeshError as wrong:
            logger.debug("reservations end with their session: %s", str(wrong))
