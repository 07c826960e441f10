"""KMesh for vLLM: prompts' KV state is restored from, and stored in, a ``kmesh-spand`` daemon.

Name ``KMeshConnector`` of this module in vLLM's ``--kv-transfer-config``. Everything that can be
set is in ``docs/vllm.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmesh_vllm.connector import KMeshConnector

__all__ = ["KMeshConnector"]


def __getattr__(name: str) -> object:
    # Loaded when asked for: the rest of this package needs no vLLM.
    if name == "KMeshConnector":
        from kmesh_vllm.connector import KMeshConnector

        return KMeshConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
