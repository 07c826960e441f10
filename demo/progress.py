"""Says what is going on, on standard error: a spinner for a person, lines for a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

console = Console(stderr=True, highlight=False)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Shows ``what`` while the block runs, and how long it took."""
    began = time.monotonic()
    if not console.is_terminal:
        console.print(f"· {what} …")
    with console.status(what):
        yield
    console.print(f"[green]✓[/green] {what} [dim]{time.monotonic() - began:.1f} s[/dim]")
