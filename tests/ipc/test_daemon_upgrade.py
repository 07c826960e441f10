"""A new daemon takes over from the one that runs, or that one goes on; whoever is killed when."""

from __future__ import annotations

import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from daemon_process import COMMAND, Daemon, environment, wait_for
from leaks import process_tree
from rawclient import RawClient
from stored import COUNT, SETTINGS, assert_filled, fill, key, payload

from kmesh.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from kmesh_spand import upgrade
from kmesh_spand.inherit import SEALED

Start = Callable[..., Daemon]

UPGRADE = (*COMMAND, "--upgrade")


def assert_serves(daemon: Daemon) -> None:
    """It has all spans, bit for bit, and stores; it is the one that has the directory."""
    lock = daemon.socket_dir / "daemon.lock"
    wait_for(lambda: lock.read_text() == f"{daemon.pid}\n" and _answers(daemon))
    for name in ("session.sock", "upgrade.sock"):
        # The process that clients and the next daemon see, although another made the socket.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(daemon.socket_dir / name))
            assert upgrade.peer(sock) == (daemon.pid, os.geteuid())
    assert_filled(daemon)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"more" * 8, b"bytes") in (0, common_pb2.REASON_EXISTS)
        assert client.read(b"more" * 8) == b"bytes"


def _answers(daemon: Daemon) -> bool:
    # A session that met the other daemon is ended.
    try:
        daemon.status()
    except (OSError, EOFError, grpc.RpcError):
        return False
    return True


def gone(daemon: Daemon, children: list[int]) -> None:
    assert daemon.process.wait(60) == 0
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def inodes(daemon: Daemon) -> set[int]:
    """Of the slabs that it holds."""
    return {path.stat().st_ino for path in daemon.memfds("slab")}


#: Reads random spans and compares them; connects again whenever the session ends.
_READER = """
import random, select, sys
from pathlib import Path
from stored import COUNT, key, payload, read
from rawclient import RawClient
epochs, reads, ends = [], 0, 0
def told():
    return bool(select.select([sys.stdin], [], [], 0)[0])
while not told():
    try:
        with RawClient(Path(sys.argv[1])) as client:
            epochs += [client.epoch] if client.epoch not in epochs else []
            while not told():
                number = random.randrange(COUNT)
                found = read(client, number)
                assert found == payload(number), (number, found)
                reads += 1
                if reads % 50 == 1:
                    print(len(epochs), flush=True)
    except (EOFError, ConnectionError, FileNotFoundError):
        ends += 1
print("done", len(epochs), reads, ends, flush=True)
"""


