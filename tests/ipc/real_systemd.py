"""The machine's own systemd as process 1 of its namespaces, with no units but those of a test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon_process import wait_for

SYSTEMD = Path("/lib/systemd/systemd")
_TARGETS = ("basic", "multi-user", "network", "shutdown", "sysinit", "umount")

#: Its control groups lie below one of ours, which is removed afterwards.
_BOOT = """
set -e
echo $$ > {group}/cgroup.procs
exec unshare --cgroup --mount sh -c '
set -e
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /sys/fs/cgroup
mount -t cgroup2 cgroup /sys/fs/cgroup
exec env -i PATH="$PATH" container=test SYSTEMD_UNIT_PATH={units} {systemd} --system \
  --unit=multi-user.target --log-target=console --log-level=info --show-status=no'
"""


class Unable(Exception):
    """systemd can't be run so on this machine; the text says why."""


class Systemd:
    """A running one.

    Attributes:
        pid: of its process, as this machine sees it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def path(self, inside: str) -> Path:
        """A file as its services see it."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def ctl(self, *words: str) -> str:
        """Runs ``systemctl``; what it printed."""
        done = subprocess.run(
            ["nsenter", f"--target={self.pid}", "--mount", "--pid", "systemctl", *words],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert not done.returncode, (words, done.stderr, self.path("/run/service.log"))
        return done.stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.ctl("show", "--value", f"--property={name}", unit)


@contextmanager
def systemd(units: dict[str, str]) -> Iterator[Systemd]:
    """Boots it.

    Args:
        units: content of files by name, drop-ins as ``NAME.service.d/FILE``.

    Raises:
        Unable: as said there.
    """
    if os.geteuid():
        raise Unable("needs root")
    for tool in (str(SYSTEMD), "nsenter", "systemctl", "unshare"):
        if shutil.which(tool) is None:
            raise Unable(f"needs {tool}")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    groups = [Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"]
    if not groups:
        raise Unable("there are no control groups, version 2")
    group = groups[0] / f"kmesh-systemd-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as failed:
        raise Unable(f"control groups can't be made: {failed.strerror}") from None
    folder = Path(tempfile.mkdtemp(prefix="kmesh-units-"))
    try:
        for name in _TARGETS:
            text = f"[Unit]\nDescription={name}\nDefaultDependencies=no\n"
            (folder / f"{name}.target").write_text(text)
        for name, text in units.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        with _process(group, folder) as running:
            yield running
    finally:
        shutil.rmtree(folder)
        _remove(group)


@contextmanager
def _process(group: Path, units: Path) -> Iterator[Systemd]:
    script = _BOOT.format(group=group, units=units, systemd=SYSTEMD)
    log = units / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:

        def booted() -> Systemd | None:
            if process.poll() is not None:
                raise Unable(f"systemd has not started: {log.read_text()[-500:]}")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            for pid in map(int, children.split()):
                found = Systemd(pid)
                with contextlib.suppress(OSError):
                    if found.path("/run/systemd/private").is_socket():
                        return found
            return None

        yield wait_for(booted, 60, "systemd")
    finally:
        # With it goes all that runs in its namespace.
        process.send_signal(signal.SIGKILL)
        process.wait()


def _remove(group: Path) -> None:
    """Removes a control group and those below, once they are empty."""
    deadline = time.monotonic() + 30
    while group.exists():
        for path in sorted(group.glob("**/"), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()
        assert time.monotonic() < deadline, f"still in use: {group}"
        time.sleep(0.01)
