"""The built wheel, in an environment that has nothing else: what ``pip install kmesh`` gives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests" / "data" / "keys.json"
_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "client", "kmesh_spand", "vllm_connector")

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Bare:
    """An environment with the wheel and its base dependencies; ``cwd`` is outside of the tree."""

    root: Path
    cwd: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self.root / 'bin'}:/usr/bin:/bin", "HOME": str(self.cwd)}
        program = str(self.root / "bin" / command[0])
        return subprocess.run(
            [program, *command[1:]],
            cwd=self.cwd,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def python(self, code: str, *args: str) -> str:
        """What the code prints."""
        done = self.run("python", "-W", "error", "-c", code, *args)
        assert done.returncode == 0, done.stderr
        return done.stdout


def pip(*args: str) -> None:
    # Whatever points into the source tree would hide what the wheel lacks.
    env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by way of the source distribution, from a copy of the tree."""
    source = tmp_path_factory.mktemp("source")
    made = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in (*_SOURCES, "MANIFEST.in"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=made)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("dist")
    env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    root = tmp_path_factory.mktemp("bare")
    venv.create(root, with_pip=False)
    python = str(root / "bin" / "python")
    pip("--python", python, "install", "--only-binary=:all:", str(wheel))
    return Bare(root, tmp_path_factory.mktemp("elsewhere"))


def test_what_the_wheel_holds(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = ("kmesh", "kmesh_spand", "kmesh_vllm")
    assert {f"{package}/py.typed" for package in packages} <= names
    assert {"kmesh/_host.abi3.so", "kmesh/_host.pyi", "kmesh/v1/spans_pb2.py"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*packages, *(top for top in tops if top.endswith(".dist-info"))}
    assert not [name for name in names if "test_" in name or name.startswith("tests")]
    # One wheel for every Python from 3.11 on.
    assert "-cp311-abi3-linux_" in wheel.name
    # Every module of the tree is there.
    for folder in ("client/kmesh", "kmesh_spand", "vllm_connector/kmesh_vllm"):
        base = (ROOT / folder).parent
        for module in (ROOT / folder).rglob("*.py"):
            assert module.relative_to(base).as_posix() in names


def test_importing_it(bare: Bare) -> None:
    code = "import kmesh, sys; print(kmesh.__file__, kmesh.__version__); print(*sys.modules)"
    file, version = bare.python(code).splitlines()[0].split()
    assert Path(file).is_relative_to(bare.root)
    assert version[0].isdigit()
    for extra in ("numpy", "grpc", "torch", "typer"):
        assert bare.run("python", "-c", f"import {extra}").returncode != 0


def test_golden_keys(bare: Bare) -> None:
    code = """
import json, sys
from kmesh import KeyChain, Namespace
vectors = json.load(open(sys.argv[1]))
for vector in vectors:
    if vector["extras"]:
        continue
    space = Namespace.from_fields(vector["namespace"])
    assert space.digest().hex() == vector["expected"]["digest"], vector["name"]
    chain = KeyChain(
        space.digest(), span_tokens=vector["span"], sub_tokens=vector["sub"]
    )
    chain.extend(vector["tokens"])
    keys = [chain.key(i).hex() for i in range(chain.spans)]
    assert keys == vector["expected"]["keys"], vector["name"]
print(json.dumps(len(vectors)))
"""
    assert json.loads(bare.python(code, str(VECTORS))) > 3


def test_the_native_module_and_a_whole_round_trip(bare: Bare) -> None:
    code = """
import os
from kmesh import Shard
from kmesh.session import ReserveBatch
from kmesh.store import put_spans, read_span
from kmesh.testing import FakeDaemon
key, payload, shard = os.urandom(32), os.urandom(100_000), Shard(0, 1, 0, 1)
with FakeDaemon() as daemon, daemon.connect() as session:
    batch = ReserveBatch(bytes(32), shard, key, [64], [0], [len(payload)])
    assert put_spans(session, session.staging(len(payload)), batch, [payload]) == [0]
    with session.acquire(key, [shard]) as lease:
        assert read_span(session, lease, 0) == payload
print("done")
"""
    assert bare.python(code) == "done\n"


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--json"], []])
def test_the_command_says_what_it_lacks(bare: Bare, arguments: list[str]) -> None:
    done = bare.run("kmesh", *arguments)
    assert done.returncode == 2
    assert "pip install '.[cli]' in a clone of KMesh" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_daemon_says_what_it_lacks(bare: Bare) -> None:
    done = bare.run("kmesh-spand", "--version")
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs the package msgspec: pip install '.[daemon]' in a clone of KMesh" in done.stderr
    assert "Traceback" not in done.stderr
