"""How much memory is left, and waiting for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kmesh_spand.budget import Gate, Room, memory_room

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_room_in_nested_groups_v2(tmp_path: Path) -> None:
    """The parent is tighter, pages that can be dropped don't count, nor does what is not there."""
    group = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "proc/meminfo": "MemAvailable: 9000 kB\n",
            f"{group}/a/b/memory.max": "max\n",
            f"{group}/a/b/memory.current": f"{5 * MIB}\n",
            f"{group}/a/memory.max": f"{8 * MIB}\n",
            f"{group}/a/memory.current": f"{7 * MIB}\n",
            f"{group}/a/memory.stat": f"anon 1\ninactive_file {2 * MIB}\n",
        },
    )
    assert memory_room(root) == Room(3 * MIB, str(root / group / "a/memory.max"))
    (root / group / "a/b/memory.high").write_text(f"{6 * MIB}\n")
    assert memory_room(root) == Room(MIB, str(root / group / "a/b/memory.high"))


def test_room_in_nested_groups_v1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/x/y\n0::/\n",
            f"{group}/x/y/memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}/x/y/memory.usage_in_bytes": "4096\n",
            f"{group}/x/memory.limit_in_bytes": f"{4 * MIB}\n",
            f"{group}/x/memory.usage_in_bytes": f"{5 * MIB}\n",
            f"{group}/x/memory.stat": f"total_inactive_file {MIB // 2}\n",
        },
    )
    source = str(root / group / "x/memory.limit_in_bytes")
    assert memory_room(root) == Room(-MIB // 2, source)


def test_the_machine_itself_has_room() -> None:
    room = memory_room()
    assert room is not None
    assert 0 < room.size < 1 << 50


def test_a_gate_waits_for_room_and_says_so_once() -> None:
    room = [Room(25, "/limit")]
    told: list[str | None] = []
    gate = Gate(10, told.append, room=lambda: room[0], wait=0.01)
    gate.enter(10)
    assert not told
    passed: list[int] = []

    def enter(number: int) -> None:
        gate.enter(10)
        passed.append(number)

    # What the first is still taking is not seen in the file, and counts all the same.
    threads = [threading.Thread(target=enter, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while not told:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.05)
    assert not passed
    assert [text is None for text in told] == [False]
    assert "/limit" in str(told[0])
    gate.leave(10)
    deadline = time.monotonic() + 30
    while len(passed) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(passed) == 1
    room[0] = Room(100, "/limit")
    for thread in threads:
        thread.join(30)
    assert sorted(passed) == [0, 1]
    assert told[-1] is None


def test_a_gate_without_limits_is_open() -> None:
    told: list[str | None] = []
    Gate(1 << 40, told.append, room=lambda: None).enter(1 << 40)
    assert not told
