"""What workers do with recipes, and what they make of those that are none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from fake_cuda import FakeDriver
from recipe_bench import LENGTH, SIZE, Bench, GpuBench, HostBench

from kmesh import layout
from kmesh.cuda import nvrtc
from kmesh.layout import sums_offset
from kmesh_spand import jobmessages


@pytest.fixture(params=["host memory", "a GPU without a compiler"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made: Bench
    if request.param == "host memory":
        made = HostBench()
    else:
        monkeypatch.setattr(nvrtc, "_candidates", lambda _major: ())
        made = GpuBench(FakeDriver())
    yield made
    made.close()


@pytest.fixture
def family(bench: Bench) -> tuple[jobmessages.Payload, jobmessages.Payload, bytes]:
    """A base, a member that is half the same, and the member's payload."""
    rng = np.random.default_rng(1)
    base = rng.bytes(LENGTH)
    step, half = 8192, 4096
    own = b"".join(base[at : at + half] + rng.bytes(half) for at in range(0, LENGTH, step))
    return bench.put(b"base", 0, base), bench.put(b"own", LENGTH, own), own


def kept(
    bench: Bench, base: jobmessages.Payload, own: jobmessages.Payload, offset: int = 2 * LENGTH
) -> jobmessages.Payload:
    made = bench.encode(own, [base])
    assert isinstance(made, jobmessages.Encoded)
    assert made.used == [0]
    answer = bench.recipes.keep(jobmessages.KeepRecipe(made.job, 0, offset, made.length))
    return jobmessages.Payload(own.key, 0, offset, made.length, 4, answer.root, 64, 0)


def test_there_and_back(
    bench: Bench, family: tuple[jobmessages.Payload, jobmessages.Payload, bytes]
) -> None:
    base, own, payload = family
    mirror = kept(bench, base, own)
    assert mirror.length < LENGTH
    fact = jobmessages.Fact(base.key, base.generation, base.root, 64, 0)
    assert bench.verify(mirror) == jobmessages.Verified(1, True, LENGTH, own.root, [fact])
    target = 4 * LENGTH
    job = jobmessages.Densify(9, mirror, [base], 0, target, LENGTH, own.root)
    assert bench.recipes.densify(job) == jobmessages.Densified(9, True)
    assert bytes(bench.store.view(0, target, LENGTH)) == payload
    assert bench.store.verify(0, target, LENGTH, own.root)


def test_what_shares_nothing_stays(bench: Bench) -> None:
    base = bench.put(b"base", 0, os.urandom(LENGTH))
    own = bench.put(b"own", LENGTH, os.urandom(LENGTH))
    answer = bench.encode(own, [base])
    assert isinstance(answer, jobmessages.NotEncoded)
    assert "worth a recipe" in answer.why


def test_turned_keys_need_a_rotary(
    bench: Bench, family: tuple[jobmessages.Payload, jobmessages.Payload, bytes]
) -> None:
    base, own, _ = family
    answer = bench.encode(own, [base], ((0, 32, 0, 16),))
    assert isinstance(answer, jobmessages.NotEncoded)
    assert "no rotary" in answer.why


def test_memory_that_changed_makes_no_recipe(
    bench: Bench, family: tuple[jobmessages.Payload, jobmessages.Payload, bytes]
) -> None:
    """Of what was read, roots are those that were stored, or it is not kept."""
    base, own, _ = family
    bench.damage(own.offset + 9, b"\x55")
    assert bench.encode(own, [base]) == jobmessages.EncodeSpoiled(1, True, [])
    bench.recipes.forget(1)


def test_a_base_that_changed_makes_no_recipe(
    bench: Bench, family: tuple[jobmessages.Payload, jobmessages.Payload, bytes]
) -> None:
    base, own, _ = family
    far = bench.put(b"far", 2 * LENGTH, os.urandom(LENGTH))
    bench.damage(base.offset + 9, b"\x55")
    assert bench.encode(own, [far, base]) == jobmessages.EncodeSpoiled(1, False, [1])


def test_a_base_that_changed_gives_no_payload(
    bench: Bench, family: tuple[jobmessages.Payload, jobmessages.Payload, bytes]
) -> None:
    base, own, _ = family
    mirror = kept(bench, base, own)
    bench.damage(base.offset, b"\x55")
    job = jobmessages.Densify(1, mirror, [base], 0, 4 * LENGTH, LENGTH, own.root)
    assert bench.recipes.densify(job) == jobmessages.Densified(1, False)


