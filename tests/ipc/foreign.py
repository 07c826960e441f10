"""Python that runs as another user, with the tests' helpers at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from daemon_process import Daemon, environment

NOBODY = 65534
#: Everything is imported first: the user may not be let to where Python lies.
_HEAD = """
import ctypes, errno, fcntl, grpc, json, mmap, os, sys
from pathlib import Path
from rawclient import RawClient, Refused
from kmesh.index import IndexReader
from kmesh.layout import Shard
from kmesh.mapping import Mapping
from kmesh.v1 import admin_pb2, admin_pb2_grpc, sessions_pb2, sessions_pb2_grpc
os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})
socket_dir = Path(sys.argv[1])
"""


def run_as(uid: int, script: str, *arguments: object) -> str:
    """What a script prints. ``socket_dir`` is its first argument; it must not fail."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), environment()["PYTHONPATH"]])
    env = {**environment(), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _HEAD.format(uid=uid) + script, *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def let_in(daemon: Daemon) -> None:
    """Opens the daemon's directory to all users."""
    for path in (daemon.socket_dir, daemon.socket_dir.parent):
        path.chmod(0o755)
