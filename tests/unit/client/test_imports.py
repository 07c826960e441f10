"""What ``import kmesh`` costs whoever imports it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_HEAVY = {"numpy", "torch", "grpc", "asyncio", "vllm", "typer", "rich"}


@pytest.mark.parametrize(
    "module", ["kmesh", "kmesh.session", "kmesh.index", "kmesh.store", "kmesh.testing"]
)
def test_imports_are_light(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in out.stdout.split()}
    assert not loaded & _HEAVY
    assert not {"kmesh_spand", "kmesh_vllm"} & loaded
