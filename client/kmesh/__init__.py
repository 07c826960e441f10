"""KMesh: the KV state of related LLM inference requests, held once for a node.

Importing this package does no work: what is exported is loaded when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmesh.aio import AsyncSession
    from kmesh.client import AsyncClient, Client
    from kmesh.errors import KMeshError
    from kmesh.handles import Handle, HandleKind, Location
    from kmesh.keys import Extra, KeyChain, Namespace
    from kmesh.layout import Shard, SpanGeometry
    from kmesh.lease import Lease
    from kmesh.session import Role, Session

    __version__: str

_EXPORTS = {
    "AsyncClient": "kmesh.client",
    "AsyncSession": "kmesh.aio",
    "Client": "kmesh.client",
    "Extra": "kmesh.keys",
    "Handle": "kmesh.handles",
    "HandleKind": "kmesh.handles",
    "KMeshError": "kmesh.errors",
    "KeyChain": "kmesh.keys",
    "Lease": "kmesh.lease",
    "Location": "kmesh.handles",
    "Namespace": "kmesh.keys",
    "Role": "kmesh.session",
    "Session": "kmesh.session",
    "Shard": "kmesh.layout",
    "SpanGeometry": "kmesh.layout",
}

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "Client",
    "Extra",
    "Handle",
    "HandleKind",
    "KMeshError",
    "KeyChain",
    "Lease",
    "Location",
    "Namespace",
    "Role",
    "Session",
    "Shard",
    "SpanGeometry",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        value: object
        try:
            value = version("kmesh")
        except PackageNotFoundError:  # a source tree that was never installed
            value = "0+source"
    elif name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
