"""What a request that waits knows of the flight: by the daemon's word, and by what it sees land."""

from __future__ import annotations

from collections.abc import Callable

from kmesh.errors import KMeshError
from kmesh_vllm.config import Settings
from kmesh_vllm.part import Part
from kmesh_vllm.rates import Rates
from kmesh_vllm.requests import RequestState
from kmesh_vllm.waiting import Outlook

#: Seconds between two thoughts about going on to wait.
THINK_SECONDS = 0.05


def thinks(part: Part, now: float, tell: Callable[[object], None]) -> bool:
    """Whether it is time to think again about waiting on.

    The daemon is asked first how far the flight is. Its answer is waited for until the time of the
    next thought; without it, what is known has to do.

    Args:
        tell: is called when the answer is there.
    """
    asked, claim = part.asked, part.claim
    assert claim is not None
    if asked is not None and asked.done():
        part.asked = None
        far = asked.result() if asked.exception() is None else None
        if far is not None:
            part.far, part.far_at = far, now
        return True
    if now < part.think:
        return False
    part.think = now + THINK_SECONDS
    if asked is not None:
        return True
    try:
        part.asked = part.session.progress_async(claim.flight, claim.place)
    except KMeshError:
        return True
    part.asked.add_done_callback(tell)
    return False


def outlook(
    state: RequestState,
    part: Part,
    found: int,
    now: float,
    *,
    queue: int,
    rates: Rates,
    settings: Settings,
) -> Outlook:
    """What is known now.

    Args:
        found: tokens that are here or in KMesh.
        queue: requests of this engine that wait.
    """
    claim = part.claim
    assert claim is not None
    span = part.session.welcome.span_tokens
    begin = part.found // span * span
    end = min(begin + claim.covered * span, part.limit)
    news = max(found - part.found, 0)
    if news and part.landing is None:
        part.landing = now
    far, since = part.far, now - part.far_at
    frontier = max(far.begin + far.landed, claim.first + news // span)
    waited = state.waited + now - part.since
    return Outlook(
        whole=state.whole,
        missing=max(part.limit - found, 0),
        covered=max(end - max(found, begin), 0),
        ahead=max(claim.first + claim.covered - frontier, 0) * span,
        landed=(frontier - far.begin) * span,
        computed=far.computed * span,
        seen=news,
        landing=now - part.landing if part.landing is not None else 0.0,
        age=far.age_ms / 1000 + since,
        quiet=far.quiet_ms / 1000 + since,
        pause=far.pause_ms / 1000,
        beside=far.beside,
        waited=waited,
        left=settings.flight_wait_ms / 1000 - waited,
        queue=queue,
        prefill=rates.prefill,
        restore=rates.restore,
        patience=settings.flight_patience,
    )
