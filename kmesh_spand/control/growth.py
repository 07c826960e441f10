"""How far slabs of host memory have pages, as the store worker tells."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kmesh.layout import slab_capacity
from kmesh_spand import ipc, messages
from kmesh_spand.core import events

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SlabState:
    """What the worker said of a slab.

    Attributes:
        populated: payload bytes with pages.
        hugepages, small_pages: huge pages were granted, or asked for and not granted.
        failed: why the rest could not be populated, until it could.
        sealed: it can only be read.
    """

    size: int
    capacity: int
    populated: int = 0
    hugepages: bool = False
    small_pages: bool = False
    failed: str = ""
    sealed: bool = False

    @classmethod
    def of(cls, size: int, *, sealed: bool = False) -> SlabState:
        """That of a slab of ``size`` bytes of which nothing was said."""
        return cls(size, slab_capacity(size), sealed=sealed)


class Growth:
    """Of all slabs; what is new of them is an event for the core.

    Attributes:
        slabs: by number.
        paused: why they do not grow now, or empty. pauses: how often they stopped growing.
    """

    def __init__(self, slabs: dict[int, SlabState], event: Callable[[events.Event], None]) -> None:
        self.slabs = slabs
        self.paused = ""
        self.pauses = 0
        fallbacks = {f"fallback_{kind}": 0 for kind in messages.FALLBACKS}
        self.counters = {**fallbacks, "populate_failed": 0}
        self._event = event

    def hear(self, message: ipc.AnyMessage) -> bool:
        """Takes a message of the worker; False if it is about something else."""
        match message:
            case messages.PopulatePaused():
                self.paused = message.reason
                self.pauses += bool(message.reason)
            case messages.Populated() | messages.PopulateFailed() | messages.Fallback() if (
                message.slab not in self.slabs
            ):
                # It was given back meanwhile.
                pass
            case messages.Populated():
                slab = self.slabs[message.slab]
                slab.hugepages = slab.hugepages or message.hugepages
                # A restarted worker begins again; pages that are there stay there.
                if message.capacity == slab.capacity:
                    slab.failed = ""
                if message.capacity > slab.populated:
                    slab.populated = message.capacity
                    self._event(events.Populated(message.slab, message.capacity))
            case messages.PopulateFailed():
                self.counters["populate_failed"] += 1
                slab = self.slabs[message.slab]
                if not slab.failed:
                    logger.error(
                        "a slab stays smaller: %s", message.error, extra={"slab": message.slab}
                    )
                slab.failed = message.error
            case messages.Fallback():
                self.fell_back(message)
            case _:
                return False
        return True

    def fell_back(self, message: messages.Fallback) -> None:
        """Something was done in a lesser way, for a slab of any memory."""
        if message.kind == "hugepages":
            self.slabs[message.slab].small_pages = True
        name = f"fallback_{message.kind}"
        if not self.counters[name]:
            logger.info(messages.FALLBACKS[message.kind], extra={"slab": message.slab})
        self.counters[name] += 1
