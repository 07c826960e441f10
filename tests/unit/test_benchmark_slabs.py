"""What `python -m benchmarks.gpu` says of the daemon's memory, as far as no GPU is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fake_cuda import FakeDriver

from benchmarks.check import read_targets
from benchmarks.gpu import slabs
from benchmarks.gpu.__main__ import ROOT, TARGETS
from benchmarks.results import Row
from demo.evidence import command, source
from experiments import profile
from kmesh.cuda.device import Device
from kmesh_spand import memory

RUN = "python -m benchmarks.gpu"


def missing(rows: list[Row]) -> list[str]:
    """Rows that ``targets.toml`` does not name, or not with their unit."""
    units = {target.row: target.unit for target in read_targets(TARGETS)}
    return [row.name for row in rows if units.get(row.name) != row.unit]


@pytest.mark.parametrize("granted", [True, False])
def test_registration_of_huge_pages_is_a_figure_or_a_reason(
    granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "hugepages_allowed", lambda: granted)
    monkeypatch.setattr(memory, "hugepages_granted", lambda address: granted)
    fake = FakeDriver()
    with Device(fake, "0") as device:
        small, huge = slabs.registration(device, 2, 4 << 20)
    assert not any(fake.ledger().values())
    assert (small.name, len(small.samples["register"])) == ("register_4k", 2)
    assert small.value is not None
    assert huge.name == "register_huge"
    if granted:
        assert huge.value is not None
    else:
        assert huge.value is None
        assert "no huge pages (/sys/kernel/mm/transparent_hugepage/shmem_enabled" in huge.note
    assert missing([small, huge]) == []


@pytest.mark.slow
def test_a_daemon_that_grows_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(slabs.pool(1, 128))
    assert [row.name for row in rows] == ["pool_ready_4k", "pool_ready_huge"]
    assert rows[0].value is not None
    # What is to be measured beside growth must not depend on how fast this machine is.
    seen = iter([False, False, False, True])
    monkeypatch.setattr(slabs, "_whole", lambda spand: next(seen))
    (row,) = slabs.starts(2, 128)
    assert {name: len(taken) for name, taken in row.samples.items()} == {"growing": 2, "whole": 2}
    assert missing([*rows, row]) == []


def test_a_command_names_no_place_of_a_machine(tmp_path: Path) -> None:
    given = ["run", "--out", f"{tmp_path}/b.json", f"--peer={tmp_path}/p.json", "--rounds", "5"]
    assert (
        command(RUN, given) == "python -m benchmarks.gpu run --out b.json --peer=p.json --rounds 5"
    )
    inside = ["run", "--out", str(ROOT / "evidence" / "bench-gpu.json"), "--only", "host"]
    assert command(RUN, inside) == (
        "python -m benchmarks.gpu run --out evidence/bench-gpu.json --only host"
    )
    assert command("python -m demo", []) == "python -m demo"


def test_what_was_measured_is_told_or_gits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KMESH_COMMIT", raising=False)
    assert source("abc") == {"commit": "abc", "clean": True}
    monkeypatch.setenv("KMESH_COMMIT", "def")
    assert source() == {"commit": "def", "clean": True}
    assert source("abc")["commit"] == "abc"
    monkeypatch.delenv("KMESH_COMMIT")
    # Neither told, nor a git that knows.
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    with pytest.raises(subprocess.CalledProcessError):
        source()
    assert profile.source() == {"commit": "unknown", "clean": False}
