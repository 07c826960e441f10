"""The page of complaints has every row, and names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "field-tests.md").read_text()
ROWS = 40
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_NAMED = sorted(set(_TEST.findall(PAGE)))


def test_every_row_is_there_once() -> None:
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]
    assert sorted(numbers) == list(range(1, ROWS + 1))


def test_every_row_has_a_test_or_says_what_is_planned() -> None:
    today, _, later = PAGE.partition("## Rows that need other hardware")
    for line in today.splitlines():
        if re.match(r"\| \d+ \|", line):
            _, _, complaint, tests, how, _ = (cell.strip() for cell in line.split("|"))
            assert complaint
            assert how
            assert _TEST.sub("", tests).strip(", ") == "", line
            assert _TEST.search(tests), line
    for line in later.partition("##")[0].splitlines():
        if re.match(r"\| \d+ \|", line):
            assert len(line.split("|")[3].split()) > 5, line


@pytest.mark.parametrize(("file", "name"), _NAMED, ids=[name for _, name in _NAMED])
def test_what_is_named_exists(file: str, name: str) -> None:
    """As pytest collects it: a function of a test module, not skipped whatever happens."""
    path = ROOT / file
    assert path.name.startswith("test_")
    assert name.startswith("test_")
    found = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    assert len(found) == 1
    marks = {ast.unparse(mark).partition("(")[0] for mark in found[0].decorator_list}
    assert not marks & {"pytest.mark.skip", "pytest.mark.xfail"}
