"""What happened in a chaos run, with times and pids."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Events:
    """An event log in a file, a JSON object a line; the last ones are at hand."""

    def __init__(self, path: Path, show: Callable[[str], None] | None = None) -> None:
        self._began = time.monotonic()
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._show = show
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, **more: Any) -> None:
        row = {"t": round(time.monotonic() - self._began, 3), "what": what, **more}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        if self._show is not None:
            self._show(self.line(row))

    @staticmethod
    def line(row: dict[str, Any]) -> str:
        more = " ".join(f"{k}={v}" for k, v in row.items() if k not in ("t", "what"))
        return f"{row['t']:8.3f}  {row['what']:10} {more}"

    def last(self, count: int) -> str:
        return "\n".join(map(self.line, self.rows[-count:]))

    def close(self) -> None:
        self._file.close()
