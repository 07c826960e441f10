"""Pages on a GPU: restores on a stream of their own, stores through a buffer on the GPU."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kmesh.cuda.reading import FetchedSlab
from kmesh.cuda.slabs import DeviceSlab, HostSide
from kmesh.errors import DeadlineExceeded, UnsupportedError
from kmesh.kernels.cuda import Load, Memory, Request, Restorer, Settings
from kmesh.kernels.cuda_rounds import RoundRestorer, RoundSettings
from kmesh.kernels.host import PagedLayout
from kmesh.kernels.plan import merged
from kmesh.session import Session, Staging
from kmesh_vllm.bringing import Bringer, Brought
from kmesh_vllm.counts import Counts
from kmesh_vllm.decoding import Payload
from kmesh_vllm.gpu import Gpu
from kmesh_vllm.gpulaunch import Launched, round_of
from kmesh_vllm.gpumemory import GpuMemory
from kmesh_vllm.gpustore import GpuStore, TakenOnGpu
from kmesh_vllm.lending import LentToGpu
from kmesh_vllm.movers import Ids, Piece, Readable, Records, Slab, empty_records

logger = logging.getLogger("kmesh_vllm")

#: Seconds after which kernels that could not be compiled are tried again.
_COMPILE_PAUSES = (1.0, 2.0, 4.0, 8.0)
#: Seconds that an engine's end waits for kernels that are being compiled.
_CLOSE_WAIT = 30.0


class GpuMover:
    """See ``movers.Mover``.

    Restores are the engine's thread's alone, stores its and one thread's of ours; what is brought
    to the host is the business of other threads of ours.

    Args:
        gpu: that the pages are on.
        current: the worker's live session, or None.
        max_ctas: thread blocks that a restore may have, 0: as many as are of use.
        buffer_bytes: through which is stored; 0: nothing is stored.
        peers: what lies in other GPUs' memory may be restored too.
        calibrate: restores choose their route by what this GPU is seen to do.
        recipes: spans may come as recipes.
    """

    starts_only = True
    moves_recipes = True

    def __init__(
        self,
        gpu: Gpu,
        layout: PagedLayout,
        current: Callable[[], Session | None],
        counts: Counts,
        *,
        max_ctas: int,
        buffer_bytes: int,
        peers: bool = False,
        calibrate: bool = False,
        recipes: bool = False,
    ) -> None:
        self._gpu = gpu
        self._calibrate = calibrate
        self._layout = layout
        self._counts = counts
        self._settings = Settings(max_ctas=max_ctas or None)
        self._memory = GpuMemory(gpu.device, current, peers=peers)
        self._restorer = gpu.restorer(layout, self._settings)
        round_settings = RoundSettings(max_ctas=max_ctas or None)
        self._rounds = gpu.round_restorer(layout, round_settings) if recipes else None
        self._bringer = Bringer(gpu, self._memory.join, self.end) if recipes else None
        self._stream, self._behind = gpu.stream(), gpu.event()
        self._store = GpuStore(gpu, layout, self._settings, buffer_bytes) if buffer_bytes else None
        self._under_way: list[Launched] = []
        self._compiled, self._closing = threading.Event(), threading.Event()
        self._failed = ""
        #: The rounds' kernel: looked at last, so that nothing else waits for it.
        self._rounds_compiled, self._no_rounds = threading.Event(), not recipes
        self.devices: tuple[str, ...] = (gpu.device.uuid, *self._memory.peers)
        if self._memory.reads_host:
            self.devices += ("",)
        else:
            counts.add("host_memory_unreadable")
            logger.warning(
                "nothing is restored from host memory: %s can't read memory that is mapped"
                " read-only",
                gpu.device.name,
            )
        # It may wait for a compiler for ever, which must not keep a process from its end.
        self._thread = threading.Thread(target=self._compile, name="kmesh-kernels", daemon=True)
        self._thread.start()

    def warm(self, session: Session | None) -> None:
        """A session is new, or lost: its slabs come, or go, in the background. Never waits."""
        self._memory.changed()

    def attached(self, session: Session, number: int) -> DeviceSlab | None:
        return self._memory.attached(session, number) if self.ready() else None

    def attach(self, session: Session, number: int, timeout: float) -> DeviceSlab:
        until = time.monotonic() + timeout
        slab = self._memory.attach(session, number, timeout)
        if not self._compiled.wait(max(until - time.monotonic(), 0)):
            raise DeadlineExceeded("the kernels are not compiled yet")
        if self._failed:
            raise UnsupportedError(f"the kernels can't be compiled: {self._failed}")
        return slab

    def reads_gpu(self, slab: Slab) -> bool:
        return isinstance(slab, DeviceSlab) and not slab.in_host

    @property
    def recipes(self) -> tuple[str, ...]:
        # What is in other GPUs' memory the daemon makes dense: it was not seen to be restored so.
        return () if self._no_rounds else (self._gpu.device.uuid,)

    def at_hand(self, slab: Slab) -> HostSide | None:
        return slab.host if isinstance(slab, DeviceSlab) else None

    def readable(self, slab: Slab) -> Readable:
        assert isinstance(slab, DeviceSlab)
        return slab.host or FetchedSlab(slab, self._data)

    def bring(self, addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> Brought:
        if self._bringer is None:
            raise UnsupportedError("no recipes are restored here")
        return self._bringer.tables(addresses, lengths)

    def _data(self, address: int, size: int) -> bytearray:
        if self._bringer is None:
            raise UnsupportedError("no recipes are restored here")
        return self._bringer.data(address, size)

    def takes_recipes(self, timeout: float) -> bool:
        if self._no_rounds:
            return False
        return self._rounds_compiled.wait(timeout) and not self._no_rounds

    def lend(self, payloads: Sequence[Payload]) -> LentToGpu:
        self._gpu.enter()
        return LentToGpu(payloads, self._gpu.device)

    def restore(self, pieces: list[Piece]) -> Launched:
        gpu = self._gpu
        # Blocks are given to a load while the step that used them last still runs.
        gpu.record(self._behind, gpu.compute())
        gpu.follow(self._stream, self._behind)
        launched = Launched(pieces, self._layout.row_bytes, self._counts)
        self._under_way = [one for one in self._under_way if not one.done()]
        self._under_way.append(launched)
        if any(piece.recipes is not None for piece in pieces):
            self._restore_round(launched, pieces)
        else:
            self._restore_dense(launched, pieces)
        return launched

    def _restore_round(self, launched: Launched, pieces: list[Piece]) -> None:
        """All of it in one launch, so that siblings share what their recipes refer to."""
        assert self._rounds is not None
        try:
            launched.add_round(self._rounds.restore(round_of(pieces), self._stream))
        except UnsupportedError:
            raise
        except Exception as wrong:
            launched.error = wrong

    def _restore_dense(self, launched: Launched, pieces: list[Piece]) -> None:
        """A launch for each memory."""
        try:
            for memory in Memory:
                self._restore_from(memory, launched, pieces)
        except Exception as wrong:
            # What was started before is waited for.
            launched.error = wrong

    def _restore_from(self, memory: Memory, launched: Launched, pieces: list[Piece]) -> None:
        loads, owner = [], {}
        for number, piece in enumerate(pieces):
            records = piece.part(memory is Memory.GPU)
            if len(records):
                request = Request(piece.pages)
                owner[request] = number
                loads.append(Load(records, [request]))
        if not loads:
            return
        loads = merged(loads)
        pending = self._restorer.restore(loads, self._stream, memory=memory)
        launched.add(pending, memory, [[owner[r] for r in load.requests] for load in loads])

    def ready(self) -> bool:
        return self._compiled.is_set() and not self._failed

    def take(self, records: Records, pages: Ids) -> TakenOnGpu:
        assert self._store is not None
        return self._store.take(records if self.ready() else records[:0], pages)

    def room(self, length: int, timeout: float) -> bool:
        return self.ready() and self._store is not None and self._store.room(length, timeout)

    def prepare_staging(self, staging: Staging) -> None:
        assert self._store is not None
        self._store.prepare(staging)

    def touch_staging(self, staging: Staging) -> None:
        pass  # The GPU writes it, and all of its pages were registered.

    def begin(self) -> int:
        return self._memory.begin()

    def end(self, load: int) -> None:
        self._memory.end(load)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_WAIT)
        stuck = any(one is not None and one.stuck for one in (self._store, self._bringer))
        if stuck or any(not one.done() for one in self._under_way):
            # The kernel may read and write for as long as it likes: all of it stays.
            logger.error("the GPU has not ended what was started: its memory is kept")
            return
        compiling = self._thread.is_alive()
        if not compiling:
            self._restorer.close()
            if self._rounds is not None:
                self._rounds.close()
        if self._bringer is not None:
            self._bringer.close()
        if self._store is not None:
            self._store.close()
        ended = self._memory.close()
        if compiling:
            logger.error("kernels are still being compiled: what they are compiled on is kept")
        elif ended:
            self._gpu.close()

    def _compile(self) -> None:
        """Compiles all kernels that may be of use, in the order in which they are waited for."""
        try:
            self._failed = self._tried(self._run_kernels)
            if self._failed:
                logger.error(
                    "nothing is restored or stored: the kernels can't be compiled: %s", self._failed
                )
            else:
                self._choose_by_rates()
                try:
                    self._prepare(self._restorer)
                except Exception as wrong:
                    logger.warning("the first restore has to prepare itself: %s", str(wrong))
        finally:
            self._compiled.set()
        try:
            rounds = self._rounds
            if rounds is not None and not self._failed and not self._closing.is_set():
                failed = self._tried(lambda: self._prepare(rounds))
                self._no_rounds = bool(failed)
                if failed:
                    logger.warning("the kernel for recipes can't be compiled: %s", failed)
        finally:
            self._rounds_compiled.set()

    def _tried(self, compiles: Callable[[], None]) -> str:
        """Why something can't be compiled, or nothing; what fails may be another's doing, and is
        tried again."""
        for pause in (*_COMPILE_PAUSES, None):
            try:
                compiles()
                break
            except Exception as wrong:
                if pause is None or isinstance(wrong, UnsupportedError):
                    return str(wrong)
                logger.warning("the kernels can't be compiled yet: %s", str(wrong))
                if self._closing.wait(pause):
                    return str(wrong)
        return ""

    def _prepare(self, restorer: Restorer | RoundRestorer) -> None:
        """The very object that restores later, which the engine's thread does not use before it is
        said that kernels are there. Where there is no memory now, the first restore asks for it."""
        try:
            restorer.prepare(copies=self._memory.reads_host)
        except MemoryError as lacking:
            logger.warning("the first restore will have to allocate: %s", str(lacking))

    def _choose_by_rates(self) -> None:
        if not self._calibrate:
            return
        found = self._gpu.rates()
        self._counts.add("calibrated" if found else "calibration_failed")
        if found:
            self._restorer.rates = found
            if self._rounds is not None:
                self._rounds.rates = found

    def _run_kernels(self) -> None:
        """With objects of this thread's own."""
        self._gpu.enter()
        stream, nothing = self._gpu.stream(), Request(np.zeros(0, np.int64))
        load = Load(empty_records(0), [nothing])
        with contextlib.closing(self._gpu.restorer(self._layout, self._settings)) as restorer:
            restorer.restore([load], stream, memory=Memory.GPU).wait()
        if self._store is not None:
            with contextlib.closing(self._gpu.storer(self._layout, self._settings)) as storer:
                storer.store(load.records, nothing, stream, memory=Memory.GPU).wait()
