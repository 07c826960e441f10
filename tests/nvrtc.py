"""NVIDIA's runtime compiler, without a GPU: the locked package brings it."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path


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
