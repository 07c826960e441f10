"""``kmesh doctor --gpu``: each rung of a GPU's memory, proved between processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kmesh import dmabuf, errors
from kmesh.cli.checks import Check, attempt
from kmesh.cli.render import size as shown
from kmesh.cuda import driver as cuda
from kmesh.cuda.device import Device, see_all
from kmesh.cuda.memory import DeviceMemory
from kmesh.cuda.proof import through_export, through_registration
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.errors import NotFound
from kmesh.handles import HandleKind
from kmesh.session import Session

#: What runs another process; its arguments follow.
PEER = (sys.executable, "-m", "kmesh.cli.gpu_peer")
RUNGS = (
    *("export", "import", "read-only", "dma-buf", "exporter killed"),
    *("host", "host vmm", "slabs"),
)

#: What helps engines on a GPU that reads no memory that is mapped read-only.
_OTHER_TIER = (
    "its engines restore nothing from host memory: give the daemon memory on the GPU, or for it in"
    ' the host\'s (gpu, gpu_memory, gpu_place), and its engines "tier": "gpu"'
)
_PATTERN_BYTES = 1 << 20
#: A process that starts CUDA may take so long.
_START_SECONDS = 60.0


def examine(
    name: str, session: Session | None, *, peer: Sequence[str] = PEER, timeout: float = 5.0
) -> list[Check]:
    """Makes every check that can be made.

    Args:
        name: number or UUID of the GPU.
        session: with the daemon whose slabs are imported; None if there is none.
    """
    try:
        see_all()
        driver = cuda.load()
        device = Device(driver, name)
    except errors.KMeshError as failed:
        fix = "" if isinstance(failed, errors.ConfigError) else "install NVIDIA's driver"
        return [Check("gpu", "fail", str(failed), fix), *_skipped(RUNGS, "no GPU")]
    with device:
        try:
            device.check_whole()
        except errors.UnsupportedError as failed:
            return [Check("gpu", "fail", str(failed)), *_skipped(RUNGS, "a part of a GPU")]
        free, total = device.memory_info()
        version = driver.version()
        seen = (
            f"{device.name}, {device.uuid}, CUDA {version // 1000}.{version % 1000 // 10}; "
            f"{shown(free)} free of {shown(total)}; "
            f"{'' if device.rdma else 'not '}reachable for NICs"
        )
        return [
            Check("gpu", "ok", seen),
            *_between_processes(device, peer),
            attempt("gpu host", lambda: _host(device)),
            attempt("gpu host vmm", lambda: _host_vmm(device)),
            attempt("gpu slabs", lambda: _slabs(device, session, timeout)),
        ]


def _skipped(rungs: Sequence[str], why: str) -> list[Check]:
    return [Check(f"gpu {rung}", "skip", why) for rung in rungs]


class _Exporter:
    """Another process that has made memory with a pattern in it, and its file descriptors."""

    def __init__(self, device: Device, peer: Sequence[str]) -> None:
        self.pattern = os.urandom(_PATTERN_BYTES)
        self.size = device.granularity
        self.memory = self.dma_buf = -1
        self._channel, theirs = socket.socketpair()
        with theirs:
            self.process = _start(peer, "export", device, self.size, theirs)
        try:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:
                pipe.write(self.pattern)
            if not select.select([self._channel], [], [], _START_SECONDS)[0]:
                raise TimeoutError(f"nothing came in {_START_SECONDS} s")
            data, fds, _, _ = socket.recv_fds(self._channel, 4096, 2)
            if not data:
                raise RuntimeError(_last_words(self.process))
            self.memory, self.dma_buf = [*fds, -1][:2]
            self.why_no_dma_buf = str(json.loads(data)["dma_buf"])
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """Ends the process as a fault would."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends the process, and closes its file descriptors here."""
        self.kill()
        self._channel.close()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        for fd in (self.memory, self.dma_buf):
            if fd >= 0:
                os.close(fd)


