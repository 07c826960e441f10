"""A daemon's directory: what lies in the way there, and what may go wrong with what is written."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from room import settings

from kmesh.errors import ConfigError
from kmesh_spand.place import Place


@contextmanager
def no_room() -> Iterator[None]:
    """Files can't grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_lock_that_is_a_link_is_not_followed(socket_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("somebody's")
    socket_dir.mkdir(parents=True, exist_ok=True)
    (socket_dir / "daemon.lock").symlink_to(other)
    with pytest.raises(ConfigError, match=r"socket_dir: .* symbolic links"):
        Place.take(settings(socket_dir))
    assert other.read_text() == "somebody's"


def test_a_lock_that_can_not_be_written_locks(
    socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with no_room():
        place = Place.take(settings(socket_dir))
    try:
        assert "daemon.lock can't be written" in caplog.text
        with pytest.raises(ConfigError, match=r"another daemon serves \S+$"):
            Place.take(settings(socket_dir))
        place.sign()
        with pytest.raises(ConfigError, match=rf"serves \S+ \(process {os.getpid()}\)$"):
            Place.take(settings(socket_dir))
    finally:
        place.close()
    assert os.listdir(socket_dir) == ["daemon.lock"]


def test_a_socket_that_was_removed_ends_nobody(
    socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place.take(settings(socket_dir))
    try:
        (socket_dir / "session.sock").unlink()
        place.lent = True
        place.own(settings(socket_dir))
        assert "session.sock: " in caplog.text
        assert not place.lent
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(socket_dir / "upgrade.sock"))
    finally:
        place.close()


def test_a_daemon_whose_lock_was_removed_is_the_only_one_all_the_same(socket_dir: Path) -> None:
    place = Place.take(settings(socket_dir))
    try:
        assert place.locked()
        for away in ("removed", "replaced"):
            (socket_dir / "daemon.lock").unlink()
            if away == "replaced":
                (socket_dir / "daemon.lock").touch()
            assert not place.locked()
            with pytest.raises(ConfigError, match=r"serves \S+, and its daemon.lock is gone"):
                Place.take(settings(socket_dir))
            # Nothing of it was touched.
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(str(socket_dir / "session.sock"))
    finally:
        place.close()
    Place.take(settings(socket_dir)).close()


def test_a_lock_that_another_opening_has_is_not_held(socket_dir: Path) -> None:
    place = Place.take(settings(socket_dir))
    other = os.open(socket_dir / "daemon.lock", os.O_RDWR)
    try:
        shared = os.dup(place.lock)
        os.close(place.lock)
        place.lock = other
        assert not place.locked()
        os.close(shared)
        assert place.locked()
    finally:
        place.close()
