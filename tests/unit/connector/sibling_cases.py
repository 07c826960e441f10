"""Siblings that a fake daemon keeps as recipes, and engines on a GPU that restore them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_cases import DIGEST, promised, prompt, warm
from mini_engine import DIM, HEADS, LAYERS, MiniEngine, until
from test_connector_halves import stored_by

from kmesh import _host, fake_families
from kmesh.codec import Base, Encoder, Form, Segment, SpanDescription
from kmesh.fake_state import FakeRecipe, Span
from kmesh.families import Family
from kmesh.keys import KeyChain
from kmesh.layout import TILE_BYTES, Shard, sums_offset
from kmesh.testing import FakeDaemon

WHOLE = Shard(0, LAYERS, 0, HEADS)
TOKENS = 200
SIBLINGS = (5, 6, 7)
#: Of each span's tokens, those from here on are a sibling's own.
OWN = 40


def chain(tokens: list[int]) -> KeyChain:
    made = KeyChain(DIGEST)
    made.extend(tokens)
    return made


def own(position: int) -> bool:
    return position % 64 >= OWN and position < 192


def stored(engine: MiniEngine, daemon: FakeDaemon, seed: int) -> None:
    """A sibling's state: the base's but for its own tokens."""
    before, tokens, name = daemon.spans, prompt(TOKENS, seed), f"sibling {seed}"
    engine.scheduler.add(name, tokens, DIGEST)
    assert engine.match(name, 0, TOKENS) == 0
    blocks = list(range(1, -(-TOKENS // engine.block) + 1))
    engine.scheduler.allocated(name, blocks, 0)

    def others() -> None:
        for begin in range(OWN, 192, 64):
            engine.compute(seed, blocks, begin, begin + 64 - OWN)

    engine.prefill(name, 7, blocks, 0, TOKENS, others)
    until(lambda: daemon.spans == before + 3 * len(engine.identity.sharding.shards))
    engine.scheduler.finished(name)


def round_of_siblings(
    daemon: FakeDaemon, engine: MiniEngine, seeds: Sequence[int] = SIBLINGS
) -> None:
    """Prompts, all of whose full spans are recipes over those of ``prompt(TOKENS)``."""
    stored_by(engine, daemon, prompt(TOKENS))
    for seed in seeds:
        stored(engine, daemon, seed)
    session = engine.client.session
    assert session is not None
    shards = engine.identity.sharding.shards
    base = chain(prompt(TOKENS)).keys
    session.families.declare(Family("round", DIGEST, "float32", DIM, shards, base))
    for seed in seeds:
        session.families.join("round", str(seed), chain(prompt(TOKENS, seed)).keys, DIGEST)
    assert daemon.encode("round") == 3 * len(shards) * len(seeds)


def wrong(engine: MiniEngine, seed: int, blocks: list[int]) -> set[int]:
    """Positions of a sibling's pages that do not hold its state."""
    ours = {p for p in engine.wrong(seed, blocks, 0, 192) if own(p)}
    return ours | {p for p in engine.wrong(7, blocks, 0, 192) if not own(p)}


def ready(engine: MiniEngine, daemon: FakeDaemon) -> None:
    """Its memory and its kernels are there."""
    warm(engine, daemon)
    mover: Any = engine.workers[0]._mover
    until(lambda: mover.takes_recipes(0))


def start(engine: MiniEngine, names: dict[str, list[int]]) -> dict[str, list[int]]:
    """Loads of these prompts, in one step; the blocks of each."""
    places, at = {}, 1
    for name, tokens in names.items():
        found = promised(engine, name, tokens)
        assert found == 192
        places[name] = list(range(at, at + 6))
        at += 6
        engine.scheduler.allocated(name, places[name], found)
    engine.run(engine.scheduler.plan([], []))
    return places


def ends(engine: MiniEngine, names: Any) -> set[int]:
    """Waits for all of them; the bad blocks."""
    (worker,) = engine.workers
    ended: set[str] = set()
    bad: set[int] = set()

    def some() -> bool:
        ended.update(worker.finished())
        bad.update(worker.bad_blocks())
        return ended == set(names)

    until(some)
    engine.scheduler.worked(worker.report(), ended)
    return bad


def key_of(seed: int, number: int) -> bytes:
    return chain(prompt(TOKENS, seed)).key(number)


def place_of(daemon: FakeDaemon, seed: int, number: int) -> FakeRecipe:
    """Of a recipe, in the daemon."""
    span = daemon._model.spans[key_of(seed, number), WHOLE.code()]
    assert span.recipe is not None
    return span.recipe


def bytes_of(daemon: FakeDaemon, place: FakeRecipe) -> memoryview:
    return daemon._model.slabs[place.slab].memory.view(place.offset, place.length)


def sealed(daemon: FakeDaemon, place: FakeRecipe) -> None:
    """Its sums are right again."""
    memory = daemon._model.slabs[place.slab].memory
    sums = sums_offset(memory.size) + place.offset // TILE_BYTES * 8
    at = memory.address + place.offset
    place.root = _host.tile_sums(at, place.length, memory.address + sums)


def cold(daemon: FakeDaemon, engine: MiniEngine, seed: int, number: int) -> None:
    """Makes a recipe anew, in the form that is not moved as it lies."""
    span = daemon._model.spans[key_of(seed, number), WHOLE.code()]
    base = daemon._model.spans[key_of(0, number), WHOLE.code()]
    slabs = daemon._model.slabs

    def view(one: Span) -> memoryview:
        return slabs[one.slab].memory.view(one.offset, one.length)

    def what(one: Span) -> SpanDescription:
        names = (one.keys[0], DIGEST, "float32", WHOLE, DIM, one.tokens)
        return SpanDescription(*names, one.start, one.generation)

    encoder = Encoder(Base([Segment(what(base), view(base))]), form=Form.COLD)
    data = encoder.encode(what(span), view(span)).data
    span.recipe = fake_families._keep(data, slabs, [base])
