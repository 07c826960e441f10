"""Each counter of the connector arrives on the ``/metrics`` page of a real vLLM server."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from daemon_process import Daemon, wait_for
from driver import ENVIRONMENT, HERE, environment, tokens
from faulty import COMMAND, DIRECTORY
from nursery import Fork, Nursery
from rawclient import RawClient

from kmesh.families import Family
from kmesh.flight import FlightCause, Standing
from kmesh.keys import KeyChain
from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans, read_span
from kmesh.v1 import admin_pb2, admin_pb2_grpc, common_pb2, spans_pb2
from kmesh_vllm.counts import NAMES

SHARD = common_pb2.Shard(layer_begin=0, layer_end=4, head_begin=0, head_end=2)
#: What is counted where the KV cache is on a GPU.
ON_GPUS = {
    "calibrated",
    "calibration_failed",
    "host_memory_unreadable",
    "restored_bytes_copy",
    "restored_bytes_gpu",
    "restored_bytes_kernel",
}
SPAN_BYTES = 4 * 2 * 2 * 32 * 4 * 64
_SAMPLE = re.compile(r"^vllm:kmesh_(\w+)_total\{[^}]*\} (\S+)$", re.MULTILINE)


class Server:
    """vLLM's OpenAI server."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                return response.status, response.read().decode()
        finally:
            connection.close()

    def up(self) -> bool:
        try:
            return self.ask("GET", "/health")[0] == 200
        except OSError:
            return False

    def complete(self, prompt: list[int], said: dict[str, Any] | None = None) -> None:
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
        body["temperature"] = 0
        if said is not None:
            body["kv_transfer_params"] = {"kmesh": said}
        status, text = self.ask("POST", "/v1/completions", body)
        assert status == 200, text

    @contextmanager
    def completing(self, prompt: list[int]) -> Iterator[None]:
        """The request runs meanwhile, and must end well."""
        failed: list[BaseException] = []

        def run() -> None:
            try:
                self.complete(prompt)
            except BaseException as wrong:
                failed.append(wrong)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        assert not failed, failed

    def counts(self) -> dict[str, float]:
        return {
            name: float(value) for name, value in _SAMPLE.findall(self.ask("GET", "/metrics")[1])
        }

    def wait_count(
        self, name: str, again: Sequence[int] = (5, 6, 7), said: dict[str, Any] | None = None
    ) -> None:
        """What a step counted is told with a later step, for which this prompt is completed.

        A prompt that can give the count again is one: on a starved machine an answer may have come
        too late the first time, which is another count.
        """

        def there() -> bool:
            self.complete(list(again), said)
            return self.counts()[name] > 0

        wait_for(there, 60, name)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kmesh-") as base:
        yield Path(base)


@pytest.fixture
def spand(folder: Path) -> Iterator[Daemon]:
    (folder / "faults").mkdir()
    daemon = Daemon(
        folder / "s",
        command=COMMAND,
        env={DIRECTORY: str(folder / "faults")},
        host_memory="6MiB",
        staging_memory="64MiB",
        grace_ms=200,
        stuck_ms=60_000,
    )
    daemon.wait_populated()
    yield daemon
    daemon.stop()
    daemon.kill()


