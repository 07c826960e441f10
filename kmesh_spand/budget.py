"""How much memory is left, and waiting for it rather than being killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = "/proc/meminfo, MemAvailable"


@dataclass(frozen=True, slots=True)
class Room:
    """``size`` bytes may still be taken, as ``source`` (a file) says."""

    size: int
    source: str


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of a control group's files; ``cache`` is the key of pages that can be dropped."""

    limits: tuple[str, ...]
    usage: str
    cache: str


_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def memory_room(root: Path = Path("/")) -> Room | None:
    """The least that any control group of this process, or the machine, has left.

    Args:
        root: where /proc and /sys are looked for.
    """
    return min(_rooms(root), key=lambda room: room.size, default=None)


def shortage(length: int, headroom: int, taking: int = 0, room: Room | None = None) -> str | None:
    """Why ``length`` bytes can't be taken now; None if they can.

    Args:
        headroom: bytes to leave to others.
        taking: bytes that others of this process are just taking.
        room: as it was seen, or None to look.
    """
    room = room or memory_room()
    if room is None or room.size >= taking + length + headroom:
        return None
    return (
        f"{max(room.size, 0) >> 20} MiB left by {room.source}, and "
        f"{headroom >> 20} MiB are for others (memory_headroom)"
    )


def _rooms(root: Path) -> Iterator[Room]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _group_rooms(root / "sys/fs/cgroup", path, _V2)
        elif "memory" in controllers.split(","):
            yield from _group_rooms(root / "sys/fs/cgroup/memory", path, _V1)
    available = _field(root / "proc/meminfo", "MemAvailable:")
    if available is not None:
        yield Room(available << 10, _MEMINFO)


def _group_rooms(mount: Path, path: str, files: _Files) -> Iterator[Room]:
    """Of a group and its parents. In a container the path may only exist outside."""
    group = mount / path.lstrip("/")
    while True:
        used = _number(group / files.usage)
        if used is not None:
            used -= min(_field(group / "memory.stat", files.cache) or 0, used)
            for name in files.limits:
                limit = _number(group / name)
                # v1 writes "no limit" as the largest whole number of pages.
                if limit is not None and limit < 1 << 60:
                    yield Room(limit - used, str(group / name))
        if group == mount:
            return
        group = group.parent


class Gate:
    """Lets memory be taken while enough of it is left; any number of threads wait otherwise.

    Args:
        headroom: bytes to leave to others.
        told: why there is a pause, and None when it is over.
        room: asked anew each time.
        wait: seconds between looks during a pause.
    """

    def __init__(
        self,
        headroom: int,
        told: Callable[[str | None], None],
        *,
        room: Callable[[], Room | None] = memory_room,
        wait: float = 0.5,
    ) -> None:
        self._headroom = headroom
        self._told = told
        self._room = room
        self._wait = wait
        self._taking = 0
        self._change = threading.Condition()
        self._paused = False

    def enter(self, length: int) -> None:
        """Returns when ``length`` bytes may be taken; ``leave`` must follow."""
        with self._change:
            while (short := self._short(length)) is not None:
                if not self._paused:
                    self._paused = True
                    self._told(short)
                self._change.wait(self._wait)
            if self._paused:
                self._paused = False
                self._told(None)
            self._taking += length

    def leave(self, length: int) -> None:
        """They were taken, or could not be."""
        with self._change:
            self._taking -= length

    def _short(self, length: int) -> str | None:
        """Why not now. What others are just taking may not show in the files yet."""
        room = self._room()
        if room is None:
            return None
        return shortage(length, self._headroom, self._taking, room)


def _number(file: Path) -> int | None:
    text = "".join(_lines(file))
    return int(text) if text.isdigit() else None


def _field(file: Path, name: str) -> int | None:
    for line in _lines(file):
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
