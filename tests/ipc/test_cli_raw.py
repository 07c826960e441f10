"""``kmesh call`` and ``kmesh token`` against real daemons."""

from __future__ import annotations

import json
import re
import sys

from daemon_process import ROOT, Daemon, wait_for
from test_cli import kmesh


def test_call(spand: Daemon) -> None:
    where = {"socket_dir": spand.socket_dir}
    status = json.loads(kmesh("call", "Admin/Status", **where).stdout)
    assert status["socket_dir"] == str(spand.socket_dir)
    done = kmesh("call", "kmesh.v1.Admin.Drain", '{"cancel": true}', **where)
    assert len(done.stdout.splitlines()) == 1
    json.loads(done.stdout)
    said = re.sub(r"[│\s]", "", kmesh("call", "Admin/Nothing", **where).stderr)
    for name in (ROOT / "proto" / "kmesh" / "v1").glob("*.proto"):
        for service in re.findall(r"^service (\w+)", name.read_text(), re.MULTILINE):
            assert f"{service}/" in said
    assert json.loads(kmesh("call", "Families/List", **where).stdout) == {}
    assert kmesh("call", "Admin/Status", '{"no": 1}', **where).returncode == 2
    refused = kmesh("call", "Admin/Evict", "{}", **where)
    assert refused.returncode == 4
    assert "nothing is chosen" in refused.stderr


TOKEN = """
import os, sys, grpc
from kmesh.v1 import sessions_pb2, sessions_pb2_grpc
metadata = (("kmesh-session", os.environ["KMESH_TOKEN"]),)
with grpc.insecure_channel("unix:" + os.environ["KMESH_GRPC"]) as channel:
    stub = sessions_pb2_grpc.SessionsStub(channel)
    print(stub.Describe(sessions_pb2.DescribeSessionRequest(), metadata=metadata).session_id)
sys.exit(int(sys.argv[1].removeprefix("--exit=")))
"""


def test_token(spand: Daemon) -> None:
    where = {"socket_dir": spand.socket_dir}
    done = kmesh("token", "--", sys.executable, "-c", TOKEN, "--exit=7", **where)
    assert done.returncode == 7, done.stderr
    assert int(done.stdout) > 0
    wait_for(lambda: spand.status().sessions == 1)
    shown = kmesh("token", "--", "sh", "-c", "echo $KMESH_TOKEN", **where).stdout.strip()
    assert len(shown) > 40
    assert shown not in spand.log()
    assert kmesh("token", "--", "/no/such/command", **where).returncode == 127
    assert kmesh("token", "--", "sh", "-c", "kill -9 $$", **where).returncode == 137
