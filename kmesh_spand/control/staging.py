"""Staging memory: one memfd for a session, never recycled, within a budget."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from kmesh import errors
from kmesh.layout import PAGE_BYTES
from kmesh_spand.control.workers import Workers
from kmesh_spand.memory import make_memfd


class StagingPool:
    """Makes and destroys sessions' staging.

    Attributes:
        used: bytes of all staging, also of sessions that ended while copies read from it.
        total, each: limits of all sessions and of one, in bytes.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, worker: Workers, *, total: int, each: int
    ) -> None:
        self.used = 0
        self.total = total
        self.each = each
        self._loop = loop
        self._worker = worker
        self._making: dict[int, bool] = {}

    def size(self, session: int) -> int:
        """Bytes of a session's staging, 0 if it has none."""
        return self._worker.staging_size(session)

    def attach(
        self, session: int, size: int, done: Callable[[int, errors.RequestError | None], None]
    ) -> None:
        """Makes a session's staging, with pages behind it, outside of the event loop.

        Args:
            done: told the fd, which stays ours, or what went wrong; not told if the session
                ended meanwhile.

        Raises:
            RequestError: the session has one, or the size is over a limit.
        """
        name = "attach_staging.size"
        if self.size(session) or session in self._making:
            raise errors.InvalidArgument("the session has its staging already", field=name)
        if not size or size % PAGE_BYTES:
            raise errors.InvalidArgument(f"not a multiple of {PAGE_BYTES}", field=name)
        if size > self.each:
            raise errors.TooLarge(f"over {self.each}, the limit of a session", field=name)
        if self.used + size > self.total:
            raise errors.Exhausted(
                f"staging memory: {self.total - self.used} of {self.total} bytes are free",
                field=name,
            )
        self.used += size
        self._making[session] = True
        future = self._loop.run_in_executor(None, _make, session, size)
        future.add_done_callback(lambda made: self._made(session, size, made, done))

    def drop(self, session: int) -> None:
        """Destroys a session's staging, if it has one."""
        if session in self._making:
            self._making[session] = False
        self.used -= self._worker.drop_staging(session)

    def _made(
        self,
        session: int,
        size: int,
        made: asyncio.Future[int],
        done: Callable[[int, errors.RequestError | None], None],
    ) -> None:
        wanted = self._making.pop(session)
        failed = made.exception()
        fd = -1 if failed is not None else made.result()
        if wanted and failed is None:
            try:
                self._worker.add_staging(session, fd, size)
            except OSError as lacking:
                failed = lacking
            else:
                done(fd, None)
                return
        self.used -= size
        if fd >= 0:
            os.close(fd)
        if wanted:
            text = failed.strerror if isinstance(failed, OSError) else "failed"
            done(-1, errors.Exhausted(f"staging memory: {text}", field="attach_staging.size"))


def _make(session: int, size: int) -> int:
    fd = make_memfd(f"staging{session}", size)
    try:
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
