"""Keys of a long prompt against a plain chain of blake3 over the same chunks."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from unittest import mock

from blake3 import blake3

from benchmarks.bench_scheduler import NAMESPACE, SHARDING, Holder
from benchmarks.results import Row
from benchmarks.spand import serve
from benchmarks.timing import in_turn
from kmesh.keys import KeyChain, chain_root
from kmesh.session import Role
from kmesh_vllm.config import Settings
from kmesh_vllm.identity import Identity
from kmesh_vllm.scheduler import SchedulerHalf

TOKENS = 32_768
CHUNK = 64 * 4


def plain(root: bytes, data: bytes) -> list[bytes]:
    """What anyone would write first: each key is the hash of the one before and of its chunk."""
    keys, parent = [], root
    for begin in range(0, len(data), CHUNK):
        parent = blake3(parent + data[begin : begin + CHUNK]).digest()
        keys.append(parent)
    return keys


def hashings(tokens: Sequence[int], asks: int) -> int:
    """How often a request's tokens are hashed when the scheduler asks that many times."""
    with serve(host_memory="32MiB", staging_memory="32MiB") as spand:
        session = spand.connect(Role.SCHEDULER, "bench", NAMESPACE)
        half = SchedulerHalf(
            Identity(NAMESPACE, SHARDING, 16, 1 << 16),
            Settings(str(spand.socket_dir), min_flight_tokens=0),
            Holder(session),
        )
        inner, count = KeyChain.extend, 0

        def extend(chain: KeyChain, ids: Sequence[int], known: KeyChain | None = None) -> None:
            nonlocal count
            count += 1
            inner(chain, ids, known)

        try:
            with mock.patch.object(KeyChain, "extend", extend):
                half.add("request", tokens, NAMESPACE.digest())
                for _ in range(asks):
                    half.match("request", 0, len(tokens))
        finally:
            half.shutdown()
            session.close()
    return count


def run(quick: bool) -> Iterator[Row]:
    """Rows of this file."""
    rng = random.Random(1)
    tokens = [rng.randrange(128_000) for _ in range(TOKENS)]
    digest = NAMESPACE.digest()
    root = chain_root(digest)
    data = array("I", tokens).tobytes()

    def ours() -> bytes:
        chain = KeyChain(digest)
        chain.extend(tokens)
        return chain.keys

    if ours() != b"".join(plain(root, data)):
        raise RuntimeError("the two chains differ")
    taken = in_turn(
        {
            "kmesh": ours,
            "plain, from ids": lambda: plain(root, array("I", tokens).tobytes()),
            "plain, from bytes": lambda: plain(root, data),
        },
        40 if quick else 200,
        warm=5,
    )
    kmesh, ids, ready = taken.values()
    what = f"{TOKENS:,} token ids (a list) to keys of 64 tokens each"
    yield Row("hashing", "ratio", "median of a/b", {"kmesh": kmesh, "plain": ids}, what)
    bare = "the plain loop is given the chunks as bytes; token ids are a list in vLLM"
    yield Row(
        "hashing_from_bytes", "ratio", "median of a/b", {"kmesh": kmesh, "plain": ready}, bare
    )
    asks = 100
    count = hashings(tokens, asks)
    yield Row("hashing_times", "times", "max", {"times": [count]}, f"for {asks} questions")
