"""``kmesh bench``, and what it and ``kmesh doctor`` leave behind: nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import Daemon
from foreign import NOBODY, let_in
from rawclient import RawClient
from test_cli import as_json, kmesh, store
from test_cli_operator import engine, explained, start

from kmesh.cli.bench import _tidy
from kmesh.cli.options import Options


def test_bench_leaves_nothing(spand: Daemon) -> None:
    with engine(spand) as session:
        store(session, 2)
    found = as_json("bench", "--rounds", "20", socket_dir=spand.socket_dir)
    assert found["left_spans"] == 0
    assert found["rounds"] == 20
    for name, value in found.items():
        assert name == "left_spans" or value > 0, name
    explained(found)
    status = spand.status()
    assert status.spans == 2
    assert status.counters["spans_evicted"] == 0
    assert "ping_median_us" in kmesh("bench", "--rounds", "10", socket_dir=spand.socket_dir).stdout


def test_bench_leaves_nothing_when_told_to_end(spand: Daemon) -> None:
    command = start("bench", "--rounds", "1000000", socket_dir=spand.socket_dir)
    spand.wait_status(lambda s: s.spans == 256)
    command.terminate()
    _, said = command.communicate(timeout=30)
    assert command.returncode not in (0, -signal.SIGTERM), said
    assert spand.status().spans == 0


# Late: that user may not be let to where Python lies.
_AS_NOBODY = f"""
import os
import kmesh
from kmesh.cli import commands, rpc
kmesh.__version__
connect = rpc.Session.connect
def as_nobody(*given, **named):
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
        os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
    return connect(*given, **named)
rpc.Session.connect = as_nobody
commands.app()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_another_user_leaves_nothing(start_spand: Callable[..., Daemon], command: str) -> None:
    daemon = start_spand(socket_mode="0666", allow_uids=f"0,{NOBODY}", host_memory="64MiB")
    let_in(daemon)
    daemon.wait_populated()
    done = kmesh(command, "--json", socket_dir=daemon.socket_dir, code=_AS_NOBODY)
    assert str(NOBODY) in [tenant.name for tenant in daemon.status().tenants], done.stderr
    assert daemon.status().spans == 0
    found = json.loads(done.stdout)
    if command == "bench":
        assert found["left_spans"] == 0
    else:
        assert "pattern left" not in {check["name"] for check in found["checks"]}


def test_bench_evicts_nobody(start_spand: Callable[..., Daemon]) -> None:
    daemon = start_spand(host_memory="8MiB")
    daemon.wait_populated()
    done = kmesh("bench", socket_dir=daemon.socket_dir)
    assert done.returncode == 1
    assert "evicts nobody" in done.stderr


def test_bench_evicts_nothing_where_a_quota_is_used_up(start_spand: Callable[..., Daemon]) -> None:
    daemon = start_spand(host_memory="64MiB", tenants="default=16MiB")
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        assert not client.store(os.urandom(32), bytes(60000))
    done = kmesh("bench", "--rounds", "10", socket_dir=daemon.socket_dir)
    assert done.returncode == 1
    assert "evicts nobody" in done.stderr
    assert daemon.status().spans == 1


def test_bench_says_so_where_it_can_not_tidy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _tidy(Options(str(tmp_path), 1.0), bytes(32))
    assert "kmesh evict --namespace" in capsys.readouterr().err
