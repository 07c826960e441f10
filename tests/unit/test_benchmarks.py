"""How figures are made of samples and judged; nothing is measured here."""

from __future__ import annotations

import importlib
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import check, machine, readme, suite
from benchmarks.__main__ import main
from benchmarks.check import Target, TargetError, Verdict, judge, judge_all, read_targets
from benchmarks.engines import Run
from benchmarks.gpu import engines, round_engine
from benchmarks.results import REDUCE, Row, bootstrap, p99, unavailable
from benchmarks.timing import in_turn
from tools.verify_evidence import check_document, check_file, derive

ROOT = Path(__file__).parents[2]
TARGETS = ROOT / "benchmarks" / "targets.toml"

samples = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=40)


def row(value: float = 1.0, unit: str = "ms", name: str = "figure") -> dict[str, Any]:
    return Row(name, unit, "max", {"values": [value]}).to_json()


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "label": "functional, CPU",
        "date": "2026-01-01",
        "commit": "0" * 40,
        "clean": True,
        "quick": False,
        "hardware": {"cpu": "a processor", "cpus": 2, "memory_gib": 1.0, "kernel": "6"},
        "raw": {"rows": list(rows)},
    }


# The README's table.


def test_the_readme_shows_the_evidence() -> None:
    document = (ROOT / "README.md").read_text()
    evidence = ROOT / "evidence" / "bench-cpu.json"
    text = ""
    if evidence.exists():
        found = json.loads(evidence.read_text())
        text = readme.markdown(found, evidence.stem, read_targets(TARGETS), ROOT)
    assert document == readme.placed(document, text).replace(
        f"{readme.BEGIN}\n\n{readme.END}", f"{readme.BEGIN}\n{readme.END}"
    ), "python -m benchmarks table --write README.md"


def test_a_table_shows_every_target_and_what_became_of_it(tmp_path: Path) -> None:
    (tmp_path / "why.md").touch()
    targets = [
        Target("fast", "Something fast", "ms", at_most=2),
        Target("slow", "Something slow", "ms", at_most=2, adr="why.md"),
        Target("large", "Something large", "B"),
        Target("gone", "Nothing", "B", at_least=1),
    ]
    rows = [row(0.012345, name="fast"), row(2.5, name="slow"), row(12345.0, "B", "large")]
    lines = readme.markdown(result(*rows), "bench", targets, tmp_path).splitlines()
    assert "a processor, 2 CPUs, 1 GiB, Linux 6; 2026-01-01, commit 000000000000;" in lines[0]
    shown = [[cell.strip() for cell in line.split("|")[2:5]] for line in lines[4:]]
    assert shown == [
        ["0.0123 ms <!-- evidence: bench.fast -->", "≤ 2 ms", "holds"],
        ["2.50 ms <!-- evidence: bench.slow -->", "≤ 2 ms", "falls short, [explained](why.md)"],
        ["12345 B <!-- evidence: bench.large -->", "", "shown"],
        ["–", "≥ 1 B", "MISSING"],
    ]


@given(st.floats(1e-5, 1e9))
def test_the_verifier_takes_figures_as_the_table_shows_them(value: float) -> None:
    shown = f"| {readme.figure(value)} µs <!-- evidence: bench.row --> |"
    assert check_document(shown, {"bench": {"derived": {"row": value}}}) == []
    other = {"bench": {"derived": {"row": value * 1.01}}}
    assert len(check_document(shown, other)) == 1


@pytest.mark.parametrize("document", ["", "{0}", "{1}{0}", "{0}{1}{0}", "{0}{0}{1}"])
def test_a_document_has_one_place_for_the_table(document: str) -> None:
    with pytest.raises(readme.MarkerError):
        readme.placed(document.format(readme.BEGIN, readme.END), "text")


def test_a_table_is_put_in_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, evidence = tmp_path / "page.md", tmp_path / "bench.json"
    page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nbehind\n")
    evidence.write_text(json.dumps(result(row(name="acquire_release"))))
    assert main(["table", str(evidence)]) == 0
    text = capsys.readouterr().out
    assert "evidence: bench.acquire_release" in text
    assert main(["table", str(evidence), "--write", str(page)]) == 0
    assert page.read_text() == f"before\n{readme.BEGIN}\n{text}{readme.END}\nbehind\n"
    page.write_text("no markers")
    assert main(["table", str(evidence), "--write", str(page)]) == 1
    assert main(["table", str(tmp_path / "none.json")]) == 1