@pytest.mark.parametrize("what", ["generation", "key", "position", "none"])
def test_another_base_gives_no_payload(
    bench: Bench, family: tuple[jobmessages.Payload, jobmessages.Payload, bytes], what: str
) -> None:
    base, own, _ = family
    mirror = kept(bench, base, own)
    change = {"generation": 9, "key": b"x" * 32, "position": 5}
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    bases = [] if what == "none" else [jobmessages.Payload(**{**fields, what: change[what]})]
    job = jobmessages.Densify(1, mirror, bases, 0, 4 * LENGTH, LENGTH, own.root)
    assert bench.recipes.densify(job) == jobmessages.Densified(1, False)


def test_bytes_that_are_no_recipe(bench: Bench) -> None:
    """They have their sums; only what is in them is wrong."""
    for payload in (b"x" * 300, os.urandom(5000), b"KMRECIPE" + bytes(400)):
        mirror = bench.put(b"m", 0, payload)
        assert bench.verify(mirror) == jobmessages.Verified(1, False)
        job = jobmessages.Densify(1, mirror, [], 0, 4 * LENGTH, LENGTH, 1)
        assert bench.recipes.densify(job) == jobmessages.Densified(1, False)


def test_a_recipe_that_says_it_gives_more(
    bench: Bench, family: tuple[jobmessages.Payload, jobmessages.Payload, bytes]
) -> None:
    """What the record says is the measure: a few bytes may claim to be many."""
    base, own, _ = family
    mirror = kept(bench, base, own)
    job = jobmessages.Densify(1, mirror, [base], 0, 4 * LENGTH, LENGTH // 2, own.root)
    assert bench.recipes.densify(job) == jobmessages.Densified(1, False)


def test_every_flipped_bit_is_seen(
    bench: Bench, family: tuple[jobmessages.Payload, jobmessages.Payload, bytes]
) -> None:
    base, own, _ = family
    mirror = kept(bench, base, own)
    rng = np.random.default_rng(3)
    kept_bytes = bytes(bench.store.view(0, mirror.offset, mirror.length))
    places = [*range(0, 600, 7), *rng.integers(0, mirror.length, 60).tolist()]
    for at in places:
        bench.damage(mirror.offset + at, bytes([kept_bytes[at] ^ 1 << at % 8]))
        assert not bench.store.verify(0, mirror.offset, mirror.length, mirror.root)
        job = jobmessages.Densify(1, mirror, [base], 0, 4 * LENGTH, LENGTH, own.root)
        assert bench.recipes.densify(job) == jobmessages.Densified(1, False)
        bench.damage(mirror.offset + at, kept_bytes[at : at + 1])


def test_ranges_that_no_span_can_have(
    bench: Bench, family: tuple[jobmessages.Payload, jobmessages.Payload, bytes]
) -> None:
    base, own, _ = family
    made = bench.encode(own, [base])
    assert isinstance(made, jobmessages.Encoded)
    capacity = sums_offset(SIZE)
    assert capacity > layout.slab_capacity(SIZE) - 1
    with pytest.raises(ValueError, match="outside the slab"):
        bench.recipes.keep(
            jobmessages.KeepRecipe(made.job, 0, capacity // 65536 * 65536, made.length)
        )
    # It was given up with that.
    with pytest.raises(KeyError):
        bench.recipes.keep(jobmessages.KeepRecipe(made.job, 0, 0, made.length))
    far = jobmessages.Payload(own.key, 0, 64 << 20, LENGTH, 3, 1, 64, 0)
    with pytest.raises(ValueError, match="outside the slab"):
        bench.encode(far, [base])


def test_a_recipe_of_another_length_is_not_written(
    bench: Bench, family: tuple[jobmessages.Payload, jobmessages.Payload, bytes]
) -> None:
    base, own, _ = family
    made = bench.encode(own, [base])
    assert isinstance(made, jobmessages.Encoded)
    with pytest.raises(ValueError, match="bytes, not"):
        bench.recipes.keep(jobmessages.KeepRecipe(made.job, 0, 2 * LENGTH, made.length - 1))
