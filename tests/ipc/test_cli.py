"""The ``kmesh`` command against real daemons, and without one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from daemon_process import Daemon, environment
from leaks import open_fds

from kmesh import errors
from kmesh.cli import doctor, rpc
from kmesh.cli.commands import app
from kmesh.handles import HandleKind, HandleRefusal, Tier
from kmesh.keys import Namespace
from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans
from kmesh.testing import FakeDaemon

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
SPACE = Namespace("a model", "w", "float32", 4, 2, 8)
SHARD = Shard(0, 4, 0, 2)


def kmesh(
    *arguments: str, socket_dir: Path | str = "", code: str = ""
) -> subprocess.CompletedProcess[str]:
    where = {"KMESH_SOCKET_DIR": str(socket_dir)} if socket_dir else {}
    program = ["-c", code] if code else ["-m", "kmesh.cli"]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        env=environment(**where),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def as_json(*arguments: str, socket_dir: Path, returns: int = 0) -> Any:
    done = kmesh(*arguments, "--json", socket_dir=socket_dir)
    assert done.returncode == returns, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def store(session: Session, count: int, space: Namespace = SPACE) -> bytes:
    keys = os.urandom(32 * count)
    batch = ReserveBatch(
        space.digest(), SHARD, keys, [64] * count, range(0, 64 * count, 64), [1000] * count
    )
    staging = session.staging(count * 1024)
    assert put_spans(session, staging, batch, [bytes(1000)] * count) == [0] * count
    return keys


def test_status(spand: Daemon) -> None:
    with Session.connect(spand.socket_dir, role=Role.TOOL, namespace=SPACE) as session:
        keys = store(session, 3)
        with session.acquire(keys, [SHARD]) as lease:
            assert lease.hits == 3
            status = as_json("status", socket_dir=spand.socket_dir)
            human = kmesh("status", socket_dir=spand.socket_dir)
    assert status["spans"] == 3
    assert status["span_bytes"] == 3000
    assert status["leases"] == 1
    assert status["sessions"] == 2
    assert status["epoch"] == f"{session.epoch:016x}"
    assert status["socket_dir"] == str(spand.socket_dir)
    (slab,) = status["slabs"]
    assert slab["kind"] == "MEMFD"
    assert slab["used"] == 3 * 65536
    assert human.returncode == 0
    assert "3 of at most" in human.stdout
    assert "1 on 2.9 KiB" in human.stdout
    for key in (*status, *slab):
        assert f"`{key}`" in DOCS, f"docs/cli.md does not explain {key}"


def test_handles_are_agreed_on_and_a_lesser_kind_is_shown(spand: Daemon) -> None:
    """The wish is refused, for its reason, in every place where somebody would look."""
    wish = {Tier.HOST: (HandleKind.DMA_BUF, HandleKind.MEMFD)}
    with Session.connect(spand.socket_dir, role=Role.TOOL, handles=wish) as session:
        agreed = session.welcome.handles[Tier.HOST]
        assert agreed.chosen == HandleKind.MEMFD
        assert agreed.fallback is not None
        assert agreed.fallback.refusal == HandleRefusal.NOT_ALLOWED
        assert session.welcome.handle_kinds == (HandleKind.MEMFD,)
        assert session.slab(0).kind == HandleKind.MEMFD
        with pytest.raises(errors.PermissionDenied, match='setting dma_buf is "off"') as refused:
            session.export_slab(0, kind=HandleKind.DMA_BUF)
        assert refused.value.field == "attach_slab.kind"
        keys = store(session, 1)
        with session.acquire(keys, [SHARD]) as lease:
            before = open_fds()
            with pytest.raises(errors.PermissionDenied, match='setting dma_buf is "off"'):
                session.export_span(lease, 0)
            assert not open_fds() - before
        status = as_json("status", socket_dir=spand.socket_dir)
        human = kmesh("status", socket_dir=spand.socket_dir).stdout
        report = as_json("doctor", socket_dir=spand.socket_dir)
        command = ("export", keys.hex()[:10], "--dma-buf", "--", "touch", "never")
        exported = kmesh(*command, socket_dir=spand.socket_dir)
    host, gpu = status["handles"]
    assert (host["tier"], host["chosen"], gpu["tier"], gpu["chosen"]) == (
        *("host", "MEMFD"),
        *("gpu", None),
    )
    memfd, dma_buf = host["offers"]
    assert (memfd["kind"], memfd["slabs"], memfd["refusal"]) == ("MEMFD", True, None)
    assert (dma_buf["kind"], dma_buf["slabs"], dma_buf["spans"]) == ("DMA_BUF", False, False)
    assert dma_buf["refusal"] == "not_allowed"
    mine = next(c for c in status["clients"] if c["session"] == session.welcome.session_id)
    assert [offer["kind"] for offer in mine["handles"][0]["offers"]] == ["DMA_BUF", "MEMFD"]
    assert status["counters"]["handle_fallbacks"] == 1
    assert "MEMFD, not DMA_BUF" in human
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["handles"]["level"] == "warn"
    assert "lesser kind than they asked for: 1" in checks["handles"]["seen"]
    assert 'MEMFD (DMA_BUF: the daemon\'s setting dma_buf is "off"' in checks["handles"]["fix"]
    assert exported.returncode == 4
    assert 'DMA_BUF is not given: the daemon\'s setting dma_buf is "off"' in exported.stderr
    assert spand.log().count("a client would rather have DMA_BUF") == 1
    for key in (*host, *memfd, *mine):
        assert f"`{key}`" in DOCS, f"docs/cli.md does not explain {key}"


def test_export_says_what_is_wrong_with_its_arguments(spand: Daemon) -> None:
    with Session.connect(spand.socket_dir, role=Role.TOOL, namespace=SPACE) as session:
        first = store(session, 1).hex()
    where = {"socket_dir": spand.socket_dir}
    for arguments, said in (
        ((first, "--", "true"), "--dma-buf is the only one"),
        (("zz", "--dma-buf", "--", "true"), "no hex digits"),
        ((first, "--dma-buf", "--layers", "1", "--", "true"), "is not BEGIN:END"),
        ((first, "--dma-buf", "--salt-digest", "00", "--", "true"), "64 hex digits"),
    ):
        done = kmesh("export", *arguments, **where)
        assert done.returncode == 2
        assert said in " ".join(done.stderr.replace("│", " ").split()), done.stderr
    absent = ("--layers", "7:9", "--heads", "0:1")
    done = kmesh("export", first, "--dma-buf", *absent, "--", "true", **where)
    assert done.returncode == 4
    assert "not served to this user" in done.stderr


def test_ls(spand: Daemon) -> None:
    other = Namespace("another model", "w", "float16", 4, 2, 8)
    with Session.connect(spand.socket_dir, role=Role.TOOL, namespace=SPACE) as session:
        keys = store(session, 4)
        with Session.connect(spand.socket_dir, role=Role.TOOL, namespace=other) as second:
            store(second, 2, other)
            spans = as_json("ls", socket_dir=spand.socket_dir)["spans"]
            few = as_json("ls", "--limit", "3", socket_dir=spand.socket_dir)
            few_human = kmesh("ls", "--limit", "3", socket_dir=spand.socket_dir).stdout
            digest = SPACE.digest().hex()
            part = ("ls", "--namespace", digest[:10])
            mine = as_json(*part, socket_dir=spand.socket_dir)["spans"]
            one_of_mine = as_json(*part, "--limit", "1", socket_dir=spand.socket_dir)
            exactly = as_json("ls", "--limit", "6", socket_dir=spand.socket_dir)
            spaces = as_json("ls", "--namespaces", socket_dir=spand.socket_dir)["namespaces"]
            human = kmesh("ls", socket_dir=spand.socket_dir).stdout
            spaces_human = kmesh("ls", "--namespaces", socket_dir=spand.socket_dir).stdout
            nobody = kmesh("ls", "--namespace", "zz", socket_dir=spand.socket_dir)
    assert len(spans) == 6
    assert (len(few["spans"]), few["more"]) == (3, 3)
    assert few_human.endswith("… 3 more: --limit\n")
    assert (len(one_of_mine["spans"]), one_of_mine["more"]) == (1, 3)
    assert (len(exactly["spans"]), exactly["more"]) == (6, 0)
    expected = {keys[i : i + 32].hex() for i in range(0, len(keys), 32)}
    assert {span["key"] for span in mine} == expected
    span = mine[0]
    assert span["namespace"] == digest
    assert span["state"] == "committed"
    assert (span["layers"], span["heads"]) == ([0, 4], [0, 2])
    assert (span["length"], span["tokens"], span["leases"]) == (1000, 64, 0)
    by_digest = {space["digest"]: space for space in spaces}
    assert by_digest[digest]["spans"] == 4
    assert by_digest[digest]["bytes"] == 4000
    assert by_digest[digest]["fields"]["model"] == "a model"
    assert len(human.strip().splitlines()) == 7
    assert "model=another model" in spaces_human
    assert nobody.returncode == 2
    assert "no namespace begins with" in nobody.stderr
    for key in (*span, *by_digest[digest]):
        assert f"`{key}`" in DOCS, f"docs/cli.md does not explain {key}"


def test_long_lists_are_asked_for_page_by_page(
    spand: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_PAGE", 3)
    with rpc.Tool(str(spand.socket_dir), 10) as tool:
        keys = store(tool.session, 10)
        listed = [span.key for span in tool.spans(b"", 100)]
        assert sorted(listed) == sorted(keys[i : i + 32] for i in range(0, 320, 32))
        assert len(list(tool.spans(SPACE.digest(), 7))) == 7
        assert list(tool.spans(bytes(32), 7)) == []


def test_doctor_finds_a_daemon_well(spand: Daemon) -> None:
    report = as_json("doctor", socket_dir=spand.socket_dir)
    assert report["ok"] is True
    levels = {check["name"]: check["level"] for check in report["checks"]}
    for name in ("native", "proc", "memfd", "socket", "health", "slabs", "pattern"):
        assert levels[name] == "ok", report
    assert "fail" not in levels.values()
    # By default nothing is given as DMA-BUF, and not every machine can make one.
    assert {name for name, level in levels.items() if level == "skip"} <= {"udmabuf", "dma_buf"}
    assert levels["dma_buf"] == "skip"
    by_name = {check["name"]: check["seen"] for check in report["checks"]}
    assert "NVIDIA driver" in by_name["driver"]
    assert "two processes" in by_name["pattern"]
    assert "read by a second process" in by_name["memfd"]
    assert "HOST: MEMFD (slabs)" in by_name["handles"]
    assert 'not DMA_BUF: the daemon\'s setting dma_buf is "off"' in by_name["handles"]
    for name in levels:
        assert f"`{name}`" in DOCS, f"docs/cli.md does not explain {name}"
    assert "`pattern left`" in DOCS
    # What it stored is gone: no other command has to choose among namespaces because of it.
    assert as_json("ls", "--namespaces", socket_dir=spand.socket_dir)["namespaces"] == []
    assert as_json("status", socket_dir=spand.socket_dir)["counters"]["spans_committed"] == 1
    human = kmesh("doctor", socket_dir=spand.socket_dir)
    assert human.returncode == 0
    assert "pattern" in human.stdout


def test_doctor_finds_a_daemon_of_several_users_well(start_spand: Callable[..., Daemon]) -> None:
    """Slabs in which nothing of this user lies are not given to it, and that is no fault."""
    spand = start_spand(allow_uids=f"{os.getuid()},{os.getuid() + 1}")
    spand.wait_populated()
    report = as_json("doctor", socket_dir=spand.socket_dir)
    seen = {check["name"]: check for check in report["checks"]}
    assert report["ok"] is True, report
    slabs = len(as_json("status", socket_dir=spand.socket_dir)["slabs"])
    assert slabs > 1
    assert seen["slabs"]["level"] == "ok"
    assert seen["slabs"]["seen"].startswith("1 imported: sealed")
    assert f"; {slabs - 1} hold nothing of uid {os.getuid()}" in seen["slabs"]["seen"]


def test_doctor_of_a_drained_daemon_says_how_it_takes_spans_again(spand: Daemon) -> None:
    assert kmesh("drain", "--wait", socket_dir=spand.socket_dir).returncode == 0
    report = as_json("doctor", socket_dir=spand.socket_dir)
    (pattern,) = (c for c in report["checks"] if c["name"] == "pattern")
    assert pattern["level"] == "warn"
    assert pattern["fix"] == "kmesh drain --cancel, unless it was drained with --stop: then it ends"


def test_doctor_says_whose_group_lets_a_user_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "sockets"
    refused = errors.PermissionDenied("may not connect", field="socket_dir")

    def tool(*_given: object) -> None:
        raise refused

    # Root, as which tests may run, is kept out by no mode.
    monkeypatch.setattr(doctor, "Tool", tool)
    # As it is seen: only root can give a file to another group.
    seen = os.stat

    def stat_of(path: str, group: int) -> os.stat_result:
        found = list(seen(path))
        found[stat.ST_GID] = group
        return os.stat_result(found)

    socket = where / "session.sock"
    where.mkdir()
    socket.touch()
    modes = [(False, 0o750, where), (True, 0o620, socket)]
    closed = [(False, 0o700, where), (False, 0o740, where), (True, 0o640, socket)]
    for gid, joins, tried in ((4321, True, modes), (4321, False, closed), (0, False, modes)):
        for may_pass, mode, path in tried:
            path.chmod(mode)
            monkeypatch.setattr(os, "access", lambda *_given, passes=may_pass: passes)
            with monkeypatch.context() as owned:
                owned.setattr(os, "stat", partial(stat_of, group=gid))
                found = {check.name: check for check in doctor.examine(str(where), 1.0).checks}
            assert found["health"].level == "skip"
            fix = found["socket"].fix
            if joins:
                assert fix.startswith(
                    f"join the group 4321 of {path}, or change its mode, {mode:04o}:"
                )
            else:
                assert fix.startswith(f"change the group or the mode, {mode:04o}, of {path}:")
    shutil.rmtree(where)
    monkeypatch.setattr(os, "access", lambda *_given: False)
    found = {check.name: check for check in doctor.examine(str(where), 1.0).checks}
    assert f"directories above {where}" in found["socket"].fix


def test_doctor_finds_a_stuck_daemon(spand: Daemon) -> None:
    worker = spand.child("worker")
    os.kill(worker, signal.SIGSTOP)
    try:
        done = kmesh("--timeout", "1", "doctor", "--json", socket_dir=spand.socket_dir)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    levels = {check["name"]: check["level"] for check in report["checks"]}
    assert report["ok"] is False
    assert levels["socket"] == "ok"
    assert levels["pattern"] == "fail"


def test_without_a_daemon(tmp_path: Path) -> None:
    for command in ("status", "ls"):
        done = kmesh(command, "--json", socket_dir=tmp_path)
        assert done.returncode == 3
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert str(tmp_path) in done.stderr
        assert "kmesh-spand" in done.stderr
    report = as_json("doctor", socket_dir=tmp_path, returns=3)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["socket"]["level"] == "fail"
    assert str(tmp_path) in checks["socket"]["fix"]
    assert checks["pattern"]["level"] == checks["health"]["level"] == "skip"
    # What needs no daemon was done.
    assert checks["memfd"]["level"] == checks["native"]["level"] == "ok"


def test_a_daemon_that_refuses(tmp_path: Path) -> None:
    with FakeDaemon(socket_dir=tmp_path) as daemon:
        refusal = errors.PermissionDenied("uid 7 may not connect", field="uid")
        daemon.refuse("hello", refusal, times=2)
        done = kmesh("status", socket_dir=tmp_path)
        assert done.returncode == 4
        assert done.stderr == "kmesh: uid: uid 7 may not connect\n"
        report = as_json("doctor", socket_dir=tmp_path, returns=4)
        (check,) = (c for c in report["checks"] if c["name"] == "socket")
        assert "allow_uids" in check["fix"]
        # It lets us in, but there is no gRPC.
        assert kmesh("status", socket_dir=tmp_path).returncode == 3


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["ls", "--limit", "0"], ["--timeout", "x", "status"], []]
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert kmesh(*arguments).returncode == 2


def test_where_the_daemon_is_may_be_said_anywhere(spand: Daemon, tmp_path: Path) -> None:
    right, wrong = ("--socket-dir", str(spand.socket_dir)), ("--socket-dir", str(tmp_path))
    for line in (
        [*right, "doctor"],
        ["doctor", *right],
        [*wrong, "doctor", *right],
        ["--timeout", "0.01", *wrong, "doctor", "--timeout", "5", *right],
        ["token", *right, "--", "sh", "-c", f'test "$KMESH_SOCKET_DIR" = {right[1]}'],
    ):
        done = kmesh(*line, socket_dir=tmp_path)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    for line in ([*right, "status", *wrong], ["status", *wrong], ["status"]):
        done = kmesh(*line, socket_dir=tmp_path)
        assert done.returncode == 3
        assert f"{tmp_path}/session.sock: No such file" in done.stderr
        assert "--socket-dir says where" in done.stderr
    assert kmesh("status", *right, "--timeout", "0").returncode == 2


def test_every_command_takes_the_options_of_all() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {"status", "doctor", "token", "export"} < set(commands)
    for name, command in commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--socket-dir", "--timeout"} <= options, name


def test_version_and_help() -> None:
    version = kmesh("--version")
    assert version.returncode == 0
    assert version.stdout.startswith("kmesh ")
    text = kmesh("--help").stdout
    for word in ("status", "doctor", "ls", "--socket-dir", "Exit codes"):
        assert word in text


def test_the_packages_of_the_command_are_named_when_they_lack() -> None:
    code = "import sys; sys.modules['typer'] = None; from kmesh.cli import main; main()"
    done = kmesh("--help", code=code)
    assert done.returncode == 2
    assert done.stderr == (
        "kmesh: the command needs the package typer: pip install '.[cli]' in a clone of KMesh\n"
    )
