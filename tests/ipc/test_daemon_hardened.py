"""Hardened mode: no importer can write a slab, whoever it is; the store worker can, for good."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import Daemon, wait_for
from foreign import NOBODY, let_in, run_as
from probe import Faults
from rawclient import RawClient

from kmesh.v1 import common_pb2

Start = Callable[..., Daemon]
KEY, PAYLOAD = b"k" * 32, b"what is stored" * 5000

#: Every way to write a slab that is open to whoever may open it again through /proc.
_IMPORT = """
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
READ, WRITE, SHARED, PUNCH = 1, 2, 1, 3

def call(function, *arguments):
    ctypes.set_errno(0)
    result = function(*arguments)
    failed = result is None or result == ctypes.c_void_p(-1).value or result == -1
    return errno.errorcode[ctypes.get_errno()] if failed else "done"

def attempt(function, *arguments):
    try:
        function(*arguments)
    except OSError as failed:
        return errno.errorcode[failed.errno]
    return "done"

said = {}
for pid in sys.argv[2:]:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = os.readlink(path)
        except FileNotFoundError:
            continue
        if not link.startswith("/memfd:kmesh-slab"):
            continue
        path.chmod(0o600)
        fd = os.open(path, os.O_RDWR)
        size = os.fstat(fd).st_size
        address = libc.mmap(None, size, READ, SHARED, fd, 0)
        found = {
            "map": call(libc.mmap, None, size, READ | WRITE, SHARED, fd, 0),
            "protect": call(libc.mprotect, address, size, READ | WRITE),
            "write": attempt(os.pwrite, fd, b"x", 0),
            "punch": call(libc.fallocate, fd, PUNCH, 0, 4096),
            "seal": attempt(fcntl.fcntl, fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            "shrink": attempt(os.ftruncate, fd, 4096),
        }
        said.setdefault(json.dumps(found), []).append(pid)
print(json.dumps([json.loads(text) for text in said]))
"""
_REFUSED = {
    "map": "EPERM",
    "protect": "EACCES",
    "write": "EPERM",
    "punch": "EPERM",
    "seal": "EPERM",
    "shrink": "EPERM",
}


#: A daemon of another user, who may not be let to where Python lies. It stays as open to its own
#: user as one that was started by that user.
_AS = """
import ctypes, os, sys
import kmesh_spand.__main__, kmesh_spand.control.metrics, kmesh_spand.control.entry
import kmesh_spand.control.rpc, kmesh_spand.flags, kmesh_spand.supervisor, kmesh_spand.worker
os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})
ctypes.CDLL(None).prctl(4, 1)
sys.exit(kmesh_spand.__main__.main())
"""


def attack(daemon: Daemon, uid: int) -> list[dict[str, str]]:
    """The distinct outcomes over all slabs that any process of the daemon has open."""
    pids = [daemon.pid, daemon.child("control"), daemon.child("worker")]
    found = json.loads(run_as(uid, _IMPORT, daemon.socket_dir, *pids))
    assert isinstance(found, list)
    return found


def writable(pid: int) -> int:
    """Slabs that a process has mapped writable."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("kmesh-slab" in line and "w" in line.split()[1] for line in lines)


def store_and_read(daemon: Daemon, key: bytes) -> None:
    def stored() -> bool:
        with RawClient(daemon.socket_dir) as client:
            return client.store(key, PAYLOAD) == 0 and client.read(key) == PAYLOAD

    wait_for(stored)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to choose users")
@pytest.mark.parametrize("uid", [0, NOBODY])
def test_no_importer_can_write_a_slab(start_spand: Start, socket_dir: Path, uid: int) -> None:
    """Not of the daemon's own user, and not root."""
    os.chown(socket_dir.parent, uid, uid)
    command = (sys.executable, "-c", _AS.format(uid=uid))
    daemon = start_spand(
        hardened="true", slab_size="16MiB", allow_uids=f"{uid},0", share="all", command=command
    )
    daemon.wait_populated()
    assert daemon.socket_dir.stat().st_uid == uid
    store_and_read(daemon, KEY)
    assert attack(daemon, uid) == [_REFUSED]
    assert attack(daemon, 0) == [_REFUSED]
    with RawClient(daemon.socket_dir) as client:
        assert client.read(KEY) == PAYLOAD
    assert daemon.status().hardened


