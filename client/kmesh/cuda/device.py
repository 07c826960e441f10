"""One GPU of this process, found by UUID or number."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from kmesh.cuda.driver import Attribute, Driver
from kmesh.errors import ConfigError, CudaError, UnsupportedError

_UUID = re.compile(
    r"GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z", re.IGNORECASE
)
_NUMBER = re.compile(r"\d{1,4}\Z")
_PART_UUID = re.compile(r"MIG-", re.IGNORECASE)
#: In the driver's name of an instance: "NVIDIA H200 MIG 1g.18gb".
_PART_NAME = re.compile(r" MIG \d")


def check_name(name: str) -> str:
    """A GPU's name as it is compared: a number, or its UUID in lower case.

    Raises:
        ValueError: it is neither, or an instance of a GPU that is split (MIG).
    """
    if _PART_UUID.match(name):
        raise ValueError(f"{name!r} is a part of a GPU (MIG): only whole GPUs are served")
    if _NUMBER.match(name):
        return str(int(name))
    if _UUID.match(name):
        return "GPU-" + name[4:].lower()
    raise ValueError(f"{name!r} is no GPU: write its number, or its UUID as nvidia-smi -L shows it")


def see_all() -> None:
    """Lets this process see every GPU, counted as ``nvidia-smi`` does; before ``driver.load``.

    For processes of KMesh's own: which GPU is meant does not depend on the environment.
    """
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def find(driver: Driver, name: str) -> int:
    """The driver's ordinal of a GPU.

    Args:
        name: number or UUID.

    Raises:
        ConfigError: there is no such GPU; says which there are.
        CudaError: the driver refuses.
    """
    try:
        wanted = check_name(name)
    except ValueError as wrong:
        raise ConfigError(f"gpu: {wrong}") from None
    there = [driver.device_uuid(device) for device in range(driver.device_count())]
    if wanted in there:
        return there.index(wanted)
    if wanted.isdigit() and int(wanted) < len(there):
        return int(wanted)
    shown = ", ".join(f"{device} ({uuid})" for device, uuid in enumerate(there))
    raise ConfigError(f"gpu: there is no GPU {wanted} here" + (f", only {shown}" if there else ""))


class Device:
    """A GPU with a context in this process: its primary one, which frameworks use too.

    Attributes:
        driver: behind it.
        ordinal: as the driver counts.
        uuid: of the GPU. name: as its maker calls it.
        rdma: NICs may reach memory that is made with ``DeviceMemory.create``.
        part: it is an instance of a GPU that is split (MIG). Its UUID is not the GPU's, and of its
            siblings the driver shows none.

    Args:
        name: number or UUID.

    Raises:
        ConfigError: there is no such GPU.
        UnsupportedError: it can't export memory.
        CudaError: the driver refuses.
    """

    def __init__(self, driver: Driver, name: str) -> None:
        self.driver = driver
        self.ordinal = find(driver, name)
        self.uuid = driver.device_uuid(self.ordinal)
        self.name = driver.device_name(self.ordinal)
        self.part = bool(_PART_NAME.search(self.name))
        for needed in (Attribute.VIRTUAL_MEMORY, Attribute.POSIX_FD):
            if not self.can(needed):
                raise UnsupportedError(f"{self.name} ({self.uuid}) has no {needed.name}")
        self.rdma = self.can(Attribute.RDMA_WITH_VMM)
        self._context: int | None = driver.retain_context(self.ordinal)

    def check_whole(self) -> None:
        """For whoever shares memory of it with other processes.

        Raises:
            UnsupportedError: it is a part of a GPU: how processes share that is not known.
        """
        if self.part:
            raise UnsupportedError(
                f"gpu: {self.name} is a part of a GPU (MIG): only whole GPUs are served;"
                " end MIG mode (nvidia-smi -mig 0) or name another GPU"
            )

    def can(self, attribute: Attribute) -> bool:
        """Whether the GPU has it."""
        return bool(self.driver.attribute(self.ordinal, attribute))

    def peers(self) -> dict[str, int]:
        """Other GPUs that this process sees and whose memory this one can read: ordinal by UUID.

        One that the driver can't tell of is none.
        """
        found = {}
        for peer in range(self.driver.device_count()):
            with suppress(CudaError):
                if peer != self.ordinal and self.driver.can_access_peer(self.ordinal, peer):
                    found[self.driver.device_uuid(peer)] = peer
        return found

    @contextmanager
    def current(self) -> Iterator[Driver]:
        """The driver, with this GPU's context current in this thread until the block ends.

        Raises:
            ValueError: the device is closed.
        """
        if self._context is None:
            raise ValueError(f"{self.uuid} is closed")
        self.driver.push_context(self._context)
        try:
            yield self.driver
        finally:
            self.driver.pop_context()

    def enter(self) -> None:
        """For a thread that calls CUDA beside one that may capture graphs: before all else.

        A capture in CUDA's mode "global", the usual one, forbids other threads whatever it does
        not expect: such a call fails, and the capture with it. May be called again.
        """
        with self.current() as driver:
            driver.relax_capture()

    def memory_info(self) -> tuple[int, int]:
        """Free bytes and all bytes of the GPU."""
        with self.current() as driver:
            return driver.memory_info()

    def granularity_on(self, node: int | None) -> int:
        """Sizes of memory that is made there are multiples of it; None: on the GPU."""
        return self.driver.granularity(self.ordinal, rdma=self.rdma, node=node)

    @property
    def granularity(self) -> int:
        """Sizes of memory that is made here are multiples of it."""
        return self.granularity_on(None)

    @property
    def host_node(self) -> int:
        """The host's NUMA node that is next to the GPU, in which ``DeviceMemory`` can be made.

        Raises:
            UnsupportedError: the driver knows of none (before CUDA 12.2).
        """
        try:
            return max(self.driver.attribute(self.ordinal, Attribute.HOST_NUMA_ID), 0)
        except CudaError as refused:
            raise UnsupportedError(
                f"{self.name}'s driver makes no memory in the host's (CUDA 12.2 does): {refused}"
            ) from None

    def close(self) -> None:
        """Gives the context back; memory made with it must be closed before."""
        if self._context is not None:
            self._context = None
            self.driver.release_context(self.ordinal)

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
