"""What is said of a round: each shortfall is noticed, and evidence comes to the same figures."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.profile import PROFILES, Profile, ProfileError
from experiments.tokendance import kept
from experiments.tokendance import round as through
from experiments.tokendance.__main__ import go_round, show_round
from experiments.tokendance.roundreport import DENSE, RECIPES, Answer, Report
from kmesh.layout import TILE_BYTES
from tools.verify_evidence import derive

DENSE_BYTES = 5 * TILE_BYTES
RECIPE = TILE_BYTES + 100


def _span(member: str, number: int, *, recipe: bool) -> dict[str, Any]:
    size = RECIPE if recipe else DENSE_BYTES
    codec = {"dense_bytes": DENSE_BYTES, "bytes": size, "depends_on_base": recipe}
    return {
        "member": member,
        "span": number,
        "tokens": 64,
        "dense_bytes": DENSE_BYTES,
        "bytes": size,
        "recipe": recipe,
        "codec": codec,
    }


def _answer(engine: str, member: str, form: str) -> Answer:
    return Answer(engine, member, form, 130, 10, 120, (7, 8, 9), "seven")


@pytest.fixture
def report() -> Report:
    """Two engines, two siblings of a dense span and a recipe each; the primer has a recipe too."""
    members = ("member-1", "member-2")
    member = {
        "dense_bytes": 2 * DENSE_BYTES,
        "stored_bytes": DENSE_BYTES + RECIPE,
        "recipe_bytes": RECIPE,
        "used_bytes": 7 * TILE_BYTES,
    }
    status = {
        "families": 1,
        "mirrors": 3,
        "mirror_bytes": 3 * RECIPE,
        "counters": {"densified": 0, "corrupt": 0},
    }
    held = {
        "status": status,
        "family": {
            "recipe_bytes": 3 * RECIPE,
            "of_members": [
                *({"member": name, **member} for name in members),
                {"member": "primer", "recipe_bytes": RECIPE},
            ],
        },
        "base": [{"tokens": 64, "bytes": DENSE_BYTES}],
        "spans": [_span(name, n, recipe=n > 0) for name in members for n in (0, 1)],
    }
    return Report(
        "model",
        first={"member-1": 7, "member-2": 6},
        answers=[
            _answer(engine, name, form)
            for form in (DENSE, RECIPES)
            for engine in "AB"
            for name in members
        ],
        same=4,
        held=held,
        after=copy.deepcopy(status),
    )


def _change(report: Report, number: int, **fields: object) -> None:
    report.answers[number] = replace(report.answers[number], **fields)  # type: ignore[arg-type]


def test_a_good_round(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.problems() == []
    show_round(report)
    said = capsys.readouterr().out
    assert "2 recipes have the bytes that codec.json says" in said
    memory = (5 + 2 * 7) * TILE_BYTES
    assert f"{memory:13,} B  {memory / (4 * DENSE_BYTES):.4f}" in said
    assert said.count("'seven'") == 8


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda it: _change(it, 4, tokens=(7, 8)), "A, member-1: 'seven' out of recipes is not"),
        (lambda it: _change(it, 0, tokens=()), "A, member-1: "),
        (lambda it: _change(it, 5, restored=0, computed=130), "0 of 130 tokens restored"),
        (lambda it: _change(it, 2, computed=11), "are not the prompt's"),
        (lambda it: it.answers.pop(0), "not every request"),
        (lambda it: setattr(it, "same", 3), "3 of 4 spans came back"),
        (lambda it: it.after["counters"].update(densified=1), "made dense instead"),
        (lambda it: it.after.update(mirrors=2), "made dense instead"),
        (lambda it: it.after["counters"].update(corrupt=1), "1 spans corrupt"),
        (lambda it: it.held["spans"][1].update(bytes=RECIPE + 1), "by codec.json"),
        (lambda it: it.held["spans"].clear(), "no span of a sibling is a recipe"),
    ],
)
def test_each_shortfall_is_noticed(
    report: Report, change: Callable[[Report], object], complaint: str
) -> None:
    change(report)
    found = report.problems()
    assert any(complaint in problem for problem in found), found


def test_evidence_comes_to_the_same_figures(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "round.json"
    through.write_evidence(path, report)
    evidence = json.loads(path.read_text())
    figures = evidence["derived"]
    totals = kept.totals(report.held)
    assert figures["stored_bytes"] == totals["stored"]
    assert figures["memory_bytes"] == totals["memory"]
    assert figures["recipes"] == figures["recipes_as_codec"] == totals["recipes"] == 2
    assert (figures["requests"], figures["same_tokens"]) == (8, 4)
    assert figures["first_as_reference"] == 2
    assert figures["families_off_bytes"] == figures["status_off_bytes"] == 0
    evidence["raw"]["held"]["spans"][1]["bytes"] += TILE_BYTES
    changed = derive(evidence)
    assert changed["recipes_as_codec"] == 1
    assert changed["families_off_bytes"] == 2 * TILE_BYTES


def test_a_round_says_at_once_all_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, model = PROFILES["tokendance-cpu"], PROFILES["tokendance-model"]
    codec = tmp_path / "codec.json"

    def remedy(config: Profile) -> str:
        with pytest.raises(ProfileError) as raised:
            through.check(config, tmp_path)
        return str(raised.value).rpartition("\n")[2]

    both = "run `make defconfig-tokendance-model tokendance-codec tokendance-round`"
    sizes = "run `make tokendance-codec tokendance-round`"
    for text in (None, '{"arms": {}}', "{}"):
        if text is not None:
            codec.write_text(text)
        assert remedy(drawn) == both
        assert remedy(model) == sizes
    codec.write_text('{"arms": {"spans": {"members": {}}}}')
    assert remedy(drawn) == "run `make defconfig-tokendance-model tokendance-round`"
    assert through.check(model, tmp_path) == {"members": {}}
    # A bundle of another checkpoint's state.
    (tmp_path / "manifest.json").write_text('{"checkpoint_digest": "aa"}')
    mine = replace(model, checkpoint_digest="aa")
    assert through.check(mine, tmp_path) == {"members": {}}
    assert remedy(replace(model, checkpoint_digest="bb")) == sizes
    monkeypatch.setattr(through, "_PACKAGES", ("torch", "kmesh_has_none_such"))
    assert remedy(model) == "run `make env tokendance-round`"
    monkeypatch.setattr(through, "ROOT", tmp_path)
    codec.unlink()
    with pytest.raises(ProfileError) as raised:
        go_round(drawn, False, None)
    said = str(raised.value)
    assert "packages: kmesh_has_none_such" in said
    assert ".config has tokendance-cpu" in said
    assert "arm 'spans'" in said
    assert "make env defconfig-tokendance-model tokendance-codec tokendance-round" in said
