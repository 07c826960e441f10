"""NVIDIA's runtime compiler, without a GPU: the locked package brings it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kmesh.kernels import sources

#: What all kernels are compiled for.
ARCHITECTURES = ("sm_100", "sm_90", "sm_80")


class CompileError(Exception):
    """The text is no program; the message is the compiler's log."""


def library() -> Path:
    """The compiler's shared library.

    Raises:
        FileNotFoundError: ``nvidia-cuda-nvrtc`` is not installed.
    """
    spec = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    for folder in spec.submodule_search_locations or () if spec else ():
        found = Path(folder, "lib", "libnvrtc.so.13")
        if found.exists():
            return found
    raise FileNotFoundError("nvidia-cuda-nvrtc is not installed")


def compile_text(text: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Compiles a program for a real architecture.

    Returns the machine code and what the compiler said.

    Raises:
        CompileError: it does not compile.
    """
    path = library()
    # The compiler opens it by name alone, and takes the one that is there already.
    ctypes.CDLL(str(path.with_name("libnvrtc-builtins.so.13.0")))
    nvrtc = ctypes.CDLL(str(path))
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    )
    try:
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        said = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        log = said.rstrip(b"\0").decode()
        if failed:
            raise CompileError(log)
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    data = ctypes.create_string_buffer(size.value)
    _check(get(program, data))
    return data.raw


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"nvrtc: error {code}")


class Compiled(NamedTuple):
    """What came of a program for an architecture; ``machine_code`` is the beginning of it."""

    architecture: str
    program: str
    machine_code: str
    said: str


class Kernels:
    """All kernels, compiled for all architectures by a process of its own, which begins at once.

    Args:
        env: its environment.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=subprocess.DEVNULL, stdout=self._out
        )

    def compiled(self) -> list[Compiled]:
        """Waits for all of them.

        Raises:
            RuntimeError: something does not compile; the compiler's log is on stderr.
        """
        if status := self._process.wait():
            raise RuntimeError(f"exit status {status}")
        self._out.seek(0)
        return [Compiled(*json.loads(line)) for line in self._out]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._out.close()


def _compiled(architecture: str, program: str) -> Compiled:
    options = [f"-arch={architecture}", "--ptxas-options=-v", *sources.OPTIONS]
    code, said = compile_text(sources.text(program), f"{program}.cu", options)
    return Compiled(architecture, program, code[:4].hex(), said)


def main() -> None:
    # Whoever runs tests meanwhile goes first.
    os.nice(5)
    wanted = itertools.product(ARCHITECTURES, sources.PROGRAMS)
    with ThreadPoolExecutor(2) as threads:
        for one in threads.map(lambda pair: _compiled(*pair), wanted):
            print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
