"""Generates client/kmesh/v1 from proto/kmesh/v1; with --check, says whether it is up to date."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = Path("kmesh/v1")
TARGET = ROOT / "client" / PACKAGE
INIT = '"""Generated from proto/kmesh/v1 by tools/gen_proto.py. Do not edit."""\n'
_SERVICE = re.compile(r"^service\s+\w+", re.MULTILINE)


def generate(out: Path) -> None:
    """Writes modules, type stubs and ``__init__`` below ``out``.

    Files without a service get no gRPC module. Raises CalledProcessError, with protoc's words.
    """
    files = sorted((PROTO / PACKAGE).glob("*.proto"))
    services = [path for path in files if _SERVICE.search(path.read_text())]
    plugins = Path(sys.executable).parent
    base = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{PROTO}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
    ]
    for kinds, sources in ((("python", "mypy"), files), (("grpc_python", "mypy_grpc"), services)):
        outs = [f"--{kind}_out={out}" for kind in kinds]
        command = base + outs + [str(path) for path in sources]
        subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
    (out / PACKAGE / "__init__.py").write_text(INIT)


def differences(made: Path, kept: Path) -> list[str]:
    """Names of files that are not the same in both folders."""
    names = {path.name for folder in (made, kept) for path in folder.glob("*.py*")}
    return sorted(name for name in names if _bytes(made / name) != _bytes(kept / name))


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if stale")
    check: bool = parser.parse_args(argv).check
    with tempfile.TemporaryDirectory() as folder:
        try:
            generate(Path(folder))
        except subprocess.CalledProcessError as error:
            print(error.stderr, end="", file=sys.stderr)
            return 1
        made = Path(folder) / PACKAGE
        stale = differences(made, TARGET)
        if check:
            for name in stale:
                print(f"client/{PACKAGE}/{name} is stale: run make proto", file=sys.stderr)
            return 1 if stale else 0
        TARGET.mkdir(parents=True, exist_ok=True)
        for name in stale:
            content = _bytes(made / name)
            if content is None:
                (TARGET / name).unlink()
            else:
                (TARGET / name).write_bytes(content)
            print(f"client/{PACKAGE}/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
