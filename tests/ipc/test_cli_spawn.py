"""How ``kmesh export`` hands a file descriptor to a command, which ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from daemon_process import environment, wait_for

SPAWN = [sys.executable, "-m", "kmesh.cli.spawn"]
#: Starts a command through spawn, and waits to be killed.
PARENT = """
import os, subprocess, sys
fd = os.memfd_create("t")
command = [sys.executable, "-m", "kmesh.cli.spawn", str(fd), "3", str(os.getpid())]
child = subprocess.Popen([*command, "sh", "-c", "echo $$; exec sleep 600"], pass_fds=[fd])
child.wait()
"""


def spawn(*command: str, number: int = 3) -> subprocess.CompletedProcess[str]:
    fd = os.memfd_create("what is handed over")
    os.pwrite(fd, b"content", 0)
    try:
        return subprocess.run(
            [*SPAWN, str(fd), str(number), str(os.getpid()), *command],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            pass_fds=[fd],
            timeout=60,
            check=False,
        )
    finally:
        os.close(fd)


def test_the_command_finds_it_at_its_number_and_nothing_else() -> None:
    done = spawn("sh", "-c", "cat <&3; ls /proc/self/fd | wc -l; exit 5")
    # Standard streams, the descriptor, and the directory that is listed.
    assert done.stdout == "content5\n", done.stderr
    assert done.returncode == 5


@pytest.mark.parametrize(("command", "status"), [("/no/such", 127), ("/etc/passwd", 126)])
def test_what_cannot_be_run(command: str, status: int) -> None:
    done = spawn(command)
    assert done.returncode == status
    assert f"kmesh: {command}: " in done.stderr


def test_the_command_ends_with_the_process_that_holds_the_lease() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env=environment(), stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        wait_for(lambda: not alive(child), 30, f"{child} lives on")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
