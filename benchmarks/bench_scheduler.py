"""The connector's time in vLLM's scheduler for a prompt of 32,768 tokens, with a real daemon."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.results import Row
from benchmarks.spand import Spand, serve, store
from kmesh.keys import KEY_BYTES, KeyChain, Namespace
from kmesh.layout import TILE_BYTES
from kmesh.session import Role, Session
from kmesh_vllm.config import Settings
from kmesh_vllm.identity import Identity
from kmesh_vllm.requests import Phase
from kmesh_vllm.scheduler import SchedulerHalf
from kmesh_vllm.sharding import Sharding

TOKENS = 32_768
SPANS = TOKENS // 64
ASKS = 100
#: Of a common 8B model, whose heads can be cut in four ways, so that four are looked for.
NAMESPACE = Namespace("bench", "w", "bfloat16", layers=32, kv_heads=8, head_dim=128)
SHARDING = Sharding(32, 8, 1)


@dataclass
class Holder:
    """Stands for ``kmesh.client.Client``, which reconnects."""

    session: Session | None


class Bench:
    """A scheduler half over one session; without flights unless ``min_flight_tokens`` says so."""

    def __init__(
        self, spand: Spand, session: Session, min_flight_tokens: int = 0, seed: int = 1
    ) -> None:
        identity = Identity(NAMESPACE, SHARDING, 16, 1 << 16)
        settings = Settings(str(spand.socket_dir), min_flight_tokens=min_flight_tokens)
        self.half = SchedulerHalf(identity, settings, Holder(session))
        self._rng = random.Random(seed)
        self._digest = NAMESPACE.digest()
        self._count = 0

    def prompt(self, tokens: int = TOKENS) -> list[int]:
        return [self._rng.randrange(128_000) for _ in range(tokens)]

    def add(self, tokens: list[int]) -> tuple[str, float]:
        """A new request, and the seconds of that: its keys are computed."""
        self._count += 1
        name = f"request-{self._count}"
        begin = time.perf_counter()
        self.half.add(name, tokens, self._digest)
        return name, time.perf_counter() - begin

    def ask(self, name: str, tokens: list[int]) -> tuple[float, int | None]:
        """Seconds of one question, and its answer."""
        begin = time.perf_counter()
        answer, _ = self.half.match(name, 0, len(tokens))
        return time.perf_counter() - begin, answer

    def misses(self, rounds: int, *, hashed: bool, cold: bool = False) -> list[float]:
        """Microseconds of the first question about a prompt that nobody stored.

        Args:
            hashed: its keys were computed before; else that counts too.
            cold: other work is done before each question, which leaves nothing in the caches of
                the processor.
        """
        taken = []
        prompts = [self.prompt() for _ in range(rounds + 3)]
        added = [self.add(tokens) for tokens in prompts]
        for (name, adding), tokens in zip(added, prompts, strict=True):
            if cold:
                self.prompt()
            took, answer = self.ask(name, tokens)
            if answer != 0:
                raise RuntimeError(f"a miss was answered with {answer}")
            taken.append((took if hashed else adding + took) * 1e6)
        for name, _ in added:
            self.half.finished(name)
        return taken[3:]

    def claims(self, rounds: int) -> dict[str, list[float]]:
        """Microseconds of the questions about a miss that nobody computes yet: the first claims
        it, those after it wait for the answer, the last ones lead."""
        taken: dict[str, list[float]] = {"first": [], "leading": []}
        for number in range(rounds + 3):
            tokens = self.prompt()
            name, _ = self.add(tokens)
            first, _ = self.ask(name, tokens)
            until = time.monotonic() + 5
            while self.ask(name, tokens)[1] is None and time.monotonic() < until:
                time.sleep(0.0005)
            leading = [self.ask(name, tokens) for _ in range(10)]
            if self.half._states[name].part is None or leading[-1][1] != 0:
                raise RuntimeError(f"a claim was answered with {leading[-1][1]}")
            self.half.finished(name)
            if number >= 3:
                taken["first"].append(first * 1e6)
                taken["leading"] += [took * 1e6 for took, _ in leading]
        return taken

    def hits(self, tokens: list[int], rounds: int) -> dict[str, list[float]]:
        """Microseconds of the first question about a stored prompt, and of those after it."""
        taken: dict[str, list[float]] = {"first": [], "waiting": [], "leased": []}
        for number in range(rounds + 3):
            name, _ = self.add(tokens)
            state = self.half._states[name]
            asks = [self.ask(name, tokens) for _ in range(ASKS)]
            until = time.monotonic() + 5
            while self.ask(name, tokens)[1] is None and time.monotonic() < until:
                time.sleep(0.0005)
            leased = [self.ask(name, tokens) for _ in range(10)]
            if state.phase is not Phase.LEASED or leased[-1][1] != TOKENS:
                raise RuntimeError(f"a hit was answered with {leased[-1][1]}")
            self.half.finished(name)
            if number >= 3:
                taken["first"].append(asks[0][0] * 1e6)
                taken["waiting"] += [took * 1e6 for took, _ in asks[1:]]
                taken["leased"] += [took * 1e6 for took, _ in leased]
        return taken


def run(quick: bool) -> Iterator[Row]:
    """Rows of this file."""
    rounds = 15 if quick else 60
    what = f"{TOKENS:,} tokens, {SPANS} spans, four shardings looked for, real daemon"
    with serve(host_memory="96MiB", staging_memory="64MiB") as spand:
        session = spand.connect(Role.SCHEDULER, "bench", NAMESPACE)
        bench = Bench(spand, session)
        try:
            stored = bench.prompt(TOKENS + 64)
            chain = KeyChain(NAMESPACE.digest())
            chain.extend(stored)
            with spand.connect() as tool:
                keys = chain.keys[: SPANS * KEY_BYTES]
                store(tool, keys, SHARDING.shards[0], length=TILE_BYTES)
            before = spand.status().counters["requests_acquire"]
            missed = bench.misses(rounds, hashed=True)
            cold = bench.misses(rounds, hashed=True, cold=True)
            hashing = bench.misses(rounds, hashed=False)
            calls = spand.status().counters["requests_acquire"] - before
            yield Row("scheduler_miss", "µs", "median", {"ask": missed}, what)
            note = "the same, each after 10 ms of other work"
            yield Row("scheduler_miss_cold", "µs", "median", {"ask": cold}, note)
            yield Row("scheduler_miss_calls", "calls", "max", {"calls": [calls]}, "of all misses")
            yield Row("scheduler_miss_hashing", "µs", "median", {"ask": hashing}, what)
            hits = bench.hits(stored, rounds)
            yield Row("scheduler_hit_first", "µs", "median", {"first": hits["first"]}, what)
            later = f"questions 2 to {ASKS}, the lease still on its way for the first of them"
            yield Row("scheduler_hit_waiting", "µs", "median", {"waiting": hits["waiting"]}, later)
            note = "the lease is there, but no blocks yet"
            yield Row("scheduler_hit_leased", "µs", "median", {"leased": hits["leased"]}, note)
            flying = Bench(spand, session, 512, seed=2)
            claims = flying.claims(rounds)
            flying.half.shutdown()
            note = "a miss, with flights: the question that claims it"
            yield Row("scheduler_claim_first", "µs", "median", {"first": claims["first"]}, note)
            note = "the same request, asked again when it leads"
            leading = {"leading": claims["leading"]}
            yield Row("scheduler_claim_leading", "µs", "median", leading, note)
        finally:
            bench.half.shutdown()
            session.close()