# Judging.


@pytest.mark.parametrize(
    ("bounds", "value", "verdict"),
    [
        ({"at_most": 2.0}, 2.0, Verdict.HOLDS),
        ({"at_most": 2.0}, 2.001, Verdict.SHORT),
        ({"at_least": 2.0}, 2.0, Verdict.HOLDS),
        ({"at_least": 2.0}, 1.999, Verdict.SHORT),
        ({"at_most": 0.0}, 0.0, Verdict.HOLDS),
        ({}, 7.0, Verdict.SHOWN),
    ],
)
def test_a_figure_is_compared_with_its_bound(
    bounds: dict[str, float], value: float, verdict: Verdict
) -> None:
    line = judge(Target("figure", "", "ms", **bounds), row(value), ROOT)
    assert line.verdict is verdict
    assert line.verdict.fails is (verdict is Verdict.SHORT)


def test_a_missing_row_fails_whatever_explains_it(tmp_path: Path) -> None:
    (tmp_path / "why.md").write_text("because")
    for target in (Target("figure", "", "ms"), Target("figure", "", "ms", 1.0, adr="why.md")):
        line = judge(target, None, tmp_path)
        assert (line.verdict, line.verdict.fails) == (Verdict.MISSING, True)


def test_an_adr_explains_a_shortfall_only_if_it_is_there(tmp_path: Path) -> None:
    target = Target("figure", "", "ms", at_most=1.0, adr="docs/adr/0042-why.md")
    assert judge(target, row(2.0), tmp_path).verdict is Verdict.SHORT
    page = tmp_path / target.adr
    page.parent.mkdir(parents=True)
    page.write_text("because")
    line = judge(target, row(2.0), tmp_path)
    assert (line.verdict, line.verdict.fails) == (Verdict.EXPLAINED, False)
    assert target.adr in str(line)
    assert judge(target, row(1.0), tmp_path).verdict is Verdict.HOLDS


def test_what_a_machine_does_not_give_is_no_excuse_for_a_target() -> None:
    gone = unavailable("figure", "ms", "no such pages").to_json()
    line = judge(Target("figure", "", "ms"), gone, ROOT)
    assert (line.verdict.fails, line.note) == (False, "no such pages")
    assert judge(Target("figure", "", "ms", at_most=1.0), gone, ROOT).verdict is Verdict.MISSING


def test_another_unit_is_not_compared() -> None:
    line = judge(Target("figure", "", "µs", at_most=50), row(0.04, "ms"), ROOT)
    assert line.verdict is Verdict.MISSING


def test_a_row_that_no_target_names_is_noticed() -> None:
    lines = judge_all(result(row(), row(name="other")), [Target("figure", "", "ms")], ROOT)
    assert [(line.target.row, line.verdict.fails) for line in lines] == [
        ("figure", False),
        ("other", True),
    ]


@pytest.mark.parametrize(
    ("value", "status", "last"), [(1.0, 0, "1 of 1 in order"), (9.0, 1, "0 of 1 in order")]
)
def test_the_check_prints_a_line_for_each_target(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    value: float,
    status: int,
    last: str,
) -> None:
    path, targets = tmp_path / "bench.json", tmp_path / "targets.toml"
    path.write_text(json.dumps(result(row(value))))
    targets.write_text('[[target]]\nrow = "figure"\ntext = "x"\nunit = "ms"\nat_most = 2\n')
    assert check.main(path, targets, tmp_path) == status
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("figure")
    assert "≤ 2 ms" in lines[1]
    assert lines[-1] == last


