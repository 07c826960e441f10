"""How far the leader of a flight is, by what it says and by what lands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """Of one leader; times as the core's clock, in ms.

    Attributes:
        computed: position behind the last key that it has computed, as far as it has said so.
        began_ms: when it began.
        last_ms: when it last computed or landed something, or began.
        pause_ms: the longest between two such moments.
    """

    computed: int
    began_ms: int
    last_ms: int = 0
    pause_ms: int = 0

    def __post_init__(self) -> None:
        self.last_ms = self.began_ms

    def went_on(self, now_ms: int) -> None:
        """It has computed or landed something."""
        self.pause_ms = max(self.pause_ms, now_ms - self.last_ms)
        self.last_ms = now_ms
