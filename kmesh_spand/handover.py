"""The running daemon's side of an upgrade: ``upgrade.py`` says how it goes."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Protocol

from kmesh_spand import manifest as manifests
from kmesh_spand import upgrade
from kmesh_spand.inherit import Named
from kmesh_spand.life import Life
from kmesh_spand.manifest import Unfit
from kmesh_spand.place import Place

logger = logging.getLogger(__name__)

#: A peer that does not read for so long is given up.
_SEND_SECONDS = 10.0
#: A daemon that has not gone on, or has not begun its life, by then does not get another chance.
_BEGIN_SECONDS = 60.0
_TRY_SECONDS = 0.05


class House(Protocol):
    """The daemon whose memory is handed over."""

    def why_not(self) -> str:
        """Why it can't be handed over at all, or nothing."""

    def belongings(self) -> Sequence[Named]:
        """All file descriptors that another daemon needs; they stay the house's."""

    def halt(self) -> str:
        """Ends all other processes; if one of them stays, says so, and goes on."""

    def resume(self) -> None:
        """Serves again."""


class Handover:
    """At most one conversation at a time.

    Attributes:
        gone: the other daemon serves; this one is to end.
        given: the memory is the other daemon's, as it seems.

    Nothing happens before ``begin``.
    """

    _manifest: int
    _life: Life

    def __init__(self, house: House) -> None:
        self._house = house
        self._listener: socket.socket | None = None
        self._peer: socket.socket | None = None
        self._offered = self._giving = False
        self._give_up_at = 0.0
        self.given = False
        self.gone = False

    def begin(self, place: Place, manifest: int, life: Life) -> None:
        """Listens.

        Args:
            place: where; stays the caller's.
            manifest: file descriptor of the one of this daemon's memory.
        """
        self._listener, self._manifest, self._life = place.upgrades, manifest, life

    @property
    def sockets(self) -> list[socket.socket]:
        """To hear from."""
        if self._peer is not None:
            return [self._peer]
        return [] if self.given or self._listener is None else [self._listener]

    @property
    def moment(self) -> float | None:
        """When ``turn`` has something to do."""
        if self._peer is not None:
            return self._give_up_at
        return time.monotonic() + _TRY_SECONDS if self.given else None

    def hear(self, fd: int) -> bool:
        """Takes what came on the socket with that descriptor, if it is one of these."""
        if fd not in [sock.fileno() for sock in self.sockets]:
            return False
        if self._peer is not None:
            self._answer(self._peer)
        elif self._listener is not None:
            self._accept(self._listener)
        return True

    def turn(self) -> None:
        """Takes the memory back from a daemon that is gone, or that does not begin."""
        if self._peer is not None and time.monotonic() < self._give_up_at:
            return
        if not self.given:
            self._part()
        elif self._life.try_begin():
            logger.error("upgrade: the other daemon does not serve; going on")
            self._part()
            self.given = False
            self._house.resume()
        elif self._peer is not None:
            # It has begun, and may take its time.
            self._give_up_at = time.monotonic() + _BEGIN_SECONDS

    def break_off(self) -> None:
        """What was offered does not hold any more."""
        if self._offered and not self._giving:
            self._part()

    def close(self) -> None:
        self._part()

    def _part(self) -> None:
        self._offered = False
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _accept(self, listener: socket.socket) -> None:
        try:
            self._peer, _ = listener.accept()
        except OSError as failed:
            if not isinstance(failed, BlockingIOError):
                logger.error("upgrade: %s", failed)
            return
        self._peer.settimeout(_SEND_SECONDS)
        self._give_up_at = time.monotonic() + _BEGIN_SECONDS
        pid, uid = upgrade.peer(self._peer)
        if not upgrade.trusted(uid):
            self._refuse(f"uid {uid} may not have its memory")
            return
        logger.info("upgrade: asked by process %d", pid)

    def _refuse(self, text: str) -> None:
        logger.warning("upgrade: refused: %s", text)
        if self._peer is not None:
            with contextlib.suppress(OSError):
                upgrade.send(self._peer, upgrade.Refused(text))
        self._part()

    def _answer(self, peer: socket.socket) -> None:
        try:
            message, fds = upgrade.receive(peer)
            for fd in fds:
                os.close(fd)
            match message:
                case upgrade.Ask() if not self._offered:
                    self._offer(peer, message)
                case upgrade.Have() if self._offered and not self.given:
                    self._give(peer)
                case upgrade.Serving() if self.given:
                    self.gone = True
                case _:
                    self._refuse(f"unexpected message {type(message).__name__}")
        except (EOFError, OSError) as failed:
            logger.warning("upgrade: broken off: %s", str(failed) or "the other daemon is gone")
            self._part()

    def _offer(self, peer: socket.socket, ask: upgrade.Ask) -> None:
        if text := self._house.why_not():
            self._refuse(text)
            return
        try:
            size = os.fstat(self._manifest).st_size
            mine = manifests.decode(os.pread(self._manifest, size, 0))
            mine.check(manifests.decode(ask.manifest))
        except Unfit as differs:
            self._refuse(str(differs))
            return
        upgrade.send_all(peer, self._house.belongings())
        self._offered = True

    def _give(self, peer: socket.socket) -> None:
        self._giving = True
        text = self._house.halt()
        self._giving = False
        if text:
            self._refuse(text)
            return
        self._give_up_at = time.monotonic() + _BEGIN_SECONDS
        self.given = True
        self._life.release()
        upgrade.send(peer, upgrade.Yours())
