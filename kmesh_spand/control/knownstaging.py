"""Staging that a worker reads from: each worker is told of all that there is."""

from __future__ import annotations

import logging
import os

from kmesh_spand import jobmessages
from kmesh_spand.control.link import Link

logger = logging.getLogger(__name__)


class KnownStaging:
    """File descriptors of sessions' staging, and their sizes. ``link`` is the way to a worker that
    takes jobs; None: there is none, and the next one is told."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int]] = {}

    def add(self, session: int, fd: int, size: int, link: Link | None) -> None:
        """Takes ``fd``.

        Raises:
            OSError: no file descriptor is left; ``fd`` stays the caller's.
        """
        if link is not None:
            link.send(jobmessages.Staging(session, size), fd)
        self._held[session] = (fd, size)

    def drop(self, session: int, link: Link | None) -> int:
        """Destroys a session's, if it has one; returns the bytes that are free now."""
        fd, size = self._held.pop(session, (-1, 0))
        if size:
            os.close(fd)
            if link is not None:
                link.send(jobmessages.DropStaging(session))
        return size

    def size(self, session: int) -> int:
        """Bytes of a session's, 0 if it has none."""
        return self._held.get(session, (-1, 0))[1]

    def fd(self, session: int) -> int:
        """Of a session that has one; it stays ours."""
        return self._held[session][0]

    def started(self, link: Link) -> None:
        """A worker takes jobs: it is told of all."""
        for session, (fd, size) in self._held.items():
            try:
                link.send(jobmessages.Staging(session, size), fd)
            except OSError as failed:
                # Its copies will say that there is no staging.
                logger.error("staging: %s", failed.strerror, extra={"session": session})

    def close(self) -> None:
        """Destroys all."""
        for fd, _ in self._held.values():
            os.close(fd)
        self._held.clear()
