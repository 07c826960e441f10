"""The commands that ask why, steer and watch, against real daemons."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon_process import Daemon, environment, wait_for
from test_cli import DOCS, SHARD, SPACE, as_json, kmesh, store
from test_operator import chain_of
from test_operator import store as store_prompt

from kmesh.keys import Namespace, salt_digest
from kmesh.session import ReserveBatch, Role, Session

OTHER_SPACE = Namespace("another model", "w", "float32", 4, 2, 8)


def explained(keys: Any) -> None:
    for key in keys:
        assert f"`{key}`" in DOCS, f"docs/cli.md does not explain {key}"


def start(*arguments: str, socket_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kmesh.cli", *arguments],
        env=environment(KMESH_SOCKET_DIR=str(socket_dir)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def engine(daemon: Daemon, space: Namespace = SPACE) -> Session:
    return Session.connect(
        daemon.socket_dir, role=Role.TOOL, namespace=space, client_name="an [engine]"
    )


# status


def test_status_says_what_each_client_pins(spand: Daemon) -> None:
    with engine(spand) as session:
        keys = store(session, 3)
        again = ReserveBatch(SPACE.digest(), SHARD, keys, [64] * 3, [0] * 3, [1000] * 3)
        session.reserve(again)
        with session.acquire(keys + os.urandom(32), [SHARD], prefix=False):
            answer = as_json("status", socket_dir=spand.socket_dir)
            clients = answer["clients"]
            human = kmesh("status", socket_dir=spand.socket_dir).stdout
    assert len(clients) == 2
    (mine,) = (c for c in clients if c["client"] == "an [engine]")
    assert (mine["leased_bytes"], mine["hits"], mine["misses"]) == (3000, 3, 1)
    assert (mine["committed"], mine["reasons"]) == (3, {"exists": 3})
    assert mine["pid"] == os.getpid()
    assert re.search(r"an \[engine\] +tool .* 2\.9 KiB .* exists 3", human), human
    explained(mine)
    (tenant,) = answer["tenants"]
    assert (tenant["tenant"], tenant["spans"], tenant["quota"]) == (str(os.getuid()), 3, 0)
    assert (tenant["counters"]["hits"], tenant["counters"]["misses"]) == (3, 1)
    used = f"{tenant['used'] / 1024:.1f} KiB"
    assert re.search(rf"^{os.getuid()} +3 +{used} +no limit +1 +3 +1 +0$", human, re.M), human
    explained(tenant)


# explain


def test_explain(spand: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(json.dumps([*range(128), *range(500, 600)]))
    with engine(spand) as session:
        store_prompt(session, list(range(128)))
        answer = as_json("explain", "--tokens", str(file), socket_dir=spand.socket_dir)
        human = kmesh("explain", "--tokens", str(file), socket_dir=spand.socket_dir).stdout
        file.write_text(" ".join(map(str, range(64))) + "\n64")
        salt = f"salt={salt_digest('a tenant')}"
        command = ("explain", "--tokens", str(file), "--field", salt)
        salted = as_json(*command, socket_dir=spand.socket_dir)
        salted_human = kmesh(*command, socket_dir=spand.socket_dir).stdout
    (part,) = answer["shards"]
    assert (answer["tokens"], answer["spans"]) == (228, 3)
    assert (part["spans"], part["tokens"], part["verdict"]) == (2, 128, "never")
    assert (part["layers"], part["heads"]) == ([0, 4], [0, 2])
    assert answer["namespace"] == SPACE.digest().hex()
    assert answer["fields"]["model"] == "a model"
    assert "128 tokens are served" in human
    assert "never stored" in human
    (match,) = salted["nearest"]
    assert (match["differing"], match["tokens"]) == (["salt"], 64)
    assert salted["shards"][0]["verdict"] == "never"
    assert f"salt: asked {salt_digest('a tenant')}, stored none" in salted_human
    for level in (answer, part, match):
        explained(level)


def test_explain_an_ending(spand: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(str(list(range(64))))
    where = {"socket_dir": spand.socket_dir}
    with engine(spand) as session:
        store_prompt(session, list(range(64)))
        assert kmesh("evict", "--all", "--yes", **where).returncode == 0
        # Nothing of it is there any more, but it is the only one that is remembered.
        answer = as_json("explain", "--tokens", str(file), **where)
        human = kmesh("explain", "--tokens", str(file), **where).stdout
        with engine(spand, OTHER_SPACE):
            named = ("explain", "--tokens", str(file), "--namespace", SPACE.digest().hex()[:12])
            assert as_json(*named, **where) | {"remembered_ms": 0, "shards": []} == answer | {
                "remembered_ms": 0,
                "shards": [],
            }
            unclear = kmesh("explain", "--tokens", str(file), **where)
        assert unclear.returncode == 2
        assert "several namespaces" in unclear.stderr
        assert as_json("ls", "--namespaces", **where) == {"namespaces": []}
        known = as_json("ls", "--remembered", **where)["namespaces"]
        assert [(space["digest"], space["spans"]) for space in known] == [
            (OTHER_SPACE.digest().hex(), 0),
            (SPACE.digest().hex(), 0),
        ]
    (part,) = answer["shards"]
    assert (part["verdict"], part["cause"]) == ("ended", "operator")
    assert part["key"] == chain_of(list(range(64))).keys.hex()
    assert "evicted by an operator" in human


def test_explain_text(spand: Daemon, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"one": 1, "two": 2, "?": 0}, unk_token="?")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    with engine(spand) as session:
        store_prompt(session, [1, 2] * 32)
        command = ("explain", "one two " * 32, "--tokenizer", str(tmp_path))
        answer = as_json(*command, socket_dir=spand.socket_dir)
        code = "import sys; sys.modules['tokenizers'] = None; from kmesh.cli import main; main()"
        lacking = kmesh(*command, socket_dir=spand.socket_dir, code=code)
    assert answer["shards"][0]["tokens"] == 64
    assert answer["shards"][0]["verdict"] == "served"
    assert lacking.returncode == 2
    assert "pip install tokenizers" in lacking.stderr
    assert lacking.stderr.count("\n") == 1


def test_explain_refuses_what_is_unclear(spand: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("[1, 2, true]")
    parts = tmp_path / "parts"
    parts.write_text("[1, 2.5]")
    good = tmp_path / "good"
    good.write_text("1 2 3")

    def written(text: str) -> str:
        path = tmp_path / f"tokens {len(list(tmp_path.iterdir()))}"
        path.write_text(text)
        return str(path)

    for arguments, said in (
        ((), "either PROMPT or --tokens"),
        (("text", "--tokens", str(good)), "both PROMPT and --tokens are given"),
        (("text",), "--tokenizer"),
        (("--tokens", str(file)), "index 2: true is no token id"),
        (("--tokens", str(parts)), "index 1: 2.5 is no token id"),
        (("--tokens", written('[1, 2, "a"]')), 'index 2: "a" is no token id'),
        (("--tokens", written("[1, 2, -3]")), "index 2: -3 is not from 0 to 4294967295"),
        (("--tokens", written("1 2 4294967296")), "index 2: 4294967296 is not from"),
        (("--tokens", written("[1, 2")), "no JSON list"),
        (("--tokens", written(f"[1, {'9' * 4301}]")), "an integer in it has too many digits"),
        (("--tokens", written(" ")), "no token ids in it"),
        (("--tokens", str(tmp_path / "none")), "none: No such file"),
        (("--tokens", str(good)), "no namespace is known"),
        (("--tokens", str(good), "--field", "nothing"), "NAME=VALUE"),
        (("--tokens", str(good), "--field", "model=x"), "missing namespace field"),
    ):
        done = kmesh("explain", *arguments, socket_dir=spand.socket_dir)
        assert done.returncode == 2
        assert said in " ".join(re.sub("[│╭╰─╮╯]", " ", done.stderr).split()), done.stderr


# evict


def test_evict(spand: Daemon) -> None:
    where = {"socket_dir": spand.socket_dir}
    with engine(spand) as session:
        keys = store(session, 4)
        dry = as_json("evict", "--all", "--dry-run", **where)
        assert dry == {
            "dry_run": True,
            "spans": 4,
            "bytes": 4000,
            "leased": 0,
            "busy": 0,
            "held": 0,
            "disk_spans": 0,
            "disk_bytes": 0,
        }
        explained(dry)
        # Without a terminal nobody can be asked.
        unasked = kmesh("evict", "--all", **where)
        assert unasked.returncode == 2
        assert "--yes" in unasked.stderr
        assert spand.status().spans == 4
        one = as_json("evict", "--key", keys[:32].hex().upper(), "--yes", **where)
        assert one["spans"] == 1
        for ages in (("--older-than", "1h", "--idle", "5min"), ("--idle", "5000")):
            assert as_json("evict", *ages, "--yes", **where)["spans"] == 0
        # As `kmesh ls` shows it; named twice it is one.
        named = ("--key", keys[32:64].hex()[:16], "--key", keys[32:64].hex())
        assert as_json("evict", *named, "--dry-run", **where)["spans"] == 1
        unknown = keys[:32].hex()[:16]
        for text, said in ((unknown, "no span in memory begins with"), ("x" * 8, "hex digits")):
            refused = kmesh("evict", "--key", text, "--yes", **where)
            assert refused.returncode == 2
            assert said in " ".join(refused.stderr.split())
        with session.acquire(keys[32:64], [SHARD]):
            part = ("evict", "--namespace", SPACE.digest().hex()[:12], "--yes")
            some = kmesh(*part, **where)
            assert some.returncode == 1
            assert "2 spans" in some.stdout
            assert "1 leased" in some.stdout
    for arguments in (
        (),
        ("--all", "--key", "00" * 32),
        ("--key", "xy"),
        ("--older-than", "soon"),
        ("--idle", "5 s"),
        ("--namespace", "zz"),
    ):
        assert kmesh("evict", *arguments, "--yes", **where).returncode == 2


def test_evict_asks(spand: Daemon) -> None:
    import pty

    with engine(spand) as session:
        store(session, 2)
        for answer, left in ((b"n\n", 2), (b"y\n", 0)):
            ours, theirs = pty.openpty()
            process = subprocess.Popen(
                [sys.executable, "-m", "kmesh.cli", "evict", "--all"],
                env=environment(KMESH_SOCKET_DIR=str(spand.socket_dir)),
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            os.close(theirs)
            os.write(ours, answer)
            _, asked = process.communicate(timeout=60)
            os.close(ours)
            assert b"Evict 2 spans" in asked
            assert process.returncode == (1 if left else 0)
            assert spand.status().spans == left


# drain


def test_drain(spand: Daemon) -> None:
    where = {"socket_dir": spand.socket_dir}
    with engine(spand) as session:
        keys = store(session, 1)
        session.reserve(ReserveBatch(SPACE.digest(), SHARD, os.urandom(32), [64], [0], [1000]))
        answer = as_json("drain", **where)
        assert (answer["draining"], answer["done"], answer["reservations"]) == (True, False, 1)
        explained(answer)
        late = kmesh("drain", "--wait", "--deadline", "200ms", **where)
        assert late.returncode == 1
        assert "late: 1 reservations" in late.stdout
        # What is stored is served, and the daemon can be looked at.
        with session.acquire(keys, [SHARD]) as lease:
            assert lease.hits == 1
        assert as_json("status", **where)["draining"] is True
        assert as_json("drain", "--cancel", **where)["draining"] is False
    assert as_json("drain", "--wait", **where)["done"] is True
    assert kmesh("drain", "--cancel", "--stop", **where).returncode == 2


def test_drain_and_stop(spand: Daemon) -> None:
    done = kmesh("drain", "--stop", "--wait", socket_dir=spand.socket_dir)
    assert done.returncode == 0, done.stderr
    assert "the daemon ends now" in done.stdout
    assert spand.process.wait(20) == 0


def test_drain_and_stop_unattended(spand: Daemon) -> None:
    done = kmesh("drain", "--stop", socket_dir=spand.socket_dir)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the daemon ends now\n")
    assert spand.process.wait(20) == 0


# watch


def test_watch(spand: Daemon) -> None:
    where = {"socket_dir": spand.socket_dir}
    with engine(spand) as session:
        keys = store(session, 2)
        lines = kmesh("watch", "--kind", "span_committed", "--count", "2", **where).stdout
        events = [json.loads(line) for line in lines.splitlines()]
        # Two threads copied them.
        assert {event["key"] for event in events} == {keys[:32].hex(), keys[32:].hex()}
        kmesh("evict", "--all", "--yes", **where)
        place = ("--after", str(events[-1]["sequence"]), "--epoch", events[-1]["epoch"])
        kinds = ("--kind", "span_evicted", "--kind", "session_opened")
        more = kmesh("watch", *place, *kinds, "--count", "4", "--json", **where).stdout
        found = [json.loads(line) for line in more.splitlines()]
    assert {event["kind"] for event in found} == {"span_evicted", "session_opened"}
    evicted = [event for event in found if event["kind"] == "span_evicted"]
    assert [event["cause"] for event in evicted] == ["operator"] * 2
    opened = next(event for event in found if event["kind"] == "session_opened")
    assert opened["text"] == "kmesh CLI"
    for event in [*events, *found]:
        explained(event)
    assert kmesh("watch", "--kind", "nonsense", **where).returncode == 2
    for kind in re.findall(r"Only (.*?)\.", " ".join(kmesh("watch", "--help").stdout.split())):
        explained(re.findall(r"[a-z]+_[a-z_]+", kind))


def test_watch_outlives_a_restart(start_spand: Callable[..., Daemon]) -> None:
    daemon = start_spand(errors=True)
    process = start("watch", socket_dir=daemon.socket_dir)
    lines: list[dict[str, Any]] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(json.loads(line))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_for(lambda: any(line.get("kind") == "started" for line in lines))
        os.kill(daemon.child("control"), signal.SIGKILL)
        wait_for(lambda: sum(line.get("kind") == "started" for line in lines) == 2)
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(20)
        reader.join()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
    assert status == 0
    assert any(line.get("lost") for line in lines)
    assert len({line["epoch"] for line in lines}) == 2
    explained(["lost"])


def test_watch_ends_without_a_daemon(spand: Daemon) -> None:
    process = start("watch", "--patience", "0.3", socket_dir=spand.socket_dir)
    assert process.stdout is not None
    process.stdout.readline()
    spand.stop()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 3
    assert said.count("\n") == 1


# top


def test_top(spand: Daemon) -> None:
    where = {"socket_dir": spand.socket_dir}
    with engine(spand) as session:
        keys = store(session, 2)
        done = threading.Event()

        def work() -> None:
            while not done.is_set():
                session.acquire(keys + bytes(32), [SHARD]).release()
                time.sleep(0.01)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            command = ("top", "--json", "--interval", "0.3", "--count", "2")
            lines = kmesh(*command, **where).stdout.splitlines()
            once = kmesh("top", "--once", "--interval", "0.2", **where)
            live = kmesh("top", "--count", "2", "--interval", "0.1", **where)
        finally:
            done.set()
            worker.join()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 2
    for sample in samples:
        assert sample["hits_per_s"] > 0
        assert 0.5 < sample["hit_rate"] < 0.8
        assert len(sample["clients"]) == 2
    explained(samples[0])
    assert once.returncode == live.returncode == 0
    assert "an [engine]" in once.stdout
    assert "% hits" in live.stdout


def test_without_a_daemon(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("1 2 3")
    for command in (
        ("explain", "--tokens", str(file)),
        ("evict", "--all", "--yes"),
        ("drain",),
        ("watch",),
        ("top", "--once"),
        ("bench",),
        ("call", "Admin/Status"),
        ("token", "--", "true"),
    ):
        done = kmesh(*command, socket_dir=tmp_path)
        assert done.returncode == 3, command
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1


def test_explain_where_much_is_remembered(spand: Daemon, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("1 2 3")
    last = b""
    for number in range(300):
        long = f"{number:05}" * 800
        space = Namespace(long, long, "float32", 1, 1, 1, rope=long, adapter=long)
        Session.connect(spand.socket_dir, role=Role.TOOL, namespace=space).close()
        last = space.digest()
    known = as_json("ls", "--remembered", socket_dir=spand.socket_dir)["namespaces"]
    # The newest ones, as many as an answer has room for.
    assert known[0]["digest"] == last.hex()
    assert 50 < len(known) < 70
    done = kmesh("explain", "--tokens", str(tokens), socket_dir=spand.socket_dir)
    assert "there are several namespaces" in done.stderr
    with engine(spand) as session:
        store(session, 1)
    done = kmesh("explain", "--tokens", str(tokens), socket_dir=spand.socket_dir)
    assert done.returncode == 0, done.stderr
