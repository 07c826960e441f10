"""Compute flights, as one engine takes part in them: it leads, waits, or computes alone.

Nothing here waits but ``rest``. Claims and waits are answered in the background; a request that
has no answer yet is asked for again, which costs a look at its state.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

from kmesh.errors import DeadlineExceeded, InvalidArgument, KMeshError
from kmesh.flight import Arrival, Arrived, Claim, FlightCause, Standing
from kmesh.keys import KEY_BYTES, split
from kmesh.layout import Shard
from kmesh.session import Session
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.part import Part, Role, give_back
from kmesh_vllm.rates import Rates
from kmesh_vllm.requests import RequestState
from kmesh_vllm.resting import Rest
from kmesh_vllm.storing import key_at
from kmesh_vllm.underway import UnderWay
from kmesh_vllm.waiting import worth_waiting
from kmesh_vllm.watching import THINK_SECONDS, outlook, thinks

logger = logging.getLogger("kmesh_vllm")

#: As for leases: after a claim without an answer, none is made during so many waits.
_PAUSE = 5
#: Steps behind the end of a prompt after which all of it that is stored has been reserved: the
#: scheduler is at most two steps ahead of the workers.
_SETTLED = 3


class Computing:
    """Decides for one engine.

    Args:
        shards: in which it stores.
        sharing: vLLM's own prefix cache is on, so siblings find each other's blocks there.
        place: names what this engine computes on, or is empty.
        lockstep: other engines wait for each step of this one.

    Attributes:
        rates: of this engine.
        place: as above.
    """

    def __init__(
        self,
        settings: Settings,
        shards: tuple[Shard, ...],
        counts: Counts,
        *,
        sharing: bool,
        place: str = "",
        lockstep: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rates = Rates()
        self.place = place
        self._settings = settings
        self._shards = shards
        self._counts = counts
        self._sharing = sharing
        self._clock = clock
        self._by_key: dict[bytes, RequestState] = {}
        self._asking: set[RequestState] = set()
        self._rest = Rest(lockstep=lockstep)
        self._under_way = UnderWay()
        self._paused_until = 0.0
        self._too_old: Session | None = None
        self._waits = itertools.count(1)

    def __len__(self) -> int:
        """Requests that wait for an answer."""
        return len(self._asking)

    # Asked for a match

    def holds(
        self, state: RequestState, session: Session, local: int, found: Callable[[], int]
    ) -> bool:
        """Whether the request has to be asked for again.

        Args:
            found: looks how many tokens are here or in KMesh now.
        """
        part = state.part
        if part is not None and part.session is not session:
            self._drop(state)
            part = None
        if part is None:
            return self._stands_by(state, session, local)
        if part.role is Role.CLAIMING:
            return self._claimed(state, part)
        if part.role is Role.WAITING:
            return self._waited(state, part, found)
        return False

    def claims(
        self,
        state: RequestState,
        session: Session,
        found: int,
        limit: int,
        device: str | None = "",
    ) -> bool:
        """Claims what is missing behind ``found`` tokens; whether to ask again.

        Args:
            device: UUID of the GPU in whose memory it will be stored, empty for host memory. None:
                not known yet.
        """
        least = self._settings.min_flight_tokens
        if (
            not least
            or device is None
            or state.part is not None
            or not state.claims_left
            or not state.may_store
            or limit - found < least
            or session is self._too_old
            or self._clock() < self._paused_until
        ):
            return False
        span = session.welcome.span_tokens
        chain = state.chain(span, session.welcome.sub_tokens)
        packed = chain.keys[found // span * KEY_BYTES :][: session.welcome.max_batch * KEY_BYTES]
        if len(packed) // KEY_BYTES * span < least:
            return False
        state.claims_left -= 1
        state.whole = state.whole or limit - found
        wait = self._settings.acquire_timeout_ms / 1000
        version = session.index.version
        try:
            future = session.claim_async(
                packed,
                self._shards,
                timeout=wait,
                salt=state.salt,
                device=device,
                place=self.place,
            )
        except KMeshError:
            return False
        keys = split(packed)
        now = self._clock()
        state.part = Part(
            Role.CLAIMING, session, keys, found, limit, version, now, now + wait, future
        )
        self._asking.add(state)
        self._rest.disturb()
        future.add_done_callback(self._rest.tell)
        if self._sharing:
            for key in keys:
                self._by_key.setdefault(key, state)
        return True

    def _stands_by(self, state: RequestState, session: Session, local: int) -> bool:
        """Whether to wait for a sibling; over all waits of a request, no longer than for others."""
        if not self._by_key and state.stands_by is None:
            return False
        now = self._clock()
        if state.stands_by is None:
            state.stands_by = now
        waited = now - state.stands_by
        left = self._settings.flight_wait_ms / 1000 - state.waited - waited
        if left > 0 and self._sibling_computes(state, session, local):
            return True
        state.waited += waited
        state.stands_by = None
        return False

    def _sibling_computes(self, state: RequestState, session: Session, local: int) -> bool:
        """Whether another request of this engine sees to the span that this one needs next."""
        if not self._by_key:
            return False
        key = key_at(state, session, local)
        other = self._by_key.get(key) if key is not None else None
        if other is None or other is state or other.part is None:
            return False
        if other.part.role in (Role.CLAIMING, Role.WAITING):
            # If its answer is there, it takes that in when it is asked, in this step or the next.
            return True
        # One that was not given blocks yet may have to wait for memory that this one holds.
        return other.began is not None

    def _claimed(self, state: RequestState, part: Part) -> bool:
        done = part.future.done()
        if not done and self._clock() < part.deadline:
            return True
        error = part.future.exception() if done else DeadlineExceeded("no answer in time")
        if error is not None:
            self._failed(state, part, error)
            return False
        claim = part.future.result()
        assert isinstance(claim, Claim)
        part.claim = claim
        part.far, part.far_at = claim.progress, self._clock()
        if claim.standing is Standing.LEAD:
            self._counts.add("flight_leads")
            self._become(state, part, Role.LEADING)
        elif claim.standing is Standing.STORED and part.session.index.version != part.version:
            self._drop(state)
        elif claim.standing is Standing.COMPUTING and self._worth(state, part, part.found):
            left = self._settings.flight_wait_ms / 1000 - state.waited
            try:
                part.wait = next(self._waits)
                part.future = part.session.await_flight_async(claim, left, wait=part.wait)
            except KMeshError as failed:
                self._failed(state, part, failed)
                return False
            part.future.add_done_callback(self._rest.tell)
            part.role, part.think = Role.WAITING, self._clock() + THINK_SECONDS
            self._counts.add("flight_joins")
            return True
        else:
            if claim.standing is Standing.COMPUTING:
                self._counts.add("flight_declined")
            self._become(state, part, Role.ALONE)
        return False

    def _waited(self, state: RequestState, part: Part, found: Callable[[], int]) -> bool:
        now = self._clock()
        if not part.future.done():
            if not thinks(part, now, self._rest.tell) or self._worth(state, part, found()):
                return True
            self._counts.add("flight_left")
            self._leave(state, part)
            return False
        error = part.future.exception()
        if error is not None:
            self._failed(state, part, error)
            return False
        state.waited += now - part.since
        arrived = part.future.result()
        assert isinstance(arrived, Arrived)
        if arrived.arrival is Arrival.LANDED:
            self._counts.add("flight_landed")
            self._drop(state)
        elif arrived.arrival is Arrival.LEAD:
            self._counts.add("flight_promoted")
            self._become(state, part, Role.LEADING)
        elif arrived.cause is FlightCause.LEFT:
            # Another request of this engine left the flight. A daemon that is too old to know waits
            # by their numbers then ends all of them.
            self._drop(state)
        else:
            self._counts.add("flight_ended")
            self._become(state, part, Role.ALONE)
        return False

    def _worth(self, state: RequestState, part: Part, found: int) -> bool:
        """The rule, asked with what is known now."""
        known = outlook(
            state,
            part,
            found,
            self._clock(),
            queue=max(len(self._asking), 1),
            rates=self.rates,
            settings=self._settings,
        )
        return worth_waiting(known)

    def _failed(self, state: RequestState, part: Part, error: BaseException) -> None:
        """A claim or a wait had no good answer: the request computes."""
        if isinstance(error, InvalidArgument) and error.field == "body":
            if self._too_old is not part.session:
                logger.warning("the daemon knows no flights: each engine computes for itself")
            self._too_old = part.session
        elif not isinstance(error, DeadlineExceeded):
            if not isinstance(error, KMeshError):
                logger.error("a flight failed", exc_info=error)
            self._counts.add("flight_refused")
        elif part.role is Role.CLAIMING:
            self._counts.add("flight_late")
            wait = self._settings.acquire_timeout_ms / 1000
            self._paused_until = self._clock() + _PAUSE * wait
        else:
            self._counts.add("flight_left")
        if part.role is Role.WAITING:
            self._leave(state, part)
        else:
            part.future.add_done_callback(give_back(part.session))
            self._become(state, part, Role.ALONE)

    # Told what becomes of requests

    def scheduled(self, state: RequestState, computed: int, scheduled: int) -> None:
        """A step computes tokens [computed, computed + scheduled) of a request."""
        prompt, part = len(state.tokens), state.part
        state.reached = computed + scheduled
        self._rest.disturb()
        if state.began is None:
            state.began = self._clock(), computed
        if part is not None and part.role is Role.LEADING:
            self._under_way.add(state, state.reached)
        if part is not None and state.reached >= prompt:
            # Siblings find its blocks from now on.
            self._unregister(state, part)
            if computed >= prompt and not state.again.spans:
                part.settled += 1
                if part.settled == _SETTLED:
                    self._end(state, part, FlightCause.DONE)
        if computed > prompt and not state.measured:
            self._measure(state)

    def planned(self) -> int:
        """A step is planned; the number that workers are to say when it has run, or 0."""
        return self._under_way.planned()

    def ran(self, step: int) -> None:
        """That step has run: those who wait are told how far what we lead is."""
        for state, reached in self._under_way.ran(step):
            part = state.part
            if part is None or part.role is not Role.LEADING:
                continue
            assert part.claim is not None
            span = part.session.welcome.span_tokens
            keys = min(reached // span - part.found // span, part.claim.covered)
            if keys > part.told:
                part.told = keys
                part.session.computed(part.claim.flight, keys)

    def preempted(self, state: RequestState) -> None:
        """A request lost its blocks, and begins again later."""
        state.began = None
        if state.part is not None:
            self._end(state, state.part, FlightCause.PREEMPTED)

    def finished(self, state: RequestState) -> None:
        """A request has ended, in whatever state."""
        whole = state.reached >= len(state.tokens)
        if whole and not state.measured:
            self._measure(state)
        if state.part is not None:
            cause = FlightCause.DONE if whole else FlightCause.ABORTED
            self._end(state, state.part, cause)

    def give_up(self, state: RequestState) -> None:
        """A request is of no use to flights any more, but for what it computes for others."""
        part = state.part
        if part is not None and part.role in (Role.CLAIMING, Role.WAITING):
            self._end(state, part, FlightCause.ABORTED)

    def reset(self, state: RequestState) -> None:
        """What a request computes is nobody else's any more."""
        if state.part is not None:
            self._end(state, state.part, FlightCause.ABORTED)

    def rest(self) -> None:
        """Waits a moment for an answer, in a step in which nothing else is to be done."""
        if self._asking:
            self._rest.rest()
        self._rest.renew()

    def _measure(self, state: RequestState) -> None:
        state.measured = True
        if state.began is not None:
            began, computed = state.began
            self.rates.prefilled(len(state.tokens) - computed, self._clock() - began)

    # Parts

    def _become(self, state: RequestState, part: Part, role: Role) -> None:
        part.role = role
        self._asking.discard(state)

    def _leave(self, state: RequestState, part: Part) -> None:
        """Waits no longer, and computes."""
        state.waited += self._clock() - part.since
        assert part.claim is not None
        if not part.future.done():
            part.session.leave(part.claim.flight, part.wait)
        part.future.add_done_callback(give_back(part.session, part.claim.flight))
        self._become(state, part, Role.ALONE)

    def _end(self, state: RequestState, part: Part, cause: FlightCause) -> None:
        if part.role is Role.CLAIMING:
            part.future.add_done_callback(give_back(part.session))
        elif part.role is Role.WAITING:
            self._counts.add("flight_left")
            self._leave(state, part)
        elif part.role is Role.LEADING:
            assert part.claim is not None
            part.session.land(part.claim.flight, cause)
        self._drop(state)

    def _drop(self, state: RequestState) -> None:
        part, state.part = state.part, None
        self._asking.discard(state)
        if part is not None:
            self._unregister(state, part)

    def _unregister(self, state: RequestState, part: Part) -> None:
        for key in part.keys:
            if self._by_key.get(key) is state:
                del self._by_key[key]
        part.keys = ()
