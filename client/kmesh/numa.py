"""On which NUMA node memory lies. System calls by number: the C library has no names for them."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_ONLINE = Path("/sys/devices/system/node/has_memory")
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
_MPOL_BIND = 2
_MPOL_F_NODE, _MPOL_F_ADDR = 1, 2
_MASK_BITS = 1024


def nodes() -> list[int]:
    """Nodes with memory, in order; empty where the kernel does not say."""
    try:
        text = _ONLINE.read_text().strip()
    except OSError:
        return []
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def bind(address: int, size: int, node: int) -> None:
    """Pages of a shared mapping that are made from now on lie on ``node``, whoever makes them.

    Args:
        address: of a page.
        size: bytes; in whole pages.

    Raises:
        OSError: the kernel refused, or has no NUMA.
    """
    if not 0 <= node < _MASK_BITS:
        raise OSError(22, f"no NUMA node {node}")
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    _call(0, address, size, _MPOL_BIND, ctypes.addressof(mask), _MASK_BITS, 0)


def node_of(address: int) -> int:
    """The node of the page at ``address``, which is made if it is not there.

    Raises:
        OSError: as ``bind``.
    """
    found = ctypes.c_int(-1)
    _call(1, ctypes.addressof(found), 0, 0, address, _MPOL_F_NODE | _MPOL_F_ADDR)
    return found.value


def _call(which: int, *arguments: int) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(38, f"NUMA is not known on {platform.machine()}")
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(ctypes.c_long(numbers[which]), *(ctypes.c_ulong(value) for value in arguments)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
