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
    chain = state.chain(span, sub)
    first = wanted[0][0] * span // block_tokens
    last = -(-(wanted[-1][0] * span + wanted[-1][1]) // block_tokens)
    if last > len(state.blocks):
        return None
    keys = [chain.key(number, tokens) for number, tokens in wanted]
    there = [False] * len(keys)
    if device is not None:
        there = covered(b"".join(keys), session.index, shardings, device)
    waits = next((i for i, key in enumerate(keys) if there[i] and bad(key)), len(keys))
    del wanted[waits:]
    if not wanted:
        return None
    with_tail = wanted[-1][1] < span
    state.stored += len(wanted) - with_tail
    state.tail_stored = state.tail_stored or with_tail
    missing = [i for i in range(len(wanted)) if not there[i]]
    if not missing:
        return None
    sub_keys = b""
    if with_tail and missing[-1] == len(wanted) - 1:
        sub_keys = b"".join(chain.sub_keys(full, tail)[:-1])
    return StorePlan(
        namespace=state.namespace,
        keys=b"".join(keys[i] for i in missing),
        tokens=tuple(wanted[i][1] for i in missing),
        start=tuple(wanted[i][0] * span for i in missing),
        sub_keys=sub_keys,
        first=first * block_tokens,
        blocks=packed_ids(state.blocks[first:last]),
        salt=state.salt,
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
