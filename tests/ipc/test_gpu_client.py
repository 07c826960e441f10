"""A daemon's slabs as a client's GPU sees them, and what doctor says; without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_gpu
import pytest
from daemon_process import Daemon, environment
from fake_cuda import MIB, UUIDS, FakeDriver, Gpu
from rawclient import RawClient

from kmesh import dmabuf, errors, layout
from kmesh.cli import gpu
from kmesh.cuda import driver as cuda
from kmesh.cuda import proof
from kmesh.cuda import slabs as slabs_module
from kmesh.cuda.device import Device
from kmesh.cuda.driver import Attribute
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.handles import HandleKind, Tier
from kmesh.session import Role, Session

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """16 MiB of host memory, and 8 MiB on the first GPU."""
    parent = Path(tempfile.mkdtemp(prefix="kmesh-"))
    (parent / "faults").mkdir()
    paths = os.pathsep.join([environment()["PYTHONPATH"], str(TESTS)])
    one = Daemon(
        parent / "s",
        command=fake_gpu.COMMAND,
        env={fake_gpu.DIRECTORY: str(parent / "faults"), "PYTHONPATH": paths},
        host_memory="16MiB",
        gpu=0,
        gpu_memory="8MiB",
        gpu_slab_size="4MiB",
    )
    try:
        one.wait_populated()
        yield one
        one.stop()
        one.check_log()
    finally:
        one.kill()
        shutil.rmtree(parent)


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as opened:
        yield opened
    # pytest keeps the session for longer, and what it has mapped would count as left behind.
    del opened.index


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    proof._proved.clear()
    made = FakeDriver(Gpu(), Gpu(UUIDS[1]))
    yield made
    proof._proved.clear()
    assert not any(made.ledger().values())
    assert not slabs_module._registered


@pytest.fixture
def device(fake: FakeDriver) -> Iterator[Device]:
    with Device(fake, "0") as opened:
        yield opened


def test_host_and_gpu_slabs_are_read_by_the_gpu(
    daemon: Daemon, session: Session, device: Device, fake: FakeDriver
) -> None:
    with RawClient(daemon.socket_dir) as writer:
        writer.attach_staging(MIB)
        assert writer.store(b"k" * 32, b"pattern of a span" * 5000) == 0
        place = writer.acquire([b"k" * 32])
        with DeviceSlabs(session, device) as slabs:
            assert fake.ledger()["registered"] == 0
            host = slabs.slab(place.slab[0])
            assert (host.kind, host.size) == (HandleKind.MEMFD, 16 * MIB)
            seen = proof.fetch(device, host.address + place.offset[0], place.length[0])
            assert seen == b"pattern of a span" * 5000
            sums = proof.fetch(device, host.sums_address(place.offset[0]), 16)
            assert sums != bytes(16)
            made = slabs.slab(1)
            assert (made.slab, made.kind, made.size) == (1, HandleKind.CUDA_VMM_FD, 4 * MIB)
            assert made.sums_address(65536) == made.address + layout.sums_offset(4 * MIB) + 8
            assert proof.fetch(device, made.address, 4 * MIB) == bytes(4 * MIB)
            before = len(fake.calls)
            assert slabs.slab(1) is made
            assert slabs.slab(0) is host
            assert len(fake.calls) == before
            with device.current() as driver, pytest.raises(errors.CudaError):
                driver.fill(made.address, 1, 1)
        slabs.close()


def test_a_host_slab_is_registered_once_a_process(
    daemon: Daemon, session: Session, device: Device, fake: FakeDriver
) -> None:
    first = DeviceSlabs(session, device)
    address = first.slab(0).address
    proofs = fake.calls.count("register") - 1
    with (
        Session.connect(daemon.socket_dir, role=Role.TOOL) as again,
        DeviceSlabs(again, device) as second,
    ):
        assert second.slab(0).address == address
        first.close()
        assert proof.fetch(device, address, 4)
        assert fake.calls.count("register") == 1 + proofs
    assert fake.ledger()["registered"] == 0


def test_slabs_of_a_gpu_that_this_one_does_not_reach_are_refused(
    session: Session, fake: FakeDriver
) -> None:
    with Device(fake, UUIDS[1]) as other, DeviceSlabs(session, other) as slabs:
        words = f"slab 2 is on {UUIDS[0]}, which {UUIDS[1]} can't read here"
        with pytest.raises(errors.UnsupportedError, match=words):
            slabs.slab(2)
        with pytest.raises(errors.NotFound):
            slabs.slab(3)
    assert fake.calls.count("import_fd") == 0


def test_a_gpu_reads_the_slabs_of_another_one_that_it_reaches(session: Session) -> None:
    """Whichever numbers they have here; there is no context on the other one, ever."""
    proof._proved.clear()
    # As with CUDA_VISIBLE_DEVICES reversed: the daemon's first GPU is the second one here.
    fake = FakeDriver(Gpu(UUIDS[1], peers=frozenset({UUIDS[0]})), Gpu(UUIDS[0]))
    with Device(fake, "0") as device, DeviceSlabs(session, device) as slabs:
        assert device.peers() == {UUIDS[0]: 1}
        slab = slabs.slab(1)
        assert (slab.kind, slab.size) == (HandleKind.CUDA_VMM_FD, 4 * MIB)
        assert proof.fetch(device, slab.address, 4 * MIB) == bytes(4 * MIB)
        with device.current() as driver, pytest.raises(errors.CudaError):
            driver.fill(slab.address, 1, 1)
        assert fake.ledger()["contexts"] == 1
        assert proof._proved == {(UUIDS[1], HandleKind.CUDA_VMM_FD, 1, False)}
    proof._proved.clear()
    assert not any(fake.ledger().values())


def test_a_peer_that_gives_other_bytes_is_not_used(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof._proved.clear()
    fake = FakeDriver(Gpu(UUIDS[1], peers=frozenset({UUIDS[0]})), Gpu(UUIDS[0]))
    with (
        Device(fake, "0") as device,
        DeviceSlabs(session, device) as slabs,
        monkeypatch.context() as broken,
    ):
        broken.setattr(FakeDriver, "write", lambda self, address, source, size: None)
        with pytest.raises(errors.UnsupportedError, match="read other bytes than were written"):
            slabs.slab(1)
        assert fake.ledger()["mapped"] == 0
    assert not any(fake.ledger().values())


def test_a_kind_is_proved_before_it_is_used(
    session: Session, device: Device, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read must be what was written: else the kind is not used, each time anew."""
    for kind, number, way in (
        (HandleKind.MEMFD, 0, "through_registration"),
        (HandleKind.CUDA_VMM_FD, 1, "through_export"),
    ):
        with monkeypatch.context() as broken, DeviceSlabs(session, device) as slabs:
            broken.setattr(proof, way, lambda _, pattern, *peer: bytes(len(pattern)))
            for _ in range(2):
                with pytest.raises(errors.UnsupportedError, match=f"{kind.name}: Fake GPU read"):
                    slabs.slab(number)
            assert fake.ledger()["mapped"] == fake.ledger()["registered"] == 0
        with DeviceSlabs(session, device) as slabs:
            slabs.slab(number)
    with pytest.raises(errors.UnsupportedError, match="Fake GPU reads no DMA_BUF"):
        proof.prove(device, HandleKind.DMA_BUF)


