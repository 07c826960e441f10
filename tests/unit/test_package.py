"""What importing the package costs, and that everything it names is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kmesh

HEAVY = {"numpy", "torch", "grpc", "msgspec", "asyncio"}


def loaded_by(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(' '.join(sys.modules))"
    # Without site (whose hooks import things of their own), an editable install is not found.
    paths = [str(Path(kmesh.__file__).parents[1]), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run(
        [sys.executable, "-S", "-c", program], env=env, capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_importing_the_package_does_no_work() -> None:
    loaded = loaded_by("import kmesh")
    assert not loaded & HEAVY
    assert {name for name in loaded if name.startswith("kmesh")} == {"kmesh"}


def test_native_parts_load_nothing_heavy() -> None:
    modules = "kmesh.index, kmesh.mapping, kmesh.kernels.host, kmesh.keys, kmesh.layout"
    assert not loaded_by(f"import {modules}") & HEAVY


def test_every_export_is_there() -> None:
    for name in kmesh.__all__:
        assert getattr(kmesh, name) is not None
    assert set(kmesh.__all__) == set(dir(kmesh))
    assert not hasattr(kmesh, "nothing_of_that_name")


def test_the_version_is_one_line_of_text() -> None:
    assert kmesh.__version__
    assert kmesh.__version__ == kmesh.__version__.strip()
