"""Requests that say what of their prompt others share: what is checked, found and stored.

A prefix restore is not changed by it. A segment that is stored elsewhere in a prompt is found and
counted, and never restored: at another position its state is not what would be computed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kmesh.errors import SegmentError
from kmesh.keys import KEY_BYTES
from kmesh.segmentkeys import SegmentSpan, keyed_segments, match_segments
from kmesh.segments import SegmentedPrompt, parse, split
from kmesh.session import Session
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.identity import Identity
from kmesh_vllm.joining import Joining, Member
from kmesh_vllm.lookup import covered
from kmesh_vllm.metadata import StorePlan
from kmesh_vllm.requests import RequestState
from kmesh_vllm.segmentbook import SegmentBook

#: For so many seconds a span that a request stores is left to it by the others.
_LEFT_TO_ONE = 30.0
#: Spans that are remembered as such.
_MOST_LEFT = 8192


@dataclass(eq=False, slots=True)
class _Request:
    """A request with segments, or with a family.

    Attributes:
        left: spans of its segments that are still to be stored, in order; None before it runs.
        grid: tokens of a span and of the step in which tails are stored, when they were chosen.
        base: keys of its shared segments' spans, each once.
        own: of these, those that it stores.
        joined: there is no family to be told of it any more.
    """

    prompt: SegmentedPrompt
    left: list[SegmentSpan] | None = None
    grid: tuple[int, int] = (0, 0)
    base: tuple[bytes, ...] = ()
    own: tuple[bytes, ...] = ()
    joined: bool = False


class Segmenting:
    """Acts for the scheduler half of one engine.

    Args:
        identity: of the engine.

    Attributes:
        book: what is remembered of segments over requests.
        joining: tells families of their members.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._shardings = identity.sharding.alternatives()
        self._counts = counts
        self._block = identity.block_tokens
        self._separators = frozenset(settings.segment_separators)
        self._requests: dict[str, _Request] = {}
        self._refused: dict[str, SegmentError] = {}
        self._plans: list[StorePlan] = []
        self._session = (0, 0)
        self._left_to_one: OrderedDict[bytes, float] = OrderedDict()
        self.book = SegmentBook()
        self.joining = Joining(identity, counts)

    def __len__(self) -> int:
        """Requests of which something is remembered."""
        return len(self._requests) + len(self._refused)

    def heard(self, state: RequestState, params: object) -> None:
        """A new request with what its client said; what can't be used is left out."""
        if params is None and not self._separators:
            return
        try:
            prompt = self._read(state, params)
        except SegmentError as wrong:
            self._refuse(state.request_id, wrong)
            return
        if prompt is not None and (prompt.segments or prompt.family):
            self._counts.add("segment_requests")
            self._requests[state.request_id] = _Request(prompt, joined=not prompt.family)

    def declined(self, request_id: str, params: object, why: str) -> None:
        """A request that is neither restored nor stored."""
        if isinstance(params, dict) and "kmesh" in params:
            self._refuse(request_id, SegmentError(why, field="kmesh"))

    def plan(
        self, state: RequestState, session: Session, computed: int, device: str | None
    ) -> None:
        """A step completes the first ``computed`` tokens of a request that may be stored.

        Args:
            device: as for ``storing.plan_store``.
        """
        request = self._requests.get(state.request_id)
        if request is None:
            return
        grid = session.welcome.span_tokens, session.welcome.sub_tokens
        if request.left is None:
            request.grid = grid
            self._look(state, request, session, device)
        elif request.grid != grid:
            # Another daemon, which cuts spans elsewhere.
            request.left = []
        left = request.left or []
        reach = min(computed, len(state.blocks) * self._block)
        ready = sum(span.end <= reach for span in left)
        if ready:
            self._store(state, left[:ready], session, device)
            del left[:ready]
        if not left and computed >= len(state.tokens) and not request.joined:
            request.joined = True
            # Recipes are kept in host memory.
            if device == "":
                self._join(state, request, session)
        if not request.joined:
            state.complete = False

    def take(self) -> list[StorePlan]:
        """What the workers are to store of segments in this step."""
        plans, self._plans = self._plans, []
        return plans

    def finished(self, request_id: str) -> dict[str, Any]:
        """A request has ended; returns what its client may know of its segments."""
        request = self._requests.pop(request_id, None)
        for span in (request.left or ()) if request is not None else ():
            self._left_to_one.pop(span.key, None)
        wrong = self._refused.pop(request_id, None)
        return {} if wrong is None else {"refused": {"field": wrong.field, "why": wrong.why}}

    def _read(self, state: RequestState, params: object) -> SegmentedPrompt | None:
        prompt = parse(params, state.tokens, lambda id: self.book.named(state.namespace, id))
        if self._separators and (prompt is None or not prompt.segments):
            family = prompt.family if prompt is not None else None
            return split(state.tokens, self._separators, family) or prompt
        return prompt

    def _refuse(self, request_id: str, wrong: SegmentError) -> None:
        self._counts.add("segment_refused")
        self._refused[request_id] = wrong

    def _look(
        self, state: RequestState, request: _Request, session: Session, device: str | None
    ) -> None:
        """Looks for the shared segments of a request, and chooses what of them to store."""
        prompt = request.prompt
        keyed = keyed_segments(
            prompt,
            state.tokens,
            state.namespace,
            span_tokens=session.welcome.span_tokens,
            sub_tokens=session.welcome.sub_tokens,
            extras=state.extras,
        )
        matches = match_segments(
            keyed,
            lambda keys: self._stored(keys, session, device),
            self.book.same,
            state.tokens,
        )
        for one in keyed:
            self.book.learn(state.namespace, one, state.tokens)
        for match in matches:
            if match.keyed.spans:
                self._counts.add("segment_hits" if match.whole else "segment_misses")
        request.left = []
        at = session.epoch, session.welcome.session_id
        if at != self._session:
            # What was about to be stored ended with its session.
            self._session = at
            self._left_to_one.clear()
        if prompt.family and self._settings.store_segments:
            found = {span.key for match in matches for span in match.found}
            # Of a segment that is there twice, the first is stored.
            spans = {span.key: span for one in reversed(keyed) for span in one.spans}
            wanted = sorted(spans.values(), key=lambda span: span.end)
            request.base = tuple(span.key for span in wanted)
            request.left = [
                span for span in wanted if span.key not in found and self._is_ours(span.key)
            ]
            request.own = tuple(span.key for span in request.left)

    def _is_ours(self, key: bytes) -> bool:
        """Whether no other request of this engine is about to store a span; none is from now on."""
        now, until = self._clock(), self._left_to_one.get(key, 0.0)
        if now < until:
            return False
        self._left_to_one[key] = now + _LEFT_TO_ONE
        self._left_to_one.move_to_end(key)
        if len(self._left_to_one) > _MOST_LEFT:
            self._left_to_one.popitem(last=False)
        return True

    def _join(self, state: RequestState, request: _Request, session: Session) -> None:
        """All that a request stores is on its way: its family is told."""
        chain = state.chain(*request.grid)
        keys = chain.keys
        if tail := chain.tokens % request.grid[0] // request.grid[1] * request.grid[1]:
            keys += chain.key(chain.spans, tail)
        family = request.prompt.family
        if keys and family is not None:
            # A member's keys are one batch.
            most = session.welcome.max_batch
            own = request.own[: most // 2]
            keys = keys[: (most - len(own)) * KEY_BYTES]
            self.joining.join(
                session,
                Member(
                    family,
                    state.request_id,
                    state.namespace,
                    state.salt,
                    request.base,
                    keys + b"".join(own),
                ),
            )

    def _stored(self, keys: bytes, session: Session, device: str | None) -> list[bool]:
        if device is None:
            return [False] * (len(keys) // KEY_BYTES)
        return covered(keys, session.index, self._shardings, device)

    def _store(
        self, state: RequestState, spans: list[SegmentSpan], session: Session, device: str | None
    ) -> None:
        there = self._stored(b"".join(span.key for span in spans), session, device)
        spans = [span for span, stored in zip(spans, there, strict=True) if not stored]
        if not spans:
            return
        first, last = spans[0].begin // self._block, -(-spans[-1].end // self._block)
        self._counts.add("segment_spans", len(spans))
        self._plans.append(
            StorePlan(
                namespace=state.namespace,
                keys=b"".join(span.key for span in spans),
                tokens=tuple(span.tokens for span in spans),
                start=tuple(span.begin for span in spans),
                sub_keys=b"".join(span.sub_keys for span in spans),
                first=first * self._block,
                blocks=np.asarray(state.blocks[first:last], np.int64).tobytes(),
                salt=state.salt,
            )
        )
