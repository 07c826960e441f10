"""Staging memory: one memfd for a session, never recycled, within a budget."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from kmesh import errors
from kmesh.layout import PAGE_BYTES
from kmesh_spand.control.workers import Workers
from kmesh_spand.memory import make_memfd

#: Told the fd, which stays the pool's, or what went wrong.
Done = Callable[[int, errors.RequestError | None], None]


@dataclass(slots=True)
class _Making:
    """A session's staging that is being made: for how many who still wait, and whom to tell."""

    size: int
    wanted: int = 0
    told: list[Done] = field(default_factory=list)


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
        self._making: dict[int, _Making] = {}

    def size(self, session: int) -> int:
        """Bytes of a session's staging, 0 if it has none."""
        return self._worker.staging_size(session)

    def attach(self, session: int, size: int, done: Done) -> None:
        """Makes a session's staging, with pages behind it, outside of the event loop.

        A session has one. It is given again to who asks for as much again: the answer to a first
        request may have come when nobody waited for it any more.

        Args:
            done: told the fd, which stays ours, or what went wrong; not told if the session
                ended meanwhile.

        Raises:
            RequestError: the session has one of another size, or the size is over a limit.
        """
        name = "attach_staging.size"
        making = self._making.get(session)
        has = making.size if making is not None else self.size(session)
        if has and has != size:
            raise errors.InvalidArgument(f"the session has its {has} bytes already", field=name)
        if making is None and has:
            done(self._worker.staging_fd(session), None)
            return
        if making is None:
            making = self._make(session, size, name)
        making.wanted += 1
        making.told.append(done)

    def late(self, session: int) -> None:
        """One who asked for it does not wait any more: what nobody waits for is not kept."""
        if session in self._making:
            self._making[session].wanted -= 1

    def drop(self, session: int) -> None:
        """Destroys a session's staging, if it has one."""
        if session in self._making:
            self._making[session].wanted = 0
        self.used -= self._worker.drop_staging(session)

    def _make(self, session: int, size: int, name: str) -> _Making:
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
        making = self._making[session] = _Making(size)
        future = self._loop.run_in_executor(None, _make, session, size)
        future.add_done_callback(lambda made: self._made(session, made))
        return making

    def _made(self, session: int, made: asyncio.Future[int]) -> None:
        making = self._making.pop(session)
        wanted = making.wanted > 0
        failed = made.exception()
        fd = -1 if failed is not None else made.result()
        if wanted and failed is None:
            try:
                self._worker.add_staging(session, fd, making.size)
            except OSError as lacking:
                failed = lacking
            else:
                for done in making.told:
                    done(fd, None)
                return
        self.used -= making.size
        if fd >= 0:
            os.close(fd)
        if wanted:
            text = failed.strerror if isinstance(failed, OSError) else "failed"
            refused = errors.Exhausted(f"staging memory: {text}", field="attach_staging.size")
            for done in making.told:
                done(-1, refused)


def _make(session: int, size: int) -> int:
    fd = make_memfd(f"staging{session}", size)
    try:
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
