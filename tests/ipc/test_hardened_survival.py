"""Sealed slabs outlive their daemon: they are served, and new ones are written.

Nobody can write them any more, and nobody can take a page from them: they are given back whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import COMMAND, Daemon, wait_for
from managed import Managed
from rawclient import DIGEST, RawClient
from stored import COUNT, SETTINGS, assert_filled, fill, key, payload

from kmesh.aio import AsyncSession
from kmesh.errors import NotFound
from kmesh.session import Role, Session
from kmesh.v1 import admin_pb2, admin_pb2_grpc, common_pb2

Start = Callable[..., Daemon]
HARDENED = {**SETTINGS, "hardened": "true", "grace_ms": 100}
HOST, SLAB = 32 << 20, 8 << 20
SLABS = HOST // SLAB
#: Three of them fill a slab.
LARGE = bytes(range(256)) * (5 << 11)


class House:
    """Daemons that follow each other in one way."""

    def __init__(self, how: str, start: Start, manager: Managed) -> None:
        self.how = how
        self.start = start
        self.manager = manager
        self.last: Daemon | None = None

    def daemon(self, **more: object) -> Daemon:
        """The next one, when the last one has ended or is there to be taken over."""
        settings = {**HARDENED, **more}
        last = self.last
        if self.how == "upgrade":
            command = (*COMMAND, "--upgrade") if last else COMMAND
            self.last = self.start(command=command, **settings)
            assert last is None or last.process.wait(60) == 0
            return self.last
        if last is not None:
            last.kill()
        self.last = self.manager.daemon(**settings)
        return self.last


@pytest.fixture
def manager(start_spand: Start, socket_dir: Path) -> Iterator[Managed]:
    with Managed(start_spand, socket_dir.parent / "notify") as made:
        yield made


@pytest.fixture
def house(request: pytest.FixtureRequest, start_spand: Start, manager: Managed) -> House:
    return House(getattr(request, "param", "upgrade"), start_spand, manager)


def slabs(daemon: Daemon) -> dict[int, admin_pb2.SlabInfo]:
    found = {slab.slab: slab for slab in daemon.status().slabs}
    # Of a place's two numbers only one is ever there.
    assert len({number % SLABS for number in found}) == len(found)
    assert sum(slab.size for slab in found.values()) <= HOST
    return found


def settle(daemon: Daemon, sealed: set[int]) -> None:
    """Waits until these are all that is sealed, and all else can be written."""

    def settled() -> bool:
        found = slabs(daemon)
        there = {number for number, slab in found.items() if slab.read_only}
        full = all(slab.populated == slab.capacity for slab in found.values())
        return there == sealed and len(found) == SLABS and full

    wait_for(settled)


def held(daemon: Daemon) -> dict[int, int]:
    """Bytes of all slabs that a process of the daemon has open or mapped, by inode."""
    found: dict[int, int] = {}
    for pid in (daemon.pid, daemon.child("control"), daemon.child("worker")):
        for folder in ("fd", "map_files"):
            for path in Path(f"/proc/{pid}/{folder}").iterdir():
                # What is closed while this looks is not held.
                with contextlib.suppress(FileNotFoundError):
                    if "kmesh-slab" in os.readlink(path):
                        about = path.stat()
                        found[about.st_ino] = about.st_blocks * 512
    return found


def writable(daemon: Daemon) -> set[int]:
    """Inodes of slabs that a process of the daemon has mapped writable."""
    found = set()
    for pid in (daemon.pid, daemon.child("control"), daemon.child("worker")):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, mode, _, _, inode, *path = line.split(maxsplit=5)
            if path and "kmesh-slab" in path[0] and "w" in mode:
                found.add(int(inode))
    return found


def inode(client: RawClient, slab: int) -> int:
    _, fd = client.attach_slab(slab)
    found = os.fstat(fd).st_ino
    client.fds.remove(fd)
    os.close(fd)
    return found


def store(client: RawClient, name: bytes, data: bytes) -> None:
    """Stores, as soon as there is room."""
    wait_for(lambda: client.store(name, data) in (0, common_pb2.REASON_EXISTS))
    assert client.read(name) == data


def evict_all(daemon: Daemon) -> None:
    with daemon.rpc() as (channel, token):
        request = admin_pb2.EvictRequest(namespace=DIGEST)
        assert admin_pb2_grpc.AdminStub(channel).Evict(request, metadata=token).spans > COUNT


def large(number: int) -> bytes:
    return b"large" + bytes([number]) * 27


def fill_all(daemon: Daemon) -> None:
    """Three spans in each of the slabs."""
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        for number in range(3 * SLABS):
            assert client.store(large(number), LARGE) == 0
    assert all(slab.used for slab in slabs(daemon).values())


def place_of(client: RawClient, name: bytes) -> int:
    """In which slab a span lies."""
    found = client.acquire([name])
    client.release(found.lease)
    return int(found.slab[0])


@pytest.mark.parametrize("house", ["upgrade", "kill"], indirect=True)
def test_sealed_spans_are_served_and_others_are_written(house: House) -> None:
    fill(house.daemon())
    second = house.daemon()
    assert_filled(second)
    settle(second, {0})
    counters = second.status().counters
    assert (counters["spans_recovered"], counters["spans_verified"]) == (COUNT, COUNT)
    assert counters["spans_slabs_given_up"] == SLABS - 1
    with RawClient(second.socket_dir) as client:
        store(client, b"n" * 32, b"new")
        assert place_of(client, b"n" * 32) in {5, 6, 7}
        assert place_of(client, key(3)) == 0
        sealed = inode(client, 0)
        assert sealed in held(second)
        assert sealed not in writable(second)
    assert sum(held(second).values()) <= HOST
    # What was written meanwhile is kept as well, and so is what is read-only.
    third = house.daemon()
    assert_filled(third)
    with RawClient(third.socket_dir) as client:
        wait_for(lambda: client.read(b"n" * 32) == b"new")
        settle(third, {0, place_of(client, b"n" * 32)})
        assert inode(client, 0) == sealed
    # An operator's wish empties them all.
    evict_all(third)
    settle(third, set())
    assert sealed not in held(third)
    assert sum(held(third).values()) <= HOST
    with RawClient(third.socket_dir) as client:
        store(client, key(3), payload(3))


def test_a_full_pool_gives_up_one_slab_for_what_is_new(house: House) -> None:
    fill_all(house.daemon())
    daemon = house.daemon()
    settle(daemon, set(range(SLABS)))
    names = [large(number) for number in range(3 * SLABS)]
    with RawClient(daemon.socket_dir) as client:
        wait_for(lambda: [client.read(name) for name in names] == [LARGE] * len(names))
        where = [place_of(client, name) for name in names]
        used_last = where[-1]
        # As long as somebody leases some of each, nothing is given up.
        leases = [client.acquire([large(where.index(slab))]) for slab in range(SLABS)]
        wait_for(lambda: client.store(b"n" * 32, b"new") == common_pb2.REASON_POOL_FULL)
        assert not daemon.status().counters["spans_slabs_given_up"]
        for lease in leases:
            client.release(lease.lease)
        store(client, b"n" * 32, b"new")
        left = [name for name in names if client.read(name) == LARGE]
        gone = {where[names.index(name)] for name in set(names) - set(left)}
        assert len(gone) == 1
        assert len(left) == len(names) - 3
        assert used_last not in gone
        assert place_of(client, b"n" * 32) == gone.pop() + SLABS
    assert sum(held(daemon).values()) <= HOST
    assert daemon.status().counters["spans_evicted"] == 3


def test_processes_die_beside_sealed_slabs(house: House) -> None:
    fill(house.daemon())
    daemon = house.daemon(errors=True)
    settle(daemon, {0})
    with RawClient(daemon.socket_dir) as client:
        store(client, b"n" * 32, b"new")
        sealed = inode(client, 0)
    pid = daemon.child("worker")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: daemon.child("worker") != pid)
    with RawClient(daemon.socket_dir) as client:
        assert client.read(b"n" * 32) == b"new"
        store(client, b"w" * 32, b"after the worker")
    os.kill(daemon.child("control"), signal.SIGKILL)
    daemon.wait_ready(2)
    with RawClient(daemon.socket_dir) as client:
        wait_for(lambda: client.read(b"w" * 32) == b"after the worker")
        store(client, b"c" * 32, b"after control")
    assert_filled(daemon)
    settle(daemon, {0})
    assert sealed not in writable(daemon)
    # As of any sealed slab, what control took over is given back when it is empty.
    evict_all(daemon)
    settle(daemon, set())
    assert sum(held(daemon).values()) <= HOST


def mapped(slab_inode: int) -> int:
    """How often this process has a slab mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(int(line.split(maxsplit=5)[4]) == slab_inode for line in lines)


