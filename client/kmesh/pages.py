"""Pages of a mapping, touched before somebody would wait for each of them."""

from __future__ import annotations

import ctypes

#: The kernel's own values for ``madvise``.
_POPULATE_READ, _POPULATE_WRITE = 22, 23
#: Of one call, which holds up all who map memory in this process.
_PIECE = 2 << 20

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def touch(address: int, size: int, *, writable: bool) -> None:
    """Maps the pages of a range, which stay as they are; may take long.

    Kernels that don't know how (before 5.14) do nothing, and what can't be had is left to whoever
    touches it.

    Args:
        address, size: bytes; whole pages of one mapping, which outlives the call.
        writable: for writing; otherwise for reading.
    """
    how = _POPULATE_WRITE if writable else _POPULATE_READ
    for at in range(address, address + size, _PIECE):
        if _libc.madvise(at, min(_PIECE, address + size - at), how):
            return