def test_the_check_fails_without_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(tmp_path / "bench.json", TARGETS, ROOT) == 1
    assert "run `make bench` first" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("__main__", "bench-gpu"),
        ("engines", "bench-gpu-engines"),
        ("herd", "bench-gpu-herd"),
        ("pair", "bench-gpu-pair"),
        ("round_engine", "bench-gpu-round"),
    ],
)
def test_a_check_without_a_result_names_the_target_that_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], module: str, target: str
) -> None:
    main = importlib.import_module(f"benchmarks.gpu.{module}").main
    assert main(["check", str(tmp_path / "none.json")]) == 1
    assert f"run `make {target}` first" in capsys.readouterr().out
    assert f"\n{target}: " in (ROOT / "Makefile").read_text()


def test_the_check_names_parts_that_were_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, targets = tmp_path / "bench.json", tmp_path / "targets.toml"
    (row_of_a_part := row(1.0))["benchmark"] = "one"
    path.write_text(json.dumps(result(row_of_a_part)))
    targets.write_text(
        "".join(
            f'[[target]]\nrow = "{name}"\npart = "{part}"\ntext = "x"\nunit = "ms"\n'
            for name, part in (("figure", "one"), ("lost", "one"), ("b", "two"), ("c", "two"))
        )
    )
    assert check.main(path, targets, tmp_path, "bench-parts") == 1
    said = [line for line in capsys.readouterr().out.splitlines() if "part is not in" in line]
    assert len(said) == 1
    assert said[0].startswith("two: ")
    assert "make bench-parts BENCH_ARGS='--parts two'" in said[0]


# Targets.


def test_the_targets_can_be_read_and_their_pages_are_there() -> None:
    assert len(read_targets(TARGETS)) > 30
    files = [TARGETS, *TARGETS.parent.glob("gpu/*targets.toml")]
    assert len(files) == 6
    for file in files:
        targets = read_targets(file)
        assert [t.adr for t in targets if t.adr and not (ROOT / t.adr).is_file()] == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('row = "a"\ntext = ""\nunit = "s"\nat_most = 1\nat_least = 1', "a: both"),
        ('row = "a"\ntext = ""\nunit = "s"\nadr = "x.md"', "a: an ADR"),
        ('row = "a"\ntext = ""\nunit = "s"\nat_mots = 1', "at_mots"),
        (
            'row = "a"\ntext = ""\nunit = "s"\n[[target]]\nrow = "a"\ntext = ""\nunit = "s"',
            "twice: a",
        ),
    ],
)
def test_targets_that_contradict_themselves_are_refused(
    tmp_path: Path, text: str, names: str
) -> None:
    path = tmp_path / "targets.toml"
    path.write_text(f"[[target]]\n{text}\n")
    with pytest.raises(TargetError, match=names):
        read_targets(path)


# Figures.


@given(samples)
def test_p99_leaves_at_most_one_in_a_hundred_above(values: list[float]) -> None:
    found = p99(values)
    assert found in values
    assert sum(v > found for v in values) <= len(values) / 100


@given(samples, st.sampled_from(sorted(REDUCE)))
def test_the_verifier_comes_to_the_same_figures_by_itself(values: list[float], name: str) -> None:
    others = [value * 3 + 1 for value in values]
    one = Row("figure", "ms", name, {"a": values, "b": others, "more": values})
    evidence = {"kind": "bench", "raw": {"rows": [one.to_json()]}}
    assert one.value is not None
    assert math.isclose(derive(evidence)["figure"], one.value, rel_tol=1e-6, abs_tol=1e-6)


def test_a_row_survives_its_file() -> None:
    one = Row("figure", "ratio", "median of a/b", {"a": [1.0, 2.0], "b": [2.0, 2.0]}, "n", (0.5, 1))
    again = Row.from_json(json.loads(json.dumps(one.to_json())))
    assert again == one
    assert again.value == 0.75


def test_samples_are_written_with_the_digits_that_figures_are_made_of() -> None:
    one = Row("figure", "s", "median", {"a": [1.23456789]})
    assert one.value == one.to_json()["series"]["a"]["values"][0] == 1.2346


def test_the_interval_holds_the_figure_and_is_the_same_again() -> None:
    rng = random.Random(1)
    ours = [rng.uniform(0.9, 1.2) for _ in range(12)]
    low, high = bootstrap(ours, [1.0] * 12)
    assert low <= sorted(ours)[5] <= high
    assert (low, high) == bootstrap(ours, [1.0] * 12)
    assert low < high


