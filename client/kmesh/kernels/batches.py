"""Copies that are asked for together: one call of the CUDA driver, which CUDA 12.8 brought.

Asked for one by one, each takes the copy engine some two microseconds in which nothing is on the
bus.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

#: Copies, u64 [number, (to, from, bytes)], and a stream's handle; an error's number or 0.
Batch: TypeAlias = Callable[[npt.NDArray[np.uint64], int], int]

_LIBRARY = "libcuda.so.1"
_SINCE = 12080
_STREAM_ORDER = 1


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("order", c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", c_uint),
    )


@cache
def find() -> Batch | None:
    """The driver's call; None: there is no driver, or one without it."""
    call = c_void_p()
    try:
        library = ctypes.CDLL(_LIBRARY)
        status = library.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync", byref(call), c_int(_SINCE), c_ulonglong(0), None
        )
    except (OSError, AttributeError):
        return None
    if status or not call.value:
        return None
    return _batch(call.value)


def _batch(address: int) -> Batch:
    """The call that is there, in the form that 12.8 has."""
    start = ctypes.CFUNCTYPE(
        c_int, c_void_p, c_void_p, c_void_p, c_size_t, POINTER(_Attributes), POINTER(c_size_t),
        c_size_t, POINTER(c_size_t), c_void_p,
    )(address)  # fmt: skip
    # One kind for all, from the first on.
    kind, first = _Attributes(order=_STREAM_ORDER), c_size_t(0)

    def batch(copies: npt.NDArray[np.uint64], stream: int) -> int:
        # Three lists, one behind the other: to, from, bytes.
        lists, failed = np.ascontiguousarray(copies.T), c_size_t()
        to, count = lists.ctypes.data, len(copies)
        return int(
            start(
                to, to + 8 * count, to + 16 * count, count,
                byref(kind), byref(first), 1, byref(failed), stream,
            )
        )  # fmt: skip

    return batch
