"""Traces to replay: the public one, and made ones. All are chains of blocks, as prompts are.

A request is a list of block ids; equal ids share everything before them. Made traces come from a
seed, and are the same on each machine.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.spand import ROOT

NAME = "mooncake_conversation.jsonl.gz"
#: Of a block of the public trace.
BLOCK_TOKENS = 512
Trace = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Weighted:
    """A trace with the tokens of each request's last block; all others are whole.

    Attributes:
        text: what it is, for people.
    """

    text: str
    requests: list[list[int]]
    last: list[int]

    def tokens(self, request: int, blocks: int) -> int:
        """Tokens of the first ``blocks`` blocks of a request."""
        whole = blocks * BLOCK_TOKENS
        full = blocks == len(self.requests[request])
        return whole - (BLOCK_TOKENS - self.last[request]) * full


def trace_path() -> Path | None:
    """``KMESH_TRACE``, a file or its folder; else beside the repository. None if there is none."""
    given = os.environ.get("KMESH_TRACE")
    path = Path(given) if given else ROOT.parent / "shared" / "traces"
    path = path / NAME if path.is_dir() else path
    return path if path.is_file() else None


def read_rows(path: Path) -> list[dict[str, object]]:
    """The requests as they are written, in the order of their arrival."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    rows.sort(key=lambda row: row["timestamp"])
    return rows


def read_trace(path: Path) -> list[list[int]]:
    """Block ids of each request, in the order of their arrival."""
    return [row["hash_ids"] for row in read_rows(path)]  # type: ignore[misc]


def read_weighted(path: Path) -> Weighted:
    """The public trace with the tokens that its requests' last blocks have."""
    requests, last = [], []
    for row in read_rows(path):
        ids, length = row["hash_ids"], row["input_length"]
        assert isinstance(ids, list)
        assert isinstance(length, int)
        requests.append(ids)
        last.append(min(max(length - BLOCK_TOKENS * (len(ids) - 1), 1), BLOCK_TOKENS))
    return Weighted(path.name, requests, last)


def zipf(rng: random.Random, requests: int) -> list[list[int]]:
    """Documents of which few are asked about often, each time with a question of its own."""
    ids = itertools.count()
    documents = [_chain(ids, rng.randint(8, 40)) for _ in range(600)]
    weights = [1 / rank for rank in range(1, len(documents) + 1)]
    asked = rng.choices(documents, weights, k=requests)
    return [document + _chain(ids, rng.randint(1, 2)) for document in asked]


def loop(rng: random.Random, requests: int) -> list[list[int]]:
    """The same documents one after the other, again and again, as an evaluation does."""
    ids = itertools.count()
    documents = [_chain(ids, rng.randint(8, 24)) for _ in range(400)]
    return [documents[n % len(documents)] + _chain(ids, 1) for n in range(requests)]


def scan(rng: random.Random, requests: int) -> list[list[int]]:
    """A few prompts that come back, and between them long ones that never do."""
    ids = itertools.count()
    hot = [_chain(ids, rng.randint(6, 16)) for _ in range(120)]
    made: list[list[int]] = []
    while len(made) < requests:
        made += [rng.choice(hot) + _chain(ids, 1) for _ in range(60)]
        made += [_chain(ids, rng.randint(20, 60)) for _ in range(12)]
    return made[:requests]


def agents(rng: random.Random, requests: int) -> list[list[int]]:
    """Groups of agents with a prompt in common and a history each, in rounds until they end."""
    ids = itertools.count()
    system = _chain(ids, 6)
    made: list[list[int]] = []
    groups: list[tuple[int, list[list[int]]]] = []
    while len(made) < requests:
        while len(groups) < 24:
            task = system + _chain(ids, rng.randint(4, 12))
            groups.append((rng.randint(2, 12), [task] * rng.randint(2, 8)))
        at = rng.randrange(len(groups))
        rounds, members = groups.pop(at)
        said = [_chain(ids, 1) for _ in members]
        grown = [history + new for history, new in zip(members, said, strict=True)]
        made += grown
        if rounds > 1:
            groups.append((rounds - 1, grown))
    return made[:requests]


def _chain(ids: Iterator[int], length: int) -> list[int]:
    return list(itertools.islice(ids, length))


#: Made traces: how, from which seed, and how many requests.
MADE: dict[str, tuple[Callable[[random.Random, int], list[list[int]]], int, int]] = {
    "zipf": (zipf, 1, 3000),
    "loop": (loop, 2, 3000),
    "scan": (scan, 3, 3000),
    "agents": (agents, 4, 3000),
}


def make(name: str) -> Weighted:
    """A made trace; all of its blocks are whole."""
    how, seed, count = MADE[name]
    requests = how(random.Random(seed), count)
    text = (how.__doc__ or "").rstrip(".")
    return Weighted(f"made, seed {seed}: {text}", requests, [BLOCK_TOKENS] * len(requests))