@contextmanager
def reader(daemon: Daemon) -> Iterator[subprocess.Popen[str]]:
    paths = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    paths = os.pathsep.join([paths, str(Path(__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-c", _READER, str(daemon.socket_dir)],
        env={**environment(), "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_readers_meet_no_wrong_byte_and_no_error(start_spand: Start) -> None:
    first = start_spand(**SETTINGS)
    fill(first)
    before = inodes(first)
    with ExitStack() as stack:
        readers = [stack.enter_context(reader(first)) for _ in range(4)]
        for process in readers:
            assert line(process) == ["1"]
        children = process_tree(first.pid)
        second = start_spand(command=UPGRADE, **SETTINGS)
        gone(first, children)
        for process in readers:
            # Each has been served by the new one.
            while (seen := line(process)) == ["1"]:
                pass
            assert seen == ["2"]
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in readers:
            while (seen := line(process))[0] != "done":
                assert seen == ["2"]
            assert int(seen[1]) == 2
            assert process.wait(60) == 0
    assert inodes(second) == before
    assert_serves(second)
    for text in ("upgrade: taking over from process", "all memory is here", "upgrade: done"):
        assert text in second.log()
    # And once more, by its own sockets.
    third = start_spand(command=UPGRADE, **SETTINGS)
    assert second.process.wait(60) == 0
    assert_serves(third)
    assert third.stop() == 0
    assert os.listdir(third.socket_dir) == ["daemon.lock"]


def refused(socket_dir: Path, **settings: object) -> str:
    """What a daemon says that may not take over."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [*UPGRADE, f"--socket-dir={socket_dir}", "--staging-memory=64MiB", *flags],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1].partition("upgrade: ")[2]


def test_what_does_not_fit_is_refused(start_spand: Start, socket_dir: Path) -> None:
    assert refused(socket_dir, **SETTINGS) == f"no daemon serves {socket_dir}"
    daemon = start_spand(**SETTINGS)
    fill(daemon)
    goes_on = "the daemon that runs goes on: "
    changed = {**SETTINGS, "slab_size": "4MiB"}
    assert refused(socket_dir, **changed) == goes_on + "slab_size was 8388608, and is 4194304"
    with RawClient(socket_dir) as client:
        assert client.read(key(1)) == payload(1)
        # Anything else than a daemon.
        for data in (b"", b"\x93", b"[" * 5000, os.urandom(300)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(30)
                sock.connect(str(socket_dir / "upgrade.sock"))
                if data:
                    sock.send(data)
                    assert sock.recv(100) == b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(30)
            sock.connect(str(socket_dir / "upgrade.sock"))
            upgrade.send(sock, upgrade.Have())
            assert upgrade.receive(sock)[0] == upgrade.Refused("unexpected message Have")
        assert client.read(key(2)) == payload(2)
    assert daemon.status().control_restarts == 0


#: A daemon of another version: it hands on something more, or can't end its processes.
_OTHER = """
import os, sys
from kmesh_spand.__main__ import main
from kmesh_spand.holdings import Holdings
from kmesh_spand.inherit import PREFIX, Named
from kmesh_spand.supervisor import Supervisor
named = Holdings.named
def with_more(self):
    yield from named(self)
    yield Named(PREFIX + "more", self.manifest)
def stuck(self):
    return "process 1 was killed, and has not ended"
{owner}.{name} = {instead}
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        (("Holdings", "named", "with_more"), 2, "nothing is known of more"),
        (("Supervisor", "halt", "stuck"), 1, "process 1 was killed, and has not ended"),
    ],
)
def test_a_daemon_that_goes_on_goes_on_whole(
    start_spand: Start, change: tuple[str, str, str], status: int, text: str
) -> None:
    """Those that read its index still believe it."""
    owner, name, instead = change
    code = _OTHER.format(owner=owner, name=name, instead=instead)
    first = start_spand(command=(sys.executable, "-c", code), errors=True, **SETTINGS)
    fill(first)
    with RawClient(first.socket_dir) as client:
        _, (fd,) = client.call(attach_index={})
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as index:
            second = start_spand(command=UPGRADE, ready=False, errors=True, **SETTINGS)
            assert second.process.wait(60) == status
            assert f"upgrade: the daemon that runs goes on: {text}" in second.log()
            assert index[40] == 0
        assert client.read(key(1)) == payload(1)
    assert_serves(first)
    assert first.status().control_restarts == 0


def test_ages_of_spans_go_on(start_spand: Start) -> None:
    first = start_spand(errors=True, **SETTINGS)
    fill(first)
    time.sleep(1)
    os.kill(first.child("control"), signal.SIGKILL)
    first.wait_ready(2)
    second = start_spand(command=UPGRADE, **SETTINGS)
    assert first.process.wait(60) == 0
    assert_filled(second)
    with second.rpc() as (channel, token):
        admin = admin_pb2_grpc.AdminStub(channel)
        rows = admin.List(admin_pb2.ListRequest(), metadata=token).spans
        assert len(rows) == COUNT
        assert all(row.age_ms > 900 for row in rows)
        evict = admin_pb2.EvictRequest(min_age_ms=900)
        assert admin.Evict(evict, metadata=token).spans == COUNT


@pytest.mark.parametrize("why", ["hardened", "systemd"])
def test_some_daemons_are_not_taken_over(start_spand: Start, socket_dir: Path, why: str) -> None:
    if why == "hardened":
        # Hardened memory with DMA-BUFs of whole slabs, which its next daemon could not make.
        start_spand(hardened="true", dma_buf="slabs", **SETTINGS)
        text = refused(socket_dir, hardened="true", dma_buf="off", **SETTINGS)
        assert text.endswith(SEALED)
        return
    start_spand(env={"NOTIFY_SOCKET": str(socket_dir.parent / "none")}, **SETTINGS)
    assert "its process is systemd's: restart the service" in refused(socket_dir, **SETTINGS)


def test_a_daemon_whose_lock_was_removed_is_neither_replaced_nor_taken_over(
    start_spand: Start, socket_dir: Path
) -> None:
    first = start_spand(**SETTINGS)
    fill(first)
    (socket_dir / "daemon.lock").unlink()
    second = start_spand(ready=False, errors=True, **SETTINGS)
    assert second.process.wait(60) == 2
    assert "another daemon serves" in second.log()
    assert "its lock is not what it was" in refused(socket_dir, **SETTINGS)
    assert_filled(first)


#: Kills or stops the process when it gets to a place.
_AT = """
import os, signal, sys
from kmesh_spand import handover, holdings, upgrade, place, supervisor
from kmesh_spand.life import Life
from kmesh_spand.__main__ import main
def before(owner, name):
    inner = getattr(owner, name)
    def instead(*arguments, **named):
        os.kill(os.getpid(), signal.{signal})
        return inner(*arguments, **named)
    setattr(owner, name, instead)
before({owner}, {name!r})
sys.exit(main())
"""


def at(owner: str, name: str, number: str = "SIGKILL", *flags: str) -> tuple[str, ...]:
    code = _AT.format(owner=owner, name=name, signal=number)
    return (sys.executable, "-c", code, *flags)


NEW_DIES = {
    "before it asks": ("upgrade.manifests.Manifest", "of"),
    "before it takes": ("upgrade", "receive"),
    "before it checks": ("holdings", "inherit"),
    "before it says that it has all": ("upgrade.Predecessor", "wait_to_begin"),
    "before it begins": ("Life", "begin"),
    "when it has begun": ("holdings.Holdings", "_end_indexes"),
    "before it serves": ("holdings.Holdings", "serving"),
}


def test_the_old_daemon_goes_on_when_the_new_one_dies(start_spand: Start) -> None:
    """At any step, one after the other, and at last it is done."""
    first = start_spand(errors=True, **SETTINGS)
    fill(first)
    for when, (owner, name) in NEW_DIES.items():
        second = start_spand(
            command=at(owner, name, "SIGKILL", "--upgrade"), ready=False, errors=True, **SETTINGS
        )
        assert second.process.wait(60) == -signal.SIGKILL, when
        assert_serves(first)
    # It was only ended by those that had said that they have all.
    assert first.status().control_restarts == 3
    third = start_spand(command=UPGRADE, **SETTINGS)
    assert first.process.wait(60) == 0
    assert_serves(third)


OLD_DIES = {
    "before it answers": ("handover.Handover", "_offer", False),
    "when it has sent all": ("handover.Handover", "_give", True),
    "before it lets go": ("Life", "release", True),
    "before it says so": ("upgrade", "Yours", True),
    "when the new one serves": ("place.Place", "close", True),
}


@pytest.mark.parametrize("when", OLD_DIES)
def test_the_new_daemon_serves_when_the_old_one_dies(start_spand: Start, when: str) -> None:
    owner, name, has_all = OLD_DIES[when]
    first = start_spand(command=at(owner, name), **SETTINGS)
    fill(first)
    second = start_spand(command=UPGRADE, ready=has_all, errors=True, **SETTINGS)
    assert first.process.wait(60) == -signal.SIGKILL
    if has_all:
        assert_serves(second)
        assert second.stop() == 0
        assert os.listdir(second.socket_dir) == ["daemon.lock"]
    else:
        # There is nothing that it could serve.
        assert second.process.wait(60) == 1
        assert "upgrade: the daemon that runs has ended, or broken off" in second.log()


def test_the_old_daemon_goes_on_when_the_new_one_can_not_serve(start_spand: Start) -> None:
    first = start_spand(errors=True, **SETTINGS)
    fill(first)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        taken.listen()
        second = start_spand(
            command=UPGRADE, ready=False, errors=True, metrics_listen=address, **SETTINGS
        )
        assert second.process.wait(60) == 1
    assert "metrics_listen: " in second.log()
    wait_for(lambda: "upgrade: the other daemon does not serve; going on" in first.log())
    assert_serves(first)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    "place", ["upgrade.Predecessor._take", "supervisor.Supervisor._start_control"]
)
def test_the_old_daemon_goes_on_when_the_new_one_is_told_to_stop(
    start_spand: Start, place: str, number: str
) -> None:
    """Before it asks for anything, and when it has it all, but does not serve."""
    first = start_spand(errors=True, **SETTINGS)
    fill(first)
    owner, name = place.rsplit(".", 1)
    command = at(owner, name, number, "--upgrade")
    second = start_spand(command=command, ready=False, **SETTINGS)
    status = second.process.wait(60)
    assert status in (0, -signal.Signals[number])
    assert "upgrade: done" not in second.log()
    # It says why, in whatever way it saw it.
    wait_for(lambda: re.search(r"upgrade: broken off: \S", first.log()))
    assert_serves(first)


def test_the_old_daemon_may_be_told_to_stop_in_between(start_spand: Start) -> None:
    """The new one has it all then, and serves."""
    first = start_spand(**SETTINGS)
    fill(first)
    second = start_spand(
        command=at("upgrade.Predecessor", "wait_to_begin", "SIGSTOP", "--upgrade"),
        ready=False,
        errors=True,
        **SETTINGS,
    )
    stat = Path(f"/proc/{second.pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(") ")[2][0] == "T")
    assert first.stop() == 0
    second.process.send_signal(signal.SIGCONT)
    second.wait_ready()
    assert_serves(second)
    assert second.stop() == 0


def test_only_its_own_user_may_take_over(spand: Daemon) -> None:
    if os.geteuid():
        pytest.skip("needs root, to be another user")
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(1, 5);"
        "s.connect(sys.argv[1]); print(s.recv(1000))"
    )
    path = spand.socket_dir / "upgrade.sock"
    for folder in (spand.socket_dir, spand.socket_dir.parent):
        folder.chmod(0o755)
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "PermissionError" in done.stderr
    # Who came by it in another way.
    path.chmod(0o666)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "uid 65534 may not have its memory" in done.stdout
