"""The kernels that encode, compiled for the CPU: tests' GPUs run these."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

from kmesh.kernels import sources

UNIT = Path(__file__).parent / "unit"
KERNELS = Path(sources.__file__).parent


def build(folder: Path) -> ctypes.CDLL:
    """The kernels that encode as a shared library of the CPU's."""
    library = folder / "cpu_encode.so"
    command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-O1", "-Wall", "-Werror"]
    command += ["-Wno-unknown-pragmas", "-Wno-unused-function", "-ffp-contract=off", "-shared"]
    command += [
        "-fPIC",
        "-I",
        str(KERNELS),
        "-I",
        str(UNIT),
        "-x",
        "c++",
        str(UNIT / "codec" / "cpu_encode.cpp"),
    ]
    subprocess.run([*command, "-o", str(library)], check=True, timeout=110)
    return ctypes.CDLL(str(library))
