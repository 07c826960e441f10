"""What can be restored for a request: the answer to vLLM's question, asked until it is final.

Nothing here waits but ``Patience``: look-ups read the shared index, leases come in the background,
and a request whose lease is under way is answered "ask again".
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kmesh.errors import DeadlineExceeded, KMeshError
from kmesh.keys import KEY_BYTES
from kmesh.session import Session
from kmesh_vllm.computing import Computing
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.flights import Flights
from kmesh_vllm.identity import Identity
from kmesh_vllm.leases import Held, Leases
from kmesh_vllm.lookup import Hit, Looked, longest_hit
from kmesh_vllm.patience import Patience
from kmesh_vllm.quarantine import Quarantine
from kmesh_vllm.requests import LookedAt, Phase, RequestState, Restore
from kmesh_vllm.storing import key_at
from kmesh_vllm.tiers import Tiers

logger = logging.getLogger("kmesh_vllm")

#: After a lease that did not come in time, none is asked for during so many waits: a daemon that
#: hangs holds up one request now and then, not each.
_PAUSE = 5
#: Part of the time for a lease that the daemon may take to bring spans from disk: what has not come
#: by then is computed, what has is used.
_DISK_SHARE = 0.75

#: (tokens, True): restore so many; (0, False): nothing; (None, False): ask again.
Match = tuple[int | None, bool]


class Matcher:
    """Brings requests from IDLE to LEASED, or says that nothing is to be had.

    Args:
        computing: who sees to what is not there.
        sharing: vLLM's own prefix cache is on, so siblings can share the blocks of one load.
        patience: how long questions of one step wait for their leases.
        recipes: workers can restore spans out of recipes.

    Attributes:
        flights: loads of this engine, by the keys that they bring.
        quarantine: keys whose loads failed.
        tiers: whose memory is looked in.
    """

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        counts: Counts,
        computing: Computing,
        patience: Patience,
        *,
        sharing: bool,
        recipes: bool,
        clock: Callable[[], float],
    ) -> None:
        self.flights = Flights()
        self.quarantine = Quarantine(settings.retry_after_ms / 1000, clock=clock)
        self.tiers = Tiers(settings.tier, settings.acquire_timeout_ms / 1000, clock)
        self._leases = Leases()
        self._looked = Looked()
        self._recipes = recipes
        self._identity = identity
        self._settings = settings
        self._counts = counts
        self._computing = computing
        self._patience = patience
        self._sharing = sharing
        self._clock = clock
        self._shardings = identity.sharding.alternatives()
        self._paused_until = 0.0

    def match(self, state: RequestState, session: Session | None, local: int, total: int) -> Match:
        """See ``SchedulerHalf.match``; the request does not load."""
        block = self._identity.block_tokens
        limit = min((total - 1) // block * block, len(state.tokens) // block * block)
        if (
            session is None
            or not state.may_load
            or limit - local < max(self._settings.min_restore_tokens, 1)
        ):
            self.idle(state)
            self._computing.give_up(state)
            return 0, False
        if not self.tiers.look:
            return (None, False) if self.tiers.wait() else (0, False)
        if self._sharing and self._other_brings(state, session, local):
            return None, False
        if state.restore is not None and (
            state.restore.session is not session
            or state.restore.first > local // session.welcome.span_tokens
        ):
            self.idle(state)
        if state.phase is Phase.IDLE:
            if self._computing.holds(state, session, local, self._finder(state, session, limit)):
                return None, False
            return self._begin(state, session, local, limit)
        if state.phase is Phase.ACQUIRING:
            answer = self._await_lease(state)
            if answer is not None:
                return answer
        return self._promise(state, session, local, limit)

    def idle(self, state: RequestState) -> None:
        """A request is to get nothing, for now: its lease goes back. Not while it loads."""
        self.flights.land(state)
        state.forget_restore()

    def _begin(self, state: RequestState, session: Session, local: int, limit: int) -> Match:
        if self._clock() < self._paused_until:
            return 0, False
        hit = self._look_up(state, session, limit)
        span = session.welcome.span_tokens
        stored = min(hit.tokens(span), limit) if hit is not None else 0
        found = max(stored, state.local)
        if self._computing.claims(state, session, found, limit, self.tiers.store):
            return None, False
        if hit is None or stored - local < max(self._settings.min_restore_tokens, 1):
            return 0, False
        first = local // span
        chain = state.chain(span, session.welcome.sub_tokens)
        keys = chain.keys[first * KEY_BYTES : hit.spans * KEY_BYTES]
        if hit.tail:
            keys += chain.key(hit.spans, hit.tail)
        timeout = self._settings.acquire_timeout_ms / 1000
        shards = hit.sharding.shards
        try:
            held = self._leases.ask(
                (session, keys, hit.sharding.codes, state.salt, hit.device),
                lambda: session.acquire_async(
                    keys,
                    shards,
                    prefix=True,
                    timeout=timeout,
                    salt=state.salt,
                    device=hit.device,
                    recipes=self._recipes and self.tiers.recipes(hit.device),
                    # What is on disk is waited for as a lease is, in the background.
                    wait=timeout * _DISK_SHARE,
                ),
                now=self._clock(),
                timeout=timeout,
            )
        except KMeshError:
            return 0, False
        state.restore = Restore(session, hit, first, limit, held)
        state.phase = Phase.ACQUIRING
        if self._sharing:
            key = key_at(state, session, local)
            self.flights.take_off(state, (key,) if key else ())
        if held.lease is None:
            self._patience.wait(held.future)
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
            # Its version is that of before the look: what came since is looked for again.
            known = self._looked.known(*at[:2])
            hit = longest_hit(
                state.chain(welcome.span_tokens, welcome.sub_tokens),
                session.index,
                self._shardings,
                span_tokens=welcome.span_tokens,
                sub_tokens=welcome.sub_tokens,
                block_tokens=self._identity.block_tokens,
                limit=limit,
                avoid=self.quarantine,
                devices=self.tiers.look,
                known=known,
            )
            state.remember(at, hit)
        return hit

    def _await_lease(self, state: RequestState) -> Match | None:
        """None when the lease has come; else what to answer."""
        restore = state.restore
        assert restore is not None
        held = restore.held
        error = held.error(self._clock()) if held.lease is None else None
        if error is not None:
            self._missed(held, error)
            self._give_up(state)
            return 0, False
        if held.lease is None:
            return None, False
        self.flights.land(state)
        restore.lease = held.lease
        state.phase = Phase.LEASED
        return None

    def _missed(self, held: Held, error: BaseException) -> None:
        """A lease did not come; the first of those who waited for it says so."""
        if held.told:
            return
        held.told = True
        if isinstance(error, DeadlineExceeded):
            self._counts.add("acquire_late")
            self._paused_until = self._clock() + _PAUSE * self._settings.acquire_timeout_ms / 1000
            return
        if not isinstance(error, KMeshError):
            logger.error("acquire failed", exc_info=error)
        self._counts.add("acquire_refused")

    def _promise(self, state: RequestState, session: Session, local: int, limit: int) -> Match:
        restore = state.restore
        assert restore is not None
        block, span = self._identity.block_tokens, session.welcome.span_tokens
        leased = restore.leased_tokens(span)
        end = min(leased, limit) // block * block
        if end - local >= max(self._settings.min_restore_tokens, 1):
            return end - local, True
        if leased < restore.hit.tokens(span):
            self._counts.add("acquire_refused")
            self._give_up(state)
        else:
            self.idle(state)
        return 0, False

    def _give_up(self, state: RequestState) -> None:
        """The index promised what Acquire refused: not asked again until the index changes."""
        restore = state.restore
        assert restore is not None
        self.idle(state)
        state.remember(self._circumstances(restore.session, restore.limit), None)

    def _circumstances(self, session: Session, limit: int) -> LookedAt:
        return session.epoch, session.index.version, limit, self.quarantine.generation

    def _other_brings(self, state: RequestState, session: Session, local: int) -> bool:
        """Whether the span that this request needs next is on its way for another one."""
        if not self.flights:
            return False
        key = key_at(state, session, local)
        if key is None or not self.flights.other(state, key):
            return False
        self.idle(state)
        return True
