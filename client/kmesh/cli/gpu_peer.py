"""The other processes of ``kmesh doctor --gpu``.

python -m kmesh.cli.gpu_peer export UUID SIZE SOCKET < pattern
    makes GPU memory, writes the pattern at its beginning and sends it: a JSON document, with the
    memory's file descriptor and that of a DMA-BUF where there is one. Then it waits for the
    socket to end.
python -m kmesh.cli.gpu_peer write UUID SIZE SOCKET
    is sent the memory's file descriptor, maps it read-only and tries to write; prints JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from kmesh import errors
from kmesh.cuda import driver
from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory


def _export(device: Device, size: int, channel: socket.socket) -> None:
    pattern = sys.stdin.buffer.read()
    memory = DeviceMemory.create(device, size)
    memory.write(pattern)
    fds, why = [memory.export()], ""
    try:
        fds.append(memory.dma_buf())
    except errors.KMeshError as refused:
        why = str(refused)
    socket.send_fds(channel, [json.dumps({"dma_buf": why}).encode()], fds)
    # The end of whoever asked is the end of this.
    channel.recv(1)


def _write(device: Device, size: int, channel: socket.socket) -> None:
    _, fds, _, _ = socket.recv_fds(channel, 16, 1)
    said = ""
    with DeviceMemory.open(device, fds[0], size) as memory:
        try:
            memory.write(b"not by an importer")
        except errors.CudaError as refused:
            said = str(refused)
        # A driver that found a fault ends all that this process has: nothing can be closed.
        print(json.dumps({"refused": said}), flush=True)
        os._exit(0)


def main() -> None:
    what, uuid, size, fd = sys.argv[1:]
    try:
        with socket.socket(fileno=int(fd)) as channel, Device(driver.load(), uuid) as device:
            {"export": _export, "write": _write}[what](device, int(size), channel)
    except errors.KMeshError as failed:
        sys.exit(f"{type(failed).__name__}: {failed}")


if __name__ == "__main__":
    main()
