"""Siblings of a passage that an engine has computed: recovered outside of it, and stored under the
keys of their prompts, as an orchestrator with a recovery of its own would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.cuda import reading
from kmesh.cuda.device import Device
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.families import Family, Recovered
from kmesh.kernels.rotary import ELEMENTS, Rotary, turns
from kmesh.keys import KEY_BYTES, KeyChain
from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans, read_span

SPAN = 64
#: Of each span of the passage, tokens that a sibling has its own state for.
ANEW = 12

State = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Passage:
    """Tokens, whole spans, whose state an engine has stored as those of a prompt.

    Attributes:
        rotary: of the engine's model.
        gpu: in whose memory all of it is stored; None: in the host's.
    """

    socket_dir: Path
    namespace: bytes
    shard: Shard
    head_dim: int
    tokens: list[int]
    rotary: Rotary
    gpu: Device | None = None

    @property
    def device(self) -> str:
        return self.gpu.uuid if self.gpu else ""

    @property
    def keys(self) -> bytes:
        return self.chain(self.tokens).keys

    def chain(self, tokens: list[int]) -> KeyChain:
        made = KeyChain(self.namespace)
        made.extend(tokens)
        return made

    def state(self, session: Session) -> State:
        """Bits of bfloat16, [layer, K or V, head, token, element]."""
        count = len(self.tokens) // SPAN
        with session.acquire(self.keys, [self.shard], device=self.device, timeout=30) as lease:
            assert lease.hits == count
            if self.gpu is None:
                found = [read_span(session, lease, n) for n in range(count)]
            else:
                with DeviceSlabs(session, self.gpu) as slabs:
                    found = [reading.read_span(slabs, self.gpu, lease, n) for n in range(count)]
        spans = [np.frombuffer(one, np.uint16) for one in found]
        shape = (self.shard.layers, 2, self.shard.heads, SPAN, self.head_dim)
        return np.concatenate([span.reshape(shape) for span in spans], axis=3)

    def store_siblings(self, beginnings: list[list[int]]) -> None:
        """Dense spans of prompts that have the passage behind whole spans of their own.

        What is theirs is drawn, not computed: answers mean nothing, and are the same for the same
        bytes.
        """
        rng = np.random.default_rng(3)
        with Session.connect(self.socket_dir, role=Role.TOOL) as session:
            staging, passage = session.staging(16 << 20), self.state(session)
            for own in beginnings:
                state = self._recovered(passage, len(own), rng)
                chain = self.chain([*own, *self.tokens])
                starts = range(0, SPAN * chain.spans, SPAN)
                payloads = [state[:, :, :, at : at + SPAN].tobytes() for at in starts]
                lengths = [len(payload) for payload in payloads]
                batch = ReserveBatch(
                    self.namespace, self.shard, chain.keys, [SPAN] * chain.spans, starts, lengths,
                    device=self.device,
                )  # fmt: skip
                assert not any(put_spans(session, staging, batch, payloads))
            del session.index

    def join(self, family: str, beginnings: list[list[int]]) -> None:
        """Says what they share; the daemon makes recipes of them."""
        with Session.connect(self.socket_dir, role=Role.TOOL) as session:
            declared = Family(
                family, self.namespace, "bfloat16", self.head_dim, (self.shard,), self.keys,
                self.rotary,
            )  # fmt: skip
            session.families.declare(declared)
            for number, own in enumerate(beginnings):
                keys = self.chain([*own, *self.tokens]).keys
                run = Recovered(len(own), len(self.tokens), self.keys[:KEY_BYTES], 0)
                session.families.join(family, str(number), keys, self.namespace, recovered=[run])

    def mirrors(self, family: str) -> int:
        """How many recipes there are by now."""
        with Session.connect(self.socket_dir, role=Role.TOOL) as session:
            return session.families.describe(family, device=self.device).family.mirrors

    def _recovered(self, passage: State, before: int, rng: np.random.Generator) -> State:
        moved = passage.copy()
        keys = np.ascontiguousarray(passage[:, 0])
        turned = np.empty_like(keys)
        _host.turn_rows(
            turned.reshape(-1).view(np.uint8).data, keys.reshape(-1).view(np.uint8).data,
            2 * self.head_dim, turns(self.rotary, before), self.rotary.interleaved,
            ELEMENTS["bfloat16"],
        )  # fmt: skip
        moved[:, 0] = turned
        layers, _, heads, tokens, dim = passage.shape

        def drawn(count: int) -> State:
            values = rng.standard_normal((layers, 2, heads, count, dim)).astype(np.float32)
            return (values.view(np.uint32) >> 16).astype(np.uint16)

        for at in range(0, tokens, SPAN):
            begin = at + int(rng.integers(0, SPAN - ANEW))
            moved[:, :, :, begin : begin + ANEW] = drawn(ANEW)
        return np.concatenate([drawn(before), moved], axis=3)
