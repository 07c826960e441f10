"""A family in a daemon: prompts of ``experiments.tokendance`` cut into spans, and stored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from experiments.tokendance.workload import Member, Shape, Workload
from kmesh.families import Family, Recovered
from kmesh.keys import KEY_BYTES
from kmesh.layout import Shard
from kmesh.memory import Staging
from kmesh.session import ReserveBatch, Session
from kmesh.store import put_spans

SPAN = 64
#: One token takes 2 KiB, so a span takes two tiles. Three spans of each sibling become recipes; of
#: the first less than half was recovered, so that its recipe would take two tiles as well.
SMALL = Shape(4, 2, 64, 10_000.0)
#: One token takes 56 KiB, so a span takes 56 tiles. What was recovered of the first span saves some
#: of them, so that four spans of each sibling become recipes.
LARGE = Shape(28, 4, 128, 1_000_000.0)


@dataclass(frozen=True)
class Spans:
    """One prompt as spans, in order."""

    name: str
    keys: bytes
    payloads: list[bytes]
    recovered: list[Recovered]

    def key(self, number: int) -> bytes:
        return self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]


class Household:
    """A primer, whose spans are the base, and siblings that were recovered from it.

    Args:
        span: tokens of a span.
    """

    def __init__(
        self,
        shape: Shape = SMALL,
        *,
        shared: int = 208,
        own: int = 112,
        prompts: int = 3,
        seed: int = 7,
        percent: int = 0,
        span: int = SPAN,
    ) -> None:
        self.shape = shape
        self.span = span
        work = Workload(shape, [shared], own, prompts, seed)
        self.shard = Shard(0, shape.layers, 0, shape.heads)
        self.namespace = shape.namespace
        self._start = work.prompts[0].starts[0]
        self.primer = self._cut(work.primer())
        self.siblings = [self._cut(member) for member in work.siblings(percent)]

    def _cut(self, member: Member) -> Spans:
        state = member.state
        count = state.shape[3] // self.span
        keys = [
            hashlib.sha256(f"{member.name}/{number}".encode() + self.namespace).digest()
            for number in range(count)
        ]
        payloads = [
            np.ascontiguousarray(state[:, :, :, at * self.span : (at + 1) * self.span]).tobytes()
            for at in range(count)
        ]
        recovered = []
        for run in member.provenance:
            source = self._start + run.source
            base = self.primer.key(source // self.span)
            recovered.append(Recovered(run.token, run.tokens, base, source % self.span))
        return Spans(member.name, b"".join(keys), payloads, recovered)

    @property
    def family(self) -> Family:
        return Family(
            "round",
            self.namespace,
            "bfloat16",
            self.shape.head_dim,
            (self.shard,),
            self.primer.keys,
            self.shape.rotary,
        )

    def batch(self, spans: Spans, device: str = "") -> ReserveBatch:
        count = len(spans.payloads)
        return ReserveBatch(
            self.namespace,
            self.shard,
            spans.keys,
            [self.span] * count,
            range(0, self.span * count, self.span),
            [len(payload) for payload in spans.payloads],
            device=device,
        )

    def store(self, session: Session, staging: Staging, spans: Spans, device: str = "") -> None:
        assert set(put_spans(session, staging, self.batch(spans, device), spans.payloads)) <= {0, 4}

    def join(self, session: Session, spans: Spans) -> None:
        session.families.join(
            "round", spans.name, spans.keys, self.namespace, recovered=spans.recovered
        )

    def settle(self, session: Session, device: str = "") -> None:
        """All of it: stored, declared, joined."""
        staging = session.staging(4 << 20)
        self.store(session, staging, self.primer, device)
        session.families.declare(self.family)
        for sibling in self.siblings:
            self.store(session, staging, sibling, device)
            self.join(session, sibling)
