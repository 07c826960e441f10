"""Becomes a command that finds a file descriptor at a number, and ends when its parent does.

python -m kmesh.cli.spawn FD NUMBER PARENT COMMAND ...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

NOT_FOUND, NOT_EXECUTABLE = 127, 126
_PR_SET_PDEATHSIG = 1


def main() -> None:
    fd, number, parent = map(int, sys.argv[1:4])
    command = sys.argv[4:]
    # Its parent holds the lease: without that the memory may become another span's.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.dup2(fd, number, inheritable=True)
    if fd != number:
        os.close(fd)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as failed:
        print(f"kmesh: {command[0]}: {failed.strerror}", file=sys.stderr)
        missing = isinstance(failed, FileNotFoundError)
        sys.exit(NOT_FOUND if missing else NOT_EXECUTABLE)


if __name__ == "__main__":
    main()
