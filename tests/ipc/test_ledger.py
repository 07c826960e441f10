"""What each client pins, counted before and after every fault: nobody pays for another's end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from daemon_process import Daemon, wait_for
from fake_cuda import MIB, UUIDS
from gpus import IMPORT_STEPS, Faults, importing, key, ledger
from rawclient import SHARD, RawClient, Refused, engine

from kmesh.cuda.device import Device
from kmesh.layout import Shard
from kmesh.v1 import common_pb2, sessions_pb2, sessions_pb2_grpc

Start = Callable[..., Daemon]
GPU = UUIDS[0]
PATIENCE = 60.0
SCHEDULER, WORKER = sessions_pb2.ROLE_SCHEDULER, sessions_pb2.ROLE_WORKER
#: Of a session, all that it can pin.
_PINS = (
    *("leases", "leased_spans", "leased_bytes"),
    *("reservations", "reserved_bytes", "staging_bytes"),
)


def pinned(daemon: Daemon) -> dict[tuple[str, int], tuple[int, ...]]:
    """By client name and number of the session, what it pins; the one that asks is left out."""
    with daemon.rpc() as (channel, metadata):
        stub = sessions_pb2_grpc.SessionsStub(channel)
        found = stub.List(sessions_pb2.ListSessionsRequest(), metadata=metadata, timeout=20)
    rows = {
        (row.client_name, row.session_id): tuple(int(getattr(row, name)) for name in _PINS)
        for row in found.sessions
    }
    return {name: row for name, row in rows.items() if name[0] != "rawclient"}


class Books:
    """The ledger of one daemon, to be found as it was after every fault."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.clients = pinned(daemon)
        self.whole = ledger(daemon.status())

    def balance(self) -> None:
        """Everything is as it was, when what was under way has ended."""
        wait_for(lambda: pinned(self.daemon) == self.clients, PATIENCE, str(self.clients))
        self.daemon.wait_status(lambda s: s.gpus[0].ready and ledger(s) == self.whole, PATIENCE)


@contextmanager
def holding(daemon: Daemon) -> Iterator[list[RawClient]]:
    """An engine with a worker, and a tool, that pin host and GPU memory in every way."""
    with ExitStack() as stack:

        def connect(name: str, **hello: Any) -> RawClient:
            more = {**hello, "client_name": name}
            return stack.enter_context(RawClient(daemon.socket_dir, **more))

        scheduler = connect("scheduler", **engine(SCHEDULER))
        worker = connect("worker", **engine(WORKER))
        tool = connect("tool")
        for device in ("", GPU):
            for number in range(4):
                assert worker.store(key(number), bytes([number]) * 70_000, device=device) == 0
        assert scheduler.acquire([key(0), key(1)]).reason == [0, 0]
        assert scheduler.acquire([key(0), key(2)], device=GPU).reason == [0, 0]
        assert tool.acquire([key(2)], device=GPU).reason == [0]
        assert tool.acquire([key(1)]).reason == [0]
        for device in ("", GPU):
            assert worker.reserve([key(10), key(11)], 5000, device=device).reason == [0, 0]
        tool.attach_staging(MIB)
        yield [scheduler, worker, tool]


@pytest.fixture
def daemon(start_gpu: Start, gpu_faults: Faults) -> Daemon:
    gpu_faults.begin("with_dma_buf", "yes")
    found = start_gpu(errors=True, bugs=True, dma_buf="spans", host_memory="16MiB")
    found.wait_populated()
    return found


