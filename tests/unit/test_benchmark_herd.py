"""What a herd's runs come to; the engines are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import herd
from benchmarks.check import Verdict, judge_all, read_targets
from benchmarks.engines import Run
from benchmarks.gpu import herd as gpu_herd
from benchmarks.herd import Herd, Round, Unfit, busy, computed, leads
from tools.verify_evidence import derive

ROOT = Path(__file__).parents[2]
TARGETS = ROOT / "benchmarks" / "targets.toml"
TOKENS = 256


def run(firsts: list[float], shares: list[int], ends: list[tuple[float, float]] = []) -> Run:  # noqa: B006
    return Run(max(firsts), 0.1, 9, 0.01, [], [], min(firsts), sum(shares), 7, firsts, shares, ends)


def one(**more: Any) -> Round:
    times = {"leader": 1.1, "worst": 1.5, "alone": 1.0, "tails": 0.25, "restored": 0.5}
    return Round(
        **{
            "documents": 1.0,
            "crowd": 1.0,
            "added": 0.1,
            "added_alone": 0.02,
            "waiting": 0.1,
            "flights": (1, 3, 0, 768),
            **times,
            **more,
        }
    )


class Made:
    """An engine that has what was asked of it before, and what another has stored."""

    def __init__(self, stored: set[tuple[int, ...]], *, forgets: bool = False) -> None:
        self.asked: list[tuple[list[list[int]], float]] = []
        self._stored, self._forgets = stored, forgets

    def order(self, prompts: list[list[int]], at: float) -> None:
        self.asked.append((prompts, at))

    def answer(self, wait: float) -> Run:
        prompts, _ = self.asked[-1]
        shares = []
        for prompt in prompts:
            document = tuple(prompt[:TOKENS])
            shares.append(0 if self._forgets or document not in self._stored else TOKENS)
            self._stored.add(document)
        ends = [(0.1, 0.0), (0.2, 0.01), (0.9, 0.02 if all(shares) else 0.8)]
        found = run([1.0 + share / TOKENS for share in shares], shares, ends)
        return replace(found, added=0.01 * len(prompts))


class Rest:
    """A daemon at rest, which counts how often it is asked what it counts."""

    def __init__(self) -> None:
        self.counters = dict.fromkeys(herd.FLIGHTS, 0)

    def settle(self) -> None:
        pass

    def status(self) -> Rest:
        self.counters = {name: count + 2 for name, count in self.counters.items()}
        return self


def made(**more: Any) -> tuple[Herd, list[Made]]:
    stored: set[tuple[int, ...]] = set()
    engines = [Made(stored, **more) for _ in range(herd.ENGINES)]
    return Herd(Rest(), engines, lead=0.5, wait=1.0), engines  # type: ignore[arg-type]


def test_a_round_is_a_herd_and_what_it_is_compared_with() -> None:
    asked, engines = made()
    found = asked.round(TOKENS)
    assert (found.documents, found.leader, found.worst) == (1.0, 1.0, 2.0)
    assert (found.alone, found.tails, found.restored, found.crowd) == (1.0, 2.0, 2.0, 2.0)
    assert (found.added, found.added_alone) == (0.08, 0.01)
    assert found.waiting == pytest.approx(0.025)
    assert found.flights == (2,) * len(herd.FLIGHTS)
    # Who led computes alone and from its own cache; its neighbour restores.
    assert [len(engine.asked) for engine in engines] == [4, 3, 2, 2]
    prompts, at = engines[0].asked[0]
    assert all(engine.asked[0][1] == at for engine in engines)
    everybody = [prompt for engine in engines for prompt in engine.asked[0][0]]
    assert len(everybody) == 32
    assert {tuple(prompt[:TOKENS]) for prompt in everybody} == {tuple(prompts[0][:TOKENS])}
    assert len({tuple(prompt[TOKENS:]) for prompt in everybody}) == 32
    assert {len(prompt) for prompt in everybody} == {TOKENS + herd.OWN}
    (alone,) = engines[0].asked[1][0]
    assert len(alone) == TOKENS
    assert alone != prompts[0][:TOKENS]
    for engine, which in ((engines[0], 2), (engines[1], 1)):
        assert all(prompt[:TOKENS] == alone for prompt in engine.asked[which][0])


def test_a_round_without_its_tails_cached_says_nothing() -> None:
    asked, _ = made(forgets=True)
    with pytest.raises(Unfit, match="0 of 256 tokens were there"):
        asked.round(TOKENS)


def test_what_no_request_found_was_computed() -> None:
    runs = [run([3.0, 5.0], [0, 4096]), run([4.0, 6.0], [4096, 4160])]
    assert computed(runs, 4096) == 1
    assert leads(runs) == (0, 3.0)
    runs = [run([3.0, 5.0], [2048, 4096]), run([4.0, 6.0], [4096, 0])]
    assert computed(runs, 4096) == 1.5
    assert leads(runs) == (1, 6.0)


def test_an_engine_that_waits_is_watched_until_the_leader_is_done() -> None:
    ends = [(0.5, 0.4), (1.0, 0.5), (2.5, 0.6), (3.5, 1.6)]
    assert busy(ends, 3.0) == pytest.approx(0.1)
    assert busy(ends, 0.7) is None


@pytest.mark.parametrize("file", [TARGETS, gpu_herd.TARGETS])
def test_every_row_of_a_herd_has_its_target(file: Path) -> None:
    rounds = [one(worst=2.9), one(worst=3.1, waiting=None)]
    found = [row.to_json() for row in herd.rows(rounds, "made up")]
    targets = [target for target in read_targets(file) if target.row.startswith("herd")]
    lines = judge_all({"raw": {"rows": found}}, targets, ROOT)
    assert len(lines) == len(found) == 12
    assert not [line for line in lines if line.verdict is Verdict.MISSING]
    short = [line.target.row for line in lines if line.verdict is Verdict.EXPLAINED]
    assert short == (["herd_worst_led_crowd"] if file == gpu_herd.TARGETS else [])


def test_figures_of_a_herd_follow_from_its_rounds() -> None:
    rounds = [one(), one(worst=1.6, documents=2.0), one(worst=2.0, leader=1.2)]
    raw = {"rows": [json.loads(json.dumps(r.to_json())) for r in herd.rows(rounds, "made up")]}
    figures = derive({"kind": "bench", "raw": raw})
    assert figures["herd_computed"] == 2
    assert figures["herd_worst"] == pytest.approx(1.28)
    assert figures["herd_worst_max"] == pytest.approx(1.6)
    assert figures["herd_worst_restored"] == pytest.approx(1.6 / 1.5, rel=1e-4)
    assert figures["herd_worst_crowd"] == pytest.approx(0.8)
    assert figures["herd_worst_led"] == pytest.approx(1.6 / 1.35, rel=1e-4)
    assert figures["herd_worst_led_crowd"] == pytest.approx(1.6 / 2.1, rel=1e-4)
    assert figures["herd_leader"] == pytest.approx(1.1)
    assert figures["herd_worst_time"] == 1600


def test_nobody_who_waited_is_no_figure() -> None:
    (row,) = (r for r in herd.rows([one(waiting=None)], "") if r.name == "herd_waiting_cpu")
    assert row.value is None


def test_rounds_are_written_down_before_an_engine_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []

    def fails(rounds: int, tier: str) -> Any:
        yield one()
        raise RuntimeError("the engine gave no answer")

    monkeypatch.setattr(gpu_herd, "measure", fails)
    monkeypatch.setattr(gpu_herd, "write", lambda rounds, options: written.append(len(rounds)))
    assert gpu_herd.main(["run", "--out", str(tmp_path / "herd.json")]) == 1
    assert written == [1]
    assert "1 rounds written" in capsys.readouterr().out
