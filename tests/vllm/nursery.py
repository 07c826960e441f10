"""One process that has loaded vLLM, from which engines, and programs that need it, are forked.

Loading vLLM takes ten seconds of a processor, and taking it down another three. It is done once,
before any thread is there; what a fork makes of it is its own.

Run as a program, it reads requests from the socket that it is given: as JSON an environment and
the arguments of a program (none: an engine), with the descriptors that the fork begins with. It
answers each with the fork's pid, and ends when the socket is closed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import engine_process

#: What every engine loads sooner or later.
MODULES = (
    "kmesh_vllm",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.core_client",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.qwen2",
    "vllm.transformers_utils.configs",
)
_LARGEST = 1 << 17
#: What a program's output ends with if nothing went wrong.
_ENDED = "\nthe program has ended\n"


class Nursery:
    """The process, as those see it who want engines.

    Args:
        env: the environment in which vLLM is loaded.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._env = env
        self._asked = 0
        self._pids: list[int] = []

    def fork(self, env: Mapping[str, str], program: Sequence[str], fds: Sequence[int]) -> int:
        """Asks for a fork whose first descriptors are these; returns at once, with its number."""
        request = json.dumps([dict(env), program]).encode()
        socket.send_fds(self._socket, [request], fds)
        self._asked += 1
        return self._asked - 1

    def run(self, script: Path, *arguments: str | Path) -> str:
        """Runs a Python program and waits for its end; returns what it prints.

        Raises:
            RuntimeError: it failed. What it says of that is on stderr.
        """
        fork = Fork(self, self._env, [str(script), *map(str, arguments)])
        fork.stdin.close()
        with fork.stdout as printed:
            text = printed.read()
        if not text.endswith(_ENDED):
            raise RuntimeError(f"{script.name} has failed: {text}")
        return text.removesuffix(_ENDED)

    def pid(self, number: int) -> int:
        """The pid of a fork; waits until it is there.

        Raises:
            EOFError: the nursery has died.
        """
        while len(self._pids) <= number:
            answer = self._socket.recv(64)
            if not answer:
                raise EOFError("the nursery has died")
            self._pids.append(int(answer))
        return self._pids[number]

    def close(self) -> None:
        """Ends it, which its forks do not notice."""
        self._socket.close()
        self._process.wait()


class Fork:
    """A process out of the nursery, with what is used of a ``subprocess.Popen``.

    Args:
        program: a script and its arguments; none: an engine.
        stderr: a descriptor in place of the nursery's.
    """

    def __init__(
        self,
        nursery: Nursery,
        env: Mapping[str, str],
        program: Sequence[str] = (),
        stderr: int | None = None,
    ) -> None:
        reads, commands = os.pipe()
        answers, writes = os.pipe()
        self.stdin, self.stdout = os.fdopen(commands, "w"), os.fdopen(answers)
        self._nursery = nursery
        fds = [reads, writes] if stderr is None else [reads, writes, stderr]
        self._number = nursery.fork(env, program, fds)
        os.close(reads)
        os.close(writes)

    @property
    def pid(self) -> int:
        return self._nursery.pid(self._number)

    def ended(self) -> bool:
        """Whether it has ended."""
        try:
            self.wait(0)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Waits for its end; how it ended nobody knows.

        Raises:
            subprocess.TimeoutExpired: not in that time.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not select.select([handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        finally:
            os.close(handle)


def serve(sock: socket.socket) -> list[str] | None:
    """Forks what is asked for. Returns in a fork: the program that it is to run, if any; and in the
    nursery when nobody asks more: None."""
    while True:
        request, fds, _, _ = socket.recv_fds(sock, _LARGEST, 3)
        if not request:
            return None
        env, program = json.loads(request)
        pid = os.fork()
        if not pid:
            sock.close()
            _become(env, fds)
            return list(program)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            sock.send(str(pid).encode())


def _become(env: dict[str, str], fds: list[int]) -> None:
    """What is of the nursery becomes a fork's own."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)


def _run(program: list[str]) -> None:
    sys.argv = program
    runpy.run_path(program[0], run_name="__main__")
    sys.stdout.write(_ENDED)
    sys.stdout.flush()


def main() -> None:
    # Nobody waits for engines: they are gone when they have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        for name in MODULES:
            importlib.import_module(name)
        # The first engine would have a process load vLLM to look at a model that is loaded here.
        registry = importlib.import_module("vllm.model_executor.models.registry")
        registry._run_in_subprocess = lambda look: look()
        # Engines look for garbage several times as they start and end: not in what all share. One
        # that ends would thaw all that is frozen, not only its own.
        gc.collect()
        gc.freeze()
        gc.unfreeze = lambda: None
        # Or each fork says it once more.
        sys.stdout.flush()
        program = serve(sock)
    if program is None:
        return
    if program:
        _run(program)
    else:
        engine_process.main()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
