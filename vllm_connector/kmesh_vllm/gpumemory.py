"""The daemon's memory as the engine's GPU sees it, attached off the engine's thread."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable

from kmesh.cuda.device import Device
from kmesh.cuda.driver import Attribute
from kmesh.cuda.proof import prove
from kmesh.cuda.slabs import DeviceSlab, DeviceSlabs
from kmesh.errors import ConnectionClosed, CudaError, KMeshError, NotFound, UnsupportedError
from kmesh.handles import HandleKind
from kmesh.session import Session

logger = logging.getLogger("kmesh_vllm")

_ATTACH_TIMEOUT = 60.0
#: Seconds that an engine's end waits for what is being attached.
_CLOSE_WAIT = 30.0
#: Seconds between looks for slabs that are being filled.
_FIRST_LOOK, _LAST_LOOK = 0.25, 30.0


class _Known:
    """What one session gave."""

    def __init__(self, session: Session, device: Device) -> None:
        self.session = session
        self.slabs = DeviceSlabs(session, device)
        self.there: dict[int, DeviceSlab] = {}
        #: Slabs that were given up, and are nobody's any more who begins from here on.
        self.gone: set[int] = set()


class GpuMemory:
    """Imports and registers slabs: all that there are when a session is new, in the background.

    Slabs of an ended session, and those that the daemon has given up, go when the loads that had
    begun by then have ended. Later ones don't get them, so that there may always be some. As the
    next session's slabs mostly are the same memory, those are attached before.

    Attributes:
        reads_host: whether this GPU can read host memory that is mapped read-only.
        peers: UUIDs of other GPUs whose memory it was seen to read.

    Args:
        peers: slabs of other GPUs are of use too.
    """

    def __init__(
        self, device: Device, current: Callable[[], Session | None], *, peers: bool = False
    ) -> None:
        self.peers = _proved_peers(device) if peers else ()
        self.reads_host = device.can(Attribute.READ_ONLY_REGISTER)
        self._device = device
        self._current = current
        self._lock = threading.Lock()
        self._known: _Known | None = None
        # Loads are numbered as they begin; of each number, how often it has yet to end. With what
        # is to go: the first number that has no part in it.
        self._begun = 0
        self._loads: Counter[int] = Counter()
        self._ended: list[tuple[int, _Known]] = []
        self._gone: list[tuple[int, _Known, int]] = []
        self._closed = threading.Event()
        self._wake = threading.Event()
        # One thread, so that nothing is attached through what is being closed. It may wait for a
        # daemon for ever, which must not keep a process from its end.
        self._thread = threading.Thread(target=self._run, name="kmesh-slabs", daemon=True)
        self._thread.start()

    def attached(self, session: Session, number: int) -> DeviceSlab | None:
        """A slab, if it is attached already."""
        known = self._known
        return known.there.get(number) if known and known.session is session else None

    def attach(self, session: Session, number: int, timeout: float | None = None) -> DeviceSlab:
        """A slab; errors as ``DeviceSlabs.slab``. Not for the engine's thread."""
        self._device.enter()
        known = self._of(session)
        if number in session.slabs_gone:
            raise NotFound(f"slab {number} was given up")
        slab = known.slabs.slab(number, timeout)
        with self._lock:
            if number not in known.gone:
                known.there[number] = slab
        if number in session.slabs_gone:
            self._wake.set()
        return slab

    def changed(self) -> None:
        """There is another session, or none: the background sees to what it gives."""
        self._wake.set()

    def begin(self) -> int:
        """A load begins: what it is given stays until ``end``. Returns its number."""
        with self._lock:
            number = self._begun
            self._begun += 1
            self._loads[number] += 1
        return number

    def join(self) -> int:
        """Something is begun for loads under way: what any of them was given stays until ``end``.
        Returns the number of the first of them, which is to end once more."""
        with self._lock:
            number = self._first()
            self._loads[number] += 1
        return number

    def end(self, load: int) -> None:
        """A load has ended."""
        with self._lock:
            self._loads[load] -= 1
            if self._loads[load]:
                return
            del self._loads[load]
            if not (self._ended or self._gone):
                return
            first = self._first()
            waiting = [before for before, _ in self._ended]
            waiting += [before for before, _, _ in self._gone]
        if any(load < before <= first for before in waiting):
            self._wake.set()

    def _first(self) -> int:
        """Number of the first load that is under way, or of the next one. With the lock held."""
        return min(self._loads, default=self._begun)

    def close(self) -> bool:
        """Gives everything back; nothing may be read any more.

        Returns:
            Whether it did: a driver that hangs keeps it.
        """
        self._closed.set()
        self._wake.set()
        self._thread.join(_CLOSE_WAIT)
        if self._thread.is_alive():
            logger.error("slabs are still being attached: their memory is kept")
            return False
        with self._lock:
            rest = [known for _, known in self._ended]
            rest += filter(None, [self._known])
            self._ended, self._gone, self._known = [], [], None
        _close(rest)
        return True

    def _of(self, session: Session) -> _Known:
        with self._lock:
            known = self._known
            if known is None or known.session is not session:
                if session.closed:
                    # A thread that comes late with it takes the live session's memory from nobody.
                    raise ConnectionClosed("the session that gave the slabs has ended")
                if known is not None:
                    self._ended.append((self._begun, known))
                known = self._known = _Known(session, self._device)
                session.on_slabs_gone(self._wake.set)
            return known

    def _run(self) -> None:
        wait: float | None = None
        while not self._closed.is_set():
            woken = self._wake.wait(wait)
            self._wake.clear()
            session = self._current()
            left = 0 if session is None else self._attach_filled(session)
            self._drop_gone()
            unused = self._unused(session)
            if unused:
                # Should it fail, closing says what is wrong.
                with contextlib.suppress(CudaError):
                    self._device.enter()
                _close(unused)
            if not left:
                wait = None
            else:
                wait = _FIRST_LOOK if woken or wait is None else min(wait * 2, _LAST_LOOK)

    def _unused(self, session: Session | None) -> list[_Known]:
        """What nobody needs any more: it is to be closed."""
        with self._lock:
            known = self._known
            if known is not None and known.session is not session and known.session.closed:
                self._ended.append((self._begun, known))
                self._known = None
            first = self._first()
            unused = [known for before, known in self._ended if before <= first]
            self._ended = [entry for entry in self._ended if entry[0] > first]
            return unused

    def _drop_gone(self) -> None:
        """Lets go of slabs that the daemon has given up: their memory is kept by who maps them."""
        with self._lock:
            known = self._known
            if known is not None:
                gone = known.there.keys() & known.session.slabs_gone
                known.gone |= gone
                for number in gone:
                    del known.there[number]
                self._gone += [(self._begun, known, number) for number in gone]
            first = self._first()
            unused = [(known, number) for before, known, number in self._gone if before <= first]
            self._gone = [entry for entry in self._gone if entry[0] > first]
        if unused:
            with contextlib.suppress(CudaError):
                self._device.enter()
        for known, number in unused:
            try:
                known.slabs.drop(number)
            except (KMeshError, OSError) as wrong:
                logger.warning("slab %d, which was given up: %s", number, str(wrong))

    def _attach_filled(self, session: Session) -> int:
        """Attaches slabs that are filled; returns how many are still to come.

        A hole would be filled by being registered, at this engine's cost.
        """
        left = 0
        for number in range(session.index.slab_count):
            if self._closed.is_set() or session.closed:
                return 0
            if self.attached(session, number) is not None or number in session.slabs_gone:
                continue
            try:
                device, filled = self._look(session, number)
                if device not in ("", self._device.uuid, *self.peers):
                    continue
                if filled:
                    self.attach(session, number, _ATTACH_TIMEOUT)
                else:
                    left += 1
            except NotFound:
                left += 1
            except UnsupportedError as wrong:
                logger.debug("slab %d: %s", number, str(wrong))
            except (KMeshError, OSError) as wrong:
                logger.warning("slab %d can't be attached yet: %s", number, str(wrong))
                left += 1
        return left

    def _look(self, session: Session, number: int) -> tuple[str, bool]:
        """On which GPU a slab is, and whether it has all of its pages."""
        handle = session.export_slab(number, _ATTACH_TIMEOUT)
        try:
            filled = os.fstat(handle.fd).st_blocks * 512 >= handle.size
            return handle.device, filled or handle.kind == HandleKind.CUDA_VMM_FD
        finally:
            os.close(handle.fd)


def _proved_peers(device: Device) -> tuple[str, ...]:
    proved = []
    for uuid, ordinal in device.peers().items():
        try:
            prove(device, HandleKind.CUDA_VMM_FD, ordinal)
        except (UnsupportedError, CudaError) as wrong:
            logger.warning("%s is not read by %s: %s", uuid, device.uuid, str(wrong))
        else:
            proved.append(uuid)
    return tuple(proved)


def _close(ended: list[_Known]) -> None:
    for known in ended:
        try:
            known.slabs.close()
        except (KMeshError, OSError) as wrong:
            logger.warning("memory of an ended session: %s", str(wrong))