def test_what_clients_pin_is_the_same_after_every_fault_of_others(
    daemon: Daemon, gpu_faults: Faults
) -> None:
    with holding(daemon) as (_, _, tool):
        books = Books(daemon)
        assert len(books.clients) == 3
        assert all(sum(row) for row in books.clients.values())

        def victim(*, device: str) -> RawClient:
            """Pins something of its own, and has a copy to start."""
            other = RawClient(daemon.socket_dir, client_name="victim")
            other.attach_staging(MIB)
            assert other.acquire([key(3)], device=device).reason == [0]
            reserved = other.reserve([key(20)], 5000, device=device)
            other.send(commit={"reservation": list(reserved.reservation), "staging_offset": [0]})
            return other

        def stuck(step: str, begin: Callable[[], RawClient]) -> RawClient:
            """It has begun, and the driver hangs at that."""
            gpu_faults.begin(step, "0 hang")
            other = begin()
            wait_for(lambda: gpu_faults.reached(step), PATIENCE)
            return other

        def goes_on(step: str) -> None:
            gpu_faults.end(step)
            (gpu_faults.directory / f"{step}.reached").unlink()

        # A client ends while its copy runs, in either memory.
        other = stuck("write", lambda: victim(device=GPU))
        assert pinned(daemon) != books.clients
        other.close()
        goes_on("write")
        books.balance()
        os.kill(daemon.child("worker"), signal.SIGSTOP)
        other = victim(device="")
        other.close()
        os.kill(daemon.child("worker"), signal.SIGCONT)
        books.balance()

        # A client ends while a span is exported for it.
        def export() -> RawClient:
            other = RawClient(daemon.socket_dir, client_name="victim")
            lease = other.acquire([key(3)], device=GPU).lease
            kind = common_pb2.HANDLE_KIND_DMA_BUF
            other.send(export_span={"lease": lease, "entry": 0, "kind": kind})
            return other

        stuck("dma_buf", export).close()
        goes_on("dma_buf")
        books.balance()
        # The driver refuses a copy, an export, and takes its context along.
        for step, error in (("write", "a bug that a test put here"), ("dma_buf", "NOT_SUPPORTED")):
            gpu_faults.begin(step, f"801 {error}")
            with RawClient(daemon.socket_dir, client_name="victim") as other:
                if step == "write":
                    assert other.store(key(21), b"x" * 5000, device=GPU) == 9
                else:
                    lease = other.acquire([key(3)], device=GPU).lease
                    with pytest.raises(Refused, match="NOT_SUPPORTED"):
                        other.call(export_span={"lease": lease, "entry": 0, "kind": 3})
            gpu_faults.end(step)
            books.balance()
        gpu_faults.begin("read", "719 CUDA_ERROR_LAUNCH_FAILED")
        with RawClient(daemon.socket_dir, client_name="victim") as other:
            lease = other.acquire([key(3)], device=GPU).lease
            other.call(report_corrupt={"lease": lease, "entry": [0]})
            daemon.wait_status(lambda s: s.gpus[0].restarts >= 2, PATIENCE)
        gpu_faults.end("read")
        books.balance()
        # Workers are killed, idle and in the middle of a copy.
        for name in ("gpu0", "worker"):
            before = daemon.status()
            ended = before.worker_restarts + before.gpus[0].restarts
            os.kill(daemon.child(name), signal.SIGKILL)
            daemon.wait_status(
                lambda s, n=ended: s.worker_restarts + s.gpus[0].restarts > n, PATIENCE
            )
            books.balance()
        other = stuck("write", lambda: victim(device=GPU))
        os.kill(daemon.child("gpu0"), signal.SIGKILL)
        goes_on("write")
        assert other.receive()[0].commit.reason == [9]
        other.close()
        books.balance()
        # And what was pinned is still there to be used.
        assert tool.acquire([key(2)], device=GPU).reason == [0]


def test_a_client_that_is_killed_at_any_step_of_its_import_pins_nothing(
    daemon: Daemon, tmp_path: Any, gpu_device: Device
) -> None:
    theirs = Faults(tmp_path / "theirs")
    shard = Shard(SHARD.layer_begin, SHARD.layer_end, SHARD.head_begin, SHARD.head_end)
    with holding(daemon):
        books = Books(daemon)
        for step in IMPORT_STEPS:
            theirs.begin(step, "0 hang")
            with importing(daemon, theirs, gpu_device, key(0), shard) as process:
                wait_for(lambda step=step: theirs.reached(step), PATIENCE, step)
                assert pinned(daemon) != books.clients
                process.kill()
            theirs.end(step)
            books.balance()
        with importing(daemon, theirs, gpu_device, key(0), shard) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"done\n"
        books.balance()


def test_nothing_is_pinned_for_sessions_of_a_control_that_is_gone(daemon: Daemon) -> None:
    with holding(daemon):
        os.kill(daemon.child("control"), signal.SIGKILL)
        daemon.wait_ready(2)
        status = daemon.wait_status(lambda s: s.gpus[0].ready, PATIENCE)
        assert pinned(daemon) == {}
        assert ledger(status)[:3] == (0, 0, 0)
    with RawClient(daemon.socket_dir) as other:
        for device in ("", GPU):
            for number in range(4):
                wait_for(
                    lambda n=number, d=device: other.acquire([key(n)], device=d).reason == [0],
                    PATIENCE,
                )
