"""`make test`: the suite in two halves at the same time.

Most tests of whole processes wait for them, and leave a processor free for the others. Each half is
a pytest of its own with its own cache; both have one seed, and what failed in either is left for
``make test-again`` as if one run had found it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tools.test_again import ROOT, RUN, last_run

#: What is in the first half, whose output is shown as it comes; all else is in the second.
FIRST = ("tests/ipc", "tests/chaos")
SEED = "KMESH_TEST_SEED"
_CACHES = (Path(".pytest_cache/halves/1"), Path(".pytest_cache/halves/2"))
_RUN_IN_CACHE = RUN.relative_to(".pytest_cache")
#: Exit statuses of pytest.
_PASSED, _FAILED = 0, 1
_LOOK_SECONDS = 0.2


def joined(seed: str, halves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What two runs left, as one that tests/last_run.py would have written.

    Its status is the worst one, and None if a half did not end by itself.
    """
    found = [half.get("status") for half in halves]
    failed = {name: text for half in halves for name, text in half.get("failed", {}).items()}
    return {"seed": seed, "status": None if None in found else worst(found), "failed": failed}


def worst(found: Sequence[Any]) -> Any:
    """The exit status of both: of a failed test only where nothing worse has happened."""
    return max(found, key=lambda status: (status not in (_PASSED, _FAILED), status))


class Halves:
    """Both runs of pytest in one directory; signals that would end this process interrupt both.

    Args:
        root: where pytest runs.
        first: paths of the first half.
        said: takes the output of the second.
    """

    def __init__(self, root: Path, first: Sequence[str], said: IO[bytes]) -> None:
        shown = ["--color=yes"] if sys.stdout.isatty() else []
        chosen = (list(first), [*shown, *(f"--ignore={path}" for path in first)])
        self._processes: list[subprocess.Popen[bytes]] = []
        # Before they start: what is ignored here would be ignored there.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.interrupt)
        for cache, arguments, out in zip(_CACHES, chosen, (None, said), strict=True):
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments],
                    cwd=root,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out and subprocess.STDOUT,
                    # A terminal's interrupt comes through here alone: a second one would break
                    # off their end.
                    start_new_session=True,
                )
            )

    def interrupt(self, *_: object) -> None:
        """Ends both as Ctrl-C does."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)

    def statuses(self, said: IO[bytes]) -> list[int]:
        """Waits for both; shows what the second says once the first has ended."""
        first, second = self._processes
        first.wait()
        ended = False
        while not ended:
            ended = second.poll() is not None
            sys.stdout.buffer.write(said.read())
            sys.stdout.flush()
            if not ended:
                time.sleep(_LOOK_SECONDS)
        return [first.wait(), second.wait()]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: pytest's, the worse one of both."""
    parser = argparse.ArgumentParser(prog="test_halves.py", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="where pytest runs")
    parser.add_argument("first", nargs="*", default=FIRST, metavar="PATH", help="the first half")
    options = parser.parse_args(argv)
    root: Path = options.root
    for cache in (".pytest_cache", *_CACHES):
        with contextlib.suppress(FileNotFoundError):
            (root / cache / _RUN_IN_CACHE).unlink()
    seed = os.environ.setdefault(SEED, str(random.SystemRandom().getrandbits(32)))
    print(f"== {' '.join(options.first)}; beside it, shown after it, the others", flush=True)
    with tempfile.NamedTemporaryFile() as written, open(written.name, "rb") as said:
        statuses = Halves(root, options.first, written).statuses(said)
    run = joined(seed, [last_run(root, cache / _RUN_IN_CACHE) for cache in _CACHES])
    (root / RUN).parent.mkdir(parents=True, exist_ok=True)
    (root / RUN).write_text(json.dumps(run))
    # A pytest that was killed has a negative one.
    return int(worst([abs(status) for status in statuses]))


if __name__ == "__main__":
    sys.exit(main())
