"""The suite in two halves is what it is in one: each test once, one seed, one status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import wait_for
from test_test_again import TESTS, Suite

from tools.test_again import last_run, refusal
from tools.test_halves import joined, worst

#: Beside the suite's own tests, in a folder that is the first half.
FIRST = """
import os, time
from pathlib import Path
import pytest

def test_first():
    Path("ran").open("a").write("first ")
    assert not Path("bad").exists(), "bad in the first"

def test_seed_of_the_first(run_seed):
    Path("first-seed").write_text(str(run_seed))

@pytest.fixture
def house():
    yield
    Path("ended").touch()

def test_until_interrupted(house):
    Path("there").touch()
    while Path("wait").exists():
        time.sleep(0.01)
"""


class Halved(Suite):
    """The suite, with a folder ``first``."""

    def __init__(self, root: Path, *marks: str) -> None:
        super().__init__(root, *marks)
        (root / "first").mkdir()
        (root / "first" / "test_first.py").write_text(FIRST)
        self.env["PYTHONPATH"] += os.pathsep + str(TESTS.parent)
        self.command = ("-m", "tools.test_halves", "--root", str(root), "first")

    def halves(self) -> tuple[int, str]:
        """As ``make test`` runs it: the exit status, and what it says."""
        done = self._call(*self.command)
        return done.returncode, done.stdout


def test_both_halves_are_run_once_and_shown(tmp_path: Path) -> None:
    suite = Halved(tmp_path)
    status, said = suite.halves()
    assert status == 0, said
    assert (tmp_path / "ran").read_text() == "first "
    # The first half, then the other.
    assert said.index("3 passed") < said.index("11 passed"), said
    assert (tmp_path / "first-seed").read_text() == (tmp_path / "seeds").read_text().strip()
    assert suite.again() == (1, "test-again: no test failed in the last run\n")


def test_what_failed_in_either_is_tried_again(tmp_path: Path) -> None:
    suite = Halved(tmp_path, "bad", "unsteady")
    status, said = suite.halves()
    assert status == 1, said
    assert "bad in the first" in said
    assert "bad again" in said
    failed = last_run(tmp_path)["failed"]
    assert {"first/test_first.py::test_first", "test_it.py::test_bad"} < {*failed}
    assert len(failed) == 5
    assert suite.again() == (1, "test-again: 5 tests failed, more than 3: that is no chance\n")


def test_an_unsteady_test_of_a_half_passes_alone(tmp_path: Path) -> None:
    suite = Halved(tmp_path, "unsteady")
    assert suite.halves()[0] == 1
    status, said = suite.again()
    assert status == 0, said
    assert "== unsteady: test_it.py::test_teardown failed, and passed alone" in said
    assert f"KMESH_TEST_SEED={(tmp_path / 'first-seed').read_text()}" in said


def test_a_half_that_is_killed_is_no_run(tmp_path: Path) -> None:
    suite = Halved(tmp_path)
    assert suite.halves()[0] == 0
    (tmp_path / "kill").touch()
    assert suite.halves()[0] == 1
    assert "did not end by itself" in refusal(last_run(tmp_path))


def test_an_interrupt_ends_both_in_order(tmp_path: Path) -> None:
    suite = Halved(tmp_path, "wait")
    with subprocess.Popen(
        [sys.executable, *suite.command],
        cwd=tmp_path,
        env=suite.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            wait_for((tmp_path / "there").exists, 60)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 2, said
    assert (tmp_path / "ended").exists()
    assert "KeyboardInterrupt" in said


@pytest.mark.parametrize(
    ("found", "status"),
    [((0, 0), 0), ((0, 1), 1), ((1, 0), 1), ((1, 2), 2), ((5, 1), 5), ((0, 3), 3)],
)
def test_the_worse_status_counts(found: tuple[int, int], status: int) -> None:
    assert worst(found) == status
    halves = [{"status": one, "failed": {str(n): "text"}} for n, one in enumerate(found)]
    run = {"seed": "7", "status": status, "failed": {"0": "text", "1": "text"}}
    assert joined("7", halves) == run
    # Of one that left nothing nobody knows how it ended.
    assert joined("7", [halves[0], {}])["status"] is None
