"""What the scheduler half remembers of one request."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kmesh.keys import Extra, KeyChain
from kmesh.lease import Lease
from kmesh.session import Session
from kmesh_vllm.chains import Chains
from kmesh_vllm.leases import Held
from kmesh_vllm.lookup import Hit
from kmesh_vllm.part import Part

#: Seconds until a span that somebody else has reserved is tried again, at first.
_AGAIN_SECONDS = 0.05

#: Circumstances of a look-up: epoch, index version, tokens of use, quarantine's generation.
LookedAt = tuple[int, int, int, int]


class Phase(enum.Enum):
    """Where a request's restore is.

    ::

        IDLE ──hit──▶ ACQUIRING ──leased──▶ LEASED ──blocks──▶ LOADING ──done──▶ IDLE
                          └──refused, late──▶ IDLE ◀──not needed──┘
    """

    IDLE = enum.auto()
    ACQUIRING = enum.auto()
    LEASED = enum.auto()
    LOADING = enum.auto()


@dataclass(eq=False, slots=True)
class Restore:
    """A request's hit on its way to a load. Spans are numbered over the whole request.

    Attributes:
        session: that gives the lease.
        hit: what the index said.
        first: number of the first span asked for.
        limit: tokens that were of use when the index was asked.
        held: the lease, which other requests may use too.
        lease: once it is there.
        begin, end: tokens that are promised and then loaded.
        began: when the load began.
    """

    session: Session
    hit: Hit
    first: int
    limit: int
    held: Held
    lease: Lease | None = None
    begin: int = 0
    end: int = 0
    began: float = 0.0
    _dropped: bool = False

    @property
    def future(self) -> Future[Lease]:
        """Of the lease."""
        return self.held.future

    def leased_tokens(self, span_tokens: int) -> int:
        """Position up to which the lease reaches."""
        if self.lease is None:
            return 0
        full = self.hit.spans - self.first
        if self.lease.hits > full:
            return self.hit.spans * span_tokens + self.hit.tail
        return (self.first + self.lease.hits) * span_tokens

    def drop(self) -> None:
        """Uses the lease no longer, also one that is still to come. May be called again."""
        if not self._dropped:
            self._dropped = True
            self.held.leave()


@dataclass(eq=False, slots=True)
class Again:
    """Spans that are to be stored, but that somebody else had reserved when they were tried.

    Mostly that one stores them. If it dies instead, nobody else would.

    Attributes:
        spans: their numbers; the one behind the last full span is the tail.
        at: when they are tried again.
        left: how often.
    """

    spans: set[int] = field(default_factory=set)
    at: float = 0.0
    left: int = 6

    def hear(self, spans: Iterable[int], now: float) -> None:
        """Another try found these reserved."""
        if self.left:
            self.left -= 1
            self.at = now + _AGAIN_SECONDS * 2 ** (5 - self.left)
            self.spans.update(spans)


@dataclass(eq=False, slots=True)
class RequestState:
    """One request of the engine, from its first sight to its end.

    Attributes:
        request_id: vLLM's.
        tokens: of the prompt.
        namespace: 32-byte digest, with adapter and salt.
        extras: what the prompt holds beside tokens.
        salt: digest of the request's cache salt, or empty.
        may_load, may_store: False once something went wrong that forbids it.
        local: tokens that vLLM's own prefix cache had at the last look.
        blocks: ids of the request's blocks; kept up to date while something is to be stored.
        stored: spans from the prompt's start that are in KMesh or on their way.
        tail_stored: as ``stored``, for what follows the last full span.
        complete: nothing of the prompt is left to store.
        again: what is to be tried again all the same.
        failed: position of the first bad block of the load under way, or None.
        corrupt: lease entries with wrong bytes, of the load under way.
        restored: tokens that were restored, over the request's life.
        part: in compute flights.
        claims_left: how often it may still claim; it does so again for what a flight left open.
        whole: tokens that were missing when it first claimed.
        waited: seconds that it has waited for flights.
        stands_by: since when it waits for a sibling of its own engine, or None.
        began: when its first step was planned, and how many tokens it had then; None before that.
        reached: tokens that are computed when the steps planned so far have run.
        measured: its prefill was counted in the engine's rate.
    """

    request_id: str
    tokens: Sequence[int]
    namespace: bytes
    extras: tuple[Extra, ...] = ()
    salt: bytes = field(default=b"", repr=False)
    may_load: bool = True
    may_store: bool = True
    phase: Phase = Phase.IDLE
    restore: Restore | None = None
    flight_keys: tuple[bytes, ...] = ()
    local: int = 0
    blocks: list[int] = field(default_factory=list)
    stored: int = 0
    tail_stored: bool = False
    complete: bool = False
    again: Again = field(default_factory=Again)
    failed: int | None = None
    corrupt: list[int] = field(default_factory=list)
    restored: int = 0
    part: Part | None = None
    claims_left: int = 4
    whole: int = 0
    waited: float = 0.0
    stands_by: float | None = None
    began: tuple[float, int] | None = None
    reached: int = 0
    measured: bool = False
    _chain: KeyChain | None = None
    _chain_at: tuple[int, int] = (0, 0)
    _memo: tuple[LookedAt, Hit | None] | None = None

    def chain(self, span_tokens: int, sub_tokens: int, chains: Chains | None = None) -> KeyChain:
        """The prompt's keys, computed once.

        Args:
            chains: of other prompts, which may share some; hears of this one.
        """
        if self._chain is None or self._chain_at != (span_tokens, sub_tokens):
            self._chain = KeyChain(
                self.namespace,
                span_tokens=span_tokens,
                sub_tokens=sub_tokens,
                extras=self.extras,
            )
            if chains is None:
                self._chain.extend(self.tokens)
            else:
                chains.extend(self._chain, self.namespace, self.tokens)
            self._chain_at = (span_tokens, sub_tokens)
        return self._chain

    def remembered(self, at: LookedAt) -> tuple[bool, Hit | None]:
        """Whether a look-up was made under the same circumstances, and what it found."""
        if self._memo is None or self._memo[0] != at:
            return False, None
        return True, self._memo[1]

    def remember(self, at: LookedAt, hit: Hit | None) -> None:
        """Keeps a look-up's answer."""
        self._memo = (at, hit)

    def forget_restore(self) -> None:
        """Gives back what the restore held; not while it loads."""
        if self.restore is not None and self.phase is not Phase.LOADING:
            self.restore.drop()
            self.restore = None
            self.phase = Phase.IDLE