def test_sessions_let_go_of_what_is_given_up(house: House) -> None:
    """Its memory is free only then. Who holds a mapping keeps it until it lets go."""
    fill(house.daemon())
    daemon = house.daemon()
    settle(daemon, {0})
    with RawClient(daemon.socket_dir) as client:
        store(client, b"n" * 32, b"new")
        sealed = inode(client, 0)
    told = threading.Event()
    with (
        Session.connect(daemon.socket_dir, role=Role.TOOL) as idle,
        Session.connect(daemon.socket_dir, role=Role.TOOL) as holder,
        Session.connect(daemon.socket_dir, role=Role.TOOL) as other,
    ):
        idle.slab(0)
        kept = holder.slab(0)
        other.slab(5)
        holder.on_slabs_gone(told.set)
        assert mapped(sealed) == 2
        evict_all(daemon)
        settle(daemon, set())
        assert told.wait(30)
        wait_for(lambda: mapped(sealed) == 1)
        assert idle.slabs_gone == holder.slabs_gone == {0}
        # It was never given to this one.
        other.ping()
        assert other.slabs_gone == set()
        assert bytes(kept.view(0, 1))
        del kept
        assert mapped(sealed) == 0
        with pytest.raises(NotFound):
            idle.slab(0)
        assert other.slab(5) is other.slab(5)


