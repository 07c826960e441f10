"""Starting the control process before there is anything for it to control.

Loading its code takes as long as reading the settings does, so both happen at the same time. It
is given what it works with when that exists, by whoever forked it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable

import msgspec

from kmesh.handles import HandleRefusal
from kmesh_spand import child, ipc, logs
from kmesh_spand.settings import Settings
from kmesh_spand.storage import DmaBufs, Memory, Shared

logger = logging.getLogger(__name__)

#: Most fds that the kernel takes in one packet, with room to spare.
_FDS = 200
_MORE, _LAST = b"+", b"."


class Launch(msgspec.Struct, frozen=True):
    """What a control process begins with, beside its fds. Sizes in bytes; indexes by group,
    slabs by number.

    ``dma_bufs`` is how many there are; ``refusal`` (0: none) and ``text`` say why not.
    """

    settings: Settings
    version: str
    restarts: int
    epoch: int
    catalog: int
    indexes: dict[int, int]
    slabs: dict[int, int]
    sealed: tuple[int, ...]
    spares: tuple[int, ...]
    dma_bufs: int
    refusal: int
    text: str


class Prepared:
    """A control process that loads its code and then waits for ``launch`` or ``end``.

    The caller must have a single thread.

    Args:
        forget: called in the new process first.

    Raises:
        OSError: no process, or no descriptor, is left.
    """

    def __init__(self, forget: Callable[[], None] | None = None) -> None:
        self._sock, theirs = ipc.pair()
        with theirs:
            self.pid = child.fork_or_close(
                self._sock, "control", [theirs.fileno()], lambda: _wait(theirs, forget)
            )

    def launch(
        self,
        settings: Settings,
        version: str,
        restarts: int,
        shared: Shared,
        listener: socket.socket,
        supervisor: socket.socket,
        life: int,
    ) -> None:
        """Lets it serve; all fds stay the caller's.

        Args:
            life: the lock that it holds as long as it lives.

        Raises:
            OSError: it is gone.
        """
        launch = Launch(
            settings,
            version,
            restarts,
            shared.epoch,
            shared.catalog.size,
            {group: index.size for group, index in shared.indexes.items()},
            {number: slab.size for number, slab in shared.slabs.items()},
            tuple(shared.sealed),
            tuple(shared.spares),
            len(shared.dma_bufs.fds),
            shared.dma_bufs.refusal or 0,
            shared.dma_bufs.text,
        )
        told = os.memfd_create("kmesh-launch", os.MFD_CLOEXEC)
        try:
            os.write(told, msgspec.msgpack.encode(launch))
            fds = [told, listener.fileno(), supervisor.fileno(), life, *shared.fds]
            for at in range(0, len(fds), _FDS):
                mark = _MORE if at + _FDS < len(fds) else _LAST
                socket.send_fds(self._sock, [mark], fds[at : at + _FDS], socket.MSG_NOSIGNAL)
        finally:
            os.close(told)
            self._sock.close()

    @property
    def gone(self) -> bool:
        """It has died while it waited; ``end`` is due all the same."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> None:
        """It is not needed."""
        self._sock.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _wait(sock: socket.socket, forget: Callable[[], None] | None) -> int:
    """The control process's life; returns its exit status."""
    if forget is not None:
        forget()
    child.raise_file_limit()
    # Code is never garbage: looking through it delays the start, and later some calls.
    gc.disable()
    from kmesh_spand.control import entry

    gc.freeze()
    gc.enable()
    fds: list[int] = []
    with sock:
        mark = _MORE
        while mark == _MORE:
            mark, more, flags, _ = socket.recv_fds(sock, 1, _FDS, socket.MSG_CMSG_CLOEXEC)
            fds += more
            if flags & socket.MSG_CTRUNC:
                logs.configure("control", level="error", form="text")
                logger.error("no file descriptors are left for control")
                return 1
    if not mark:
        return 0
    told, listener, supervisor, _life, *rest = fds
    with open(told, "rb") as file:
        file.seek(0)
        launch = msgspec.msgpack.decode(file.read(), type=Launch)
    settings = launch.settings
    logs.configure("control", level=settings.log_level, form=settings.log_format)
    return entry.run(
        settings,
        launch.version,
        _shared(launch, iter(rest)),
        socket.socket(fileno=listener),
        socket.socket(fileno=supervisor),
        launch.restarts,
    )


def _shared(launch: Launch, fds: Iterable[int]) -> Shared:
    """The memory, from fds in the order of ``Shared.fds``."""
    left = iter(fds)
    slabs = {number: Memory(next(left), size) for number, size in launch.slabs.items()}
    catalog = Memory(next(left), launch.catalog)
    indexes = {group: Memory(next(left), size) for group, size in launch.indexes.items()}
    refusal = HandleRefusal(launch.refusal) if launch.refusal else None
    dma_bufs = DmaBufs([next(left) for _ in range(launch.dma_bufs)], refusal, launch.text)
    sealed, spares = frozenset(launch.sealed), frozenset(launch.spares)
    return Shared(slabs, catalog, indexes, launch.epoch, dma_bufs, sealed, spares)
