"""A process in which the n-th thing that is asked of the kernel is not to be had."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from leaks import mapped_memfds, open_fds

from kmesh import _host

#: Everything by which the code of this project gets a descriptor, memory or a thread.
_SOURCES: tuple[tuple[Any, str], ...] = (
    (os, "memfd_create"),
    (os, "ftruncate"),
    (os, "posix_fallocate"),
    (os, "fchmod"),
    (os, "open"),
    (os, "dup"),
    (os, "eventfd"),
    (os, "fork"),
    (fcntl, "fcntl"),
    (socket, "socketpair"),
    (_host, "Region"),
    (threading.Thread, "start"),
)


class Scarce:
    """Counts what is asked for, and refuses one of it.

    Args:
        at: number of the one, from 1.
        code: the errno.

    Attributes:
        asked: names of what was asked for so far.
    """

    def __init__(self, at: int, code: int) -> None:
        self.asked: list[str] = []
        self._at = at
        self._code = code

    @property
    def fired(self) -> bool:
        return len(self.asked) >= self._at

    def ask(self, name: str) -> None:
        self.asked.append(name)
        if len(self.asked) == self._at:
            if name == "start":
                raise RuntimeError("can't start new thread")
            raise OSError(self._code, os.strerror(self._code))


@contextlib.contextmanager
def scarce(at: int, code: int) -> Iterator[Scarce]:
    """While it lasts, the ``at``-th allocation of this process fails with ``code``."""
    told = Scarce(at, code)

    def wrap(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*arguments: Any, **named: Any) -> Any:
            # To ask for a memfd's seals takes nothing.
            if name != "fcntl" or arguments[1] == fcntl.F_ADD_SEALS:
                told.ask(name)
            return inner(*arguments, **named)

        return chosen

    class Socket(socket.socket):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            # One around a descriptor that is there allocates nothing.
            if named.get("fileno") is None and len(arguments) < 4:
                told.ask("socket")
            super().__init__(*arguments, **named)

    with contextlib.ExitStack() as stack:
        for owner, name in _SOURCES:
            stack.enter_context(mock.patch.object(owner, name, wrap(name, getattr(owner, name))))
        stack.enter_context(mock.patch.object(socket, "socket", Socket))
        yield told


def _held() -> Counter[str]:
    return open_fds() + mapped_memfds()


def each_allocation(
    code: int, act: Callable[[], Any], *, after: Callable[[BaseException | None], Any]
) -> list[str]:
    """Runs ``act`` again and again, with its first, second, ... allocation refused.

    No descriptor and no mapped memory may be left each time.

    Args:
        after: told what ``act`` raised, with the allocations working again.

    Returns the names of what was refused, in order.
    """
    refused: list[str] = []
    for at in range(1, 200):
        before = _held()
        failed: BaseException | None = None
        with scarce(at, code) as told:
            try:
                act()
            except Exception as wrong:
                failed = wrong.with_traceback(None)
        if not told.fired:
            assert failed is None, failed
            return refused
        refused.append(told.asked[at - 1])
        after(failed)
        if _held() - before:
            # What is only kept by a cycle is no leak.
            gc.collect()
        assert not _held() - before, (told.asked, failed)
    raise AssertionError("there is no end of it")