@pytest.mark.skipif(os.getuid() != 0, reason="foreign.run_as needs root")
def test_without_it_the_same_user_can(start_spand: Start) -> None:
    """The attack works where nothing stops it, so the test above tests something."""
    daemon = start_spand()
    daemon.wait_populated()
    (outcome,) = attack(daemon, 0)
    assert (outcome["map"], outcome["write"], outcome["punch"]) == ("done", "done", "done")
    assert not daemon.status().hardened


def test_only_supervisor_and_worker_can_write(start_spand: Start) -> None:
    daemon = start_spand(hardened="true", slab_size="16MiB")
    daemon.wait_populated()
    assert [writable(pid) for pid in (daemon.pid, daemon.child("control"))] == [2, 0]
    assert writable(daemon.child("worker")) == 2
    # The supervisor has them for those that it forks: it touches no page.
    rollup = Path(f"/proc/{daemon.pid}/smaps").read_text().split("kmesh-slab", 1)[1]
    rss = next(line for line in rollup.splitlines() if line.startswith("Rss:"))
    assert int(rss.split()[1]) == 0


@pytest.mark.parametrize("name", ["worker", "control"])
def test_stores_go_on_when_a_process_dies(start_spand: Start, name: str) -> None:
    daemon = start_spand(hardened="true", errors=True, grace_ms=100)
    daemon.wait_populated()
    store_and_read(daemon, KEY)
    pid = daemon.child(name)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: daemon.child(name) != pid)
    store_and_read(daemon, b"after".ljust(32))

    def kept() -> bool:
        with RawClient(daemon.socket_dir) as client:
            return client.read(KEY) == PAYLOAD

    wait_for(kept)
    with pytest.raises(PermissionError):
        daemon.flip(0)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_slab_changes_hands_in_hardened_mode(start_spand: Start) -> None:
    """Memory that nobody can punch is wiped through the worker's own mapping."""
    daemon = start_spand(hardened="true")
    daemon.wait_populated()
    let_in(daemon)
    with RawClient(daemon.socket_dir) as client:
        client.attach_staging(1 << 20)
        reserved = client.reserve([KEY], 100, b"a" * 32)
        client.call(abort={"reservation": list(reserved.reservation)})
        wait_for(lambda: client.store(KEY, PAYLOAD, b"b" * 32) == 0)
        assert client.read(KEY, b"b" * 32) == PAYLOAD
    assert daemon.status().counters["spans_wiped"] == 1


def test_sealed_slabs_are_given_as_what_was_made_of_them_before(
    start_spand: Start, tmp_path: Path
) -> None:
    """``tests/vm`` has the real thing; here memfds are made, on any machine."""
    faults = Faults(tmp_path / "faults")
    faults.begin("pretend")
    daemon = start_spand(hardened="true", dma_buf="slabs", slab_size="16MiB", **faults.settings)
    # Before it serves, all of them have their pages.
    for slab in (0, 1):
        status = os.stat(daemon.slab_fd(slab))
        assert status.st_blocks * 512 >= 16 << 20
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        assert client.store(KEY, PAYLOAD) == 0
        assert client.read(KEY) == PAYLOAD
        for slab in (0, 1):
            handle, (fd,) = client.call(
                attach_slab={"slab": slab, "kind": common_pb2.HANDLE_KIND_DMA_BUF}
            )
            assert "kmesh-pretended" in os.readlink(f"/proc/self/fd/{fd}")
            assert os.fstat(fd).st_size == handle.size == 16 << 20
            os.close(fd)
