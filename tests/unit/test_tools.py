"""The tools and the packaging that people and CI lean on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tools import client_path, lock, preflight, prepare_model, verify_evidence

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+\Z")


def _pins() -> dict[str, str]:
    lines = [
        line
        for name in ("lock.txt", "lock-nodeps.txt")
        for line in (ROOT / "requirements" / name).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(PIN.match(line) for line in lines), "a lock holds exact versions and nothing else"
    return {
        name.lower().replace("_", "-"): version
        for name, _, version in (x.partition("==") for x in lines)
    }


def test_lock_has_what_the_project_asks_for() -> None:
    pins = _pins()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # CuPy is of no use without a GPU, and its two packages exclude each other.
    extras = {n: x for n, x in project["optional-dependencies"].items() if n[:4] != "cuda"}
    groups = [project["dependencies"], *extras.values()]
    for need in (Requirement(text) for group in groups for text in group):
        assert pins[need.name] in need.specifier, need


def test_environment_is_the_lock() -> None:
    for name, version in _pins().items():
        assert metadata.version(name).split("+")[0] == version, name


def test_lock_drops_local_versions() -> None:
    report = {
        "install": [
            {"metadata": {"name": n, "version": v}} for n, v in (("B", "2+cpu"), ("a", "1"))
        ]
    }
    assert lock.pins(report) == ["a==1", "b==2"]


def test_every_package_is_in_the_distribution() -> None:
    """A folder that pyproject.toml forgets is there in the checkout and absent from the wheel."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = []
    for name, folder in tool["package-dir"].items():
        base = ROOT / folder
        for init in base.rglob("__init__.py"):
            found.append(".".join([name, *init.parent.relative_to(base).parts]))
    assert sorted(found) == sorted(tool["packages"])


def test_preflight_is_content_with_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main() == 0, capsys.readouterr().err


def test_preflight_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert preflight.main() == 1
    said = capsys.readouterr().err
    assert "no-such-compiler" in said
    assert "3.10" in said


def test_make_help_names_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.findall(r"^\.PHONY: (\S+)$", text, re.MULTILINE)
    done = subprocess.run(
        ["make", "-C", ROOT], capture_output=True, text=True, check=True, timeout=30
    )
    shown = re.sub(r"\x1b\[\d*m", "", done.stdout)
    for target in phony:
        assert re.search(rf"^ +{target} +\w", shown, re.MULTILINE), target


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"GGUF but not really")
    target = tmp_path / "models" / "broken"
    with pytest.raises(Exception, match=r".+"):
        prepare_model.convert(source, target)
    assert list(target.parent.iterdir()) == []


def test_model_from_the_environment_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "some/where")
    assert prepare_model.model_path() == "some/where"
    for path in ("/nowhere/at/all", "./nowhere"):
        monkeypatch.setenv("MODEL", path)
        with pytest.raises(SystemExit, match=f"MODEL: {path} is no directory"):
            prepare_model.model_path()
    monkeypatch.delenv("MODEL")
    assert prepare_model.model_path() == str(prepare_model.TARGET)


def test_the_package_brings_the_model() -> None:
    with prepare_model.gguf_file().open("rb") as file:
        assert file.read(4) == b"GGUF"


def _row(request: int, engine: str, restored: int, ttft: float) -> dict[str, Any]:
    return {
        "request": request,
        "engine": engine,
        "prompt_tokens": 110,
        "computed": 110 - restored,
        "restored": restored,
        "cached_tokens": restored,
        "ttft": ttft,
        "text": f"answer {request}",
    }


@pytest.fixture
def evidence() -> dict[str, Any]:
    raw = {
        "shared_tokens": 100,
        "token_bytes": 2**20,
        "requests": [
            _row(1, "A", 0, 4.0),
            _row(2, "A", 96, 0.5),
            _row(1, "B", 96, 0.5),
            _row(2, "B", 98, 1.0),
        ],
        "control": [_row(1, "control", 0, 4.0), _row(2, "control", 0, 5.0)],
        "daemon": {"span_bytes": str(130 * 2**20)},
    }
    made: dict[str, Any] = {
        "kind": "demo",
        "label": "functional, CPU",
        "date": "2026-01-01",
        "command": "make demo",
        "commit": "0" * 40,
        "hardware": {},
        "versions": {},
        "raw": raw,
    }
    made["derived"] = verify_evidence.derive(made)
    return made


def test_evidence_is_derived_from_raw_figures(evidence: dict[str, Any]) -> None:
    assert verify_evidence.check_file(evidence) == []
    derived = evidence["derived"]
    assert derived["restored_share_min_percent"] == 96
    assert derived["ttft_ratio_max"] == 0.2
    assert derived["daemon_mib"] == 130
    assert derived["engines_mib"] == 2 * (100 + 10 + 10)
    assert derived["requests_mib"] == 4 * 110


@pytest.mark.parametrize("wrong", ["raw", "derived", "label", "kind", "missing"])
def test_wrong_evidence_is_refused(evidence: dict[str, Any], wrong: str) -> None:
    match wrong:
        case "raw":
            evidence["raw"]["requests"][2]["restored"] = 95
        case "derived":
            evidence["derived"]["daemon_mib"] = 13.0
        case "missing":
            del evidence["commit"]
        case key:
            evidence[key] = "other"
    assert verify_evidence.check_file(evidence)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("at least **96 %** <!-- evidence: demo.restored_share_min_percent -->", True),
        ("at least 96.0 % <!-- evidence: demo.restored_share_min_percent -->", True),
        ("at least 97 % <!-- evidence: demo.restored_share_min_percent -->", False),
        (
            "130 MiB <!-- evidence: demo.daemon_mib --> | 240 <!-- evidence: demo.engines_mib -->",
            True,
        ),
        (
            "240 MiB <!-- evidence: demo.daemon_mib --> | 130 <!-- evidence: demo.engines_mib -->",
            False,
        ),
        ("some <!-- evidence: demo.daemon_mib -->", False),
        ("130 <!-- evidence: other.daemon_mib -->", False),
    ],
)
def test_figures_in_documents_are_compared(
    evidence: dict[str, Any], text: str, right: bool
) -> None:
    assert (verify_evidence.check_document(text, {"demo": evidence}) == []) is right


def test_evidence_of_this_repository_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_evidence.main() == 0, capsys.readouterr().err


def test_a_clone_named_like_the_package_is_not_taken_for_it(tmp_path: Path) -> None:
    above, site = tmp_path / "above", tmp_path / "site"
    (above / "kmesh").mkdir(parents=True)
    site.mkdir()
    code = (
        "import importlib.util, site, sys; sys.path.insert(0, ''); site.addsitedir(sys.argv[1]);"
        "print(importlib.util.find_spec('kmesh').origin)"
    )

    def found() -> str:
        line = [sys.executable, "-I", "-S", "-c", code, str(site)]
        done = subprocess.run(line, cwd=above, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert found() == "None"
    client_path.write(site)
    assert found() == str(ROOT / "client" / "kmesh" / "__init__.py")


def test_nothing_heavy_is_kept_in_git() -> None:
    git = shutil.which("git")
    assert git
    listed = subprocess.run(
        [git, "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30
    )
    sizes = {
        name: (ROOT / name).stat().st_size
        for name in listed.stdout.decode().split("\0")
        if name and (ROOT / name).is_file()
    }
    assert {name: size for name, size in sizes.items() if size > 1 << 20} == {}


def test_evidence_files_are_json_with_a_label() -> None:
    for path in (ROOT / "evidence").glob("*.json"):
        assert json.loads(path.read_text())["label"] in verify_evidence.LABELS
