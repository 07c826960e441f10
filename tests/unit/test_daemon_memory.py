"""Memfds, filling them, and the limits that the machine sets."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import environment
from room import settings

from kmesh.dmabuf import NotExported
from kmesh.errors import ConfigError
from kmesh.handles import HandleRefusal
from kmesh.mapping import Mapping
from kmesh_spand import memory
from kmesh_spand.memory import MemoryLimit
from kmesh_spand.storage import Storage


def test_a_memfd_keeps_its_size_and_is_zero() -> None:
    fd = memory.make_memfd("test", 8192)
    try:
        seals = memory.SIZE_SEALS | fcntl.F_SEAL_SEAL
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == seals
        assert not os.get_inheritable(fd)
        assert os.fstat(fd).st_mode & 0o777 == 0o400
        for size in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert os.pread(fd, 8192, 0) == bytes(8192)
    finally:
        os.close(fd)


def test_a_read_only_reopen_shares_the_memory() -> None:
    fd = memory.make_memfd("test", 4096)
    reader = memory.reopen_read_only(fd)
    try:
        os.pwrite(fd, b"shared", 0)
        assert os.pread(reader, 6, 0) == b"shared"
        with pytest.raises(PermissionError):
            mmap.mmap(reader, 4096)
    finally:
        os.close(reader)
        os.close(fd)


@pytest.mark.parametrize("threads", [1, 3])
def test_populating_tells_how_far_it_is(threads: int) -> None:
    size = 100 << 20
    fd = memory.make_memfd("test", size)
    told: list[int] = []
    try:
        with Mapping(fd, size, writable=True) as mapping:
            ranges = [(96 << 20, 4 << 20), (0, 96 << 20)]
            filler = memory.Populator(fd, mapping.address, ranges, huge=False, done=told.append)
            assert os.fstat(fd).st_blocks == 0
            filler.run(threads)
        assert os.fstat(fd).st_blocks * 512 >= size
        assert told == sorted(told)
        assert told[-1] == size
        # Of several threads the one with the first piece may be the last to end.
        assert threads > 1 or len(told) >= 2
    finally:
        os.close(fd)


_NICE = """
import os
import resource
from kmesh_spand import memory
fd = memory.make_memfd("m", 1 << 20)
os.nice(19)
os.setresuid(65534, 65534, 65534)
told = []
memory.Populator(fd, 0, [(0, 1 << 20)], huge=False, done=told.append).run(2)
print(told, os.fstat(fd).st_blocks)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become a user who may not")
def test_a_user_whose_daemon_is_nice_already_has_memory_populated() -> None:
    """It may not be less nice, and threads that tried would be gone."""
    ran = subprocess.run(
        [sys.executable, "-c", _NICE], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.stderr) == (f"[{1 << 20}] {(1 << 20) // 512}\n", "")


def test_populating_by_touch_also_works() -> None:
    size = 4 << 20
    fd = memory.make_memfd("test", size)
    try:
        with Mapping(fd, size, writable=True) as mapping:
            memory.populate_range(fd, mapping.address, 0, size, huge=True)
            assert os.fstat(fd).st_blocks * 512 >= size
            assert memory.hugepages_granted(mapping.address) in (True, False)
    finally:
        os.close(fd)


def test_what_is_populated_is_mapped() -> None:
    """Whoever writes it first does not wait for the kernel at each page."""
    size = 8 << 20
    fd = memory.make_memfd("test", size)
    try:
        with Mapping(fd, size, writable=True) as mapping:
            memory.populate_range(fd, mapping.address, 0, size, huge=False)
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            ctypes.memset(mapping.address, 1, size)
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert faults < size // mmap.PAGESIZE // 8
    finally:
        os.close(fd)


def test_no_memory_is_an_error_not_a_signal() -> None:
    fd = memory.make_memfd("test", 4096)
    try:
        filler = memory.Populator(fd, 0, [(0, 4096), (1 << 62, 4096)], huge=False, done=print)
        with pytest.raises(OSError, match=r"too large|not permitted"):
            filler.run(2)
    finally:
        os.close(fd)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_of_control_groups_v2(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2048 kB\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": "1048576\n",
        },
    )
    assert memory.memory_limits(root) == [
        MemoryLimit(1 << 20, str(root / "sys/fs/cgroup/a/memory.max")),
        MemoryLimit(2 << 20, "/proc/meminfo, MemAvailable"),
    ]


def test_limits_of_control_groups_v1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/\n0::/\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "4096\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    source = root / "sys/fs/cgroup/memory/x/memory.limit_in_bytes"
    assert memory.memory_limits(root) == [MemoryLimit(4096, str(source))]


def test_limits_of_a_container_that_sees_only_its_own_group(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/elsewhere\n",
            "sys/fs/cgroup/memory.max": "4096\n",
        },
    )
    assert memory.memory_limits(root) == [MemoryLimit(4096, str(root / "sys/fs/cgroup/memory.max"))]


def test_promises_beyond_a_limit_are_refused() -> None:
    limits = [MemoryLimit(10 << 20, "/limit")]
    memory.check_memory(6 << 20, 2 << 20, 1 << 20, 1 << 20, limits)
    with pytest.raises(ConfigError, match=r"^host_memory: 11 MiB .* 10 MiB that /limit allows$"):
        memory.check_memory(11 << 20, 0, 0, 0, limits)
    with pytest.raises(ConfigError, match=r"^staging_memory: with host_memory 12 MiB"):
        memory.check_memory(8 << 20, 4 << 20, 0, 0, limits)
    with pytest.raises(ConfigError, match=r"^max_spans: catalog and indexes with .* 11 MiB"):
        memory.check_memory(8 << 20, 2 << 20, 1 << 20, 0, limits)
    with pytest.raises(ConfigError, match=r"^gpu_memory: .* 11 MiB is more than"):
        memory.check_memory(6 << 20, 2 << 20, 1 << 20, 2 << 20, limits)


def test_slabs_that_are_sealed_and_exported_have_their_pages_as_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export makes the pages that are missing, as it likes: huge ones only before it."""
    told: list[str] = []

    def advise(_address: int, _size: int) -> bool:
        told.append("huge")
        return True

    def export(fd: int, ranges: list[tuple[int, int]]) -> int:
        ((_, size),) = ranges
        told.append("whole" if os.fstat(fd).st_blocks * 512 >= size else "sparse")
        return os.dup(fd)

    monkeypatch.setattr(memory, "hugepages_allowed", lambda: True)
    monkeypatch.setattr(memory, "advise_hugepages", advise)
    monkeypatch.setattr("kmesh.dmabuf.probe", lambda: None)
    monkeypatch.setattr("kmesh.dmabuf.create", export)
    chosen = settings(
        tmp_path, host_memory="4MiB", slab_size="2MiB", hardened="true", dma_buf="slabs"
    )
    storage = Storage(chosen)
    try:
        assert told == ["huge", "whole"] * 2
    finally:
        storage.drop_writable()
        storage.close()


def test_without_a_device_sealed_slabs_stay_sparse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking() -> None:
        raise NotExported(HandleRefusal.NO_DEVICE, "no device")

    monkeypatch.setattr("kmesh.dmabuf.probe", lacking)
    storage = Storage(settings(tmp_path, hardened="true", dma_buf="slabs"))
    try:
        assert storage.dma_bufs.refusal is HandleRefusal.NO_DEVICE
        assert not os.fstat(storage.slabs[0].fd).st_blocks
    finally:
        storage.drop_writable()
        storage.close()
