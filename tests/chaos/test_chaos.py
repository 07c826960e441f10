"""One short chaos run, and that such a run finds what it is there to find."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import chaos_content
import pytest
from chaos_cast import Client
from chaos_plan import SHAPES, schedule
from chaos_pulse import Pulse
from chaos_run import run
from chaos_storm import CLIENTS, Storm
from chaos_watch import Broken, check_empty, check_rest, check_spans, check_status, touches
from daemon_process import environment, wait_for
from leaks import process_tree

from kmesh.layout import TILE_BYTES, sums_offset
from kmesh.v1 import admin_pb2
from tools.verify_evidence import derive

pytestmark = pytest.mark.chaos
HERE = Path(__file__).parent


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What a run that fails leaves; its path is short, as that of sockets must be."""
    parent = Path("/tmp", f"kmesh-{os.getpid()}")
    parent.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(parent))
    yield parent
    shutil.rmtree(parent)


# The schedule.


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_seed_gives_the_same_faults(shape: str) -> None:
    faults = list(schedule(7, 300, shape, CLIENTS))
    assert faults == list(schedule(7, 300, shape, CLIENTS))
    assert faults != list(schedule(8, 300, shape, CLIENTS))
    # A longer run begins as a shorter one.
    short = list(schedule(7, 30, shape, CLIENTS))
    assert short == faults[: len(short)]
    assert short[-1].at <= 25
    assert [fault.number for fault in faults] == list(range(1, len(faults) + 1))
    names = Counter(fault.name for fault in faults)
    assert {"kill control", "kill daemon", "stop supervisor", "flip payload", "files control"} < {
        *names
    }
    assert ("kill gpu" in names) == (shape == "gpus")
    # A daemon whose memory is stored is not taken over by another.
    assert "upgrade daemon" in names
    assert "upgrade daemon" not in {fault.name for fault in schedule(8, 300, shape, CLIENTS)}
    assert {f"client{n}" for n in range(CLIENTS)} < {fault.target for fault in faults}


def test_payloads_follow_from_their_names() -> None:
    name = chaos_content.Name(1)
    made = {
        chaos_content.payload(uid, place, one, shard)
        for uid in (0, 1)
        for place in ("", "GPU-1")
        for one in (
            name,
            chaos_content.Name(2),
            chaos_content.Name(1, 48),
            name.__class__(1, 64, 1),
        )
        for shard in (0, 1)
    }
    assert len(made) == 32
    assert chaos_content.payload(0, "", name, 0) == chaos_content.payload(0, "", name, 0)


# What it finds.


def _status(**more: object) -> admin_pb2.StatusResponse:
    """A consistent one: two spans of three tiles in one slab, and nobody but who asks."""
    slab = admin_pb2.SlabInfo(slab=0, capacity=20 * TILE_BYTES, populated=20 * TILE_BYTES)
    slab.used = 3 * TILE_BYTES
    tenant = admin_pb2.TenantInfo(used=slab.used, spans=2, span_bytes=TILE_BYTES + 5 + 100)
    values = {"slabs": [slab], "tenants": [tenant], "sessions": 1, "spans": 2}
    values |= {"span_bytes": tenant.span_bytes, "max_staging_bytes": 100, "index_entries": 2}
    return admin_pb2.StatusResponse(**{**values, **more})  # type: ignore[arg-type]


def _spans(second: int = 2 * TILE_BYTES, state: str = "committed") -> list[admin_pb2.SpanInfo]:
    first = admin_pb2.SpanInfo(offset=0, length=TILE_BYTES + 5, state="committed")
    return [first, admin_pb2.SpanInfo(offset=second, length=100, state=state)]


def test_a_ledger_that_is_not_exact_is_found() -> None:
    check_status(_status())
    check_rest(_status())
    check_spans(_status(), _spans())
    for wrong in (
        {"spans": 3},
        {"span_bytes": 1},
        {"leased_bytes": 1},
        {"staging_bytes": 101},
        {"slabs": []},
    ):
        with pytest.raises(Broken):
            check_status(_status(**wrong))
    for wrong in ({"sessions": 2}, {"leases": 1}, {"reservations": 1}, {"staging_bytes": 1}):
        with pytest.raises(Broken, match="held by nobody"):
            check_rest(_status(**wrong))
    for spans, said in (
        (_spans()[:1], "1 listed"),
        (_spans(state="suspect"), "not committed"),
        (_spans(second=TILE_BYTES), "two spans in one tile"),
    ):
        with pytest.raises(Broken, match=said):
            check_spans(_status(), spans)
    leaking = _status()
    leaking.slabs[0].used += TILE_BYTES
    with pytest.raises(Broken, match="leaked"):
        check_spans(leaking, _spans())
    empty = {"spans": 0, "span_bytes": 0, "tenants": [], "slabs": [], "index_entries": 0}
    check_empty(_status(**empty))
    for name in ("spans", "span_bytes", "slabs", "tenants", "index_entries"):
        with pytest.raises(Broken):
            check_empty(_status(**{k: v for k, v in empty.items() if k != name}))


