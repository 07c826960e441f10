"""Log lines say whose they are, keep their form, and tell no secret."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemon_process import Daemon, wait_for
from probe import Faults, get, samples
from rawclient import RawClient, Refused, engine

from kmesh.v1 import sessions_pb2

Start = Callable[..., Daemon]
ROOT = Path(__file__).parents[2]
ALWAYS = {"ts", "level", "process", "pid", "message"}


def lines(daemon: Daemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log().splitlines(True) if line.endswith("\n")]


def is_ready(daemon: Daemon) -> bool:
    try:
        return get(daemon.socket_dir, "/readyz")[0] == 200
    except OSError:
        return False


def told(daemon: Daemon, message: str) -> list[dict[str, Any]]:
    return [line for line in lines(daemon) if line["message"] == message]


def test_each_call_has_its_session_and_request(start_spand: Start) -> None:
    daemon = start_spand(log_level="debug", log_format="json")
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client, RawClient(daemon.socket_dir) as other:
        client.store(b"k" * 32, b"bytes")
        other.acquire([b"k" * 32])
        wire = other.last_id
        mine, others = client.welcome.session_id, other.welcome.session_id
    wait_for(lambda: {mine, others} <= {s["session"] for s in told(daemon, "session closed")})
    calls = [call for call in told(daemon, "call") if call["session"] in (mine, others)]
    kinds = [(c["session"], c["kind"], c["code"]) for c in calls]
    assert (mine, "reserve", "OK") in kinds
    assert (mine, "commit", "OK") in kinds
    (acquired,) = [c for c in calls if c["kind"] == "acquire"]
    assert (acquired["session"], acquired["wire"]) == (others, wire)
    assert len({c["request"] for c in calls}) == len(calls)
    assert all(c["ms"] >= 0 and c["level"] == "debug" for c in calls)
    for line in lines(daemon):
        assert set(line) >= ALWAYS
        assert abs(line["ts"] - time.time()) < 300
        assert line["level"] in ("debug", "info", "warning", "error")
        assert line["process"] in ("supervisor", "control", "worker")
    for session in (mine, others):
        assert [s["session"] for s in told(daemon, "session opened")].count(session) == 1


def test_what_a_request_caused_elsewhere_names_it(start_spand: Start, tmp_path: Path) -> None:
    faults = Faults(tmp_path / "faults")
    faults.settings["errors"] = True
    daemon = start_spand(log_level="debug", log_format="json", **faults.settings)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        with faults.during("copy"):
            assert client.store(b"k" * 32, b"bytes") == 9
        wire = client.last_id
        session = client.welcome.session_id
    (commit,) = wait_for(lambda: [c for c in told(daemon, "call") if c["kind"] == "commit"])
    assert (commit["session"], commit["wire"]) == (session, wire)
    (job,) = told(daemon, "a job failed")
    assert job["process"] == "worker"
    assert (job["session"], job["request"]) == (session, commit["request"])
    assert "a bug that a test put here" in job["exception"]
    (heard,) = [x for x in lines(daemon) if x["message"].startswith("the store worker: ")]
    assert (heard["session"], heard["request"]) == (session, commit["request"])
    # What was expected is not an error of the test.
    daemon.log_path.write_text("")


def test_slow_calls_are_told_at_any_level(start_spand: Start) -> None:
    # Nothing below a warning is said, so the log can't tell when it is ready.
    daemon = start_spand(log_level="warning", log_format="json", slow_call_ms=200, ready=False)
    wait_for(lambda: is_ready(daemon))
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        client.attach_staging(1 << 20)
        reserved = list(client.reserve([b"k" * 32], 1000).reservation)
        worker = daemon.child("worker")
        os.kill(worker, signal.SIGSTOP)
        client.send(commit={"reservation": reserved, "staging_offset": [0]})
        wait_for(lambda: samples(daemon)["kmesh_worker_copies"] == 1)
        time.sleep(0.4)
        os.kill(worker, signal.SIGCONT)
        client.receive()
        session = client.welcome.session_id
    (slow,) = wait_for(lambda: [s for s in told(daemon, "slow call") if s["kind"] == "commit"])
    assert (slow["session"], slow["level"], slow["code"]) == (session, "warning", "OK")
    assert slow["ms"] >= 300
    # Other calls may be slow on a machine that is.
    assert daemon.status().counters["slow_calls"] >= 1


def test_secrets_are_never_logged(start_spand: Start, tmp_path: Path) -> None:
    salt = "salt-that-nobody-may-see"
    trace = tmp_path / "trace"
    daemon = start_spand(log_level="debug", trace=f"file:{trace}")
    daemon.wait_populated()
    hello = engine(sessions_pb2.ROLE_SCHEDULER, salt=salt)
    tokens = []
    with RawClient(daemon.socket_dir, **hello) as client:
        tokens.append(client.welcome.token)
        client.store(b"k" * 32, b"payload-that-nobody-may-see")
        client.acquire([b"k" * 32])
        # Also where a session is refused because of what it said.
        for wrong in ({"salt": salt + "2"}, {"salt": salt, "layers": salt}):
            try:
                RawClient(daemon.socket_dir, **engine(sessions_pb2.ROLE_WORKER, **wrong))
            except Refused:
                continue
            raise AssertionError(wrong)
    with daemon.rpc() as (_, metadata):
        tokens.append(metadata[0][1])
        daemon.status()
    daemon.stop()
    said = daemon.log() + trace.read_text()
    assert "kmesh.acquire" in said
    assert "session opened" in said
    for token in tokens:
        assert len(token) > 40
        for part in (token, *token.split(".")):
            assert part not in said
    assert salt not in said
    assert "payload-that-nobody-may-see" not in said


def test_lines_are_written_down(start_spand: Start) -> None:
    text = (ROOT / "docs" / "logging.md").read_text()
    daemon = start_spand(log_level="debug", log_format="json", errors=True)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        client.store(b"k" * 32, b"bytes")
    os.kill(daemon.child("worker"), signal.SIGKILL)
    wait_for(lambda: daemon.status().worker_restarts == 1)
    daemon.stop()
    keys = set(re.findall(r"`([a-z_]+)`", text))
    for line in lines(daemon):
        if line["message"].startswith(("memory is", "a message to")):
            continue
        start = re.split(r"[:,] ", line["message"])[0]
        assert f"`{start}" in text, line
        if not line["message"].startswith("ready: "):
            assert set(line) <= keys | {"signal"}, line
