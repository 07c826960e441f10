"""``kmesh.cli.gpu_peer`` on a GPU that is not there. The first argument is what it does wrong.

``none``, ``no-driver``, ``export`` (is refused), ``change`` (the pattern), ``writable`` (maps so).
"""

from __future__ import annotations

import sys
from typing import Any

from fake_cuda import UUIDS, FakeDriver, Gpu

from kmesh.cli import gpu_peer
from kmesh.cuda import driver
from kmesh.cuda.driver import Attribute
from kmesh.cuda.memory import DeviceMemory
from kmesh.errors import CudaError, UnsupportedError


def main() -> None:
    fault = sys.argv.pop(1)

    def load() -> driver.Driver:
        if fault == "no-driver":
            raise UnsupportedError("there is no CUDA driver")

        def refuse(name: str) -> None:
            if fault == "export" and name == "export_fd":
                raise CudaError("cuMemExportToShareableHandle", 801, "CUDA_ERROR_NOT_SUPPORTED")

        dma_buf = {Attribute.DMA_BUF: int(fault == "dma-buf")}
        return FakeDriver(Gpu(attributes=dma_buf), Gpu(UUIDS[1]), refuse=refuse)

    driver.load = load
    if fault == "change":
        write = DeviceMemory.write
        DeviceMemory.write = lambda self, data, at=0: write(self, bytes(len(data)), at)  # type: ignore[method-assign]
    if fault == "writable":
        inner = DeviceMemory.open.__func__  # type: ignore[attr-defined]

        def opened(cls: Any, device: Any, fd: int, size: int, **_: Any) -> Any:
            return inner(cls, device, fd, size, writable=True)

        DeviceMemory.open = classmethod(opened)  # type: ignore[assignment, method-assign]
    gpu_peer.main()


if __name__ == "__main__":
    main()