def test_sessions_of_an_event_loop_let_go_as_well(house: House) -> None:
    fill(house.daemon())
    daemon = house.daemon()
    settle(daemon, {0})
    with RawClient(daemon.socket_dir) as client:
        store(client, b"n" * 32, b"new")
        sealed = inode(client, 0)

    async def run() -> None:
        async with await AsyncSession.connect(daemon.socket_dir, role=Role.TOOL) as session:
            await session.slab(0)
            assert mapped(sealed) == 1
            await asyncio.to_thread(evict_all, daemon)
            for _ in range(300):
                await asyncio.sleep(0.1)
                if not mapped(sealed):
                    return
            pytest.fail("it is still mapped")

    asyncio.run(run())


#: Kills the process as it puts one slab in another's place.
_AT = """
import os, signal, sys
from kmesh_spand import storage
from kmesh_spand.__main__ import main
storage.Storage.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main())
"""


def slab_names(house: House) -> list[str]:
    return sorted(name for name in house.manager.names if name.startswith("slab-"))


@pytest.mark.parametrize("house", ["kill"], indirect=True)
def test_a_daemon_dies_as_it_replaces_a_slab(house: House) -> None:
    fill(house.daemon())
    assert house.last is not None
    house.last.kill()
    killed = house.manager.daemon(command=(sys.executable, "-c", _AT), ready=False, **HARDENED)
    assert killed.process.wait(60) == -signal.SIGKILL
    # The manager may have a word of it to read yet.
    wait_for(lambda: slab_names(house) == ["slab-0", "slab-2", "slab-3"])
    daemon = house.manager.daemon(errors=True, **HARDENED)
    assert_filled(daemon)
    settle(daemon, {0})
    wait_for(lambda: slab_names(house) == ["slab-0", "slab-1", "slab-6", "slab-7"])


@pytest.mark.parametrize("house", ["kill"], indirect=True)
def test_a_store_that_does_not_answer_is_told_later(house: House, socket_dir: Path) -> None:
    """As while systemd starts itself anew. What is given up would take memory for good there."""
    fill(house.daemon())
    daemon = house.daemon()
    settle(daemon, {0})
    before = ["slab-0", "slab-5", "slab-6", "slab-7"]
    wait_for(lambda: slab_names(house) == before)
    with RawClient(daemon.socket_dir) as client:
        store(client, b"o" * 32, b"old")
    address, away = socket_dir.parent / "notify", socket_dir.parent / "away"
    address.rename(away)
    try:
        evict_all(daemon)
        settle(daemon, set())
        with RawClient(daemon.socket_dir) as client:
            store(client, b"n" * 32, b"new")
        assert slab_names(house) == before
    finally:
        away.rename(address)
    wait_for(lambda: slab_names(house) == ["slab-4", "slab-5", "slab-6", "slab-7"])
    # All of it: nothing is missing, and nothing is there twice.
    daemon = house.daemon()
    with RawClient(daemon.socket_dir) as client:
        wait_for(lambda: client.read(b"n" * 32) == b"new")
    assert daemon.status().counters["spans_recovered"] == 1
