"""Complaints about other services, for which no other test of ours stands: see
``docs/field-tests.md``."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import ROOT, Daemon, environment, wait_for
from probe import Faults, get, readiness, samples, wait_for_reasons
from rawclient import NAMESPACE, RawClient, engine

from kmesh import Role, Session, errors, numa
from kmesh.v1 import common_pb2, session_socket_pb2, sessions_pb2

Start = Callable[..., Daemon]


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "faults")


_WARMING_UP = """
import sys, time
from pathlib import Path
from rawclient import RawClient, engine
how_far = int(sys.argv[2])
client = RawClient(Path(sys.argv[1]), hello=False)
if how_far > 0:
    client.hello(**engine(2, "warming-up"))
if how_far > 1:
    client.attach_staging(1 << 20)
    client.attach_slab(0)
print("there", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how_far", [0, 1, 2], ids=["connected", "let in", "attached"])
def test_an_engine_that_dies_before_its_first_use(shared_spand: Daemon, how_far: int) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    before = shared_spand.status()
    process = subprocess.Popen(
        [sys.executable, "-c", _WARMING_UP, str(shared_spand.socket_dir), str(how_far)],
        env={**environment(), "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            status = shared_spand.status()
            assert status.sessions - before.sessions == (how_far > 0)
            assert status.staging_bytes == (1 << 20 if how_far > 1 else 0)
        finally:
            process.kill()
    # Nothing has to be waited for but the end of its connection.
    shared_spand.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes, 30)
    # The engine's id is free for another namespace, too.
    other = engine(sessions_pb2.ROLE_WORKER, "warming-up", dtype="float16")
    assert other["namespace"] != NAMESPACE
    RawClient(shared_spand.socket_dir, **other).close()


def test_a_request_that_fails_in_the_daemon_is_answered(start_spand: Start, faults: Faults) -> None:
    daemon = start_spand(bugs=True, **faults.settings)
    daemon.wait_populated()
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as session:
        with faults.during("internal"):
            for _ in range(20):
                with pytest.raises(errors.InternalError, match="a bug in the daemon"):
                    session.export_slab(0)
            assert session.pending == 0
            session.ping()
        assert session.slab(0).size == 32 << 20
        assert session.pending == 0
    status = daemon.status()
    assert status.counters["refused_internal"] == 20
    assert status.control_restarts == 0


def test_a_policy_that_throws_wherever_it_is_asked(start_spand: Start, faults: Faults) -> None:
    """Not only while it names victims: also when it is told what may go, and what may not."""
    daemon = start_spand(host_memory="2MiB", **faults.settings)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        with faults.during("order"), faults.during("policy"):
            for number in range(30):
                key = number.to_bytes(32, "little")
                assert client.store(key, key * 5000) == 0
                assert client.read(key) == key * 5000
            wait_for_reasons(daemon, "evictor", seconds=30)
            assert get(daemon.socket_dir, "/livez")[0] == 200
        counters = daemon.status().counters
        assert counters["spans_evicted"] >= 20
        # Each store and each read told it something, and each was counted.
        assert counters["spans_policy_faults"] >= 90
        assert client.store(b"z" * 32, b"bytes") == 0
        assert client.read(b"z" * 32) == b"bytes"
    assert daemon.status().control_restarts == 0


def _shared_names() -> set[str]:
    folders = map(Path, ("/dev/shm", "/dev/mqueue", "/dev/hugepages"))
    return {str(path) for folder in folders if folder.is_dir() for path in folder.iterdir()}


def _mapped(paths: set[str]) -> set[str]:
    """Those of them that a living process has mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text()
            found |= {path for path in paths if f" {path}\n" in text}
    return found


def test_a_crash_leaves_nothing_in_shared_memory(start_spand: Start, socket_dir: Path) -> None:
    before = _shared_names()
    segments = Path("/proc/sysvipc/shm").read_text()
    daemon = start_spand()
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        client.store(b"k" * 32, b"bytes")
        client.attach_slab(0)
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.process.wait()
        with pytest.raises((EOFError, ConnectionResetError)):
            client.receive()

    def left() -> set[str]:
        new = _shared_names() - before
        return new - _mapped(new)

    # What others who live have made meanwhile, such as engines of other tests, is no leftover.
    wait_for(lambda: not left(), what="names that nobody has")
    assert Path("/proc/sysvipc/shm").read_text() == segments
    # Sockets, which the next one replaces, and its lock.
    assert set(os.listdir(socket_dir)) <= {
        "session.sock",
        "grpc.sock",
        "metrics.sock",
        "upgrade.sock",
        "daemon.lock",
    }
    start_spand().wait_populated()


def test_serving_begins_before_there_is_memory(start_spand: Start, faults: Faults) -> None:
    faults.begin("populate")
    daemon = start_spand(host_memory="64MiB", slab_size="16MiB", **faults.settings)
    # Nothing has pages: sessions, look-ups and probes are served, and a store is told to wait.
    with RawClient(daemon.socket_dir) as client:
        assert client.acquire([b"k" * 32]).reason[0] == common_pb2.REASON_MISS
        assert list(client.reserve([b"k" * 32], 1000).reason) == [common_pb2.REASON_NOT_READY]
        assert get(daemon.socket_dir, "/livez")[0] == 200
        assert all(slab.populated == 0 for slab in daemon.status().slabs)
        faults.end("populate")
        wait_for(lambda: client.store(b"k" * 32, b"bytes") == 0, 30)
        daemon.wait_populated()
        page = samples(daemon)
        assert sum(v for name, v in page.items() if "populated_bytes" in name) > 63 << 20


def test_a_fall_back_is_said_once_counted_and_shown(start_spand: Start, faults: Faults) -> None:
    faults.begin("huge")
    daemon = start_spand(host_memory="64MiB", slab_size="16MiB", **faults.settings)
    daemon.wait_populated()
    status = daemon.wait_status(lambda s: s.counters["fallback_populate"] == 4)
    assert daemon.log().count("the kernel can't fill mapped memory") == 1
    assert sum(v for name, v in samples(daemon).items() if "fallback" in name) >= 4
    assert status.counters["fallback_populate"] == 4


@pytest.mark.parametrize(("kernel", "slabs"), [("no-huge", 0), ("small", 4)])
def test_small_pages_are_warned_of_where_the_kernel_would_give_huge_ones(
    start_spand: Start, faults: Faults, kernel: str, slabs: int
) -> None:
    faults.begin(kernel)
    daemon = start_spand(host_memory="64MiB", slab_size="16MiB", **faults.settings)
    daemon.wait_populated()
    status = daemon.status()
    assert status.counters["fallback_hugepages"] == slabs
    warned = [warning.text for warning in status.warnings if warning.name == "hugepages"]
    assert warned == ([f"{slabs} of 4 slabs have small pages"] if slabs else [])
    assert daemon.log().count("a slab has small pages") == bool(slabs)


def test_no_memory_need_be_locked(start_spand: Start) -> None:
    """In a container without CAP_IPC_LOCK: all of it works, and doctor names the limit."""
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    try:
        daemon = start_spand()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "kmesh.cli", "--socket-dir", daemon.socket_dir),
                *("doctor", "--json"),
            ],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    daemon.wait_populated()
    for pid in (daemon.pid, daemon.child("control"), daemon.child("worker")):
        assert resource.prlimit(pid, resource.RLIMIT_MEMLOCK)[0] == 0
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"k" * 32, b"bytes") == 0
        assert client.read(b"k" * 32) == b"bytes"
    (found,) = [c for c in json.loads(done.stdout)["checks"] if c["name"] == "memlock"]
    assert found["level"] == "ok"
    assert "limit 0" in found["seen"]


_FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "eval", "exec"}


def test_nothing_is_ever_unpickled() -> None:
    """Neither by us nor, of what comes over a socket, by a library that we call."""
    files = [
        file
        for room in ("client/kmesh", "kmesh_spand", "vllm_connector/kmesh_vllm")
        for file in (ROOT / room).rglob("*.py")
    ]
    assert len(files) > 100
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id}
            assert not names & _FORBIDDEN, f"{file}: {names}"


_BOMB = b"cos\nsystem\n(S'touch %s'\ntR."


def test_a_pickle_on_a_socket_is_garbage(shared_spand: Daemon, tmp_path: Path) -> None:
    made = tmp_path / "made"
    bomb = _BOMB % str(made).encode()
    with RawClient(shared_spand.socket_dir) as client:
        client.sock.send(bomb)
        assert client.receive()[0].status.code == common_pb2.CODE_INVALID_ARGUMENT
    with RawClient(shared_spand.socket_dir, hello=False) as client:
        hello = sessions_pb2.Hello(
            protocol_version=1, layout_version=1, role=3, client_name=bomb.decode()
        )
        request = session_socket_pb2.Request(id=1, hello=hello)
        client.sock.send(request.SerializeToString())
        assert client.receive()[0].HasField("welcome")
    assert readiness(shared_spand) == set()
    assert not made.exists()


def test_memory_lies_on_the_node_that_is_set(start_spand: Start) -> None:
    """Row 28. With one node this shows little more than the binding."""
    known = numa.nodes()
    if not known:
        pytest.skip("the kernel names no NUMA nodes")
    node = known[-1]
    daemon = start_spand(numa_node=node)
    daemon.wait_populated()
    maps = Path(f"/proc/{daemon.child('worker')}/numa_maps").read_text().splitlines()
    slabs = [line.split() for line in maps if "kmesh-slab" in line]
    assert slabs
    for words in slabs:
        assert words[1] == f"bind:{node}"
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as session:
        slab = session.slab(0)
        for offset in range(0, slab.size, 1 << 20):
            assert numa.node_of(slab.address + offset) == node


def test_a_node_that_is_not_there_is_refused(start_spand: Start) -> None:
    daemon = start_spand(numa_node=1000, ready=False, errors=True)
    assert daemon.process.wait(30) == 2
    assert "numa_node: nodes with memory are" in daemon.log()
