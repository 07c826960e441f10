"""Begins what takes long while tests run that leave a processor free: those of one process do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import pytest


class Closable(Protocol):
    def close(self) -> None: ...


Made = TypeVar("Made", bound=Closable)


class Early(Generic[Made]):
    """A plug-in that holds one such thing, which is closed when the tests have ended.

    It begins between two tests, so that neither is taken for its owner.

    Args:
        make: begins it, and does not wait for it.
        before: it begins so many tests before the first that wants it.
        wants: whether a test wants it.
    """

    def __init__(
        self, make: Callable[[], Made], before: int, wants: Callable[[pytest.Item], bool]
    ) -> None:
        self._make = make
        self._before = before
        self._wants = wants
        self._made: Made | None = None
        self._tests = 0

    def get(self) -> Made:
        """Begins it if it has not yet begun."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        numbers = (at for at, item in enumerate(session.items) if self._wants(item))
        first = next(numbers, None)
        self._tests = len(session.items) if first is None else max(0, first - self._before)

    def pytest_runtest_logstart(self) -> None:
        if self._tests == 0:
            self.get()
        self._tests -= 1

    def pytest_sessionfinish(self) -> None:
        if self._made is not None:
            self._made.close()
