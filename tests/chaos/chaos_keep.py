"""Spans that must outlive their daemon: the runner's own, under a salt that nobody else has.

A tenant's spans are evicted for its own alone, so that no other client is in the way. Until the
daemon ends they are leased, so that the operator of a run isn't either.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from chaos_watch import Broken, require
from rawclient import RawClient, Refused

from kmesh.v1 import common_pb2

_SALT = hashlib.sha256(b"keepsake").digest()
_COUNT, _BYTES = 4, 70_000
_PATIENCE = 3.0
#: Nothing of it may be missing, and some of it may be read at most that much later.
_VERIFIED = 30.0
_LATER = (common_pb2.REASON_NOT_READY, common_pb2.REASON_PENDING)


class Keepsake:
    """Spans of one life of the daemon, for the next.

    Args:
        number: of that life; each has other bytes.
    """

    def __init__(self, sockets: Path, number: int) -> None:
        self._sockets = sockets
        names = [f"keepsake/{number}/{n}".encode() for n in range(_COUNT)]
        self._keys = [hashlib.sha256(name).digest() for name in names]
        self._payloads = [hashlib.shake_128(name).digest(_BYTES) for name in names]
        self._session: RawClient | None = None

    def store(self) -> str:
        """Stores and leases them; says why that can't be done just now, or nothing."""
        until, why = time.monotonic() + _PATIENCE, "nobody answers"
        while time.monotonic() < until:
            try:
                why = self._try()
            except (OSError, EOFError, Refused) as failed:
                why = repr(failed)[:200]
            if not why:
                return ""
            self.close()
            time.sleep(0.1)
        return why

    def _try(self) -> str:
        session = self._session = RawClient(self._sockets)
        for key, payload in zip(self._keys, self._payloads, strict=True):
            reason = session.store(key, payload, _SALT)
            if reason not in (0, common_pb2.REASON_EXISTS):
                return common_pb2.Reason.Name(common_pb2.Reason.ValueType(reason))
        found = session.acquire(self._keys, salt=_SALT)
        return "" if found.lease and not any(found.reason) else f"not leased: {found.reason}"

    def check(self, flipped: int) -> int:
        """All of them are there in the next life, bit for bit.

        Args:
            flipped: bits that were flipped before it, each of which may be one span's end, since
                what does not hold is dropped.

        Returns:
            How many were.
        """
        lost = 0
        self.close()
        until = time.monotonic() + _VERIFIED
        with RawClient(self._sockets) as session:
            for key, payload in zip(self._keys, self._payloads, strict=True):
                found = session.read(key, _SALT)
                while found in _LATER and time.monotonic() < until:
                    time.sleep(0.05)
                    found = session.read(key, _SALT)
                if found == common_pb2.REASON_MISS and lost < flipped:
                    lost += 1
                    continue
                if isinstance(found, int):
                    name = common_pb2.Reason.Name(common_pb2.Reason.ValueType(found))
                    raise Broken(f"a span did not outlive its daemon: {name}")
                require(found == payload, "wrong bytes of a span that outlived its daemon")
        return lost

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
