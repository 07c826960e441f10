"""A real daemon, started as a user starts it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from leaks import process_tree
from rawclient import RawClient

from kmesh.v1 import admin_pb2, admin_pb2_grpc

ROOT = Path(__file__).parents[1]
#: Bytecode of those who may not leave it beside the source.
BYTECODE = ROOT / ".pytest_cache" / "bytecode"
COMMAND = (sys.executable, "-m", "kmesh_spand")


def environment(**more: str) -> dict[str, str]:
    """This one, without anything that would configure a daemon."""
    ours = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("KMESH_", "NOTIFY_", "LISTEN_", "FDSTORE"))
    }
    if ours.pop("PYTHONDONTWRITEBYTECODE", ""):
        # Otherwise each process of each daemon would compile all of it again.
        ours["PYTHONPYCACHEPREFIX"] = str(BYTECODE)
    paths = [str(ROOT / "client"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**ours, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "error", **more}


def wait_for(condition: Callable[[], Any], seconds: float = 30.0, what: str = "") -> Any:
    """The first true value of ``condition``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.01)
    return value


class Daemon:
    """One ``kmesh-spand``.

    Args:
        errors: its log may have errors.
        bugs: it may have the traceback of a bug that the test put there.
        command: that starts it.
        group: control group that it runs in.
        pass_fds: file descriptors that it starts with.
    """

    def __init__(
        self,
        socket_dir: Path,
        *,
        nofile: int | None = None,
        env: dict[str, str] | None = None,
        ready: bool = True,
        errors: bool = False,
        bugs: bool = False,
        command: Sequence[str] = COMMAND,
        group: Path | None = None,
        pass_fds: Sequence[int] = (),
        **settings: object,
    ) -> None:
        self.socket_dir = socket_dir
        self.errors = errors
        self.bugs = bugs
        values = {"host_memory": "32MiB", "staging_memory": "64MiB", **settings}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
        self.log_path = socket_dir.parent / f"{socket_dir.name}.{time.monotonic_ns()}.log"

        # A shell does it in the new process: this one has threads, and is not to be copied.
        begin = [f"ulimit -n {nofile}"] if nofile is not None else []
        begin += [f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))}"] if group else []
        if begin:
            command = ("sh", "-ec", f'{"; ".join(begin)}; exec "$@"', "sh", *command)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, f"--socket-dir={socket_dir}", *flags],
                env=environment(**(env or {})),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=pass_fds,
            )
        if ready:
            try:
                self.wait_ready()
            except BaseException:
                self.kill()
                raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text()

    def wait_ready(self, times: int = 1) -> None:
        """Waits for the log to say "ready" that often."""

        def ready() -> bool:
            assert self.process.poll() is None, f"exit {self.process.returncode}: {self.log()}"
            return self.log().count("ready: ") >= times

        wait_for(ready, 60.0, f"ready: {self.log()}")

    def child(self, name: str) -> int:
        """The pid of ``control`` or ``worker``."""

        def find() -> int:
            for pid in process_tree(self.pid):
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/comm").read_text().strip() == f"kmesh-{name}":
                        return pid
            return 0

        return int(wait_for(find, what=name))

    def memfds(self, name: str) -> list[Path]:
        """The supervisor's own, writable fds of memory whose name begins so, in /proc."""
        found = []
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            # What is closed while this looks is none.
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(path).startswith(f"/memfd:kmesh-{name}"):
                    found.append(path)
        return found

    def slab_fd(self, slab: int = 0) -> Path:
        """That of a slab."""
        return self.memfds(f"slab{slab} ")[0]

    def flip(self, offset: int, slab: int = 0) -> None:
        """Flips a bit of a slab, as a broken machine would."""
        path = self.slab_fd(slab)
        path.chmod(0o600)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            byte = os.pread(fd, 1, offset)[0]
            os.pwrite(fd, bytes([byte ^ 4]), offset)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def rpc(self) -> Iterator[tuple[grpc.Channel, tuple[tuple[str, str], ...]]]:
        """A gRPC channel and the metadata of a session that lives as long."""
        with (
            RawClient(self.socket_dir) as session,
            grpc.insecure_channel(f"unix:{self.socket_dir}/grpc.sock") as channel,
        ):
            yield channel, (("kmesh-session", session.welcome.token),)

    def status(self) -> admin_pb2.StatusResponse:
        """Admin.Status; the session that asks is counted in it."""
        with self.rpc() as (channel, metadata):
            stub = admin_pb2_grpc.AdminStub(channel)
            return stub.Status(admin_pb2.StatusRequest(), metadata=metadata, timeout=20)

    def wait_status(
        self, condition: Callable[[admin_pb2.StatusResponse], Any], seconds: float = 30.0
    ) -> admin_pb2.StatusResponse:
        """The first status for which ``condition`` holds."""
        last: list[admin_pb2.StatusResponse] = []

        def check() -> bool:
            last[:] = [self.status()]
            return bool(condition(last[0]))

        try:
            wait_for(check, seconds)
        except AssertionError as failed:
            raise AssertionError(f"{failed}: {last}") from None
        return last[0]

    def wait_populated(self) -> None:
        """Waits until all memory has pages."""
        self.wait_status(lambda s: all(slab.populated == slab.capacity for slab in s.slabs))

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Sends a signal, returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Ends it in any case, with its children."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def check_log(self) -> None:
        """No error was logged, unless the test expects some; a traceback only with its bug."""
        log = self.log()
        assert "Traceback" not in log or (self.bugs and "a bug that a test put here" in log), log
        assert self.errors or " error " not in log, log
