"""`make model-check`: rounds that can be made again, and that find what is wrong."""

from __future__ import annotations

import model_check
import pytest
from test_machine import CoreMachine
from world import World


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
