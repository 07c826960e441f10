"""Tests that failed once get a second chance: which, when, and what is said of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from last_run import SEED

from tools import test_again as tool

TESTS = Path(__file__).parents[1]
#: A suite of its own: what its tests do follows from the files that its runs find and leave.
SUITE = """
import os
from pathlib import Path
import pytest

def once(name):
    path = Path(name)
    if not path.exists():
        path.touch()
        raise AssertionError(f"only the first time: {name}")

def test_good():
    pass

@pytest.mark.parametrize("name", ["a b", "c[d]::e"])
def test_unsteady(name):
    if Path("unsteady").exists():
        once(name)

@pytest.fixture
def ends_badly():
    yield
    if Path("unsteady").exists():
        once("teardown")

def test_teardown(ends_badly):
    pass

def test_bad():
    assert not Path("bad").exists(), "bad again"

def test_seed(run_seed):
    with open("seeds", "a") as seeds:
        seeds.write(f"{run_seed}\\n")
    assert not Path("seed").exists() or len(Path("seeds").read_text().splitlines()) > 1


@pytest.mark.parametrize("n", range(4))
def test_four(n):
    assert not Path("four").exists()

def test_killed():
    if Path("kill").exists():
        os._exit(1)
"""


class Suite:
    """A directory with the suite; ``marks`` are files that decide what fails."""

    def __init__(self, root: Path, *marks: str) -> None:
        self.root = root
        (root / "test_it.py").write_text(SUITE)
        (root / "conftest.py").write_text("from last_run import *\n")
        (root / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
        for mark in marks:
            (root / mark).touch()
        ours = {k: v for k, v in os.environ.items() if k not in (SEED, "PYTEST_ADDOPTS")}
        # The plugins of this environment take longer to load than all of these tests.
        self.env = {**ours, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(self, *arguments: str) -> int:
        """The whole suite, as ``make test`` runs it; pytest's status."""
        return self._call("-m", "pytest", *arguments).returncode

    def again(self) -> tuple[int, str]:
        """``make test-again``: its exit status, and what it says."""
        done = self._call(str(TESTS.parent / "tools" / "test_again.py"), "--root", str(self.root))
        return done.returncode, done.stdout

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=110,
        )


def test_what_passes_alone_is_named_with_its_first_failure(tmp_path: Path) -> None:
    suite = Suite(tmp_path, "unsteady")
    assert suite.run() == 1
    status, said = suite.again()
    assert status == 0, said
    assert said.startswith("== once more, alone: 3 failed (KMESH_TEST_SEED="), said
    for name in ("test_unsteady[a b]", "test_unsteady[c[d]::e]", "test_teardown"):
        assert f"== unsteady: test_it.py::{name} failed, and passed alone" in said, said
    for what in ("a b", "c[d]::e", "teardown"):
        assert f"only the first time: {what}" in said, said
    assert "test_good" not in said
    # All passed, so there is nothing for a third time.
    status, said = suite.again()
    assert (status, said) == (1, "test-again: no test failed in the last run\n")


def test_what_fails_again_fails(tmp_path: Path) -> None:
    suite = Suite(tmp_path, "bad", "seed")
    assert suite.run() == 1
    status, said = suite.again()
    assert status == 1, said
    assert "== failed: test_it.py::test_bad" in said
    assert "bad again" in said
    assert "== unsteady: test_it.py::test_seed" in said
    # It draws the same again.
    first, second = (tmp_path / "seeds").read_text().splitlines()
    assert first == second


@pytest.mark.parametrize(
    ("mark", "why"),
    [
        ("four", "4 tests failed, more than 3: that is no chance"),
        ("kill", "the last run of the tests did not end by itself"),
    ],
)
def test_what_is_no_chance_is_not_tried_again(tmp_path: Path, mark: str, why: str) -> None:
    suite = Suite(tmp_path)
    assert suite.run() == 0
    (tmp_path / mark).touch()
    assert suite.run() == 1
    (tmp_path / mark).unlink()
    assert suite.again() == (1, f"test-again: {why}\n")


def test_a_run_that_ends_at_its_first_failure_is_not_tried_again(tmp_path: Path) -> None:
    """Most of its tests did not run at all."""
    suite = Suite(tmp_path, "bad")
    assert suite.run("-x") == 1
    (tmp_path / "bad").unlink()
    assert suite.again() == (1, "test-again: the last run of the tests did not end by itself\n")


def test_a_run_that_could_not_be_is_not_tried_again(tmp_path: Path) -> None:
    assert "did not end by itself" in tool.refusal(tool.last_run(tmp_path))
    file = tmp_path / tool.RUN
    file.parent.mkdir(parents=True)
    for content in ("", "[]", "{"):
        file.write_text(content)
        assert tool.last_run(tmp_path) == {}
    file.write_text(json.dumps({"seed": "1", "status": 2, "failed": {"a": "b"}}))
    assert "pytest's status 2" in tool.refusal(tool.last_run(tmp_path))
    file.write_text(json.dumps({"seed": "1", "status": 1, "failed": {}}))
    assert "not over a failed test" in tool.refusal(tool.last_run(tmp_path))
    file.write_text(json.dumps({"seed": "1", "status": 1, "failed": dict.fromkeys("abc", "")}))
    assert not tool.refusal(tool.last_run(tmp_path))
