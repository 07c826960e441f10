"""Runs ``kmesh`` in forks of one process that has loaded it: loading takes longer than the command.

Run as a program, it reads requests from the socket that it is given, with the three standard
streams of the command: its arguments and its environment as JSON. It answers each with the
command's pid and, when that has ended, with its status, as ``waitpid`` tells it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

_LARGEST = 1 << 17
_NUMBER = struct.Struct("<i")


class CliForks:
    """The process, as those see it who run commands: one at a time."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs.fileno()],
            )

    def run(
        self, arguments: Sequence[str], env: Mapping[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """What ``subprocess.run`` says of ``kmesh`` with these arguments, without any input.

        Raises:
            TimeoutExpired: it took longer; it was killed.
        """
        with (
            open(os.devnull) as nothing,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            request = json.dumps([list(arguments), dict(env)]).encode()
            fds = [nothing.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(self._socket, [request], fds)
            pid = self._answer()
            late = not select.select([self._socket], [], [], seconds)[0]
            if late:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(self._answer())
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read())
        if late:
            raise subprocess.TimeoutExpired(["kmesh", *arguments], seconds, *said)
        return subprocess.CompletedProcess(["kmesh", *arguments], status, *said)

    def close(self) -> None:
        """Ends it."""
        self._socket.close()
        self._process.wait()

    def _answer(self) -> int:
        answer = self._socket.recv(_NUMBER.size)
        if not answer:
            raise EOFError("the process from which kmesh is forked has died")
        return int(_NUMBER.unpack(answer)[0])


#: The one that the fixture ``cli`` has started.
forks: list[CliForks] = []


def serve(sock: socket.socket) -> bool:
    """Forks what is asked for. True in a command; False when nobody asks more."""
    while True:
        request, fds, _, _ = socket.recv_fds(sock, _LARGEST, 3)
        if not request:
            return False
        pid = os.fork()
        if not pid:
            sock.close()
            arguments, env = json.loads(request)
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            os.environ.clear()
            os.environ.update(env)
            sys.argv[1:] = arguments
            return True
        for fd in fds:
            os.close(fd)
        sock.send(_NUMBER.pack(pid))
        sock.send(_NUMBER.pack(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    import grpc  # noqa: F401

    import kmesh.cli
    import kmesh.cli.__main__
    import kmesh.cli.commands

    # It loads half of what it needs when it is first asked for something.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        kmesh.cli.commands.app(["--help"])
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        if not serve(channel):
            sys.exit()
    # Its name is in what it says of its usage.
    sys.argv[0] = kmesh.cli.__main__.__file__
    __package__ = "kmesh.cli"
    __spec__ = kmesh.cli.__main__.__spec__
    kmesh.cli.main()