def test_what_fails_while_slabs_are_attached_leaves_nothing(
    session: Session, device: Device, fake: FakeDriver
) -> None:
    def refuse(name: str) -> None:
        if name == failing:
            raise errors.CudaError(name, 999, "CUDA_ERROR_UNKNOWN")

    proof.prove(device, HandleKind.MEMFD)
    proof.prove(device, HandleKind.CUDA_VMM_FD)
    for number, failing in ((0, "register"), (0, "device_pointer"), (1, "map"), (1, "import_fd")):
        with DeviceSlabs(session, device) as slabs:
            fake.refuse = refuse
            with pytest.raises(errors.CudaError, match=failing):
                slabs.slab(number)
            fake.refuse = None
            slabs.slab(number)


# doctor


@pytest.fixture
def examine(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, object]]:
    monkeypatch.setattr(cuda, "load", lambda: fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    paths = [environment()["PYTHONPATH"], str(TESTS), str(Path(__file__).parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    peer = str(Path(__file__).with_name("fake_gpu_peer.py"))

    def run(
        fault: str = "none", name: str = "0", session: Session | None = None
    ) -> dict[str, object]:
        found = gpu.examine(name, session, peer=(sys.executable, peer, fault))
        return {check.name: (check.level, check.seen) for check in found}

    return run


Examine = Callable[..., dict[str, tuple[str, str]]]


def test_doctor_proves_every_rung(session: Session, examine: Examine) -> None:
    found = examine(session=session)
    assert {name: level for name, (level, _) in found.items()} == {
        "gpu": "ok",
        "gpu export": "ok",
        "gpu import": "ok",
        "gpu read-only": "ok",
        "gpu dma-buf": "skip",
        "gpu exporter killed": "ok",
        "gpu host": "ok",
        "gpu host vmm": "ok",
        "gpu slabs": "ok",
    }
    assert found["gpu"][1].startswith(f"Fake GPU, {UUIDS[0]}, CUDA 13.0; 256.0 MiB free of 256")
    assert "1,048,576 bytes came through" in found["gpu import"][1]
    assert "refused (cuMemcpyHtoD_v2: CUDA_ERROR_INVALID_VALUE (1))" in found["gpu read-only"][1]
    assert found["gpu dma-buf"][1] == "Fake GPU or its driver has no DMA-BUF"
    assert found["gpu slabs"][1] == "2 of the daemon's slabs imported, read-only"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_doctor_says_what_another_gpu_has(session: Session, examine: Examine) -> None:
    found = examine(name=UUIDS[1], session=session)
    assert found["gpu slabs"] == ("skip", "the daemon has no memory on this GPU")
    assert examine()["gpu slabs"] == ("skip", "no session")


@pytest.mark.parametrize(
    ("fault", "rung", "words"),
    [
        ("no-driver", "export", "another process could not export memory: UnsupportedError: there"),
        ("export", "export", "cuMemExportToShareableHandle: CUDA_ERROR_NOT_SUPPORTED (801)"),
        ("change", "import", "a pattern came out of imported memory changed"),
        ("writable", "read-only", "memory that was mapped read-only could be written"),
        ("dma-buf", "dma-buf", "what the driver gave is no DMA-BUF"),
    ],
)
def test_doctor_sees_faults(examine: Examine, fault: str, rung: str, words: str) -> None:
    found = examine(fault)
    level, seen = found[f"gpu {rung}"]
    assert level == "fail"
    assert words in seen
    if rung == "export":
        assert found["gpu import"] == ("skip", "nothing was exported")


def test_doctor_reads_what_the_kernel_says_of_a_dma_buf(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * MIB
    monkeypatch.setattr(dmabuf, "look", lambda _: dmabuf.Info(dmabuf.NVIDIA, size))
    seen = ("ok", f"exporter nv_dmabuf, {2 * MIB} bytes")
    assert examine("dma-buf")["gpu dma-buf"] == seen
    size = 4096
    assert examine("dma-buf")["gpu dma-buf"][0] == "fail"


def test_doctor_sees_memory_that_ends_with_its_exporter(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = gpu._Exporter.kill

    def lose(self: gpu._Exporter) -> None:
        kill(self)
        if self.memory >= 0:
            os.pwrite(self.memory, b"lost", 0)

    monkeypatch.setattr(gpu._Exporter, "kill", lose)
    assert examine()["gpu exporter killed"][0] == "fail"


def test_doctor_says_that_host_memory_cannot_be_read_in_place(
    examine: Examine, fake: FakeDriver
) -> None:
    fake.gpus[0].attributes[Attribute.READ_ONLY_REGISTER] = 0
    level, seen = examine()["gpu host"]
    assert (level, seen) == ("warn", "Fake GPU can't register memory that is mapped read-only")


def test_doctor_says_that_cuda_makes_no_memory_in_the_hosts(
    examine: Examine, fake: FakeDriver
) -> None:
    assert "the host's NUMA node 1 was exported" in examine()["gpu host vmm"][1]

    def refuse(name: str) -> None:
        raise errors.UnsupportedError("none here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "host_node", property(refuse))
        assert examine()["gpu host vmm"] == ("warn", "none here")


def test_doctor_of_a_part_of_a_gpu(examine: Examine, fake: FakeDriver) -> None:
    fake.gpus[0].name = "NVIDIA H200 MIG 1g.18gb"
    found = examine()
    level, seen = found.pop("gpu")
    assert (level, seen.partition(":")[2][:34]) == ("fail", " NVIDIA H200 MIG 1g.18gb is a part")
    assert set(found.values()) == {("skip", "a part of a GPU")}


def test_doctor_of_a_gpu_that_is_not_there(examine: Examine) -> None:
    found = examine(name="5")
    level, seen = found.pop("gpu")
    assert (level, seen.partition(",")[0]) == ("fail", "gpu: there is no GPU 5 here")
    assert set(found.values()) == {("skip", "no GPU")}


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_the_command_fails_without_a_gpu(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "kmesh.cli", "--socket-dir", str(daemon.socket_dir)]
    done = subprocess.run(
        [*command, "doctor", "--gpu", "0", "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["slabs"]["level"] == "ok"
    assert checks["gpu export"] == {
        "name": "gpu export",
        "level": "skip",
        "seen": "no GPU",
        "fix": "",
    }
    status = subprocess.run(
        [*command, "status"], env=environment(), capture_output=True, text=True, timeout=100
    )
    assert "CUDA_VMM_FD" in status.stdout
    assert UUIDS[0] in status.stdout
    as_json = subprocess.run(
        [*command, "status", "--json"], env=environment(), capture_output=True, timeout=100
    )
    (seen,) = json.loads(as_json.stdout)["gpus"]
    assert (seen["device"], seen["slab_bytes"], seen["ready"]) == (UUIDS[0], 8 * MIB, True)


def test_memory_that_was_imported_survives_the_end_of_the_session(
    session: Session, device: Device
) -> None:
    with DeviceSlabs(session, device) as slabs:
        host, made = slabs.slab(0), slabs.slab(1)
        session.close()
        assert len(proof.fetch(device, host.address, 4)) == 4
        assert proof.fetch(device, made.address, 4) == bytes(4)
        with pytest.raises(errors.ConnectionClosed):
            slabs.slab(2)


def test_gpu_slabs_are_given_to_who_wants_nothing_of_the_host(daemon: Daemon) -> None:
    wish = {Tier.HOST: (HandleKind.CUDA_VMM_FD,), Tier.GPU: (HandleKind.CUDA_VMM_FD,)}
    with Session.connect(daemon.socket_dir, role=Role.TOOL, handles=wish) as session:
        assert not session.welcome.handles[Tier.HOST].chosen
        handle = session.export_slab(1)
        os.close(handle.fd)
        assert (handle.kind, handle.device) == (HandleKind.CUDA_VMM_FD, UUIDS[0])
        with pytest.raises(errors.InvalidArgument, match="CUDA_VMM_FD is not given"):
            session.export_slab(0)
        with pytest.raises(errors.UnsupportedError, match="slabs of host memory are not given"):
            session.slab(0)
