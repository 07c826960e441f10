"""Hits of an engine on a GPU, all of one: from the prompt's tokens to the end that is reported.

Both halves of the connector with a real daemon; of an engine only the pages are there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.bench_scheduler import Holder
from benchmarks.spand import Spand
from kmesh.calls import ReserveBatch
from kmesh.kernels.host import PagedLayout
from kmesh.keys import KEY_BYTES, KeyChain, Namespace
from kmesh.layout import Shard
from kmesh.session import Role
from kmesh.store import put_spans
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.gpu import Gpu
from kmesh_vllm.gpumover import GpuMover
from kmesh_vllm.identity import Identity
from kmesh_vllm.loading import Loader
from kmesh_vllm.movers import Ids
from kmesh_vllm.scheduler import SchedulerHalf
from kmesh_vllm.sharding import Sharding

#: Tokens of each prompt behind the shared ones; less than a span.
_OWN = 17
_WAIT = 30.0
_STAGING = 64 << 20


class _Pages:
    """``PagedCache`` of pages that are not torch's."""

    device = 0

    def __init__(self, layout: PagedLayout) -> None:
        self.layout = layout

    def expand(self, blocks: Ids) -> Ids:
        return blocks


class Hits:
    """An engine's connector whose requests all begin with the same stored tokens.

    Requests are as many prompts of one step; none takes another one's pages.

    Args:
        gpu: that the pages are on; closed with this object.
        tokens: that are stored; whole spans.
        blocks: of each request, ids of its pages of those tokens.
    """

    def __init__(
        self,
        spand: Spand,
        gpu: Gpu,
        namespace: Namespace,
        layout: PagedLayout,
        tokens: int,
        blocks: Sequence[Ids],
    ) -> None:
        self._spand, self._namespace, self._shared = spand, namespace, tokens
        rng = random.Random(5)
        self._tokens = [rng.randrange(128_000) for _ in range(tokens + _OWN)]
        spare = layout.num_blocks - 1
        self._blocks = [[*ids.tolist(), *[spare] * 2] for ids in blocks]
        sharding = Sharding(namespace.layers, namespace.kv_heads, 1)
        identity = Identity(namespace, sharding, layout.block_tokens, layout.num_blocks)
        # Patience as long as it takes: there is nothing else to do.
        settings = Settings(str(spand.socket_dir), acquire_timeout_ms=60_000)
        self._sessions = [
            spand.connect(role, "bench", namespace) for role in (Role.SCHEDULER, Role.WORKER)
        ]
        asking, moving = self._sessions
        self._half = SchedulerHalf(
            identity, settings, Holder(asking), sharing=False, patience=_WAIT
        )
        self._mover = GpuMover(
            gpu, layout, lambda: moving, Counts(), max_ctas=0, buffer_bytes=0, calibrate=True
        )
        pages: Any = _Pages(layout)
        mine = Shard(0, namespace.layers, 0, namespace.kv_heads)
        self._loader = Loader(
            self._mover, pages, identity, mine, lambda: moving, settings, Counts()
        )
        self._count = 0

    def store(self, payloads: Iterable[bytes]) -> None:
        """Stores the tokens' spans, and waits until the engine's GPU can read them."""
        chain = KeyChain(self._namespace.digest())
        chain.extend(self._tokens)
        shard = Shard(0, self._namespace.layers, 0, self._namespace.kv_heads)
        with self._spand.connect() as tool:
            staging, span = tool.staging(_STAGING), tool.welcome.span_tokens
            for number, payload in enumerate(payloads):
                key = chain.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
                batch = ReserveBatch(
                    self._namespace.digest(), shard, key, [span], [number * span], [len(payload)]
                )
                if any(reasons := put_spans(tool, staging, batch, [payload])):
                    raise RuntimeError(f"a span was not stored: {reasons}")
        until = time.monotonic() + _WAIT
        moving = self._sessions[1]
        self._mover.warm(moving)
        while any(self._mover.attached(moving, n) is None for n in range(moving.index.slab_count)):
            if time.monotonic() > until:
                raise TimeoutError("the GPU does not read the daemon's memory")
            time.sleep(0.01)

    def run(self, requests: int) -> None:
        """Requests that come together, from their tokens until the scheduler knows of all ends."""
        half, loader = self._half, self._loader
        names = [f"request-{self._count + i}" for i in range(requests)]
        self._count += requests
        for name, blocks in zip(names, self._blocks, strict=False):
            half.add(name, self._tokens, self._namespace.digest())
            answer, _ = half.match(name, 0, len(self._tokens))
            if answer != self._shared:
                raise RuntimeError(f"a hit of {self._shared} tokens was answered with {answer}")
            half.allocated(name, blocks, answer)
        loader.start(half.plan([], []).loads)
        left = set(names)
        while left:
            ended, bad, report = loader.finished(_WAIT)
            if bad or report or not ended:
                raise RuntimeError(f"a load ended with {bad}, {report}")
            half.worked(report, ended)
            left -= ended
        for name in names:
            half.finished(name)

    def calls(self, requests: int) -> Callable[[], None]:
        """``run`` of so many."""
        return lambda: self.run(requests)

    def close(self) -> None:
        """Waits for what is under way and gives everything back."""
        self._half.shutdown()
        self._loader.close()
        self._mover.close()
        for session in self._sessions:
            session.close()
