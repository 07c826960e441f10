"""Whether the daemon lives, and whether its data path works: one answer for every asker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kmesh_spand.control import limits
from kmesh_spand.control.crowd import Crowd, count_files, max_files
from kmesh_spand.control.diskjobs import DiskJobs
from kmesh_spand.control.gpus import Gpus
from kmesh_spand.control.growth import Growth
from kmesh_spand.control.handler import Handler
from kmesh_spand.control.storeworker import StoreWorker

logger = logging.getLogger(__name__)

#: Every reason for which the daemon can be not ready; see ``docs/metrics.md``.
REASONS = ("starting", "draining", "loop", "worker", "evictor", "pool", "memory", "files")
#: Everything that is worth a warning while it serves.
WARNINGS = ("memory", "growth", "hugepages", "gpu", "disk")

#: The control loop turns several times a second.
_LIVE_SECONDS = 5.0
#: So many failures in a row, the last of them not long ago, are no accident.
_IN_A_ROW = 3
_RECENT_MS = 30_000
_COUNT_SECONDS = 1.0


class Readiness:
    """Judges the parts of the daemon; changes nothing.

    Args:
        stuck_ms: how long the store worker may owe an answer.
        changed: told the reasons whenever the first of them appears or their names change.

    Attributes:
        serving: control has opened everything that it serves.
        open_files: of this process, at most a second old.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Handler,
        worker: StoreWorker,
        growth: Growth,
        crowd: Crowd,
        gpus: Gpus,
        stuck_ms: int,
        changed: Callable[[dict[str, str]], None],
        disk: DiskJobs | None = None,
    ) -> None:
        self.serving = False
        self.max_files = max_files()
        self._loop = loop
        self._handler = handler
        self._worker = worker
        self._growth = growth
        self._crowd = crowd
        self._gpus = gpus
        self._stuck = stuck_ms / 1000
        self._changed = changed
        self._disk = disk
        self._turned_at = loop.time()
        self._names: list[str] = ["starting"]
        self._counted_at = loop.time()
        self.open_files = count_files()

    def turn(self) -> None:
        """Called by each turn of the control loop."""
        now = self._turned_at = self._loop.time()
        if now - self._counted_at >= _COUNT_SECONDS:
            self._counted_at = now
            self._crowd.trim()
            self.open_files = count_files()
        reasons = self.reasons()
        if list(reasons) != self._names:
            self._names = list(reasons)
            if reasons:
                logger.warning("not ready, %s", "; ".join(reasons.values()))
            else:
                logger.info("ready")
            self._changed(reasons)

    @property
    def turned_seconds(self) -> float:
        """Since the control loop last turned."""
        return self._loop.time() - self._turned_at

    @property
    def live(self) -> bool:
        """Whether the control loop turns."""
        return self.turned_seconds < _LIVE_SECONDS

    def reasons(self) -> dict[str, str]:
        """Why it is not ready: a sentence by each name of ``REASONS`` that holds."""
        found: dict[str, str] = {}
        if not self.serving:
            found["starting"] = "not everything is served yet"
        if self._handler.draining:
            found["draining"] = "the daemon is stopping"
        if not self.live:
            found["loop"] = f"the control loop has not turned for {self.turned_seconds:.1f} s"
        for name, text in (
            ("worker", self._of_worker()),
            ("evictor", self._of_evictor()),
            ("pool", self._of_pool()),
            ("memory", self._of_memory()),
            ("files", self._of_files()),
        ):
            if text:
                found[name] = text
        return found

    def warnings(self) -> dict[str, str]:
        """What is not as it should be, although it serves, by names of ``WARNINGS``."""
        found: dict[str, str] = {}
        failed = self._failed()
        if failed and not self._of_memory():
            found["memory"] = "; ".join(failed)
        if self._growth.paused:
            found["growth"] = f"slabs do not grow: {self._growth.paused}"
        small = [slab for slab in self._growth.slabs.values() if slab.small_pages]
        if small:
            found["hugepages"] = f"{len(small)} of {len(self._growth.slabs)} slabs have small pages"
        if gpu := self._gpus.warning:
            found["gpu"] = gpu
        if disk := self._of_disk():
            found["disk"] = disk
        return found

    def _of_disk(self) -> str:
        jobs, core = self._disk, self._handler.core.disk
        if jobs is None or core is None:
            return ""
        if jobs.error:
            return f"nothing is written to disk: {jobs.error}"
        if (since := core.fetches.outage.since_ms) is not None:
            seconds = (self._handler.now_ms() - since) / 1000
            return f"the disk does not answer, and has been left alone for {seconds:.1f} s"
        if jobs.owed_seconds >= self._stuck:
            return f"the disk has not answered for {jobs.owed_seconds:.1f} s"
        if core.failing_since_ms is not None:
            seconds = (self._handler.now_ms() - core.failing_since_ms) / 1000
            return f"no file could be written for {seconds:.1f} s"
        return ""

    def _of_worker(self) -> str:
        worker = self._worker
        if not worker.up:
            return "there is no store worker"
        if worker.silent_seconds >= self._stuck:
            return f"the store worker has not answered for {worker.silent_seconds:.1f} s"
        if worker.owed_seconds >= self._stuck:
            return f"{worker.copies} copies, none done for {worker.owed_seconds:.1f} s"
        return ""

    def _of_evictor(self) -> str:
        faults = self._handler.core.policy_faults
        if self._holds(faults):
            return f"the eviction policy failed {faults[0]} times in a row"
        return ""

    def _of_pool(self) -> str:
        failures = self._handler.core.place_failures
        if self._holds(failures):
            return f"{failures[0]} spans in a row found no room, although some may be evicted"
        return ""

    def _holds(self, row: tuple[int, int]) -> bool:
        count, last_ms = row
        return count >= _IN_A_ROW and self._handler.now_ms() - last_ms < _RECENT_MS

    def _of_memory(self) -> str:
        failed = self._failed()
        if failed and not any(slab.populated for slab in self._growth.slabs.values()):
            return "no memory: " + "; ".join(failed)
        return ""

    def _failed(self) -> list[str]:
        return [f"slab {n}: {s.failed}" for n, s in self._growth.slabs.items() if s.failed]

    def _of_files(self) -> str:
        left = self.max_files - self.open_files
        # The next connection, and what counts files when it comes.
        if left - 2 < limits.FD_MARGIN:
            return f"{left} file descriptors are left of {self.max_files}"
        return ""
