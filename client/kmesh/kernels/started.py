"""Jobs on a GPU that were started, and what they came to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from kmesh.kernels.device import Device, Slot

T = TypeVar("T")


class Started(ABC, Generic[T]):
    """One job. What it reads and writes stays alive and unused until it ends.

    Args:
        slot: its memory, which goes back to the device when the result was read.
        refused: why there is no job, if that was seen when payloads were on their way already:
            then it has ended when they are there, and nothing is written.
    """

    def __init__(self, device: Device, slot: Slot, refused: Exception | None = None) -> None:
        self._device = device
        self._slot: Slot | None = slot
        self._refused = refused
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
            if self._refused is None:
                self._result = self._read(self._slot)
            self._device.release(self._slot)
            self._slot = None
        if self._refused is not None:
            raise self._refused
        return self._result

    @abstractmethod
    def _read(self, slot: Slot) -> T:
        """The result of a job that has ended: nothing of the slot's memory is in it."""
