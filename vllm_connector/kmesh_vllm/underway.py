"""Which tokens are computed when a step has run: a scheduler is ahead of its workers."""

from __future__ import annotations

import itertools

from kmesh_vllm.requests import RequestState

#: Steps that are remembered; a scheduler is two ahead at most.
_MOST = 64


class UnderWay:
    """Steps that compute something of interest, by the number that workers say when they ran."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._steps: dict[int, list[tuple[RequestState, int]]] = {}
        self._next: list[tuple[RequestState, int]] = []

    def add(self, state: RequestState, reached: int) -> None:
        """The step that is being planned computes a request up to so many tokens."""
        self._next.append((state, reached))

    def planned(self) -> int:
        """The step is planned; its number, 0 if nothing of interest is in it."""
        if not self._next:
            return 0
        number = next(self._numbers)
        self._steps[number], self._next = self._next, []
        while len(self._steps) > _MOST:
            del self._steps[min(self._steps)]
        return number

    def ran(self, number: int) -> list[tuple[RequestState, int]]:
        """That step has run, and all before it: requests, and how far they are computed."""
        done = [n for n in self._steps if n <= number]
        return [reached for n in done for reached in self._steps.pop(n)]
