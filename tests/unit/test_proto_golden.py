"""The contract does not change by accident, and its code runs under two majors of protobuf."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from tools import describe_proto, gen_proto

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "descriptors.txt"
STUBS = ROOT / "client" / "kmesh" / "v1"
PROTOBUF_7 = "7.36.2"

# Prints the version that it ran under, after a message with every kind of field went round.
PROBE = """
import importlib, pathlib, sys
import google.protobuf
for path in sorted(pathlib.Path(sys.argv[1]).glob("*_pb2*.py")):
    importlib.import_module(f"kmesh.v1.{path.stem}")
from kmesh.v1 import session_socket_pb2, spans_pb2
sent = session_socket_pb2.Response(id=7, epoch=1 << 63)
sent.acquire.lease = 9
sent.acquire.offset.extend([0, 1 << 40])
sent.acquire.root.append((1 << 64) - 1)
back = session_socket_pb2.Response.FromString(sent.SerializeToString())
assert back == sent and back.WhichOneof("body") == "acquire", back
print(google.protobuf.__version__)
"""


def test_contract_is_what_was_last_agreed() -> None:
    """A number, a name or a type that moved breaks every peer of another version."""
    assert describe_proto.describe() == GOLDEN.read_text(), (
        "the wire contract changed; if that is meant, see tools/describe_proto.py"
    )


def test_generated_code_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert gen_proto.main(["--check"]) == 0, capsys.readouterr().err


def test_stale_generated_code_is_noticed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(STUBS, kept, ignore=shutil.ignore_patterns("__pycache__"))
    assert gen_proto.differences(STUBS, kept) == []
    with (kept / "spans_pb2.py").open("a") as module:
        module.write("# touched\n")
    (kept / "removed_pb2.py").touch()
    assert gen_proto.differences(STUBS, kept) == ["removed_pb2.py", "spans_pb2.py"]


def test_dependencies_allow_what_the_generated_code_asks_for() -> None:
    """The gRPC modules refuse a runtime older than their generator."""
    made_with = {
        version
        for path in STUBS.glob("*_pb2_grpc.py")
        for version in re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", path.read_text())
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {
        need.partition(">=")[2]
        for extra in ("cli", "daemon")
        for need in extras[extra]
        if need.startswith("grpcio>=")
    }
    assert len(made_with) == 1
    assert asked == made_with


def test_stubs_under_protobuf_6() -> None:
    assert _probe([]).startswith("6.")


def test_stubs_under_protobuf_7() -> None:
    assert _probe([str(_installed(PROTOBUF_7))]) == PROTOBUF_7


def _probe(first_on_path: list[str]) -> str:
    path = os.pathsep.join([*first_on_path, str(ROOT / "client")])
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(STUBS)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _installed(version: str) -> Path:
    """A folder with just that protobuf, downloaded once."""
    target = ROOT / ".cache" / f"protobuf-{version}"
    if not target.is_dir():
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            work = Path(folder, "site")
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
            command += ["--target", str(work), f"protobuf=={version}"]
            subprocess.run(command, check=True, timeout=100)
            work.rename(target)
    return target
