"""Jobs on a GPU that were started, and what they came to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from kmesh.kernels.device import Device, Slot

J = TypeVar("J")
T = TypeVar("T")


class Started(ABC, Generic[J, T]):
    """One job. What it reads and writes stays alive and unused until it ends.

    Args:
        slot: its memory, which goes back to the device when the result was read.
        job: what was written down, or why nothing was, if that was seen when payloads were on
            their way already: then it has ended when they are there, and nothing is written.
    """

    def __init__(self, device: Device, slot: Slot, job: J | Exception) -> None:
        self._device = device
        self._slot: Slot | None = slot
        self._job = job
        self._result: T

    def done(self) -> bool:
        """Whether it has ended."""
        return self._slot is None or self._slot.done()

    def wait(self) -> T:
        """Waits for the end; says what it came to, also when asked again.

        Raises:
            Exception: why there was no job.
        """
        if self._slot is not None:
            self._slot.wait()
            if not isinstance(self._job, Exception):
                self._result = self._read(self._job, self._slot)
            self._device.release(self._slot)
            self._slot = None
        if isinstance(self._job, Exception):
            raise self._job
        return self._result

    @abstractmethod
    def _read(self, job: J, slot: Slot) -> T:
        """The result of a job that has ended: nothing of the slot's memory is in it."""
