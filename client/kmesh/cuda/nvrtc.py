"""NVIDIA's runtime compiler through ctypes: as a package, on the path, or in a toolkit."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from kmesh.errors import UnsupportedError

#: CUDA 12 is the first whose compiler knows all GPUs that the kernels are written for.
_OLDEST = 12
#: Of NVIDIA's packages, below a folder of ``sys.path``.
_PACKAGES = {12: "nvidia.cuda_nvrtc"}
_TOOLKITS = ("/usr/local/cuda-{major}", "/usr/local/cuda")

_Program = c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvrtcCreateProgram": (POINTER(_Program), c_char_p, c_char_p, c_int, c_void_p, c_void_p),
    "nvrtcCompileProgram": (_Program, c_int, POINTER(c_char_p)),
    "nvrtcGetProgramLogSize": (_Program, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (_Program, c_void_p),
    "nvrtcGetCUBINSize": (_Program, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (_Program, c_void_p),
    "nvrtcDestroyProgram": (POINTER(_Program),),
}


class Compiler:
    """The newest one that makes code for a driver.

    Args:
        version: the driver's, as ``Driver.version`` says it: code of a newer CUDA than that is
            none that it loads.

    Raises:
        UnsupportedError: there is none.
    """

    def __init__(self, version: int) -> None:
        newest = version // 1000
        for major in range(newest, _OLDEST - 1, -1):
            for path in _candidates(major):
                if (library := _load(path)) is not None:
                    self._calls = library
                    return
        names = " or ".join(f"libnvrtc.so.{n}" for n in range(newest, _OLDEST - 1, -1))
        raise UnsupportedError(
            f"there is no {names}" if names else f"CUDA {newest} is too old for the kernels"
        )

    def compile(self, text: str, name: str, options: Sequence[str]) -> bytes:
        """Machine code (a cubin) of a program, for the architecture that the options name.

        Raises:
            UnsupportedError: it does not compile; ends with what the compiler said.
        """
        program = _Program()
        self._do("nvrtcCreateProgram", byref(program), text.encode(), name.encode(), 0, None, None)
        try:
            given = (c_char_p * len(options))(*(option.encode() for option in options))
            if self._calls["nvrtcCompileProgram"](program, len(options), given):
                said = self._read("nvrtcGetProgramLog", program).rstrip(b"\0").decode()
                raise UnsupportedError(f"{name} does not compile: {said.strip()}")
            return self._read("nvrtcGetCUBIN", program)
        finally:
            self._calls["nvrtcDestroyProgram"](byref(program))

    def _read(self, call: str, program: c_void_p) -> bytes:
        size = c_size_t()
        self._do(f"{call}Size", program, byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._do(call, program, data)
        return data.raw

    def _do(self, call: str, *arguments: object) -> None:
        if code := self._calls[call](*arguments):
            raise UnsupportedError(f"{call}: error {code} of the compiler")


def _candidates(major: int) -> Iterator[str]:
    """Paths, or a name that is looked for as any library is."""
    name = f"libnvrtc.so.{major}"
    package = _PACKAGES.get(major, f"nvidia.cu{major}")
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield str(Path(folder, "lib", name))
    yield name
    for toolkit in _TOOLKITS:
        yield str(Path(toolkit.format(major=major), "lib64", name))


def _load(path: str) -> dict[str, Any] | None:
    found = Path(path)
    try:
        if found.is_absolute():
            if not found.exists():
                return None
            # The compiler opens it by name alone, and takes the one that is there already.
            for builtins in sorted(found.parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))
        library = ctypes.CDLL(path)
        calls = {name: library[name] for name in _SIGNATURES}
    except (OSError, AttributeError):
        return None
    for name, call in calls.items():
        call.argtypes, call.restype = _SIGNATURES[name], c_int
    return calls
