"""`make model-check`: rounds that can be made again, and that find what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import model_check
import pytest
from model_check import Round
from test_machine import CoreMachine
from world import World

from tools import verify_evidence


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "ROUNDS", ((CoreMachine, 3, 8),))
    monkeypatch.setattr(CoreMachine, "reached", CoreMachine.reached)


@pytest.mark.usefixtures("few")
def test_a_round_is_made_from_its_number() -> None:
    done = model_check.walk(7)
    assert not done.failure
    assert done.reached["steps"] > 3
    assert done == model_check.walk(7)
    assert done.reached != model_check.walk(8).reached


@pytest.mark.usefixtures("few")
def test_a_round_tells_the_walk_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = World.check

    def check(world: World) -> None:
        inner(world)
        assert not world.core.counters["committed"], "a span was committed"

    monkeypatch.setattr(World, "check", check)
    done = model_check.walk(7)
    assert "a span was committed" in done.failure
    assert "state.start(" in done.failure


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--seed", "-1"], ["--processes", "0"]])
def test_wrong_numbers_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        model_check.main(wrong)
    assert refused.value.code == 2
    assert "positive" in capsys.readouterr().err


@pytest.mark.usefixtures("few")
def test_what_was_done_is_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounds(first: int, steps: int, processes: int) -> Iterator[Round]:
        yield Round(first, Counter(steps=steps, hits=first))

    monkeypatch.setattr(model_check, "rounds", rounds)
    out = tmp_path / "model-check.json"
    seeds = ["--seed", "3", "--seed", "4"]
    assert model_check.main(["--steps", "10", *seeds, "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("10 steps in 1 rounds") == 2
    written = json.loads(out.read_text())
    assert verify_evidence.check_file(written) == []
    assert (written["derived"]["steps"], written["derived"]["seeds"]) == (20, 2)
    assert written["command"].endswith("--seed 4 --out model-check.json")
    written["raw"]["checks"].pop()
    assert len(verify_evidence.check_file(written)) > 2


@pytest.mark.usefixtures("few")
def test_a_check_ends_at_the_first_seed_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounds(first: int, steps: int, processes: int) -> Iterator[Round]:
        yield Round(first, Counter(steps=steps), "it did not hold")

    monkeypatch.setattr(model_check, "rounds", rounds)
    out = tmp_path / "model-check.json"
    arguments = ["--steps", "10", "--seed", "3", "--seed", "4", "--out", str(out)]
    assert model_check.main(arguments) == 1
    derived = json.loads(out.read_text())["derived"]
    assert (derived["rounds_failed"], derived["seeds"]) == (1, 1)
