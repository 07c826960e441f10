"""One process that has loaded vLLM, from which engines are forked.

Loading vLLM takes ten seconds of a processor, and taking it down another three. It is done once,
before any thread is there; what an engine makes of it is its own.

Run as a program, it reads requests from the socket that it is given: the environment of an engine
as JSON, with two descriptors, from which the engine reads and to which it writes. It answers each
with the engine's pid, and ends when the socket is closed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import engine_process

#: What every engine loads sooner or later.
MODULES = (
    "kmesh_vllm",
    "vllm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.core_client",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.qwen2",
    "vllm.transformers_utils.configs",
)
_LARGEST = 1 << 17


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
        self._asked = 0
        self._pids: list[int] = []

    def fork(self, env: Mapping[str, str], commands: int, answers: int) -> int:
        """Asks for an engine that reads and writes these; returns at once, with its number."""
        socket.send_fds(self._socket, [json.dumps(dict(env)).encode()], [commands, answers])
        self._asked += 1
        return self._asked - 1

    def pid(self, number: int) -> int:
        """The pid of an engine; waits until it is there.

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
        """Ends it, which its engines do not notice."""
        self._socket.close()
        self._process.wait()


def serve(sock: socket.socket) -> bool:
    """Forks what is asked for. True in an engine; False in the nursery, when nobody asks more."""
    while True:
        request, fds, _, _ = socket.recv_fds(sock, _LARGEST, 2)
        if not request:
            return False
        pid = os.fork()
        if not pid:
            sock.close()
            _become(json.loads(request), fds)
            return True
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            sock.send(str(pid).encode())


def _become(env: dict[str, str], fds: list[int]) -> None:
    """What is of the nursery becomes an engine's own."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)


def main() -> None:
    # Nobody waits for engines: they are gone when they have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        for name in MODULES:
            importlib.import_module(name)
        child = serve(sock)
    if child:
        engine_process.main()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
