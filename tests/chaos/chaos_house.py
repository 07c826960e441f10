"""The daemon of a chaos run, over several lives, and what was seen of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chaos_spand
import fake_gpu
import faulty
import grpc
from chaos_cast import SLACK, is_root
from chaos_watch import (
    LOAD,
    Broken,
    admin,
    check_status,
    children,
    descriptors,
    reasons,
    require,
)
from daemon_process import Daemon, environment
from foreign import NOBODY
from leaks import process_tree

from kmesh.v1 import admin_pb2
from tools.service_manager import ServiceManager

TESTS = Path(__file__).parents[1]
#: A process is started again after ten seconds at the latest, and then has to start.
RECOVERY = 10.0 + SLACK
MAX_SPANS = 1024
_DIED = re.compile(r"a process died: .*name_of=\W?(control|worker|device)")
_SLAB = re.compile(r"kmesh-slab\d+")
_COUNTERS = ("spans_recovered", "spans_recovered_dropped", "spans_corrupt", "spans_corrupt_false")
_COUNTERS += ("spans_evicted", "spans_wiped", "spans_copy_failed", "spans_aborted")


class House:
    """One daemon at a time, in ``directory``/s.

    Attributes:
        kept: lives whose memory was the one's before.
        troubled: the last moment (monotonic) at which a fault may have kept it from serving.
        recoveries: seconds from the last such moment until it served again.
    """

    def __init__(self, directory: Path, shape: str, stored: bool = False) -> None:
        self.faults = directory / "faults"
        self.faults.mkdir()
        self.sockets = directory / "s"
        self.disk = directory / "disk"
        self._settings: dict[str, Any] = {
            "command": chaos_spand.COMMAND,
            "env": {
                faulty.DIRECTORY: str(self.faults),
                fake_gpu.DIRECTORY: str(self.faults),
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": f"{environment()['PYTHONPATH']}:{TESTS}:{TESTS / 'ipc'}",
            },
            "host_memory": "12MiB",
            "slab_size": "2MiB",
            "staging_memory": "24MiB",
            "max_spans": MAX_SPANS,
            "disk": self.disk,
            "disk_bytes": "24MiB",
            "grace_ms": 1000,
            "copy_timeout_ms": 5000,
            "deadline_ms": 5000,
            "shutdown_timeout_ms": 3000,
        }
        if shape == "gpus":
            self._settings |= {"gpu_memory": "4MiB", "gpu_slab_size": "2MiB", "gpu": "0,1"}
        elif shape == "hardened":
            self._settings["hardened"] = "true"
        elif is_root():
            self._settings |= {"allow_uids": f"0,{NOBODY}", "socket_mode": "0666"}
        # Takes the place of systemd, if anything does.
        self._manager = ServiceManager(directory / "notify") if stored else None
        self.daemon: Daemon | None = None
        self._heir: Daemon | None = None
        self.kept = 0
        self.lives = 0
        self.restarts = {"control": 0, "worker": 0, "device": 0}
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.recoveries: list[float] = []
        self.troubled = 0.0
        self._served = True
        self._baseline: dict[str, Any] = {}
        self._seen: admin_pb2.StatusResponse | None = None
        self.logs: list[Path] = []

    @property
    def pid(self) -> int:
        assert self.daemon is not None
        return self.daemon.pid

    def start(self) -> None:
        """A new life. It is ready some time later."""
        self.daemon = self._start(self._settings["command"])
        self.troubled, self._served = time.monotonic(), False

    def _start(self, command: Sequence[str]) -> Daemon:
        self.lives += 1
        more: dict[str, Any] = {"command": command}
        if self._manager is not None:
            how = self._manager.start(command)
            env = {**self._settings["env"], **how.env}
            more = {"command": how.command, "pass_fds": how.pass_fds, "env": env}
        made = Daemon(self.sockets, ready=False, errors=True, **{**self._settings, **more})
        self.logs.append(made.log_path)
        return made

    @property
    def stored(self) -> bool:
        """Whether the next life has the memory of this one, however this one ends."""
        return self._manager is not None and bool(self._manager.names)

    def begin_upgrade(self) -> None:
        """Starts the daemon that takes over from this one."""
        self._heir = self._start([*self._settings["command"], "--upgrade"])

    def is_upgraded(self) -> bool:
        """Whether this one has ended, and that one serves."""
        assert self.daemon is not None
        assert self._heir is not None
        status = self._heir.process.poll()
        text = "\n".join(self._heir.log().splitlines()[-20:])
        require(status is None, f"the daemon that takes over ended with {status}:\n{text}")
        return self.daemon.process.poll() is not None and "ready: " in self._heir.log()

    def end_upgrade(self) -> None:
        """That one is the daemon; the end of this one was judged."""
        self.daemon, self._heir = self._heir, None
        self.kept += 1

    def check_kept(self) -> None:
        """A daemon that was given memory has used it."""
        assert self.daemon is not None
        require("memory of an earlier daemon" in self.daemon.log(), "stored memory was given up")
        self.kept += 1

    def is_ready(self) -> bool:
        """Whether it has said so in this life."""
        assert self.daemon is not None
        self.look(True)
        return "ready: " in self.daemon.log()

    def let_in(self) -> None:
        for path in (self.sockets, self.sockets.parent):
            path.chmod(0o755)

    def process(self, name: str) -> int:
        """The pid of supervisor, control, worker or gpuN; 0: there is none now."""
        return self.pid if name in ("supervisor", "daemon") else children(self.pid).get(name, 0)

    # What is seen of it.

    def look(self, troubled: bool) -> set[str] | None:
        """Why it is not ready; None: nobody answers.

        Args:
            troubled: something still keeps it from serving, or may.
        """
        assert self.daemon is not None
        now = time.monotonic()
        if self.daemon.process.poll() is not None and self._heir is None:
            text = "\n".join(self.daemon.log().splitlines()[-20:])
            raise Broken(f"the daemon ended with {self.daemon.process.returncode}:\n{text}")
        try:
            why: set[str] | None = reasons(self.sockets)
        except OSError:
            why = None
        if troubled:
            self.troubled = now
        if why is not None and why <= LOAD:
            if not self._served and not troubled:
                self.recoveries.append(round(now - self.troubled, 2))
                self._served = True
            return why
        self._served = False
        late = now - self.troubled
        if late > RECOVERY:
            raise Broken(f"it does not serve, {late:.0f} s after the last fault: {why}")
        return why

    def status(self) -> admin_pb2.StatusResponse | None:
        """A status that was found to be consistent; None: nobody answers."""
        try:
            with admin(self.sockets) as call:
                status: admin_pb2.StatusResponse = call("Status", admin_pb2.StatusRequest())
        except (OSError, EOFError, grpc.RpcError):
            return None
        check_status(status)
        if self._seen is not None and self._seen.epoch != status.epoch:
            self._account()
        self._seen = status
        return status

    def _account(self) -> None:
        """Adds up what an epoch has counted, as far as it was seen."""
        if self._seen is not None:
            for name in _COUNTERS:
                self.counters[name] += self._seen.counters[name]
        self._seen = None

    def _count_restarts(self) -> None:
        assert self.daemon is not None
        for name in _DIED.findall(self.daemon.log()):
            self.restarts[name] += 1

    def descriptors(self) -> dict[str, Any]:
        found = {}
        for name, held in descriptors(self.pid).items():
            # A sealed slab and the one that replaces it have other numbers.
            counts: Counter[str] = Counter()
            for what, count in held.items():
                counts[_SLAB.sub("kmesh-slab", what)] += count
            found[name] = dict(counts)
        return found

    def remember_descriptors(self) -> None:
        self._baseline = self.descriptors()

    def grown_descriptors(self) -> dict[str, dict[str, int]]:
        """What its processes have open, more than when it was new."""
        found = {}
        for name, held in self.descriptors().items():
            before = self._baseline.get(name, {})
            more = {what: n - before.get(what, 0) for what, n in held.items()}
            if any(n > 0 for n in more.values()):
                found[name] = {what: n for what, n in more.items() if n > 0}
        return found

    # Its end.

    def family(self) -> list[int]:
        """Descriptors of all its processes (pidfd), to be closed."""
        found = []
        for pid in process_tree(self.pid):
            with contextlib.suppress(ProcessLookupError):
                found.append(os.pidfd_open(pid))
        return found

    def ended(self) -> None:
        """After its end: counts what it said, and judges its log."""
        assert self.daemon is not None
        self._account()
        self._count_restarts()
        log = self.daemon.log()
        at = log.find("Traceback")
        require(at < 0, f"the daemon's log has a traceback:\n{log[max(0, at - 500) : at + 3000]}")

    def signal(self, number: int) -> None:
        assert self.daemon is not None
        self.daemon.process.send_signal(number)

    def close(self) -> None:
        """Ends it in any case."""
        for daemon in (self.daemon, self._heir):
            if daemon is not None and daemon.process.poll() is None:
                daemon.process.send_signal(signal.SIGCONT)
                daemon.kill()
        if self._manager is not None:
            self._manager.__exit__()
            self._manager = None
