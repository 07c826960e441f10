"""What KMesh asks of the CUDA driver, as an interface: tests replace the driver behind it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol


class Attribute(enum.IntEnum):
    """What a GPU can do; numbers as ``CUdevice_attribute``."""

    MULTIPROCESSORS = 16
    COMPUTE_MAJOR = 75
    COMPUTE_MINOR = 76
    VIRTUAL_MEMORY = 102
    POSIX_FD = 103
    RDMA_WITH_VMM = 110
    READ_ONLY_REGISTER = 113
    DMA_BUF = 124
    HOST_NUMA_ID = 134


class Driver(Protocol):
    """One method for each call. Devices are the driver's ordinals, addresses and handles numbers.

    Every method raises CudaError when the driver refuses. Calls that move bytes return when they
    are moved. Where nothing else is said a context must be current in the calling thread.
    """

    def version(self) -> int:
        """1000 times the major version, and 10 times the minor one. Needs no context."""

    def device_count(self) -> int:
        """GPUs that this process sees. Needs no context."""

    def device_uuid(self, device: int) -> str:
        """``GPU-`` and its UUID, as ``nvidia-smi -L`` prints it. Needs no context."""

    def device_name(self, device: int) -> str:
        """As its maker calls it. Needs no context."""

    def attribute(self, device: int, attribute: Attribute) -> int:
        """What the GPU can do. Needs no context."""

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether a GPU can be given access to another one's memory. Needs no context."""

    def retain_context(self, device: int) -> int:
        """The GPU's primary context, which ``release_context`` gives back."""

    def release_context(self, device: int) -> None:
        """One ``retain_context`` is over."""

    def push_context(self, context: int) -> None:
        """Makes a context the calling thread's current one."""

    def pop_context(self) -> None:
        """Makes the one before current again."""

    def relax_capture(self) -> None:
        """What the calling thread calls from here on neither fails nor spoils a CUDA graph that
        another thread captures, whatever that one asked for."""

    def memory_info(self) -> tuple[int, int]:
        """Free bytes and all bytes of the current context's GPU."""

    def granularity(self, device: int, *, rdma: bool, node: int | None = None) -> int:
        """Sizes of ``create`` are multiples of it; arguments as there."""

    def create(self, device: int, size: int, *, rdma: bool, node: int | None = None) -> int:
        """Physical memory on a GPU that can be exported; its handle. Needs no context.

        Args:
            rdma: a NIC may reach it.
            node: NUMA node of the host in whose memory it is made, instead of the GPU's.
        """

    def release(self, handle: int) -> None:
        """Gives a handle back; mappings and exported fds keep the memory."""

    def export_fd(self, handle: int) -> int:
        """A file descriptor that stands for the memory; the caller owns it."""

    def import_fd(self, fd: int) -> int:
        """A handle of exported memory; ``fd`` stays the caller's."""

    def reserve(self, size: int) -> int:
        """An address range of the GPU with nothing behind it."""

    def unreserve(self, address: int, size: int) -> None:
        """Gives a range back that nothing is mapped in."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Puts memory behind a range; nobody may touch it yet."""

    def unmap(self, address: int, size: int) -> None:
        """Takes the memory away from a range."""

    def set_access(self, address: int, size: int, device: int, *, writable: bool) -> None:
        """What a GPU may do with a mapped range."""

    def dma_buf(self, address: int, size: int, *, pcie: bool) -> int:
        """A DMA-BUF of mapped GPU memory; the caller owns the fd.

        Args:
            pcie: reached over PCIe: some platforms require it, others refuse it.
        """

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        """Lets GPUs reach this process's memory. ``read_only``: they may not write it."""

    def unregister(self, address: int) -> None:
        """Ends what ``register`` began at that address."""

    def device_pointer(self, address: int) -> int:
        """Where GPUs see registered memory."""

    def allocate(self, size: int) -> int:
        """Plain memory on the current context's GPU."""

    def free(self, address: int) -> None:
        """Gives back what ``allocate`` gave."""

    def fill(self, address: int, value: int, size: int) -> None:
        """Sets bytes of GPU memory."""

    def write(self, address: int, source: int, size: int) -> None:
        """Host memory at ``source`` → GPU memory at ``address``."""

    def read(self, target: int, address: int, size: int) -> None:
        """GPU memory at ``address`` → host memory at ``target``."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Between addresses that the GPU sees."""

    # Kernels, and what happens in their order.

    def create_stream(self) -> int:
        """A stream that waits for no other."""

    def destroy_stream(self, stream: int) -> None:
        """It is over when what was started on it has ended."""

    def synchronize(self, stream: int) -> None:
        """Waits for all that was started on a stream."""

    def copy_async(self, target: int, source: int, size: int, stream: int) -> None:
        """Starts a copy between addresses of GPUs or of this process. From or to memory that is
        not registered it may be done when this returns."""

    def fill_async(self, address: int, value: int, size: int, stream: int) -> None:
        """Starts to set bytes of GPU memory."""

    def load_module(self, image: bytes) -> int:
        """Compiled kernels (a cubin)."""

    def unload_module(self, module: int) -> None:
        """Its functions are no more."""

    def function(self, module: int, name: str) -> int:
        """A kernel of a module."""

    def launch(
        self,
        function: int,
        blocks: int,
        threads: int,
        shared: int,
        stream: int,
        arguments: Sequence[int],
    ) -> None:
        """Starts a kernel.

        Args:
            shared: bytes of a block's dynamic shared memory.
            arguments: of 64 bits each.
        """


def load() -> Driver:
    """The machine's driver, initialised.

    Raises:
        UnsupportedError: there is none, or it is too old.
        CudaError: it doesn't start, for example because there is no GPU.
    """
    from kmesh.cuda.libcuda import LibCuda

    return LibCuda()
