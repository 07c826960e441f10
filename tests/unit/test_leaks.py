"""The fixture that watches for leaks must be able to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]

_FILE = """
import mmap, os, socket, subprocess, threading
import pytest
import leaks
from kmesh._host import Region
from leaks import no_leaks

leaks.GRACE_SECONDS = 0.1
keep = []

def test_fd():
    os.dup(1)

def test_socket():
    keep.append(socket.socket())

def test_memfd():
    os.memfd_create("x")

def test_mapping():
    fd = os.memfd_create("kmesh-x")
    os.ftruncate(fd, 4096)
    keep.append(Region(fd, 4096, False))
    os.close(fd)

def test_process():
    keep.append(subprocess.Popen(["sleep", "60"]))

def test_thread():
    event = threading.Event()
    keep.append(event)
    threading.Thread(target=event.wait, args=(30,), name="left", daemon=True).start()

def test_failed():
    fd = os.memfd_create("kmesh-failed")
    os.ftruncate(fd, 4096)
    mine = Region(fd, 4096, False)
    os.close(fd)
    try:
        assert mine is None
    except AssertionError as wrong:
        raise ValueError("another") from wrong

def test_clean():
    os.close(os.dup(1))
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()

@pytest.fixture(scope="module", autouse=True)
def end():
    yield
    for one in keep:
        if isinstance(one, subprocess.Popen):
            one.kill()
            one.wait()
        elif isinstance(one, threading.Event):
            one.set()
"""


def test_each_kind_of_leak_fails_its_test(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(_FILE)
    paths = [str(_TESTS), str(_TESTS.parent / "client"), os.environ.get("PYTHONPATH", "")]
    flags = ["-q", "-c", "/dev/null", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout
    assert "1 failed, 7 passed, 6 errors" in said, said + done.stderr
    assert "ERROR at teardown of test_clean" not in said
    assert "ERROR at teardown of test_failed" not in said, said
    for what in (
        "left behind: fd ",
        "left behind: fd socket x1",
        "left behind: fd /memfd:x (deleted) x1",
        "left behind: mapped /memfd:kmesh-x (deleted) x1",
        "(sleep 60)",
        "left behind: thread left",
    ):
        assert what in said, said
