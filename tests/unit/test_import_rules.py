"""The import rules of docs/architecture.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from tools.import_contracts import AllowedContract

ROOT = Path(__file__).resolve().parents[2]


def test_import_rules_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("imported", "kept"),
    [
        ("pure.other", True),
        ("json", True),
        ("collections.abc", True),
        ("friend.keys", True),
        ("friend", False),
        ("friend.session", False),
        ("asyncio", False),
        ("socket", False),
        ("numpy", False),
    ],
)
def test_a_pure_package_imports_only_what_is_allowed(imported: str, kept: bool) -> None:
    graph = grimp.ImportGraph()
    for module in {"pure", "pure.inner", "pure.other", "friend", "friend.keys", imported}:
        graph.add_module(module)
    graph.add_import(importer="pure.inner", imported=imported)
    options = {"source": "pure", "allowed": ["friend.keys"]}
    check = AllowedContract("pure", {}, options).check(graph, verbose=False)
    assert check.kept is kept
    assert check.metadata["broken"] == ([] if kept else [("pure.inner", imported)])
