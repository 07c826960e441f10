"""GPU memory as DMA-BUF, from a driver that makes memfds; ``tests/gpu`` has the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from daemon_process import Daemon, environment, wait_for
from fake_cuda import MIB, UUIDS
from gpus import SHARD, Client, Faults, client, key
from leaks import open_fds
from rawclient import RawClient, Refused

from kmesh import errors
from kmesh.cuda.device import Device
from kmesh.handles import HandleKind, Tier
from kmesh.layout import whole_pages
from kmesh.session import Role, Session
from kmesh.v1 import common_pb2

Start = Callable[..., Daemon]
DMA_BUF = common_pb2.HANDLE_KIND_DMA_BUF
PAYLOAD = bytes(range(256)) * 300


@pytest.fixture
def start_able(start_gpu: Start, gpu_faults: Faults) -> Start:
    """A daemon whose GPUs have DMA-BUFs, which it may give."""
    gpu_faults.begin("with_dma_buf", "yes")
    return lambda **settings: start_gpu(**{"dma_buf": "spans", **settings})


@contextmanager
def exporting(daemon: Daemon, device: Device) -> Iterator[tuple[Client, RawClient, dict[str, Any]]]:
    """``PAYLOAD`` is key 1 on the GPU; who stored it, and a client with a request for it."""
    with client(daemon, device) as ours, RawClient(daemon.socket_dir) as raw:
        assert ours.put([1], [PAYLOAD]) == [0]
        acquire = {
            "keys": key(1),
            "shards": [{"layer_end": SHARD.layer_end, "head_end": SHARD.head_end}],
            "device": device.uuid,
        }
        lease = raw.call(acquire=acquire)[0].lease
        yield ours, raw, {"lease": lease, "entry": 0, "kind": DMA_BUF}


def made(daemon: Daemon) -> list[str]:
    """Who of the daemon holds DMA-BUFs."""
    return [
        name
        for name in ("control", "gpu0")
        for link in open_fds(daemon.child(name))
        if "fake-dma-buf" in link
    ]


def test_a_span_is_exactly_its_pages(start_able: Start, gpu_device: Device) -> None:
    daemon = start_able()
    with exporting(daemon, gpu_device) as (ours, raw, request):
        handle, (fd,) = raw.call(export_span=request)
        try:
            size = whole_pages(len(PAYLOAD))
            assert (handle.device, handle.size, handle.length) == (UUIDS[0], size, len(PAYLOAD))
            assert os.pread(fd, 2 * size, 0)[: len(PAYLOAD)] == PAYLOAD
            assert os.fstat(fd).st_size == size
        finally:
            os.close(fd)
        # A client looks at what it gets: this is none.
        with ours.acquire(1) as lease, pytest.raises(errors.ProtocolError, match="is none"):
            ours.session.export_span(lease, 0)
    wait_for(lambda: not made(daemon), 30)
    assert daemon.status().counters["dma_buf_spans"] == 2


def test_what_is_given_is_agreed_on_and_shown(start_able: Start) -> None:
    daemon = start_able()
    wish = {
        Tier.HOST: (HandleKind.MEMFD,),
        Tier.GPU: (HandleKind.DMA_BUF, HandleKind.CUDA_VMM_FD),
    }
    with Session.connect(daemon.socket_dir, role=Role.TOOL, handles=wish) as session:
        agreed = session.welcome.handles[Tier.GPU]
        assert agreed.chosen == HandleKind.CUDA_VMM_FD
        assert agreed.fallback is not None
        assert agreed.fallback.spans
        assert "single spans are given so, slabs are not" in agreed.fallback.text
        handle = session.export_slab(1)
        os.close(handle.fd)
        assert (handle.kind, handle.device) == (HandleKind.CUDA_VMM_FD, UUIDS[0])
        with pytest.raises(errors.PermissionDenied, match="single spans are given so"):
            session.export_slab(1, kind=HandleKind.DMA_BUF)
    RawClient(daemon.socket_dir, handles=[{"tier": 2, "kinds": [3, 2]}]).close()
    (gpu,) = [tier for tier in daemon.status().handles if tier.tier == common_pb2.TIER_GPU]
    assert [(o.kind, o.slabs, o.spans) for o in gpu.offers] == [(2, True, False), (3, False, True)]
    # Each session counts, one line is enough.
    assert daemon.log().count("GPU memory is given as CUDA_VMM_FD, a client would rather") == 1
    assert daemon.status().counters["handle_fallbacks"] == 2


def test_whole_slabs_are_given_where_that_is_permitted(
    start_able: Start, gpu_device: Device
) -> None:
    """Each is made once, and also the one that is agreed on is given to who names no kind."""
    daemon = start_able(dma_buf="slabs")
    wish = [{"tier": 2, "kinds": [3, 2]}]
    with exporting(daemon, gpu_device), RawClient(daemon.socket_dir, handles=wish) as raw:
        for kind in (0, 3):
            handle, (fd,) = raw.call(attach_slab={"slab": 1, "kind": kind})
            assert (handle.kind, handle.device, handle.size) == (3, UUIDS[0], 4 * MIB)
            assert os.fstat(fd).st_size == 4 * MIB
            os.close(fd)
        wait_for(lambda: made(daemon) == ["control"], 30)
        # Whoever names none has the common kind.
        with RawClient(daemon.socket_dir) as plain:
            handle, (fd,) = plain.call(attach_slab={"slab": 1})
            os.close(fd)
            assert handle.kind == common_pb2.HANDLE_KIND_CUDA_VMM_FD


@pytest.mark.parametrize(
    ("able", "dma_buf", "refusal", "words"),
    [
        (True, "off", common_pb2.HANDLE_REFUSAL_NOT_ALLOWED, 'setting dma_buf is "off"'),
        (False, "slabs", common_pb2.HANDLE_REFUSAL_NO_DEVICE, "neither a GPU nor its driver has"),
    ],
)  # fmt: skip
def test_why_there_is_none_is_said(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device,
    able: bool, dma_buf: str, refusal: int, words: str,
) -> None:  # fmt: skip
    if able:
        gpu_faults.begin("with_dma_buf", "yes")
    daemon = start_gpu(dma_buf=dma_buf)
    with exporting(daemon, gpu_device) as (_, raw, request):
        for body in ({"export_span": request}, {"attach_slab": {"slab": 1, "kind": DMA_BUF}}):
            with pytest.raises(Refused, match=words):
                raw.call(**body)  # type: ignore[arg-type]
    (gpu,) = [tier for tier in daemon.status().handles if tier.tier == common_pb2.TIER_GPU]
    assert gpu.offers[1].refusal == refusal
    assert words in gpu.offers[1].text


def test_a_driver_that_refuses_fails_the_export_alone(
    start_able: Start, gpu_faults: Faults, gpu_device: Device
) -> None:
    daemon = start_able()
    with exporting(daemon, gpu_device) as (ours, raw, request):
        gpu_faults.begin("dma_buf", "801 CUDA_ERROR_NOT_SUPPORTED")
        with pytest.raises(Refused, match=r"CUDA_ERROR_NOT_SUPPORTED \(801\)"):
            raw.call(export_span=request)
        gpu_faults.end("dma_buf")
        handle, (fd,) = raw.call(export_span=request)
        os.close(fd)
        assert handle.length == len(PAYLOAD)
        assert ours.read(1) == PAYLOAD
    status = daemon.status()
    assert status.gpus[0].restarts == 0
    assert status.counters["dma_buf_failed"] == 1


def test_a_command_gets_the_span_of_the_memory_that_is_named(
    start_able: Start, gpu_device: Device
) -> None:
    daemon = start_able()
    # What comes here is called a DMA-BUF, and is none.
    code = (
        "from kmesh import dmabuf; dmabuf.check = lambda *_: None; import kmesh.cli as c; c.main()"
    )

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable, "-c", code, "export", key(1).hex(), "--dma-buf", *more, "--", "sh",
                "-c", "head -c $KMESH_SPAN_LENGTH <&3 | sha256sum; echo $KMESH_DMA_BUF_SIZE",
            ],
            env=environment(KMESH_SOCKET_DIR=str(daemon.socket_dir)),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    with client(daemon, gpu_device) as ours:
        assert ours.put([1], [PAYLOAD]) == [0]
        assert ours.put([1], [b"host" * 100], device="") == [0]
    done = run("--device", UUIDS[0])
    assert done.returncode == 0, done.stderr
    digest = subprocess.run(["sha256sum"], input=PAYLOAD, capture_output=True, check=True).stdout
    assert done.stdout == digest.decode() + f"{whole_pages(len(PAYLOAD))}\n"
    unclear = run()
    assert unclear.returncode == 2
    assert "--device host" in " ".join(unclear.stderr.replace("│", " ").split())
    found = subprocess.run(
        [sys.executable, "-m", "kmesh.cli", "ls", "--json"],
        env=environment(KMESH_SOCKET_DIR=str(daemon.socket_dir)),
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert sorted(span["device"] for span in json.loads(found)["spans"]) == ["", UUIDS[0]]
