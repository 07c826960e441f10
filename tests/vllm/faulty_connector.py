"""The connector, whose loads wait or fail while a file of that name lies in a directory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kmesh_vllm import hostmover, preparing
from kmesh_vllm.connector import KMeshConnector

__all__ = ["KMeshConnector"]

DIRECTORY = "KMESH_TEST_LOADS"


def _there(name: str) -> bool:
    return Path(os.environ[DIRECTORY], name).exists()


_prepare = preparing.Preparer._prepare
_scatter = hostmover.scatter_packed


def _held(self: Any, *arguments: Any) -> bool:
    while _there("held"):
        time.sleep(0.02)
    return _prepare(self, *arguments)


def _failing(*arguments: Any) -> bytes:
    if _there("failing"):
        raise RuntimeError("a load that a test made fail")
    return _scatter(*arguments)


preparing.Preparer._prepare = _held
hostmover.scatter_packed = _failing
