"""The documents name what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from demo.engine import connector_config
from kmesh.cli.commands import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("evidence/*.md")])
README = (ROOT / "README.md").read_text()
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
_MAKE = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in _LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_make_targets_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in _MAKE.findall(document.read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def _help(*command: str) -> str:
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run(
        [program, *command[1:], "--help"],
        env={"COLUMNS": "200", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_readme_names_the_daemons_flags() -> None:
    said = _help("kmesh-spand")
    table = README.partition("### Settings")[2].partition("###")[0]
    flags = re.findall(r"^\| `(--[a-z-]+)` ", table, re.MULTILINE)
    assert flags
    for flag in [*flags, "--config", "--print-config"]:
        assert re.search(rf"^ +{flag}\b", said, re.MULTILINE), flag


def test_readme_names_the_commands() -> None:
    said = _help("kmesh")
    parsers = get_command(app).commands
    commands = re.findall(r"^\| `kmesh ([a-z]+)` ", README, re.MULTILINE)
    assert commands
    for command in commands:
        assert re.search(rf"^\W*{command} +\w", said, re.MULTILINE), command
        assert any("--json" in option.opts for option in parsers[command].params), command
    assert "--socket-dir" in said
    assert "Exit codes" in said


def test_decisions_are_listed_in_order() -> None:
    folder = ROOT / "docs" / "adr"
    pages = sorted(page for page in folder.glob("*.md") if page.name != "README.md")
    listed = re.findall(r"\| \[(\d+)\]\(([^)]+)\)", (folder / "README.md").read_text())
    assert [name for _, name in listed] == [page.name for page in pages]
    for number, (shown, name) in enumerate(listed, 1):
        text = (folder / name).read_text()
        assert int(shown) == number
        assert text.startswith(f"# {number:04d}: ")
        parts = re.findall(r"^## (\w+)$", text, re.MULTILINE)
        assert parts == ["Context", "Decision", "Consequences"], name


def test_readme_shows_the_connector_line_that_the_demo_uses() -> None:
    shown = re.search(r"--kv-transfer-config '([^']+)'", README)
    assert shown
    used = connector_config(Path("/run/kmesh"))
    assert shown[1].replace(" ", "") == used.replace(" ", "")


def test_readme_shows_settings_defaults() -> None:
    said = " ".join(_help("kmesh-spand").split())
    assert "memory for spans, such as 8GiB [1GiB]" in said
    assert "tokens of a span [64]" in said
