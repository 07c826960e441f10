"""GPU memory through the driver's interface: made, exported, imported, registered, undone."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator

import pytest
from fake_cuda import GRANULARITY, MIB, UUIDS, FakeDriver, Gpu, refuse_nth

from kmesh import _host
from kmesh.cuda import driver as driver_module
from kmesh.cuda.device import Device, check_name, find
from kmesh.cuda.driver import Attribute
from kmesh.cuda.memory import DeviceMemory, Registration
from kmesh.errors import ConfigError, CudaError, UnsupportedError
from kmesh.mapping import Mapping
from kmesh_spand.memory import make_memfd, reopen_read_only

NOTHING = dict.fromkeys(FakeDriver().ledger(), 0)


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver(Gpu(), Gpu(UUIDS[1], "Other GPU"))


@pytest.fixture
def device(fake: FakeDriver) -> Iterator[Device]:
    with Device(fake, "0") as opened:
        yield opened
    assert fake.ledger() == NOTHING


@pytest.mark.parametrize(
    ("name", "means"),
    [("0", "0"), ("007", "7"), (UUIDS[1].upper().replace("GPU", "gpu", 0), UUIDS[1])],
)
def test_names_of_gpus(name: str, means: str) -> None:
    assert check_name(name) == means


@pytest.mark.parametrize("name", ["", "-1", "0.5", "GPU-", UUIDS[0][:-1], UUIDS[0] + "0", "MI-1"])
def test_what_names_no_gpu(name: str) -> None:
    with pytest.raises(ValueError, match="no GPU"):
        check_name(name)


def test_parts_of_a_gpu_are_refused_by_name_and_where_they_are_shared(fake: FakeDriver) -> None:
    mig = UUIDS[0].replace("GPU", "MIG")
    with pytest.raises(ConfigError, match=rf"gpu: '{mig}' is a part of a GPU \(MIG\): only whole"):
        find(fake, mig)
    fake.gpus[1].name = "NVIDIA H200 MIG 1g.18gb"
    with Device(fake, "1") as part, Device(fake, "0") as whole:
        assert (part.part, whole.part) == (True, False)
        whole.check_whole()
        with pytest.raises(UnsupportedError, match=r"^gpu: NVIDIA H200 MIG 1g.18gb is a part of"):
            part.check_whole()
    assert fake.ledger() == NOTHING


def test_gpus_are_found_by_number_and_uuid(fake: FakeDriver) -> None:
    assert find(fake, "1") == find(fake, UUIDS[1]) == 1
    with pytest.raises(ConfigError, match=rf"no GPU 2 here, only 0 \({UUIDS[0]}\), 1 "):
        find(fake, "2")
    with pytest.raises(ConfigError, match="gpu: there is no GPU GPU-0"):
        find(fake, UUIDS[0].replace("a0", "a1"))
    with pytest.raises(ConfigError, match="gpu: 'x' is no GPU"):
        find(fake, "x")


def test_only_the_gpu_that_is_asked_for_gets_a_context(fake: FakeDriver) -> None:
    with Device(fake, UUIDS[1]) as opened:
        assert (opened.ordinal, opened.uuid, opened.name) == (1, UUIDS[1], "Other GPU")
        assert fake._contexts == {1: 1}
        assert opened.memory_info() == (256 * MIB, 256 * MIB)
    with pytest.raises(ValueError, match="closed"):
        opened.memory_info()
    assert fake.ledger() == NOTHING


@pytest.mark.parametrize("missing", [Attribute.VIRTUAL_MEMORY, Attribute.POSIX_FD])
def test_a_gpu_that_cannot_export_is_refused(missing: Attribute) -> None:
    fake = FakeDriver(Gpu(attributes={missing: 0}))
    with pytest.raises(UnsupportedError, match=missing.name):
        Device(fake, "0")
    assert fake.ledger() == NOTHING


def test_memory_is_made_with_rdma_where_that_is_supported() -> None:
    for supported in (0, 1):
        fake = FakeDriver(Gpu(attributes={Attribute.RDMA_WITH_VMM: supported}))
        with Device(fake, "0") as device, DeviceMemory.create(device, GRANULARITY):
            assert device.rdma == bool(supported)


def test_exported_memory_is_the_same_and_outlives_its_maker(device: Device) -> None:
    with DeviceMemory.create(device, 2 * GRANULARITY) as made:
        made.write(b"pattern", 12345)
        fd = made.export()
    try:
        with DeviceMemory.open(device, fd, 2 * GRANULARITY) as opened:
            os.close(fd)
            fd = -1
            assert opened.read(12345, 7) == b"pattern"
            assert not opened.writable
            with pytest.raises(CudaError, match="cuMemcpyHtoD_v2: CUDA_ERROR_INVALID_VALUE"):
                opened.write(b"x")
            with pytest.raises(CudaError, match="cuMemsetD8"):
                opened.fill(1)
            assert opened.read(12345, 7) == b"pattern"
    finally:
        if fd >= 0:
            os.close(fd)


def test_memory_in_the_hosts_is_made_exported_and_imported(device: Device) -> None:
    free = device.memory_info()
    assert device.host_node == 1
    # More than the GPU has.
    with DeviceMemory.create(device, 512 * MIB, node=device.host_node) as made:
        made.write(b"pattern", 12345)
        fd = made.export()
        assert device.memory_info() == free
    with DeviceMemory.open(device, fd, 512 * MIB) as opened:
        os.close(fd)
        assert opened.read(12345, 7) == b"pattern"
        with pytest.raises(CudaError, match="cuMemcpyHtoD_v2: CUDA_ERROR_INVALID_VALUE"):
            opened.write(b"x")


def test_a_driver_that_knows_no_nodes_of_the_host_is_said(fake: FakeDriver) -> None:
    with Device(fake, "0") as device:

        def old(name: str) -> None:
            if name == "attribute":
                raise CudaError("cuDeviceGetAttribute", 1, "CUDA_ERROR_INVALID_VALUE")

        fake.refuse = old
        with pytest.raises(UnsupportedError, match=r"Fake GPU's driver makes no .*CUDA 12\.2 does"):
            _ = device.host_node


def test_ranges_are_checked_before_the_driver_sees_them(device: Device) -> None:
    with DeviceMemory.create(device, GRANULARITY) as made:
        for offset, length in ((-1, 4), (0, 0), (GRANULARITY, 1), (1, GRANULARITY)):
            with pytest.raises(ValueError, match="are not in"):
                made.read(offset, length)
    with pytest.raises(ValueError, match="are not in"):
        made.read(0, 1)
    with pytest.raises(ValueError, match="closed"):
        made.export()
    made.close()


@pytest.mark.parametrize("size", [0, -GRANULARITY, GRANULARITY + 4096])
def test_sizes_that_are_no_multiple_are_refused(device: Device, size: int) -> None:
    with pytest.raises(ConfigError, match="no multiple of 2097152"):
        DeviceMemory.create(device, size)


def test_a_file_that_is_no_gpu_memory_is_refused(device: Device) -> None:
    fd = make_memfd("other", GRANULARITY)
    try:
        with pytest.raises(CudaError, match="cuMemImportFromShareableHandle"):
            DeviceMemory.open(device, fd, GRANULARITY)
    finally:
        os.close(fd)


def test_memory_that_is_smaller_than_promised_is_refused(device: Device) -> None:
    with DeviceMemory.create(device, GRANULARITY) as made:
        fd = made.export()
        with pytest.raises(CudaError, match="cuMemMap"):
            DeviceMemory.open(device, fd, 2 * GRANULARITY)
        os.close(fd)


def test_memory_runs_out(device: Device) -> None:
    with (
        DeviceMemory.create(device, 200 * MIB),
        pytest.raises(CudaError, match=r"cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY \(2\)"),
    ):
        DeviceMemory.create(device, 100 * MIB)


def test_dma_buf_tries_both_ways_and_says_when_there_is_none() -> None:
    def only_pcie(name: str) -> None:
        if name == "dma_buf" and fake.calls.count("dma_buf") == 1:
            raise CudaError(name, 801, "CUDA_ERROR_NOT_SUPPORTED")

    fake = FakeDriver(Gpu(attributes={}), refuse=only_pcie)
    with Device(fake, "0") as device, DeviceMemory.create(device, GRANULARITY) as made:
        os.close(made.dma_buf())
        assert fake.calls.count("dma_buf") == 2
    fake = FakeDriver()
    with Device(fake, "0") as device, DeviceMemory.create(device, GRANULARITY) as made:
        with pytest.raises(UnsupportedError, match="no DMA-BUF"):
            made.dma_buf()
        assert "dma_buf" not in fake.calls


@pytest.fixture
def host() -> Iterator[Mapping]:
    """An importer's mapping of the daemon's memory."""
    fd = make_memfd("host", 64 * mmap.PAGESIZE)
    seen = reopen_read_only(fd)
    os.pwrite(fd, b"pattern", 5 * mmap.PAGESIZE)
    with Mapping(seen, 64 * mmap.PAGESIZE) as mapping:
        os.close(fd)
        os.close(seen)
        yield mapping


def test_host_memory_is_registered_in_chunks(device: Device, host: Mapping) -> None:
    fake = device.driver
    assert isinstance(fake, FakeDriver)
    made = Registration(device, host.address, host.size, chunk=24 * mmap.PAGESIZE)
    assert fake.calls.count("register") == 3
    assert fake.ledger()["registered"] == host.size
    with device.current() as driver:
        scratch = driver.allocate(7)
        driver.copy(scratch, made.address + 5 * mmap.PAGESIZE, 7)
        back = bytearray(7)
        driver.read(_host.address(back), scratch, 7)
        with pytest.raises(CudaError):
            driver.write(made.address, _host.address(back), 7)
        driver.free(scratch)
    assert back == b"pattern"
    made.close()
    made.close()


def test_a_gpu_that_needs_writable_memory_is_told_apart(host: Mapping) -> None:
    fake = FakeDriver(Gpu(attributes={Attribute.READ_ONLY_REGISTER: 0}))
    with Device(fake, "0") as device, pytest.raises(UnsupportedError, match="read-only"):
        Registration(device, host.address, host.size)
    assert "register" not in fake.calls


def test_pieces_that_are_seen_apart_are_refused(device: Device, host: Mapping) -> None:
    fake = device.driver
    inner = FakeDriver.device_pointer
    fake.device_pointer = lambda at: inner(fake, at) + (4096 if at > host.address else 0)  # type: ignore[arg-type, method-assign]
    with pytest.raises(UnsupportedError, match="apart"):
        Registration(device, host.address, host.size, chunk=32 * mmap.PAGESIZE)


def _make(device: Device, _: Mapping) -> None:
    with DeviceMemory.create(device, GRANULARITY) as made:
        made.fill(0)
        os.close(made.export())


def _open(device: Device, _: Mapping) -> None:
    with DeviceMemory.create(device, GRANULARITY) as made:
        fd = made.export()
        try:
            with DeviceMemory.open(device, fd, GRANULARITY) as opened:
                opened.read(0, 4)
        finally:
            os.close(fd)


def _register(device: Device, host: Mapping) -> None:
    Registration(device, host.address, host.size, chunk=24 * mmap.PAGESIZE).close()


@pytest.mark.parametrize("what", [_make, _open, _register])
def test_a_call_that_fails_leaves_nothing(
    what: Callable[[Device, Mapping], None], host: Mapping
) -> None:
    """Each call of a whole use is refused once. What the driver would not take back stays."""
    whole = FakeDriver(Gpu(attributes={}))
    with Device(whole, "0") as device:
        begins = len(whole.calls)
        what(device, host)
        ends = len(whole.calls)
    giving = {"release", "unreserve", "unmap", "unregister", "pop_context", "release_context"}
    seen = set()
    for number in range(begins + 1, ends + 1):
        fake = FakeDriver(Gpu(attributes={}), refuse=refuse_nth(number))
        device = Device(fake, "0")
        with pytest.raises(CudaError) as failed:
            what(device, host)
        seen.add(failed.value.call)
        step = whole.calls[number - 1 : number + 1]
        if not giving & set(step if step[0] == "push_context" else step[:1]):
            device.close()
            assert fake.ledger() == NOTHING, failed.value
        fake.end()
    assert len(seen) > 5


def test_a_device_that_fails_at_each_step_leaves_nothing() -> None:
    whole = FakeDriver()
    Device(whole, "0").close()
    for number in range(1, len(whole.calls)):
        fake = FakeDriver(refuse=refuse_nth(number))
        with pytest.raises(CudaError):
            Device(fake, "0")
        assert fake.ledger() == NOTHING


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_without_a_driver_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((UnsupportedError, CudaError), match=r"CUDA driver|cuInit"):
        driver_module.load()
    monkeypatch.setattr("kmesh.cuda.libcuda._LIBRARY", "libc.so.6")
    with pytest.raises(UnsupportedError, match="too old: it has no cuInit"):
        driver_module.load()
