"""DMA-BUFs that a worker is to make, and who waits for them."""

from __future__ import annotations

import os
from collections.abc import Callable

from kmesh import errors
from kmesh.handles import HandleRefusal
from kmesh_spand import ipc, jobmessages

#: Told a DMA-BUF's fd, which it owns, or what went wrong.
Made = Callable[[int, errors.RequestError | None], None]


class Exports:
    """Those of one worker. Each is told once how it went.

    Args:
        name: of the worker, as people call it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._made: dict[int, Made] = {}
        self._last = 0

    def __bool__(self) -> bool:
        return bool(self._made)

    def begin(self, slab: int, offset: int, length: int, made: Made) -> jobmessages.Export:
        """What the worker is to be told; whole pages."""
        self._last += 1
        self._made[self._last] = made
        return jobmessages.Export(self._last, slab, offset, length)

    def hear(self, message: ipc.AnyMessage, fd: int | None) -> bool:
        """Takes an answer of the worker, with its fd; False if it is about something else."""
        match message:
            case jobmessages.Exported():
                lacking = None
                if fd is None:
                    lacking = errors.Exhausted("the daemon has no file descriptor left for it")
                self._end(message.job, -1 if fd is None else fd, lacking)
            case jobmessages.NotExported():
                self._end(message.job, -1, _error(message))
            case _:
                return False
        return True

    def not_started(self, job: int) -> None:
        """The worker was not told of it in time."""
        self._end(job, -1, errors.Exhausted(f"the {self._name} has not started yet"))

    def gone(self) -> None:
        """The worker is: it makes none of them."""
        made, self._made = self._made, {}
        for one in made.values():
            one(-1, errors.Exhausted(f"the {self._name} died"))

    def _end(self, job: int, fd: int, failed: errors.RequestError | None) -> None:
        made = self._made.pop(job, None)
        if made is not None:
            made(fd, failed)
        elif fd >= 0:
            os.close(fd)


def _error(message: jobmessages.NotExported) -> errors.RequestError:
    if message.refusal == HandleRefusal.SIZE_LIMIT:
        return errors.TooLarge(message.error)
    if message.refusal:
        return errors.Exhausted(message.error)
    return errors.InternalError("a bug in the daemon, see its log")
