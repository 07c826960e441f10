"""Herds on one GPU, in a model of the measured one: what the wait rule makes of each."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from pathlib import Path

import pytest
from herd_model import PREFILL, THINK, TICK, Herd, Scene, herds, measured_rule, paced_rule

from kmesh_vllm.waiting import STORING, worth_waiting

EVIDENCE = Path(__file__).resolve().parents[3] / "evidence" / "gpu-herd.json"
#: What engines that have computed one, two or many prompts believed, by the averages of that time.
BELIEVED = (16_000.0, 25_000.0, 31_000.0, 36_000.0, 39_000.0, PREFILL)


def measured(count: int) -> list[Scene]:
    """As on the H200: a document in one step, a leader that is somewhat slower than alone, and
    spans that begin to land some time after it has ended.
    """
    chance = random.Random(17)
    return [
        Scene(
            rates=tuple(chance.choice(BELIEVED) for _ in range(3)),
            slow=chance.uniform(1.15, 1.35),
            latency=chance.uniform(0.02, 0.045),
            landing=chance.uniform(60_000, 200_000),
        )
        for _ in range(count)
    ]


def drawn(seed: int, **known: object) -> list[Scene]:
    """Scenes of all kinds, but for what is known of them."""
    chance = random.Random(seed)
    found = []
    for _ in range(12):
        scene = Scene(
            tokens=chance.choice([1024, 2048, 4096, 8192, 16_384, 30_016]),
            step=chance.choice([512, 1024, 2048, 8192]),
            engines=chance.choice([2, 3, 4, 8]),
            rates=tuple(PREFILL * chance.choice([0.5, 0.8, 1.0]) for _ in range(7)),
            slow=chance.uniform(1.0, 3.3),
            jitter=tuple(chance.uniform(-0.2, 0.2) for _ in range(5)),
            latency=chance.uniform(0.005, 0.1),
            landing=chance.uniform(40_000, 200_000),
        )
        found.append(dataclasses.replace(scene, **known))  # type: ignore[arg-type]
    return found


def most(scene: Scene, number: int) -> float:
    """Seconds that an engine waits for a leader of which it sees nothing."""
    return 3 * scene.tokens / scene.rates[number % len(scene.rates)] + STORING + THINK + 5 * TICK


def once(found: list[Herd]) -> None:
    """Nobody left, and nothing was computed twice."""
    assert [herd.scene for herd in found if herd.left] == []
    assert max(herd.documents for herd in found) <= 1


def test_the_model_is_that_of_the_measured_rounds() -> None:
    rows = {row["row"]: row["series"] for row in json.loads(EVIDENCE.read_text())["raw"]["rows"]}
    alone = rows["herd_worst"]["alone"]["values"]
    leader = rows["herd_leader"]["in the herd"]["values"]
    assert pytest.approx(4096 / statistics.median(alone), rel=0.05) == PREFILL
    slow = [a / b for a, b in zip(leader, alone, strict=True)]
    scenes = measured(100)
    assert min(scene.slow for scene in scenes) <= statistics.median(slow)
    assert statistics.median(slow) <= max(scene.slow for scene in scenes)
    # Nobody left, in both.
    assert not any(rows["herd_computed"]["flight_leaves"]["values"])
    once(herds(scenes, worth_waiting))


def test_the_first_rule_left_in_most_rounds() -> None:
    """As it did when it was measured: in six of nine."""
    leaves = [bool(herd.left) for herd in herds(measured(100), measured_rule)]
    assert 0.5 < statistics.mean(leaves) < 1


@pytest.mark.parametrize("seed", range(12))
def test_a_shared_gpu_makes_nobody_leave(seed: int) -> None:
    once(herds(drawn(seed), worth_waiting))


@pytest.mark.parametrize("slow", [1, 2, 3, 4])
@pytest.mark.parametrize(("tokens", "step"), [(4096, 8192), (8192, 8192), (30_016, 2048)])
def test_a_gpu_that_is_slow_makes_nobody_leave(tokens: int, step: int, slow: float) -> None:
    scenes = [Scene(tokens=tokens, step=step, slow=slow, engines=count) for count in (2, 4)]
    once(herds(scenes, worth_waiting))


def test_the_rule_before_left_where_the_gpu_was_shared_by_more() -> None:
    scenes = [scene for seed in range(12) for scene in drawn(seed, slow=3.3)]
    assert any(herd.left for herd in herds(scenes, paced_rule))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [0.03, 0.2, 1.3])
def test_a_wrong_rate_makes_nobody_leave(seed: int, rate: float) -> None:
    """An engine whose only prompt was slow, since it compiled; and one that has slowed down."""
    slow = 2.5 if rate > 1 else 3.3
    once(herds(drawn(seed, rates=(rate * PREFILL, PREFILL), slow=slow), worth_waiting))


@pytest.mark.parametrize("seed", range(4))
def test_engines_apart_wait_for_one_that_is_half_as_fast(seed: int) -> None:
    once(herds(drawn(seed, beside=False, slow=1.0, speed=0.5), worth_waiting))


@pytest.mark.parametrize("seed", range(4))
def test_what_lands_late_is_waited_for_where_the_leader_says_that_it_is_computed(seed: int) -> None:
    scenes = [
        dataclasses.replace(scene, tokens=max(scene.tokens, 4096))
        for scene in drawn(seed, latency=0.3)
    ]
    once(herds(scenes, worth_waiting))


def test_a_leader_that_says_nothing_is_left_more_often() -> None:
    told = [scene for seed in range(4) for scene in drawn(seed, latency=0.3)]
    silent = [dataclasses.replace(scene, reports=False) for scene in told]
    leaves = [sum(len(herd.left) for herd in herds(s, worth_waiting)) for s in (told, silent)]
    assert leaves[0] < leaves[1]


@pytest.mark.parametrize("after", [0.03, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_who_is_preempted_or_dies_is_replaced(seed: int, after: float) -> None:
    for how in ("preempted", "dies"):
        scenes = drawn(seed, **{how: after, "slow": 1.5})
        found = herds(scenes, worth_waiting)
        assert [herd.scene for herd in found if herd.left] == []
        # What was stored is not computed again.
        assert all(herd.documents <= 2 for herd in found)


@pytest.mark.parametrize("after", [0.0, 0.05, 0.5, 1.5])
@pytest.mark.parametrize("beside", [True, False])
def test_a_leader_that_hangs_holds_nobody_up_for_longer_than_that(
    beside: bool, after: float
) -> None:
    scenes = [s for seed in range(6) for s in drawn(seed, hangs=after, beside=beside)]
    hung = [herd for herd in herds(scenes, worth_waiting) if 0 not in herd.ended]
    assert hung
    for herd in hung:
        scene = herd.scene
        # Three of its pauses, at most, from the last sign of life on.
        step = 1.2 * min(scene.step, scene.tokens) / PREFILL * scene.slow
        late = after + scene.latency + scene.tokens / scene.landing
        late += 3 * max(step, scene.latency) + STORING + THINK
        assert len(herd.left) == scene.engines - 1
        for number, left in herd.left.items():
            assert left <= max(most(scene, number), late) + 5 * TICK


@pytest.mark.parametrize("speed", [0.3, 0.1, 0.03])
def test_a_leader_apart_that_is_too_slow_is_left_as_soon_as_patience_says(speed: float) -> None:
    scenes = [s for seed in range(4) for s in drawn(seed, speed=speed, slow=1.0, beside=False)]
    for herd in herds(scenes, worth_waiting):
        for number, left in herd.left.items():
            assert left <= most(herd.scene, number)


def test_a_leader_on_the_same_gpu_is_left_when_sharing_does_not_explain_how_slow_it_is() -> None:
    scenes = [s for seed in range(4) for s in drawn(seed, speed=0.03, slow=1.0, step=512)]
    for herd in herds(scenes, worth_waiting):
        scene = herd.scene
        assert len(herd.left) == scene.engines - 1
        for number, left in herd.left.items():
            alone = scene.tokens / scene.rates[number % len(scene.rates)]
            assert left <= max(most(scene, number) + THINK, 8 * alone + THINK)
