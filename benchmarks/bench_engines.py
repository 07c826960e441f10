"""Three vLLM engines with a small real model: without KMesh, storing, and only looking up.

The engines' own prefix caches are off, so that a token is either computed or comes from KMesh.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks.engines import Engine, Run, transfer
from benchmarks.results import Row, bootstrap
from benchmarks.spand import Spand, serve
from demo.__main__ import prepared_model
from demo.prompts import DOCUMENT

SHARED, OWN = 4096, 64
STORED = 1024
#: A run of the zero-hit workload.
PROMPTS, LENGTH, OUTPUT = 2, 256, 8
VOCABULARY = 40_000


def document(model: str, tokens: int) -> list[int]:
    """So many tokens of the demo's document, again from its start where it ends."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(f"{model}/tokenizer.json").encode(DOCUMENT.read_text()).ids
    return (ids * (tokens // len(ids) + 1))[:tokens]


class Prompts:
    """Prompts that nobody has seen before."""

    def __init__(self) -> None:
        self._rng = random.Random(1)

    def own(self, tokens: int) -> list[int]:
        return [self._rng.randrange(100, VOCABULARY) for _ in range(tokens)]

    def batch(self) -> list[list[int]]:
        return [self.own(LENGTH) for _ in range(PROMPTS)]


class Bench:
    """The engines, and what is asked of them."""

    def __init__(self, model: str, spand: Spand, plain: Engine, on: Engine, off: Engine) -> None:
        self._spand = spand
        self._plain, self._on, self._off = plain, on, off
        self._prompts = Prompts()
        self._shared = document(model, SHARED)

    def first_token(self, rounds: int) -> Iterator[Row]:
        """A prompt whose beginning another engine has stored, against computing all of it."""
        self._store(self._shared + self._prompts.own(OWN))
        restored, computed = [], []
        for number in range(rounds + 1):
            prompt = self._shared + self._prompts.own(OWN)
            runs = {}
            for name in ("off", "plain") if number % 2 else ("plain", "off"):
                runs[name] = (self._off if name == "off" else self._plain).run([prompt])
            ours, theirs = runs["off"], runs["plain"]
            if ours.cached != SHARED or theirs.cached:
                raise RuntimeError(f"{ours.cached} tokens were restored, {theirs.cached} here")
            if ours.last != theirs.last:
                raise RuntimeError("the engines do not say the same")
            if number:
                restored.append(ours.first)
                computed.append(theirs.first)
        what = f"SmolLM2-135M float32: {SHARED} tokens restored and {OWN} computed, or all computed"
        samples = {"restored": restored, "computed": computed}
        yield Row("first_token", "ratio", "median a / median b", samples, what)

    def _store(self, prompt: list[int]) -> None:
        """Has the storing engine store a prompt; what was skipped is stored when it comes again."""
        for _ in range(5):
            run = self._on.run([prompt])
            self._spand.settle()
            if run.cached >= SHARED:
                return
        raise RuntimeError(f"only {run.cached} of {SHARED} tokens were stored")

    def storing(self, rounds: int) -> Iterator[Row]:
        """Steps that store all that they compute."""
        hooks, steps = [], []
        for number in range(rounds + 1):
            before = self._spand.status().spans
            run = self._on.run([self._prompts.own(STORED)])
            if self._spand.settle().spans == before:
                raise RuntimeError("nothing was stored")
            # The first one's staging is pages that nobody has touched.
            if number:
                hooks.append(run.hooks)
                steps.append(sum(took for took, _ in run.steps))
        what = f"prompts of {STORED} tokens, each stored in the step that computes it, behind one"
        samples = {"hooks": hooks, "steps": steps}
        yield Row("store_hooks", "share", "sum a / sum b", samples, what)

    def zero_hit(self, pairs: int) -> Iterator[Row]:
        """Prompts that nobody stored: the connector's share, and pairs against no connector."""
        for name, engine in (("on", self._on), ("off", self._off)):
            ours, theirs = self._abba(engine, pairs)
            if any(run.cached for run in ours):
                raise RuntimeError("a prompt that nobody stored was restored")
            hooks, total = [run.hooks for run in ours], [run.seconds for run in ours]
            what = f"stores {name}: {PROMPTS} prompts of {LENGTH} tokens, {OUTPUT} tokens out"
            yield Row(
                f"zero_hit_hooks_{name}",
                "share",
                "sum a / sum b",
                {"hooks": hooks, "total": total},
                what,
            )
            plain = [run.seconds for run in theirs]
            yield Row(
                f"zero_hit_wall_{name}",
                "ratio",
                "median of a/b",
                {"kmesh": total, "plain": plain},
                f"stores {name}: {pairs} pairs in the order ABBA, against no connector",
                bootstrap(total, plain),
            )

    def _abba(self, engine: Engine, pairs: int) -> tuple[list[Run], list[Run]]:
        """Runs of an engine and of the plain one, two at a time in the order ABBA."""
        ours, theirs = [], []
        for number in range(-1, pairs):
            batch = self._prompts.batch()
            runs = {}
            for one in (engine, self._plain) if number % 2 else (self._plain, engine):
                runs[one] = one.run(batch, OUTPUT)
            if number >= 0:
                ours.append(runs[engine])
                theirs.append(runs[self._plain])
        return ours, theirs


def run(quick: bool) -> Iterator[Row]:
    """Rows of this file."""
    model = prepared_model()
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": SHARED + 512,
        "max_num_batched_tokens": SHARED + 512,
        "max_num_seqs": 4,
    }
    with ExitStack() as stack:
        spand = stack.enter_context(serve(host_memory="2GiB", staging_memory="512MiB"))
        folder = spand.socket_dir
        engines = [
            stack.enter_context(Engine(model, config, **arguments))
            for config in (None, transfer(folder), transfer(folder, store=False))
        ]
        bench = Bench(model, spand, *(engine.up() for engine in engines))
        yield from bench.zero_hit(2 if quick else 12)
        yield from bench.storing(1 if quick else 6)
        yield from bench.first_token(1 if quick else 5)
