"""The examples of docs/client.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

from kmesh.testing import FakeDaemon

PAGE = Path(__file__).parents[3] / "docs" / "client.md"


def test_the_examples_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {"__name__": "docs"}
    with FakeDaemon(socket_dir=tmp_path):
        for block in blocks:
            code = block.replace('"/run/kmesh"', repr(str(tmp_path)))
            exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102 - it is our own page
    names.clear()
