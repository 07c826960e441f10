"""The scheduler half: what to restore, for whom, and what to store.

Nothing here waits: look-ups read the shared index, leases come in the background, and a request
whose lease is under way is answered "ask again".
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from kmesh.errors import DeadlineExceeded, KMeshError
from kmesh.keys import KEY_BYTES, Extra
from kmesh.session import Session
from kmesh_vllm.computing import Computing
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.flights import Flights
from kmesh_vllm.identity import Identity
from kmesh_vllm.lookup import Hit, longest_hit
from kmesh_vllm.metadata import LoadPlan, LoadReport, StepPlan
from kmesh_vllm.patience import PATIENCE, Patience
from kmesh_vllm.quarantine import Quarantine
from kmesh_vllm.requests import LookedAt, Phase, RequestState, Restore
from kmesh_vllm.restoring import failed_keys, load_plan, report_corrupt
from kmesh_vllm.storing import key_at, keys_between, plan_store
from kmesh_vllm.tiers import Tiers

logger = logging.getLogger("kmesh_vllm")

#: After a lease that did not come in time, none is asked for during so many waits: a daemon that
#: hangs holds up one request now and then, not each.
_PAUSE = 5
#: Part of the time for a lease that the daemon may take to bring spans from disk: what has not come
#: by then is computed, what has is used.
_DISK_SHARE = 0.75


class Sessions(Protocol):
    """What is used of ``kmesh.client.Client``."""

    @property
    def session(self) -> Session | None: ...


#: (tokens, True): restore so many; (0, False): nothing; (None, False): ask again.
Match = tuple[int | None, bool]


class SchedulerHalf:
    """Decides for one engine.

    Args:
        sharing: vLLM's own prefix cache is on, so siblings can share the blocks of one load.
        patience: seconds of one step in which questions wait for their leases.
    """

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        client: Sessions,
        *,
        sharing: bool = True,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._client = client
        self._sharing = sharing
        self._clock = clock
        self._shardings = identity.sharding.alternatives()
        self._states: dict[str, RequestState] = {}
        self._loading: dict[str, RequestState] = {}
        self._flights = Flights()
        self._loads: list[LoadPlan] = []
        self._quarantine = Quarantine(settings.retry_after_ms / 1000, clock=clock)
        self._reports = ThreadPoolExecutor(1, thread_name_prefix="kmesh-report")
        self._paused_until = 0.0
        self._computing = False
        self._patience = Patience(patience)
        self._tiers = Tiers(settings.tier, settings.acquire_timeout_ms / 1000, clock)
        self.counts = Counts()
        self.computing = Computing(
            settings, identity.sharding.shards, self.counts, sharing=sharing, clock=clock
        )
        self.reset_word = ""

    def __len__(self) -> int:
        """Requests that are known, those whose aborted load is under way included."""
        return len(self._states.keys() | self._loading.keys())

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        namespace: bytes,
        extras: Iterable[Extra] = (),
        *,
        may_load: bool = True,
        salt: bytes = b"",
    ) -> None:
        """A new request whose prompt may be restored and stored."""
        self._states[request_id] = RequestState(
            request_id,
            tokens,
            namespace,
            tuple(extras),
            salt,
            may_load=may_load and self._settings.load,
            may_store=self._settings.store,
        )

    def match(self, request_id: str, local: int, total: int) -> Match:
        """How many tokens behind the first ``local`` can be restored.

        May be asked any number of times.

        Args:
            local: tokens that vLLM's own cache has; whole blocks.
            total: tokens of the request; the last one is always computed.
        """
        state = self._states.get(request_id)
        if state is None:
            return 0, False
        if state.phase is Phase.LOADING:
            raise RuntimeError(f"{request_id}: asked for a match while its load is under way")
        state.local = local
        if request_id in self._loading:
            # An aborted request of the same id still loads, and its end would be taken for ours.
            return 0, False
        session = self._client.session
        block = self._identity.block_tokens
        limit = min((total - 1) // block * block, len(state.tokens) // block * block)
        if (
            session is None
            or not state.may_load
            or limit - local < max(self._settings.min_restore_tokens, 1)
        ):
            self._idle(state)
            self.computing.give_up(state)
            return 0, False
        if not self._tiers.look:
            return (None, False) if self._tiers.wait() else (0, False)
        if self._sharing and self._other_brings(state, session, local):
            return None, False
        if state.restore is not None and (
            state.restore.session is not session
            or state.restore.first > local // session.welcome.span_tokens
        ):
            self._idle(state)
        if state.phase is Phase.IDLE:
            if self.computing.holds(state, session, local, self._finder(state, session, limit)):
                return None, False
            return self._begin(state, session, local, limit)
        if state.phase is Phase.ACQUIRING:
            answer = self._await_lease(state)
            if answer is not None:
                return answer
        return self._promise(state, session, local, limit)

    def allocated(self, request_id: str, block_ids: Sequence[int], tokens: int) -> None:
        """Blocks were found; ``tokens`` are to be restored into them, 0 if none."""
        state = self._states.get(request_id)
        if state is None:
            return
        if tokens == 0:
            if state.phase is not Phase.LOADING:
                self._idle(state)
            return
        block = self._identity.block_tokens
        restore = state.restore
        if state.phase is not Phase.LEASED or restore is None or restore.lease is None:
            raise RuntimeError(f"{request_id}: {tokens} tokens to restore without a lease")
        restore.begin, restore.end = state.local, state.local + tokens
        ids = list(block_ids[restore.begin // block : -(-restore.end // block)])
        if self._sharing:
            keys = keys_between(state, restore.session, restore.begin, restore.end)
            self._flights.take_off(state, keys)
        state.phase = Phase.LOADING
        restore.began = self._clock()
        state.failed, state.corrupt = None, []
        self._loading[request_id] = state
        self._loads.append(load_plan(state, restore, restore.lease, ids))

    def plan(
        self,
        new: Sequence[tuple[str, list[int], int, int]],
        running: Sequence[tuple[str, list[int], bool, int, int]],
        preempted: Iterable[str] = (),
    ) -> StepPlan:
        """What the workers do in this step; rows as in ``compat``."""
        self._patience.renew()
        new, running = list(new), list(running)
        self._computing = bool(new or running)
        step = StepPlan(loads=self._loads, computes=self._computing)
        self._loads = []
        for request in preempted:
            if state := self._states.get(request):
                self.computing.preempted(state)
        if not (new or running or self._loading):
            self.computing.rest()
        for request, blocks, computed, scheduled in new:
            state = self._states.get(request)
            if state is not None:
                self.computing.scheduled(state, computed, scheduled)
            if state is not None and state.may_store:
                state.blocks = blocks
                self._admitted(state, computed)
                self._plan_store(step, state, computed + scheduled)
        for request, blocks, replace, computed, scheduled in running:
            state = self._states.get(request)
            if state is not None and (state.part is not None or not state.measured):
                self.computing.scheduled(state, computed, scheduled)
            if state is None or not state.may_store or (state.complete and not replace):
                continue
            if replace:
                state.blocks = blocks
                self._admitted(state, computed)
            else:
                state.blocks.extend(blocks)
            self._plan_store(step, state, computed + scheduled)
        return step

    def worked(self, report: LoadReport | None, finished: Iterable[str]) -> None:
        """What the workers said: what went wrong, and which loads have ended."""
        if report is not None:
            if report.devices is not None:
                self._tiers.hear(report.devices)
            for request, entries in report.corrupt.items():
                if state := self._loading.get(request):
                    state.corrupt.extend(e for e in entries if e not in state.corrupt)
            for request, position in report.failed.items():
                if state := self._loading.get(request):
                    state.failed = min(position, position if state.failed is None else state.failed)
        for request in finished:
            if state := self._loading.pop(request, None):
                self._loaded(state)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """A request has ended, in whatever state; returns what its client may know."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        self._flights.land(state)
        self.computing.finished(state)
        # A load under way keeps its lease: the workers still read.
        state.forget_restore()
        return {"kmesh": {"restored_tokens": state.restored}}

    def reset(self) -> None:
        """The weights or the cache are no longer what they were: nothing old is used again."""
        self.reset_word = secrets.token_hex(16)
        for state in self._states.values():
            state.may_load = state.may_store = False
            self._idle(state)
            self.computing.reset(state)

    def told(self) -> dict[str, int]:
        """What was counted; only in a step that computes, as vLLM may not look otherwise."""
        return self.counts.take() if self._computing else {}

    def shutdown(self) -> None:
        """Gives all leases back."""
        for state in self._states.values():
            self.computing.reset(state)
        self._reports.shutdown(wait=True, cancel_futures=True)
        for state in (*self._states.values(), *self._loading.values()):
            if state.restore is not None:
                state.restore.drop()
        self._states.clear()
        self._loading.clear()
        self._flights = Flights()

    def _begin(self, state: RequestState, session: Session, local: int, limit: int) -> Match:
        if self._clock() < self._paused_until:
            return 0, False
        hit = self._look_up(state, session, limit)
        span = session.welcome.span_tokens
        found = self._finder(state, session, limit)()
        if self.computing.claims(state, session, found, limit, self._tiers.store):
            return None, False
        if hit is None or min(hit.tokens(span), limit) - local < max(
            self._settings.min_restore_tokens, 1
        ):
            return 0, False
        first = local // span
        chain = state.chain(span, session.welcome.sub_tokens)
        keys = chain.keys[first * KEY_BYTES : hit.spans * KEY_BYTES]
        if hit.tail:
            keys += chain.key(hit.spans, hit.tail)
        timeout = self._settings.acquire_timeout_ms / 1000
        try:
            future = session.acquire_async(
                keys,
                hit.sharding.shards,
                prefix=True,
                timeout=timeout,
                salt=state.salt,
                device=hit.device,
                # What is on disk is waited for as a lease is, in the background.
                wait=timeout * _DISK_SHARE,
            )
        except KMeshError:
            return 0, False
        state.restore = Restore(session, hit, first, limit, future, self._clock() + timeout)
        state.phase = Phase.ACQUIRING
        if self._sharing:
            key = key_at(state, session, local)
            self._flights.take_off(state, (key,) if key else ())
        self._patience.wait(future)
        answer = self._await_lease(state)
        return self._promise(state, session, local, limit) if answer is None else answer

    def _finder(self, state: RequestState, session: Session, limit: int) -> Callable[[], int]:
        """Says how many tokens are here or in KMesh, at the time when it is asked."""

        def found() -> int:
            hit = self._look_up(state, session, limit)
            stored = min(hit.tokens(session.welcome.span_tokens), limit) if hit else 0
            return max(stored, state.local)

        return found

    def _look_up(self, state: RequestState, session: Session, limit: int) -> Hit | None:
        at = self._circumstances(session, limit)
        remembered, hit = state.remembered(at)
        if not remembered:
            welcome = session.welcome
            hit = longest_hit(
                state.chain(welcome.span_tokens, welcome.sub_tokens),
                session.index,
                self._shardings,
                span_tokens=welcome.span_tokens,
                sub_tokens=welcome.sub_tokens,
                block_tokens=self._identity.block_tokens,
                limit=limit,
                avoid=self._quarantine,
                devices=self._tiers.look,
            )
            state.remember(at, hit)
        return hit

    def _await_lease(self, state: RequestState) -> Match | None:
        """None when the lease has come; else what to answer."""
        restore = state.restore
        assert restore is not None
        done = restore.future.done()
        if not done and self._clock() < restore.deadline:
            return None, False
        error = restore.future.exception() if done else DeadlineExceeded("no lease in time")
        if isinstance(error, DeadlineExceeded):
            self.counts.add("acquire_late")
            self._paused_until = self._clock() + _PAUSE * self._settings.acquire_timeout_ms / 1000
        elif error is not None:
            if not isinstance(error, KMeshError):
                logger.error("acquire failed", exc_info=error)
            self.counts.add("acquire_refused")
        if error is not None:
            self._give_up(state)
            return 0, False
        self._flights.land(state)
        restore.lease = restore.future.result()
        state.phase = Phase.LEASED
        return None

    def _promise(self, state: RequestState, session: Session, local: int, limit: int) -> Match:
        restore = state.restore
        assert restore is not None
        block, span = self._identity.block_tokens, session.welcome.span_tokens
        leased = restore.leased_tokens(span)
        end = min(leased, limit) // block * block
        if end - local >= max(self._settings.min_restore_tokens, 1):
            return end - local, True
        if leased < restore.hit.tokens(span):
            self.counts.add("acquire_refused")
            self._give_up(state)
        else:
            self._idle(state)
        return 0, False

    def _give_up(self, state: RequestState) -> None:
        """The index promised what Acquire refused: not asked again until the index changes."""
        restore = state.restore
        assert restore is not None
        self._idle(state)
        state.remember(self._circumstances(restore.session, restore.limit), None)

    def _circumstances(self, session: Session, limit: int) -> LookedAt:
        return session.epoch, session.index.version, limit, self._quarantine.generation

    def _other_brings(self, state: RequestState, session: Session, local: int) -> bool:
        """Whether the span that this request needs next is on its way for another one."""
        if not self._flights:
            return False
        key = key_at(state, session, local)
        if key is None or not self._flights.other(state, key):
            return False
        self._idle(state)
        return True

    def _idle(self, state: RequestState) -> None:
        self._flights.land(state)
        state.forget_restore()

    def _admitted(self, state: RequestState, computed: int) -> None:
        """Tokens of a request that begins to run and that neither vLLM's cache nor we brought
        are another connector's: whether its load holds is not known yet, so nothing that is
        built on them is stored.
        """
        if computed > state.local:
            state.may_store = False
            self.computing.reset(state)

    def _plan_store(self, step: StepPlan, state: RequestState, computed: int) -> None:
        session = self._client.session
        if session is None or not state.may_store:
            return
        plan = plan_store(
            state,
            session,
            self._shardings,
            block_tokens=self._identity.block_tokens,
            computed=computed,
            bad=self._quarantine.__contains__,
            device=self._tiers.store,
        )
        if plan is not None:
            step.stores.append(plan)

    def _loaded(self, state: RequestState) -> None:
        """A load has ended: count it, keep away from what failed, give the lease back."""
        restore = state.restore
        assert restore is not None
        assert restore.lease is not None
        lease, session = restore.lease, restore.session
        span = session.welcome.span_tokens
        self._flights.land(state)
        good = restore.end if state.failed is None else state.failed
        state.restored += good - restore.begin
        state.local = good
        self.counts.add("restored_tokens", good - restore.begin)
        if state.failed is None:
            self.counts.add("restores")
            self.computing.rates.restored(good - restore.begin, self._clock() - restore.began)
            state.stored = max(state.stored, good // span)
        else:
            # Never again for this request: a span that fails each time would livelock it.
            state.may_load = False
            state.stored = min(state.stored, good // span)
            state.tail_stored = state.complete = False
            # With the daemon gone it is not the span's fault.
            failed = state.failed if self._client.session is session else None
            for key in failed_keys(restore, lease, state.corrupt, failed):
                self._quarantine.add(key)
        state.phase = Phase.IDLE
        state.restore = None
        if state.corrupt:
            self._reports.submit(report_corrupt, session, lease, list(state.corrupt))
        else:
            lease.release()