def _start(
    peer: Sequence[str], what: str, device: Device, size: int, channel: socket.socket
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*peer, what, device.uuid, str(size), str(channel.fileno())],
        pass_fds=[channel.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _last_words(process: subprocess.Popen[bytes]) -> str:
    """Of a process that has failed, and is about to end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_START_SECONDS)
    process.kill()
    said = process.stderr.read() if process.stderr is not None else b""
    return (said.decode(errors="replace").strip().splitlines() or ["it gave no reason"])[-1]


def _between_processes(device: Device, peer: Sequence[str]) -> Iterator[Check]:
    try:
        exporter = _Exporter(device, peer)
    except Exception as failed:
        yield Check("gpu export", "fail", f"another process could not export memory: {failed}")
        yield from _skipped(RUNGS[1:5], "nothing was exported")
        return
    try:
        made = f"another process made {shown(exporter.size)} and exported them"
        yield Check("gpu export", "ok", made)
        yield attempt("gpu import", lambda: _import(device, exporter))
        yield attempt("gpu read-only", lambda: _read_only(device, exporter, peer))
        yield attempt("gpu dma-buf", lambda: _dma_buf(exporter))
        yield attempt("gpu exporter killed", lambda: _killed(device, exporter))
    finally:
        exporter.close()


@contextmanager
def _opened(device: Device, exporter: _Exporter) -> Iterator[Callable[[], bool]]:
    """The exporter's memory, mapped read-only: whether the pattern is there."""
    with DeviceMemory.open(device, exporter.memory, exporter.size) as memory:
        yield lambda: memory.read(0, len(exporter.pattern)) == exporter.pattern


def _import(device: Device, exporter: _Exporter) -> Check:
    with _opened(device, exporter) as intact:
        if not intact():
            return Check("gpu import", "fail", "a pattern came out of imported memory changed")
    seen = f"mapped read-only here, {len(exporter.pattern):,} bytes came through"
    return Check("gpu import", "ok", seen)


def _read_only(device: Device, exporter: _Exporter, peer: Sequence[str]) -> Check:
    ours, theirs = socket.socketpair()
    with ours, theirs, _start(peer, "write", device, exporter.size, theirs) as process:
        try:
            socket.send_fds(ours, [b"."], [exporter.memory])
            assert process.stdout is not None
            ended = select.select([process.stdout], [], [], _START_SECONDS)[0]
            out = process.stdout.readline() if ended else b""
            if not out:
                why = f"a third process could not map it: {_last_words(process)}"
                return Check("gpu read-only", "fail", why)
        finally:
            process.kill()
    refusal = json.loads(out)["refused"]
    with _opened(device, exporter) as intact:
        unchanged = intact()
    if not refusal or not unchanged:
        return Check("gpu read-only", "fail", "memory that was mapped read-only could be written")
    seen = f"a write by an importer was refused ({refusal}), and changed nothing"
    return Check("gpu read-only", "ok", seen)


def _dma_buf(exporter: _Exporter) -> Check:
    if exporter.dma_buf < 0:
        return Check("gpu dma-buf", "skip", exporter.why_no_dma_buf)
    try:
        said = dmabuf.look(exporter.dma_buf)
    except errors.ProtocolError:
        return Check("gpu dma-buf", "fail", "what the driver gave is no DMA-BUF")
    seen = f"exporter {said.exporter}, {said.size} bytes"
    if said.size != exporter.size:
        return Check("gpu dma-buf", "fail", f"{seen}, of {exporter.size}")
    return Check("gpu dma-buf", "ok", seen)


def _killed(device: Device, exporter: _Exporter) -> Check:
    with _opened(device, exporter) as intact:
        exporter.kill()
        mapped = intact()
    with _opened(device, exporter) as intact:
        again = intact()
    if not mapped or not again:
        return Check("gpu exporter killed", "fail", "memory changed when its exporter was killed")
    seen = "memory outlived its exporter: what was mapped stayed, and it was imported anew"
    return Check("gpu exporter killed", "ok", seen)


def _host(device: Device) -> Check:
    pattern = os.urandom(_PATTERN_BYTES)
    try:
        back = through_registration(device, pattern)
    except errors.UnsupportedError as cannot:
        return Check("gpu host", "warn", str(cannot), _OTHER_TIER)
    if back != pattern:
        return Check("gpu host", "fail", "the GPU read other bytes than host memory holds")
    seen = "the GPU read a memfd that is mapped read-only and registered"
    return Check("gpu host", "ok", seen)


def _host_vmm(device: Device) -> Check:
    pattern = os.urandom(_PATTERN_BYTES)
    try:
        node = device.host_node
        back = through_export(device, pattern, node=node)
    except (errors.UnsupportedError, errors.CudaError) as cannot:
        return Check("gpu host vmm", "warn", str(cannot), 'gpu_place = "host" can\'t be had here')
    if back != pattern:
        return Check("gpu host vmm", "fail", "a pattern came out of the host's memory changed")
    seen = f"memory that CUDA made on the host's NUMA node {node} was exported, imported and read"
    return Check("gpu host vmm", "ok", seen)


def _slabs(device: Device, session: Session | None, timeout: float) -> Check:
    if session is None:
        return Check("gpu slabs", "skip", "no session")
    counts = {kind: 0 for kind in HandleKind}
    with DeviceSlabs(session, device) as slabs:
        for number in range(session.welcome.slab_count):
            try:
                handle = session.export_slab(number, timeout)
            except NotFound:
                # A number that no slab has now.
                continue
            os.close(handle.fd)
            if handle.device == device.uuid:
                slab = slabs.slab(number, timeout)
                counts[slab.kind] += 1
    count = counts[HandleKind.CUDA_VMM_FD]
    if not count:
        return Check("gpu slabs", "skip", "the daemon has no memory on this GPU")
    return Check("gpu slabs", "ok", f"{count} of the daemon's slabs imported, read-only")
