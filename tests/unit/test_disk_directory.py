"""The disk tier's directory: made, known again, refused."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kmesh.errors import ConfigError
from kmesh_spand import diskdir
from kmesh_spand.units import format_size


def test_a_directory_is_made_and_known_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diskdir, "_PATIENCE_SECONDS", 0.0)
    first = diskdir.open_directory(str(tmp_path / "disk"))
    assert stat.S_IMODE((tmp_path / "disk").stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="another daemon uses it"):
        diskdir.open_directory(str(tmp_path / "disk"))
    first.release()
    lent = diskdir.open_directory(str(tmp_path / "disk"))
    assert not first.take()
    lent.close()
    assert first.take()
    first.close()
    second = diskdir.open_directory(str(tmp_path / "disk"))
    second.close()
    assert second.id == first.id
    assert len(first.id) == 16


def _mark(text: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir(mode=0o700)
        (path / diskdir.MARK).write_text(text)

    return make


def _open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _linked(path: Path) -> None:
    (path.parent / "real").mkdir()
    path.symlink_to(path.parent / "real")


def _used(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def _linked_mark(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / diskdir.MARK).symlink_to("/etc/passwd")


def _linked_folder(path: Path) -> None:
    """Files would be written where it leads, and not be found again."""
    path.mkdir(mode=0o700)
    (path / diskdir.MARK).touch()
    (path.parent / "elsewhere").mkdir()
    (path / "7f").symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_linked_folder, "7f in it is a symbolic link; remove it"),
        (_open_to_all, r"others may write it \(mode 0777\); chmod go-w"),
        (_linked, "is a symbolic link"),
        (lambda path: path.write_text("a file"), "Not a directory"),
        (_used, "other files in it, such as mine.txt"),
        (_mark('{"version":7,"directory":"00"}'), "is of version 7, this daemon has 1"),
        (_mark("{"), "damaged"),
        (_mark('{"version":1,"directory":"0011"}'), "damaged"),
        (_mark('{"version":1,"directory":"xyz"}'), "damaged"),
        (_mark('{"version":1,"directory":7}'), "damaged"),
        (_mark("[1]"), "damaged"),
        (_linked_mark, "Too many levels of symbolic links"),
    ],
)
def test_a_directory_that_is_not_for_us(
    tmp_path: Path, make: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / "disk"
    make(path)
    with pytest.raises(ConfigError, match=says) as told:
        diskdir.open_directory(str(path))
    assert str(told.value).startswith(f"disk: {path}: ")


def test_a_directory_in_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no {tmp_path / 'a'} to make it in"):
        diskdir.open_directory(str(tmp_path / "a" / "b"))
    with pytest.raises(ConfigError, match=f"there is no {tmp_path / 'a'} to make it in"):
        diskdir.open_directory(f"{tmp_path}/a/b/")


def test_a_slash_at_the_end_changes_nothing(tmp_path: Path) -> None:
    made = diskdir.open_directory(f"{tmp_path}/disk/")
    assert made.path == str(tmp_path / "disk")
    made.close()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        diskdir.open_directory(f"{tmp_path}/link/")


def test_more_than_the_file_system_has_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = os.statvfs(tmp_path)
    whole = room.f_blocks * room.f_frsize
    diskdir.open_directory(str(tmp_path / "disk"), whole).close()
    assert not caplog.records
    diskdir.open_directory(str(tmp_path / "disk"), 1 << 60).close()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == (
        f"disk_bytes: {1 << 20}TiB, but the file system of {tmp_path / 'disk'} has "
        f"{format_size(whole >> 20 << 20)}"
    )


def test_a_directory_that_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diskdir.open_directory(str(tmp_path / "disk")).close()

    def fail(_: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(diskdir, "_try_to_write", fail)
    with pytest.raises(ConfigError, match="Read-only file system"):
        diskdir.open_directory(str(tmp_path / "disk"))
    monkeypatch.undo()
    diskdir.open_directory(str(tmp_path / "disk")).close()


def test_a_directory_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(ConfigError, match="belongs to uid"):
        diskdir.open_directory(str(tmp_path / "disk"))
