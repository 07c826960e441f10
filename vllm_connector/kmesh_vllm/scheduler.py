"""The scheduler half: what to restore, for whom, and what to store.

Nothing here waits; ``matching`` finds what there is.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from kmesh.keys import Extra
from kmesh.session import Session
from kmesh_vllm.chains import Chains
from kmesh_vllm.computing import Computing
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.identity import Identity
from kmesh_vllm.matching import Match, Matcher
from kmesh_vllm.metadata import LoadPlan, LoadReport, StepPlan
from kmesh_vllm.patience import PATIENCE, Patience
from kmesh_vllm.requests import Phase, RequestState
from kmesh_vllm.restoring import failed_keys, load_plan, report_corrupt
from kmesh_vllm.segmenting import Segmenting
from kmesh_vllm.storing import keys_between, plan_again, plan_store


class Sessions(Protocol):
    """What is used of ``kmesh.client.Client``."""

    @property
    def session(self) -> Session | None: ...


class SchedulerHalf:
    """Decides for one engine.

    Args:
        sharing: vLLM's own prefix cache is on, so siblings can share the blocks of one load.
        patience: seconds of one step in which questions wait for their leases.
        recipes: workers can restore spans out of recipes.
        place: names what this engine computes on, if it is no GPU; workers name that.
        lockstep: other engines wait for each step of this one.
    """

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        client: Sessions,
        *,
        sharing: bool = True,
        patience: float = PATIENCE,
        recipes: bool = False,
        place: str = "",
        lockstep: bool = False,
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
        self._loads: list[LoadPlan] = []
        self._chains = Chains()
        self._reports = ThreadPoolExecutor(1, thread_name_prefix="kmesh-report")
        self._computing = False
        self._patience = Patience(patience)
        self.counts = Counts()
        self.computing = Computing(
            settings,
            identity.sharding.shards,
            self.counts,
            sharing=sharing,
            place=place,
            lockstep=lockstep,
            clock=clock,
        )
        self._matcher = Matcher(
            identity,
            settings,
            self.counts,
            self.computing,
            self._patience,
            sharing=sharing,
            recipes=recipes,
            clock=clock,
        )
        self.segmenting = Segmenting(settings, identity, self.counts, clock)
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
        params: object = None,
    ) -> None:
        """A new request whose prompt may be restored and stored.

        Args:
            params: what its client said in ``kv_transfer_params``, whatever that is.
        """
        state = self._states[request_id] = RequestState(
            request_id,
            tokens,
            namespace,
            tuple(extras),
            salt,
            may_load=may_load and self._settings.load,
            may_store=self._settings.store,
        )
        self.segmenting.heard(state, params)
        session = self._client.session
        if session is not None and (state.may_load or state.may_store):
            # While it waits in vLLM's queue, and not when its first token is waited for.
            state.chain(session.welcome.span_tokens, session.welcome.sub_tokens, self._chains)

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
        return self._matcher.match(state, self._client.session, local, total)

    def allocated(self, request_id: str, block_ids: Sequence[int], tokens: int) -> None:
        """Blocks were found; ``tokens`` are to be restored into them, 0 if none."""
        state = self._states.get(request_id)
        if state is None:
            return
        if tokens == 0:
            if state.phase is not Phase.LOADING:
                self._matcher.idle(state)
            return
        block = self._identity.block_tokens
        restore = state.restore
        if state.phase is not Phase.LEASED or restore is None or restore.lease is None:
            raise RuntimeError(f"{request_id}: {tokens} tokens to restore without a lease")
        restore.begin, restore.end = state.local, state.local + tokens
        ids = list(block_ids[restore.begin // block : -(-restore.end // block)])
        if self._sharing:
            keys = keys_between(state, restore.session, restore.begin, restore.end)
            self._matcher.flights.take_off(state, keys)
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
            if state is None or not state.may_store:
                continue
            if state.complete and not replace and not state.again.spans:
                continue
            if replace:
                state.blocks = blocks
                self._admitted(state, computed)
            else:
                state.blocks.extend(blocks)
            self._plan_store(step, state, computed + scheduled)
        step.stores.extend(self.segmenting.take())
        step.number = self.computing.planned()
        return step

    def worked(self, report: LoadReport | None, finished: Iterable[str]) -> None:
        """What the workers said: what went wrong, and which loads have ended."""
        if report is not None:
            if report.devices is not None:
                self._matcher.tiers.hear(report.devices)
                if report.devices and self._identity.sharding.tp == 1:
                    self.computing.place = report.devices[0]
            if report.recipes is not None:
                self._matcher.tiers.hear_recipes(report.recipes)
            if report.step:
                self.computing.ran(report.step)
            for request, entries in report.corrupt.items():
                if state := self._loading.get(request):
                    state.corrupt.extend(e for e in entries if e not in state.corrupt)
            for request, starts in report.reserved.items():
                self._reserved(request, starts)
            for request, position in report.failed.items():
                if state := self._loading.get(request):
                    state.failed = min(position, position if state.failed is None else state.failed)
        for request in finished:
            if state := self._loading.pop(request, None):
                self._loaded(state)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """A request has ended, in whatever state; returns what its client may know."""
        state = self._states.pop(request_id, None)
        said = self.segmenting.finished(request_id)
        if state is None:
            return {"kmesh": said} if said else None
        self._matcher.flights.land(state)
        self.computing.finished(state)
        # A load under way keeps its lease: the workers still read.
        state.forget_restore()
        return {"kmesh": {"restored_tokens": state.restored, **said}}

    def reset(self) -> None:
        """The weights or the cache are no longer what they were: nothing old is used again."""
        self.reset_word = secrets.token_hex(16)
        for state in self._states.values():
            state.may_load = state.may_store = False
            self._matcher.idle(state)
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
        self._matcher.flights.clear()

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
        block, device = self._identity.block_tokens, self._matcher.tiers.store
        if not state.complete:
            bad = self._matcher.quarantine.__contains__
            plan = plan_store(
                state,
                session,
                self._shardings,
                block_tokens=block,
                computed=computed,
                bad=bad,
                device=device,
            )
            if plan is not None:
                step.stores.append(plan)
        if state.again.spans and self._clock() >= state.again.at:
            plan = plan_again(
                state,
                session,
                self._shardings,
                block_tokens=block,
                computed=computed,
                device=device,
            )
            if plan is not None:
                step.stores.append(plan)
        self.segmenting.plan(state, session, computed, device)

    def _reserved(self, request: str, starts: Iterable[int]) -> None:
        """Spans were not stored, since somebody else had them reserved."""
        state, session = self._states.get(request), self._client.session
        if state is not None and session is not None and state.may_store:
            span = session.welcome.span_tokens
            state.again.hear((start // span for start in starts), self._clock())

    def _loaded(self, state: RequestState) -> None:
        """A load has ended: count it, keep away from what failed, give the lease back."""
        restore = state.restore
        assert restore is not None
        assert restore.lease is not None
        lease, session = restore.lease, restore.session
        span = session.welcome.span_tokens
        self._matcher.flights.land(state)
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
                self._matcher.quarantine.add(key)
        state.phase = Phase.IDLE
        state.restore = None
        if state.corrupt:
            self._reports.submit(report_corrupt, restore, list(state.corrupt))
        else:
            restore.drop()