@pytest.fixture
def server(
    folder: Path, spand: Daemon, model: Path, cache: Path, nursery: Nursery
) -> Iterator[Server]:
    speaking = folder / "tiny"
    shutil.copytree(model, speaking)
    nursery.run(HERE / "tiny_model.py", "tokenizer", speaking)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    transfer = {
        "kv_connector": "KMeshConnector",
        "kv_connector_module_path": "faulty_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket_dir": str(spand.socket_dir),
            "staging_bytes": 4 * SPAN_BYTES,
            "acquire_timeout_ms": 1500,
            "load_timeout_ms": 3000,
            "reserve_timeout_ms": 1000,
            "retry_after_ms": 1,
            "flight_patience": 1_000_000,
            "flight_wait_ms": 10_000,
        },
    }
    arguments = ["--model", str(speaking), "--served-model-name", "tiny"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    arguments += ["--block-size", "32", "--enforce-eager", "--no-enable-prefix-caching"]
    arguments += ["--max-model-len", "4096", "--max-num-batched-tokens", "4096"]
    arguments += ["--num-gpu-blocks-override", "400", "--kv-transfer-config", json.dumps(transfer)]
    (folder / "loads").mkdir()
    env = environment(
        **ENVIRONMENT,
        XDG_CACHE_HOME=str(cache),
        KMESH_TEST_LOADS=str(folder / "loads"),
    )
    program = [str(HERE / "server_process.py"), *arguments]
    log = folder / "server.log"
    with log.open("wb") as said:
        fork = Fork(nursery, env, program, said.fileno())
    fork.stdin.close()
    fork.stdout.close()
    try:
        served = Server(port)
        # Its pid is that of its group, too, which outlives it while a child runs.
        wait_for(lambda: served.up() or fork.ended(), 400, "vLLM's server is up")
        assert not fork.ended(), log.read_text()
        yield served
    finally:
        with suppress(ProcessLookupError):
            os.kill(fork.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            fork.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(fork.pid, signal.SIGKILL)


@contextmanager
def fault(file: Path) -> Iterator[None]:
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@contextmanager
def stopped(daemon: Daemon, name: str) -> Iterator[None]:
    pid = daemon.child(name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def stored(daemon: Daemon) -> list[admin_pb2.SpanInfo]:
    with daemon.rpc() as (channel, metadata):
        answer = admin_pb2_grpc.AdminStub(channel).List(admin_pb2.ListRequest(), metadata=metadata)
        return list(answer.spans)


def settle(daemon: Daemon, spans: int) -> None:
    daemon.wait_status(lambda s: s.spans >= spans and not s.reservations and not s.leases)


def drop_but_keep_in_index(daemon: Daemon, folder: Path) -> None:
    """Damages every span and reports it, while the index forgets nothing."""
    with fault(folder / "faults" / "remove"), RawClient(daemon.socket_dir) as client:
        before = daemon.status().counters["spans_corrupt"]
        spans = stored(daemon)
        for span in spans:
            daemon.flip(span.offset, span.slab)
            request = spans_pb2.AcquireRequest(keys=span.key, shards=[SHARD])
            lease = client.call(acquire=request)[0].lease
            report = spans_pb2.ReportCorruptRequest(lease=lease, entry=[0])
            assert client.call(report_corrupt=report)[0].accepted == 1
            client.release(lease)
        daemon.wait_status(lambda s: s.counters["spans_corrupt"] == before + len(spans))


class Other:
    """Another engine, which computes a prompt of 640 tokens that this one will miss."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self._daemon = daemon
        self.prompt = tokens(640, seed=seed)
        chain = KeyChain(stored(daemon)[0].namespace)
        chain.extend(self.prompt)
        self.keys, self.digest = chain.keys, stored(daemon)[0].namespace
        self.session = Session.connect(daemon.socket_dir, role=Role.TOOL)
        self.claim = self.session.claim(self.keys, [Shard(0, 4, 0, 2)])
        assert self.claim.standing is Standing.LEAD

    def store(self, spans: int | None = None) -> None:
        """Zeros, in which nobody looks for sense; all or the first few."""
        count = len(self.keys) // 32 if spans is None else spans
        batch = ReserveBatch(
            self.digest,
            Shard(0, 4, 0, 2),
            self.keys[: 32 * count],
            [64] * count,
            range(0, 64 * count, 64),
            [SPAN_BYTES] * count,
        )
        staging = self.session.staging(count * SPAN_BYTES)
        assert not any(put_spans(self.session, staging, batch, [bytes(SPAN_BYTES)] * count))

    @contextmanager
    def waited_for(self, server: Server) -> Iterator[None]:
        """The engine misses the prompt, and waits."""
        before = self._daemon.status().counters["flight_joins"]
        with server.completing(self.prompt):
            self._daemon.wait_status(lambda s: s.counters["flight_joins"] > before)
            yield


def flights(server: Server, spand: Daemon, folder: Path, old: list[Other]) -> None:
    """What may become of a miss that another engine computes."""
    # For a while after a lease that came too late, nothing is asked for.
    for seed in range(50, 90):
        server.complete(tokens(600, seed=seed))
        if server.counts()["flight_leads"]:
            break
        time.sleep(0.5)
    server.wait_count("flight_leads")
    with fault(folder / "faults" / "claim"):
        server.wait_count("flight_refused", tokens(600, seed=23))
    # Nobody ends this one: the engine waits as long as it may, and serves others meanwhile.
    endless = Other(spand, 27)
    with endless.waited_for(server):
        other = Other(spand, 24)
        with other.waited_for(server):
            other.store()
        for name in ("flight_joins", "flight_landed"):
            server.wait_count(name)
        for seed, cause, name in (
            (25, FlightCause.ABORTED, "flight_promoted"),
            (26, FlightCause.NOT_STORED, "flight_ended"),
        ):
            following = Other(spand, seed)
            with following.waited_for(server):
                following.session.land(following.claim.flight, cause)
            server.wait_count(name)
            following.session.close()
        other.session.close()
    server.wait_count("flight_left")
    endless.session.close()
    # What was begun so long ago and has landed so little is not waited for. A claim that a starved
    # daemon answers too late says nothing: then another is tried.
    for each in old:
        each.store(1)
        server.complete(each.prompt)
        with suppress(AssertionError):
            server.wait_count("flight_declined")
            break
    assert server.counts()["flight_declined"]
    for each in old:
        each.session.close()
    with stopped(spand, "control"):
        server.complete(tokens(600, seed=28))
        server.wait_count("flight_late")


def segments(server: Server, spand: Daemon) -> None:
    """Requests that say what of their prompt others share."""
    prompt = tokens(400, seed=30)
    parts = [{"tokens": 100, "private": True}, {"tokens": 300, "id": "minutes"}]
    said = {"family": "round", "segments": parts}
    server.complete(prompt, said)
    for name in ("segment_requests", "segment_misses", "segment_spans", "family_joins"):
        server.wait_count(name)
    server.wait_count("segment_hits", prompt, said)
    server.wait_count("segment_refused", prompt, {"segments": [{"tokens": 1}]})
    # Somebody has declared a family of that name for another model.
    namespace = stored(spand)[0].namespace
    other = Family("taken", namespace, "bfloat16", 32, (Shard(0, 4, 0, 2),), base=bytes(32))
    with Session.connect(spand.socket_dir, role=Role.TOOL) as session:
        session.families.declare(other)
    server.wait_count("family_failed", prompt, said | {"family": "taken"})


def recipes(server: Server, spand: Daemon) -> None:
    """A prompt whose spans have the bytes of another one's, and are kept as recipes over them."""
    prompt, alike = tokens(400, seed=35), tokens(400, seed=36)
    server.complete(prompt)
    namespace, shard = stored(spand)[0].namespace, Shard(0, 4, 0, 2)
    chains = KeyChain(namespace), KeyChain(namespace)
    for chain, those in zip(chains, (prompt, alike), strict=True):
        chain.extend(those)
    base, keys = (chain.keys for chain in chains)
    with Session.connect(spand.socket_dir, role=Role.TOOL) as session:

        def payloads() -> list[bytes]:
            with session.acquire(base, [shard]) as lease:
                found = lease.hits if lease.hits == 6 else 0
                return [read_span(session, lease, number) for number in range(found)]

        same = wait_for(payloads, 60, "the spans")
        batch = ReserveBatch(namespace, shard, keys, [64] * 6, range(0, 384, 64), [SPAN_BYTES] * 6)
        put_spans(session, session.staging(1 << 20), batch, same)
        session.families.declare(Family("alike", namespace, "float32", 32, (shard,), base))
        session.families.join("alike", "other", keys, namespace)
        wait_for(lambda: session.families.describe("alike").family.mirrors, 60, "recipes")
    for name in ("recipes_decoded", "restored_bytes_recipes"):
        server.wait_count(name, alike)


def test_every_counter_arrives(server: Server, spand: Daemon, folder: Path) -> None:
    faults, loads = folder / "faults", folder / "loads"
    # All are there from the start, so that a rate can be taken.
    server.complete([5, 6, 7])
    assert server.counts() == dict.fromkeys(NAMES, 0.0)

    prompt = tokens(400, seed=1)
    server.complete(prompt)
    settle(spand, 6)
    # Somebody computes since long ago what the engine will miss.
    patience = [Other(spand, seed) for seed in (20, 40, 41)]
    server.complete(prompt)
    for name in ("stored_spans", "stored_tokens", "stored_bytes"):
        server.wait_count(name)
    for name in ("restores", "restored_tokens", "restored_bytes"):
        server.wait_count(name, prompt)
    counts = server.counts()
    assert counts["restored_tokens"] == 384 * counts["restores"]

    # Loads that fail: each is computed instead.
    with fault(loads / "failing"):
        server.wait_count("load_failed_error", prompt)
    with fault(loads / "held"):
        server.wait_count("load_failed_late", prompt)
    settle(spand, 6)
    for span in stored(spand):
        spand.flip(span.offset + 1000, span.slab)
    server.wait_count("load_failed_corrupt", prompt)

    # Leases that do not come.
    prompt = tokens(400, seed=2)
    server.complete(prompt)
    settle(spand, 6)
    drop_but_keep_in_index(spand, folder)
    server.complete(prompt)
    server.wait_count("acquire_refused")
    prompt = tokens(400, seed=3)
    server.complete(prompt)
    settle(spand, 6)
    with stopped(spand, "control"):
        server.complete(prompt)
        server.wait_count("acquire_late")
        # Nor does a reservation.
        server.complete(tokens(400, seed=4))
        server.wait_count("store_skipped_late")

    # What is not stored.
    with fault(faults / "index"):
        prompt = tokens(400, seed=5)
        before = spand.status().counters["spans_committed"]
        server.complete(prompt)
        spand.wait_status(lambda s: s.counters["spans_committed"] >= before + 6)
        server.wait_count("store_skipped_exists", prompt)
    with fault(faults / "copy"):
        server.wait_count("store_skipped_error", tokens(400, seed=6))
    server.wait_count("store_skipped_full", tokens(4000, seed=7))
    with stopped(spand, "worker"):
        server.wait_count("store_skipped_staging", tokens(900, seed=8))

    flights(server, spand, folder, patience)
    segments(server, spand)
    recipes(server, spand)

    # A load whose daemon goes away.
    prompt = tokens(400, seed=9)
    before = spand.status().counters["spans_committed"]
    server.complete(prompt)
    spand.wait_status(lambda s: s.counters["spans_committed"] >= before + 6)
    with server.completing(prompt), fault(loads / "held"):
        spand.wait_status(lambda s: s.leases > 0)
        os.kill(spand.child("control"), signal.SIGKILL)
        # What is mapped already could still be read, until the worker knows.
        log = folder / "server.log"
        wait_for(lambda: log.read_text().count("lost KMesh at") >= 2, 60, "both halves know")
    server.wait_count("load_failed_lost")
    assert {name for name, count in server.counts().items() if not count} == ON_GPUS
