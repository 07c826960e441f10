"""What a run leaves for ``make test-again``: its seed, how it ended, and what failed first.

Everything that tests draw by themselves follows from ``KMESH_TEST_SEED``, which is printed, and is
the same when failed tests are run again.
"""

from __future__ import annotations

import os
import random

import pytest

#: Where pytest's cache has it, as JSON: ``seed``, ``status`` (of pytest; None until it has ended
#: by itself, with nothing left to run) and ``failed`` (node ids, each with the text of its first
#: failure).
KEY = "kmesh/last_run"
SEED = "KMESH_TEST_SEED"


@pytest.fixture
def run_seed() -> int:
    """What chance begins with; printed, so that it is beside a test that failed."""
    print(f"{SEED}={os.environ[SEED]}")
    return int(os.environ[SEED])


class LastRun:
    """Writes it down as the run goes on, so that one that is killed leaves no old one behind."""

    def __init__(self, cache: pytest.Cache, seed: str) -> None:
        self._cache = cache
        self._seed = seed
        self._failed: dict[str, str] = {}

    def write(self, status: int | None = None) -> None:
        run = {"seed": self._seed, "status": status, "failed": self._failed}
        self._cache.set(KEY, run)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, report.longreprtext)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        # After `-x` or `--maxfail` nobody knows of the others.
        cut_short = session.shouldfail or session.shouldstop
        self.write(None if cut_short else int(exitstatus))


def pytest_configure(config: pytest.Config) -> None:
    seed = os.environ.setdefault(SEED, str(random.SystemRandom().getrandbits(32)))
    cache = getattr(config, "cache", None)
    if cache is not None and not config.option.collectonly:
        run = LastRun(cache, seed)
        run.write()
        config.pluginmanager.register(run, "kmesh-last-run")


def pytest_report_header() -> str:
    return f"{SEED}={os.environ[SEED]}"
