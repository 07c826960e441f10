"""The kernels' source text, for whichever compiler there is."""

from __future__ import annotations

import re
from pathlib import Path

#: The programs, with what they start: name and vector bytes are in each function's name.
PROGRAMS = ("restore", "round", "store", "encode")
OPTIONS = ("-std=c++17",)

_HERE = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "([a-z_]+\.cuh)"$', re.MULTILINE)


def text(name: str) -> str:
    """One program as one piece of text, so that a cache that looks at the text misses nothing."""
    seen: set[str] = set()

    def expand(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        source = (_HERE / file).read_text(encoding="utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: expand(match[1]), source)

    return expand(f"{name}.cu")
