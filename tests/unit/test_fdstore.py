"""The store of file descriptors while its owner does not answer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kmesh_spand import notify
from kmesh_spand.fdstore import FdStore
from tools.service_manager import ServiceManager


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("FDSTORE", "16")
    return tmp_path / "notify"


@pytest.fixture
def manager(address: Path) -> Iterator[ServiceManager]:
    with ServiceManager(address, 16) as made:
        yield made
        if not address.exists():
            (address.parent / "away").rename(address)


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [os.memfd_create(f"test{number}", os.MFD_CLOEXEC) for number in range(4)]
    yield made
    for fd in made:
        os.close(fd)


def names_of(*numbers: int) -> list[str]:
    return [f"kmesh-store-{number}" for number in numbers]


def told(store: FdStore) -> None:
    """Lets what is owed be told."""
    end = time.monotonic() + 20
    while store.moment is not None:
        assert time.monotonic() < end
        time.sleep(0.01)
        store.retry()
    store.settle()


def test_what_could_not_be_told_is_told_in_order(
    manager: ServiceManager, address: Path, fds: list[int]
) -> None:
    store = FdStore(os.environ)
    zero, one, two, three = names_of(0, 1, 2, 3)
    for name, fd in ((zero, fds[0]), (one, fds[1])):
        store.put(name, fd)
    store.settle()
    assert manager.names == ["0", "1"]
    address.rename(address.parent / "away")
    store.remove(zero)
    store.put(two, fds[2])
    # Given up before it was known: nothing is to be kept of it.
    store.put(three, fds[3])
    store.remove(three)
    # One file descriptor less under the name, and another one.
    store.remove(one)
    store.put(one, fds[3])
    store.settle()
    assert store.moment is not None
    for _ in range(3):
        time.sleep(0.05)
        store.retry()
    assert store.moment is not None, "nobody was there"
    (address.parent / "away").rename(address)
    told(store)
    assert manager.names == ["1", "2"]
    assert os.path.sameopenfile(manager.fd("1"), fds[3])
    # And from then on as before.
    store.remove(two)
    told(store)
    assert manager.names == ["1"]
    store.close()


def test_nothing_is_held_for_a_store_that_never_comes_back(
    manager: ServiceManager, address: Path, fds: list[int]
) -> None:
    store = FdStore(os.environ)
    address.rename(address.parent / "away")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        for name, fd in zip(names_of(0, 1), fds, strict=False):
            store.remove(name)
            store.put(name, fd)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    store.close()
    assert store.moment is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert manager.names == []


def test_a_barrier_is_not_waited_for_behind_what_is_owed(
    manager: ServiceManager, address: Path, fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that has much to do stands still for seconds, and nothing here for so many.
    monkeypatch.setattr(notify, "SECONDS", 100.0)
    store = FdStore(os.environ)
    address.rename(address.parent / "away")
    began = time.monotonic()
    store.settle()
    store.put(names_of(0)[0], fds[0])
    store.settle()
    assert time.monotonic() - began < 50
    store.close()


def test_a_store_that_stays_away_is_asked_more_and_more_rarely(
    manager: ServiceManager, address: Path, fds: list[int]
) -> None:
    now = 1000.0
    store = FdStore(os.environ, clock=lambda: now)
    address.rename(address.parent / "away")
    store.put(names_of(0)[0], fds[0])
    waits = []
    for _ in range(12):
        assert store.moment is not None
        waits.append(store.moment - now)
        now = store.moment
        store.retry()
    store.close()
    assert waits == sorted(waits)
    assert waits[-1] >= 5


def test_a_store_that_came_back_is_asked_at_once_when_it_goes_again(
    manager: ServiceManager, address: Path, fds: list[int]
) -> None:
    now = 1000.0
    store = FdStore(os.environ, clock=lambda: now)
    away = address.parent / "away"

    def waited() -> float:
        assert store.moment is not None
        return store.moment - now

    address.rename(away)
    store.put(names_of(0)[0], fds[0])
    first = waited()
    for _ in range(8):
        now += waited()
        store.retry()
    assert waited() > first
    away.rename(address)
    now += waited()
    store.retry()
    assert store.moment is None
    address.rename(away)
    store.put(names_of(1)[0], fds[1])
    assert waited() == first
    store.close()
