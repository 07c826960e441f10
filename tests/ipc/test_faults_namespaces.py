"""Two clients that share nothing with each other or the daemon but the socket directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import ROOT, Daemon, environment, wait_for

_UNSHARE = ("unshare", "--mount", "--ipc", "--net", "--pid", "--fork", "--kill-child")

#: In namespaces of its own, with a /proc, a /dev/shm and a /tmp that nobody else sees.
_SETUP = """
set -e
mkdir -p "$ROOM/sockets"
mount --bind "$SOCKETS" "$ROOM/sockets"
mount -t proc proc /proc
mount -t tmpfs none /dev/shm
exec "$@"
"""

_CLIENT = """
import os, sys, time
from pathlib import Path
from kmesh import Role, Session, Shard
from kmesh.session import ReserveBatch
from kmesh.store import put_spans, read_span
sockets, what, key = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
spaces = {os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "ipc", "net", "pid")}
shard, payload = Shard(0, 2, 0, 2), b"restored " * 20_000
with Session.connect(sockets, role=Role.TOOL) as session:
    # Nobody else is to be seen from here.
    assert session.peer_pid == 0 and os.getpid() < 10
    assert not Path(f"/proc/{os.environ['DAEMON']}").exists()
    assert len(Path("/proc/net/dev").read_text().splitlines()) == 3
    assert not os.listdir("/dev/shm")
    if what == "store":
        batch = ReserveBatch(b"n" * 32, shard, key, [64], [0], [len(payload)])
        assert put_spans(session, session.staging(len(payload)), batch, [payload]) == [0]
    with session.acquire(key, [shard]) as lease:
        assert lease.hits == 1 and session.index.probe(key, [shard.code()]).hits == 1
        assert read_span(session, lease, 0) == payload
    print(" ".join(sorted(spaces)), flush=True)
    sys.stdin.readline()
"""


def _may_unshare() -> str:
    """Why this kernel does not let us, or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    done = subprocess.run(
        [*_UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True
    )
    return done.stderr.strip()


_REFUSED = _may_unshare()


@pytest.mark.skipif(bool(_REFUSED), reason=f"unshare: {_REFUSED}")
def test_two_clients_that_share_only_the_socket_directory(spand: Daemon, tmp_path: Path) -> None:
    key = os.urandom(32)
    clients: list[subprocess.Popen[str]] = []
    try:
        spaces = []
        for number, what in enumerate(("store", "restore")):
            room = tmp_path / str(number)
            env = environment(ROOM=str(room), SOCKETS=str(spand.socket_dir), DAEMON=str(spand.pid))
            command = [*_UNSHARE, "sh", "-c", _SETUP, "sh", sys.executable, "-c", _CLIENT]
            clients.append(
                subprocess.Popen(
                    [*command, str(room / "sockets"), what, key.hex()],
                    env=env,
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            # Both are there at the same time.
            assert clients[-1].stdout is not None
            spaces.append(clients[-1].stdout.readline().split())
        ours = {os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "ipc", "net", "pid")}
        assert [len(names) for names in spaces] == [4, 4]
        assert not set(spaces[0]) & set(spaces[1])
        assert not ours & {*spaces[0], *spaces[1]}
        status = spand.status()
        assert (status.sessions, status.spans) == (3, 1)
        for client in clients:
            assert client.communicate("\n", timeout=30) == ("", None)
            assert client.returncode == 0
    finally:
        for client in clients:
            client.kill()
            client.wait()
            for pipe in (client.stdin, client.stdout):
                assert pipe is not None
                pipe.close()
    wait_for(lambda: spand.status().sessions == 1, 30)