def test_both_sides_are_measured_in_turn() -> None:
    calls: list[str] = []
    taken = in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, warm=1)
    assert "".join(calls) == "baabba"
    assert [len(values) for values in taken.values()] == [2, 2]


# Runs.


def test_a_run_is_an_evidence_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busy_cpus", lambda seconds=1.0: 0.0)
    one = machine.Run(quick=True)
    one.add("made up", [Row("a", "s", "max", {"v": [2.0]}), unavailable("b", "s", "no")], 1.0)
    written = json.loads(json.dumps(one.to_json()))
    assert check_file(written) == []
    assert written["derived"] == {"a": 2.0}
    assert written["quick"]
    written["derived"]["a"] = 1.9
    assert "a is 2.0" in check_file(written)[0]


def test_every_benchmark_has_its_module() -> None:
    files = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert files == {f"bench_{name}" for name in suite.BENCHMARKS | suite.ALONE}


# Engines.

KINDS = ("recompute", "prefix", "offload", "host", "gpu")


def test_every_row_of_engines_on_a_gpu_has_its_target() -> None:
    taken = engines.Taken()
    for length, tokens in engines.LENGTHS.items():
        for number in range(3):
            for what in (
                "recompute",
                "prefix",
                "offload",
                "host",
                "host_prefix",
                "gpu",
                "gpu_prefix",
            ):
                cached = what != "recompute"
                run = Run(
                    1.0,
                    0.1,
                    9,
                    0.01,
                    [(1.0, 0.1)],
                    [{"start_load_kv": 0.1}],
                    0.01 * (number + 1),
                    tokens * cached,
                    7,
                )
                taken.add(what, length, number, run, cached)
    found = list(engines.rows(taken, {length: [1.0] for length in engines.LENGTHS}))
    assert next(row.value for row in found if row.name == "engine_host_over_4k") == -1.1
    result = {"raw": {"rows": [row.to_json() for row in found]}}
    lines = judge_all(result, read_targets(engines.TARGETS), ROOT)
    assert len(lines) == len(found) == 25
    assert [line for line in lines if line.verdict is Verdict.MISSING] == []


def test_a_prompt_that_was_not_restored_whole_is_no_sample() -> None:
    taken = engines.Taken()
    with pytest.raises(RuntimeError, match="host, 4k: 4032 tokens were cached, not 4096"):
        taken.add("host", "4k", 1, Run(1.0, 0.1, 9, 0.01, [], [], 0.01, 4032, 7), cached=True)


def test_tokens_that_differ_are_counted() -> None:
    taken = engines.Taken()
    for what, last in (("host", 7), ("host_prefix", 8)):
        for number in range(3):
            run = Run(1.0, 0.1, 9, 0.01, [], [], 0.01, 4096, last if number == 2 else 1)
            taken.add(what, "4k", number, run, cached=True)
    assert taken.differing("host", "host_prefix") == 1
    assert taken.differing("host_prefix", "recompute") == 0


class Answers:
    """An engine whose runs are given."""

    def __init__(self, *cached: int) -> None:
        self.cached = list(cached)

    def reset(self) -> None:
        pass

    def run(self, prompts: list[list[int]]) -> Run:
        return Run(0.02, 0.0, 1, 0.01, [], [], 0.01, self.cached.pop(0), len(self.cached))


def test_every_row_of_a_round_in_an_engine_has_its_target() -> None:
    siblings, taken = round_engine.Siblings(), round_engine.Taken()
    whole = siblings.restored
    assert whole == 8 * 4096 + 4 * 64 + 4 * 128
    for what in ("dense", "recipes"):
        taken.measure(what, Answers(*[whole] * 4), siblings, 3)  # type: ignore[arg-type]
    found = list(taken.rows())
    result = {"raw": {"rows": [row.to_json() for row in found]}}
    lines = judge_all(result, read_targets(round_engine.TARGETS), ROOT)
    assert len(lines) == len(found) == 4
    assert [line for line in lines if line.verdict is Verdict.MISSING] == []
    with pytest.raises(RuntimeError, match="recipes: 4096 tokens were restored"):
        taken.measure("recipes", Answers(whole, 4096), siblings, 3)  # type: ignore[arg-type]
