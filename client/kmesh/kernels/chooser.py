"""Which way a restore from host memory takes: the kernel reads it, or the copy engine does.

The kernel starts at once and reads a payload once for all requests, but holds multiprocessors as
long as the bus takes. The copy engine needs none while it copies; a short kernel then scatters
each chunk. It copies whole payloads, where the kernel reads what a rank wants of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Route(enum.Enum):
    """How payloads get from host memory to the GPU."""

    KERNEL = "kernel"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine was seen to do. Bytes a second, and seconds.

    Attributes:
        kernel: bytes that the kernel reads over the bus, with as many blocks as it likes.
        kernel_block: the same with one block.
        copy: of the copy engine.
        write: that the kernel writes to pages, all requests together.
        write_block: the same with one block.
        kernel_start, copy_start: from the call to the first byte, and from the last to the end.
        copy_chunk: bytes that are copied before they are scattered.
    """

    kernel: float
    kernel_block: float
    copy: float
    write: float
    write_block: float
    kernel_start: float
    copy_start: float
    copy_chunk: int

    def kernel_time(self, size: int, requests: int, blocks: int) -> float:
        """Seconds for ``size`` bytes of payloads with that many blocks."""
        read = size / min(self.kernel, blocks * self.kernel_block)
        return self.kernel_start + max(read, self._written(size, requests, blocks))

    def copy_time(self, size: int, requests: int, blocks: int, copied: int = 0) -> float:
        """The same by copies of ``copied`` bytes, or as many: the scatter of all but the last chunk
        hides behind them."""
        copied = max(copied, size)
        written = self._written(size, requests, blocks)
        last = min(1.0, self.copy_chunk / copied) * written
        return self.copy_start + max(copied / self.copy + last, written)

    def _written(self, size: int, requests: int, blocks: int) -> float:
        return size * requests / min(self.write, blocks * self.write_block)


#: Of two routes within this share of each other, the one that leaves the multiprocessors alone.
_EQUAL = 0.01


def choose(size: int, requests: int, blocks: int, rates: Rates, copied: int = 0) -> Route:
    """The faster route; the copy engine's where both are about equal.

    Args:
        size: bytes that are wanted of the payloads, in whole tiles.
        requests: that each of them is for.
        blocks: thread blocks that a kernel may have, at least 1.
        copied: bytes of the whole payloads, if these are more.

    Raises:
        ValueError: a number is not positive.
    """
    if size <= 0 or requests <= 0 or blocks <= 0:
        raise ValueError(f"size {size}, requests {requests}, blocks {blocks}: not all positive")
    kernel = rates.kernel_time(size, requests, blocks)
    copy = rates.copy_time(size, requests, blocks, copied)
    return Route.KERNEL if kernel < copy * (1 - _EQUAL) else Route.COPY
