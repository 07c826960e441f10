"""Which spans of a request a step completes and KMesh does not have yet."""

from __future__ import annotations

from collections.abc import Callable

from kmesh.keys import KEY_BYTES, split
from kmesh.session import Session
from kmesh_vllm.lookup import covered
from kmesh_vllm.metadata import StorePlan, packed_ids
from kmesh_vllm.requests import RequestState
from kmesh_vllm.sharding import Sharding


def plan_store(
    state: RequestState,
    session: Session,
    shardings: tuple[Sharding, ...],
    *,
    block_tokens: int,
    computed: int,
    bad: Callable[[bytes], bool],
    device: str | None = "",
) -> StorePlan | None:
    """Spans of the prompt that lie within its first ``computed`` tokens; None if there are none.

    What is planned or stored already counts as stored from then on. A span that was found ``bad``
    and that the daemon has not dropped yet is waited for, with all behind it.

    Args:
        device: UUID of the GPU in whose memory is stored, empty for host memory. None: not known
            yet, so that the daemon has to say what is there.
    """
    span, sub = session.welcome.span_tokens, session.welcome.sub_tokens
    prompt = len(state.tokens)
    full, tail = prompt // span, prompt % span // sub * sub
    done = min(min(computed, prompt) // span, full)
    wanted = [(number, span) for number in range(state.stored, done)]
    if tail and not state.tail_stored and computed >= full * span + tail:
        wanted.append((full, tail))
    if not wanted:
        state.complete = state.stored == full and (state.tail_stored or not tail)
        return None
    plan = _Wanted(state, session, block_tokens, wanted)
    if not plan.in_blocks:
        return None
    there = plan.there(shardings, device)
    waits = next((i for i, key in enumerate(plan.keys) if there[i] and bad(key)), len(wanted))
    del wanted[waits:]
    if not wanted:
        return None
    with_tail = wanted[-1][1] < span
    state.stored += len(wanted) - with_tail
    state.tail_stored = state.tail_stored or with_tail
    return plan.of([i for i in range(len(wanted)) if not there[i]])


def plan_again(
    state: RequestState,
    session: Session,
    shardings: tuple[Sharding, ...],
    *,
    block_tokens: int,
    computed: int,
    device: str | None = "",
) -> StorePlan | None:
    """Spans that somebody else had reserved, and that are still not there; None: there are none.

    Args: as for ``plan_store``.
    """
    span, sub = session.welcome.span_tokens, session.welcome.sub_tokens
    prompt = len(state.tokens)
    full, tail = prompt // span, prompt % span // sub * sub
    # Numbers of a daemon that had shorter spans may lie behind the prompt.
    state.again.spans &= set(range(full + bool(tail)))
    wanted = [(number, span if number < full else tail) for number in sorted(state.again.spans)]
    wanted = [one for one in wanted if one[0] * span + one[1] <= computed]
    if not wanted:
        return None
    plan = _Wanted(state, session, block_tokens, wanted)
    if not plan.in_blocks:
        return None
    state.again.spans.difference_update(number for number, _ in wanted)
    there = plan.there(shardings, device)
    return plan.of([i for i in range(len(wanted)) if not there[i]])


class _Wanted:
    """Spans of a request, by number and tokens, in order."""

    def __init__(
        self,
        state: RequestState,
        session: Session,
        block_tokens: int,
        wanted: list[tuple[int, int]],
    ) -> None:
        self._state = state
        self._session = session
        self._wanted = wanted
        self._block = block_tokens
        self._span = span = session.welcome.span_tokens
        self._chain = state.chain(span, session.welcome.sub_tokens)
        self.keys = [self._chain.key(number, tokens) for number, tokens in wanted]
        self._first = wanted[0][0] * span // block_tokens
        self._last = -(-(wanted[-1][0] * span + wanted[-1][1]) // block_tokens)

    @property
    def in_blocks(self) -> bool:
        """Whether the request has blocks for all of them."""
        return self._last <= len(self._state.blocks)

    def there(self, shardings: tuple[Sharding, ...], device: str | None) -> list[bool]:
        """Which of them are stored already, as far as that is known."""
        if device is None:
            return [False] * len(self.keys)
        return covered(b"".join(self.keys), self._session.index, shardings, device)

    def of(self, missing: list[int]) -> StorePlan | None:
        """Stores these of them."""
        if not missing:
            return None
        wanted, sub_keys = self._wanted, b""
        number, tokens = wanted[missing[-1]]
        if tokens < self._span:
            sub_keys = b"".join(self._chain.sub_keys(number, tokens)[:-1])
        return StorePlan(
            namespace=self._state.namespace,
            keys=b"".join(self.keys[i] for i in missing),
            tokens=tuple(wanted[i][1] for i in missing),
            start=tuple(wanted[i][0] * self._span for i in missing),
            sub_keys=sub_keys,
            first=self._first * self._block,
            blocks=packed_ids(self._state.blocks[self._first : self._last]),
            salt=self._state.salt,
            request=self._state.request_id,
        )


def key_at(state: RequestState, session: Session, position: int) -> bytes | None:
    """Key of the full span that holds a position, if the prompt fills it."""
    span, sub = session.welcome.span_tokens, session.welcome.sub_tokens
    chain = state.chain(span, sub)
    number = position // span
    return chain.key(number) if number < chain.spans else None


def keys_between(state: RequestState, session: Session, begin: int, end: int) -> tuple[bytes, ...]:
    """Keys of the full spans that overlap tokens [begin, end)."""
    span, sub = session.welcome.span_tokens, session.welcome.sub_tokens
    chain = state.chain(span, sub)
    first, last = begin // span, min(-(-end // span), chain.spans)
    return split(chain.keys[first * KEY_BYTES : last * KEY_BYTES])
