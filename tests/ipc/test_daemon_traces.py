"""OpenTelemetry: off unless asked for, and then spans that fit together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon_process import COMMAND, Daemon, environment, wait_for
from rawclient import RawClient, Refused

from kmesh.v1 import spans_pb2

Start = Callable[..., Daemon]


def use(daemon: Daemon) -> tuple[int, int]:
    """Two spans are stored in one commit, one is read; returns the session and a request's id."""
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        client.attach_staging(1 << 20)
        reserved = list(client.reserve([b"a" * 32, b"b" * 32], 70_000).reservation)
        assert client.commit(reserved, [0, 70_016]) == [0, 0]
        wire = client.last_id
        assert list(client.acquire([b"a" * 32, b"z" * 32]).reason) == [0, 1]
        with pytest.raises(Refused):
            client.call(acquire=spans_pb2.AcquireRequest(keys=b"short"))
        return client.welcome.session_id, wire


def check(spans: list[dict[str, Any]], session: int, wire: int) -> None:
    """``spans`` as the console exporter writes them."""
    named: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        named.setdefault(span["name"], []).append(span)
    assert {name: len(found) for name, found in named.items()} == {
        "kmesh.reserve": 1,
        "kmesh.commit": 1,
        "kmesh.copy": 2,
        "kmesh.acquire": 2,
    }
    (commit,) = named["kmesh.commit"]
    about = commit["attributes"]
    assert (about["kmesh.session"], about["kmesh.wire"]) == (session, wire)
    assert (about["kmesh.entries"], about["kmesh.good_entries"]) == (2, 2)
    for copy in named["kmesh.copy"]:
        assert copy["parent_id"] == commit["context"]["span_id"]
        assert copy["context"]["trace_id"] == commit["context"]["trace_id"]
        assert commit["start_time"] <= copy["start_time"] <= copy["end_time"] <= commit["end_time"]
        assert copy["attributes"]["kmesh.bytes"] == 70_000
        assert copy["attributes"]["kmesh.request"] == about["kmesh.request"]
        assert copy["attributes"]["kmesh.worker_seconds"] > 0
    found, refused = sorted(named["kmesh.acquire"], key=lambda span: str(span["start_time"]))
    assert found["parent_id"] is None
    assert found["attributes"]["kmesh.good_entries"] == 1
    assert refused["attributes"]["kmesh.code"] == "InvalidArgument"


def test_a_file(start_spand: Start, tmp_path: Path) -> None:
    path = tmp_path / "spans"
    daemon = start_spand(trace=f"file:{path}")
    session, wire = use(daemon)
    # They come while it runs, not only when it ends.
    wait_for(lambda: len(path.read_text().splitlines()) == 6)
    check([json.loads(line) for line in path.read_text().splitlines()], session, wire)


def test_the_console(start_spand: Start) -> None:
    daemon = start_spand(trace="console")
    session, wire = use(daemon)
    daemon.stop()
    lines = [line for line in daemon.log().splitlines() if line.startswith("{")]
    check([json.loads(line) for line in lines], session, wire)


def test_a_collector_on_a_unix_socket(start_spand: Start, socket_dir: Path) -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages

    got: list[Any] = []

    def export(request: Any, _context: Any) -> Any:
        got.extend(
            span
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        )
        return messages.ExportTraceServiceResponse()

    handler = grpc.method_handlers_generic_handler(
        "opentelemetry.proto.collector.trace.v1.TraceService",
        {
            "Export": grpc.unary_unary_rpc_method_handler(
                export,
                messages.ExportTraceServiceRequest.FromString,
                messages.ExportTraceServiceResponse.SerializeToString,
            )
        },
    )
    with futures.ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((handler,))
        server.add_insecure_port(f"unix:{socket_dir.parent}/otlp")
        server.start()
        try:
            daemon = start_spand(trace=f"otlp:unix:{socket_dir.parent}/otlp")
            use(daemon)
            wait_for(lambda: len(got) == 6)
        finally:
            server.stop(None).wait()
    (commit,) = [span for span in got if span.name == "kmesh.commit"]
    assert [s.parent_span_id for s in got if s.name == "kmesh.copy"] == [commit.span_id] * 2


def test_a_collector_that_is_not_there_hurts_nobody(start_spand: Start, socket_dir: Path) -> None:
    daemon = start_spand(trace=f"otlp:unix:{socket_dir.parent}/nobody", errors=True)
    use(daemon)
    assert daemon.stop() == 0


def test_off_loads_nothing(spand: Daemon) -> None:
    use(spand)
    for process in ("control", "worker"):
        files = Path(f"/proc/{spand.child(process)}/maps").read_text()
        assert "opentelemetry" not in files
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, kmesh_spand.control.entry, kmesh_spand.control.rpc, "
            "kmesh_spand.control.metrics, kmesh_spand.worker; "
            "print([m for m in sys.modules if m.startswith('opentelemetry')])",
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "[]\n", done.stderr


def test_without_the_extra_it_is_refused(tmp_path: Path) -> None:
    # A package that hides the real one, as where it was never installed.
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").touch()
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    for trace in ("console", "file:/tmp/x", "otlp:unix:/tmp/x"):
        done = subprocess.run(
            [*COMMAND, f"--socket-dir={tmp_path}/s", f"--trace={trace}"],
            env={**environment(), "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert "trace: OpenTelemetry is not installed" in done.stderr
