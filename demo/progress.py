"""Says what is going on, on standard error: a spinner for a person, lines for a log.

Lines begin with the seconds since the program's start, and what takes long is said again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

console = Console(stderr=True, highlight=False)
#: Seconds after which a step that lasts is said again in a log.
AGAIN = 15.0
#: The same of the spinner's own text.
_TICK = 1.0
_STARTED = time.monotonic()


@contextmanager
def step(what: str) -> Iterator[None]:
    """Shows ``what`` while the block runs, for how long it does, and how long it took."""
    began = time.monotonic()
    ended = threading.Event()
    if not console.is_terminal:
        _line("·", f"{what} …")
    with console.status(what) as spinner:
        teller = threading.Thread(target=_tell, args=(what, began, ended, spinner), daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()
    _line("[green]✓[/green]", f"{what} [dim]{time.monotonic() - began:.1f} s[/dim]")


def _tell(what: str, began: float, ended: threading.Event, spinner: Status) -> None:
    while not ended.wait(_TICK if console.is_terminal else AGAIN):
        lasted = f"{what} … for {time.monotonic() - began:.0f} s"
        if console.is_terminal:
            spinner.update(lasted)
        else:
            _line("·", lasted)


def _line(mark: str, text: str) -> None:
    console.print(f"{time.monotonic() - _STARTED:4.0f} s {mark} {text}", soft_wrap=True)