def test_a_flipped_bit_explains_its_own_span_alone() -> None:
    size = 2 << 20
    sums = sums_offset(size)
    span = (9, size, 2 * TILE_BYTES, TILE_BYTES + 1)
    assert touches((9, 2 * TILE_BYTES), *span)
    assert touches((9, 3 * TILE_BYTES), *span)
    assert touches((9, sums + 16), *span)
    assert touches((9, sums + 31), *span)
    for flip in ((8, 2 * TILE_BYTES), (9, 2 * TILE_BYTES - 1), (9, 3 * TILE_BYTES + 1)):
        assert not touches(flip, *span)
    for at in (sums + 15, sums + 32):
        assert not touches((9, at), *span)


def test_a_call_that_hangs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_cast.SLACK", 0.0)
    client = Client(0, tmp_path, {})
    client.process = subprocess.Popen(["sleep", "60"])
    try:
        writer = Pulse(tmp_path / "client0.pulse")
        with writer.calling("acquire", 100.0):
            client.check()
        with writer.calling("acquire", 0.0), pytest.raises(Broken, match="client0 hangs: acquire"):
            client.check()
        client.check()
        writer.count("ops", 3)
        assert client.pulse.counts()["ops"] == 3
        writer.close()
        client.process.kill()
        client.process.wait()
        with pytest.raises(Broken, match="ended with -9"):
            client.check()
        client.killed = True
        client.check()
    finally:
        client.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wrong_bytes_end_a_run(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients store what their keys do not say: the sums of it are right, as if served wrongly."""
    monkeypatch.setattr(Storm, "arguments", {"lie": 1})
    with pytest.raises(Broken, match="wrong bytes") as broken:
        run(2, 60, "uids")
    assert "SEED=2 (uids, 60 s)" in str(broken.value)
    assert "the last events:" in str(broken.value)
    # All that is needed to look into it is kept.
    (directory,) = kept.iterdir()
    assert str(directory) in str(broken.value)
    rows = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert rows[-1]["report"] == "broken"
    assert [*directory.glob("s.*.log")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_run(kept: Path) -> None:
    done = run(2, 8, "uids")
    assert done["faults"]
    # The audit at its end has stored something, and read it.
    assert done["clients"]["read_ok"] > 0
    derived = derive({"kind": "chaos", "raw": {"runs": [done]}})
    assert (derived["left"], derived["ledger_off_bytes"], derived["unexplained"]) == (0, 0, 0)
    assert derived["operations"] == done["clients"]["ops"]
    done["ledger"] |= {"leases": 2, "used_bytes": done["ledger"]["used_bytes"] + 7}
    done["reports"]["corrupt"] = done["corruptions_explained"] + 1
    derived = derive({"kind": "chaos", "raw": {"runs": [done]}})
    assert (derived["left"], derived["ledger_off_bytes"], derived["unexplained"]) == (2, 7, 1)
    assert not list(kept.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_interrupted_ends_all_that_it_started(kept: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(HERE), "--seconds=600", "--seed=3"],
        env=environment(TMPDIR=str(kept)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "SEED=3 (hardened)\n"
            wait_for(lambda: any("begin" in path.read_text() for path in kept.glob("*/ev*")), 60)
            assert process.poll() is None
            family = process_tree(process.pid)
            # The daemon with control and its worker, the rude client, and the others.
            assert len(family) >= CLIENTS + 4
            process.send_signal(signal.SIGINT)
            out, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, said) == (130, "", "stopped\n")
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family), 30)
    assert not list(kept.iterdir())


def test_the_command_refuses_and_shows(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, str(HERE)]
    shown = subprocess.run(
        [*command, "--plan", "--seconds=20", "--seed=4"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    plan = [fault.to_json() for fault in schedule(4, 20, "gpus", CLIENTS)]
    assert [json.loads(line) for line in shown.stdout.splitlines()] == plan
    refused = subprocess.run(
        [*command, "--seconds=1"], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2
    assert "--seconds" in refused.stderr
