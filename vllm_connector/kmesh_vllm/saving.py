"""Stores of one worker: reserve while the model runs, take when it has run, commit behind it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np

from kmesh.errors import ConnectionClosed, DeadlineExceeded, KMeshError
from kmesh.layout import Shard
from kmesh.session import Session
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.identity import Identity
from kmesh_vllm.metadata import StorePlan
from kmesh_vllm.movers import Mover, Records, Taken, empty_records
from kmesh_vllm.paged import PagedCache
from kmesh_vllm.reserving import Held, Reserver, Step, abort, give_back
from kmesh_vllm.serial import SerialExecutor

logger = logging.getLogger("kmesh_vllm")

_COMMIT_TIMEOUT = 60.0
#: Seconds that a thread of ours waits for room in staging.
_PUT_TIMEOUT = 10.0
#: Bytes that are put together, so that the daemon copies some while others are on their way.
_PUT_BYTES = 16 << 20


class Saver:
    """Stores what the model computes.

    ``begin`` asks for reservations in the background; ``finish`` takes the spans out of their
    pages, which the engine may write again when it returns. So preemption and abort have nothing
    to fence: on a GPU too, where whatever the engine starts next waits, on its own stream, until
    the pages were read. What cannot be stored is skipped and counted.

    Args:
        mover: moves bytes between the pages of ``cache`` and staging.
        mine: the heads that this rank holds.
        device: UUID of the GPU in whose memory is stored, or empty: in host memory.
    """

    def __init__(
        self,
        mover: Mover,
        cache: PagedCache,
        identity: Identity,
        mine: Shard,
        current: Callable[[], Session | None],
        settings: Settings,
        counts: Counts,
        device: str = "",
    ) -> None:
        self._mover = mover
        self._cache = cache
        self._identity = identity
        self._mine = mine
        self._settings = settings
        self._counts = counts
        self._thread = SerialExecutor("kmesh-reserve")
        self._writer = SerialExecutor("kmesh-store")
        self._closing = False
        self._pending: tuple[Future[Step | None], int] | None = None
        self._late: Future[Step | None] | None = None
        self._freed = threading.Event()
        self._reserver = Reserver(
            mover, identity, mine, current, settings, counts, device, self._writer.submit
        )

    def begin(self, plans: Sequence[StorePlan]) -> None:
        """Reserves the spans of a step, in the background."""
        self.abandon()
        if not plans:
            return
        spans = sum(len(plan.tokens) for plan in plans)
        late = self._late is not None and not self._late.done()
        if late or not self._mover.ready():
            # The daemon hangs: one step has waited for it, that is enough. No step waits for
            # kernels, and what can't be taken is not reserved.
            self._counts.add("store_skipped_late", spans)
        else:
            try:
                self._pending = self._thread.submit(self._reserver.reserve, list(plans)), spans
            except OSError as lacking:
                self._failed(lacking, spans)

    def abandon(self) -> None:
        """Stores nothing of this step: its pages do not hold what they should."""
        if self._pending is not None:
            future, spans = self._pending
            self._pending = None
            self._thread.submit(give_back, future)
            self._counts.add("store_skipped_error", spans)

    def finish(self) -> None:
        """Takes this step's spans, and commits them in the background."""
        if self._pending is None:
            return
        future, spans = self._pending
        self._pending = None
        try:
            step = future.result(self._settings.reserve_timeout_ms / 1000)
        except FutureTimeout:
            self._late = future
            self._thread.submit(give_back, future)
            self._counts.add("store_skipped_late", spans)
            return
        except Exception as wrong:
            self._failed(wrong, spans)
            return
        if step is not None and step.held:
            self._take(step)

    def reserved(self) -> dict[str, set[int]]:
        """See ``Reserver.reserved``."""
        return self._reserver.reserved()

    def close(self) -> None:
        """Forgets what is under way; the daemon forgets it with the session."""
        if self._pending is not None:
            self._pending[0].cancel()
            self._pending = None
        self._closing = True
        self._freed.set()
        # What was taken waits for nothing but the GPU now.
        self._writer.shutdown()
        self._thread.shutdown(cancel=True)
        self._reserver.close()

    def _records(self, step: Step) -> Records:
        names, heads = self._identity.namespace, self._mine.heads
        records = empty_records(len(step.held))
        for name in ("tokens", "length", "position"):
            records[name] = [getattr(held, name) for held in step.held]
        records["token_end"] = records["tokens"]
        records["src_heads"] = records["heads"] = heads
        records["src_layers"] = records["layers"] = names.layers
        return records

    def _take(self, step: Step) -> None:
        """Takes a step's spans out of the pages, and has them put into staging."""
        pages = self._cache.expand(np.asarray(step.blocks, np.int64))
        records, timeout = self._records(step), self._settings.reserve_timeout_ms / 1000
        until = time.monotonic() + timeout
        held = step.held
        while held:
            taken: Taken | None = None
            try:
                taken = self._mover.take(records, pages)
                mine = held[: taken.count]
                if taken.kept:
                    self._writer.submit(self._put, step, mine, taken, _PUT_TIMEOUT)
            except Exception as wrong:
                self._failed(wrong, len(held))
                self._thread.submit(abort, step.session, held)
                if taken is not None:
                    # It waits for the GPU.
                    self._thread.submit(taken.drop)
                return
            if not taken.kept:
                self._put(step, mine, taken, timeout)
            held, records = held[taken.count :], records[taken.count :]
            if held and not self._mover.room(held[0].length, until - time.monotonic()):
                self._skip(step, held)
                return

    def _put(self, step: Step, held: list[Held], taken: Taken, timeout: float) -> None:
        """Puts and commits; waits, for a while, until the daemon has emptied the staging."""
        until = time.monotonic() + timeout
        done = 0
        try:
            if step.session.closed:
                # The daemon has ended the reservations with it.
                self._counts.add("store_skipped_error", len(held))
                return
            while done < len(held):
                done += self._put_some(step, held, taken, done)
                left = held[done:]
                if left and not self._has_room(step, left[0].length, until):
                    self._skip(step, left)
                    return
        except Exception as wrong:
            self._failed(wrong, len(held) - done)
            self._thread.submit(abort, step.session, held[done:])
        finally:
            taken.drop()

    def _skip(self, step: Step, held: list[Held]) -> None:
        self._counts.add("store_skipped_staging", len(held))
        self._thread.submit(abort, step.session, held)

    def _has_room(self, step: Step, length: int, until: float) -> bool:
        ring = step.ring
        while not ring.fits(length):
            self._freed.clear()
            if ring.fits(length):
                return True
            if self._closing or step.session.closed or not ring.used:
                return False
            if not self._freed.wait(until - time.monotonic()):
                return False
        return True

    def _put_some(self, step: Step, held: list[Held], taken: Taken, first: int) -> int:
        """Puts and commits some spans, as far as there is staging for them; returns how many."""
        placed: list[tuple[Held, int]] = []
        size = 0
        for one in held[first:]:
            size += one.length
            if placed and size > _PUT_BYTES:
                break
            offset = step.ring.allocate(one.length)
            if offset is None:
                break
            placed.append((one, offset))
        if not placed:
            return 0
        try:
            status = taken.put(first, [offset for _, offset in placed], step.staging)
        except BaseException:
            for _, offset in placed:
                step.ring.free(offset)
            raise
        good = [pair for pair, code in zip(placed, status, strict=True) if code == 0]
        bad = [pair for pair, code in zip(placed, status, strict=True) if code != 0]
        if bad:
            logger.error("%d spans could not be copied out of their blocks", len(bad))
            self._counts.add("store_skipped_error", len(bad))
            self._thread.submit(abort, step.session, [one for one, _ in bad])
            for _, offset in bad:
                step.ring.free(offset)
        if good:
            self._commit(step, good)
        return len(placed)

    def _commit(self, step: Step, spans: list[tuple[Held, int]]) -> None:
        try:
            future = step.session.commit_async(
                [held.reservation for held, _ in spans],
                [offset for _, offset in spans],
                timeout=_COMMIT_TIMEOUT,
            )
        except KMeshError as wrong:
            self._failed(wrong, len(spans))
            return
        future.add_done_callback(lambda done: self._committed(step, spans, done))

    def _committed(
        self, step: Step, spans: list[tuple[Held, int]], done: Future[list[int]]
    ) -> None:
        error = done.exception()
        if error is not None:
            self._failed(error, len(spans))
            # The daemon may still read what it was told to: these bytes are never written
            # again. A new session has new staging.
            if not isinstance(error, ConnectionClosed):
                step.session.close()
            # Whoever waits for room sees now that none will come.
            self._freed.set()
            return
        for (held, offset), reason in zip(spans, done.result(), strict=True):
            step.ring.free(offset)
            if reason == 0:
                self._counts.add("stored_spans")
                self._counts.add("stored_tokens", held.tokens)
                self._counts.add("stored_bytes", held.length)
            else:
                self._counts.add("store_skipped_error")
        self._freed.set()

    def _failed(self, wrong: BaseException, spans: int) -> None:
        if isinstance(wrong, DeadlineExceeded):
            self._counts.add("store_skipped_late", spans)
            return
        self._counts.add("store_skipped_error", spans)
        if not isinstance(wrong, KMeshError | OSError):
            logger.error("a store failed", exc_info=wrong)
        elif not isinstance(wrong, ConnectionClosed):
            logger.warning("a store failed: %s", str(wrong))
