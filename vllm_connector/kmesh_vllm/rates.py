"""How fast this engine computes and restores, by its own recent requests."""

from __future__ import annotations

#: Tokens a second before anything was measured: what small machines reach.
_PREFILL, _RESTORE = 4_000.0, 50_000.0
#: Weight of a new sample.
_WEIGHT = 0.3
#: Shorter runs say more about the rest of a step.
_MIN_TOKENS = 256


class Rates:
    """Moving averages, in tokens a second.

    Attributes:
        prefill: of requests from their first step to the end of their prompt, with all that ran
            beside them.
        restore: of loads, from their blocks to their end.
    """

    def __init__(self) -> None:
        self.prefill = _PREFILL
        self.restore = _RESTORE
        self._guesses = {"prefill", "restore"}

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A prompt was computed."""
        self.prefill = self._mixed("prefill", self.prefill, tokens, seconds)

    def restored(self, tokens: int, seconds: float) -> None:
        """A load has ended well."""
        self.restore = self._mixed("restore", self.restore, tokens, seconds)

    def _mixed(self, name: str, rate: float, tokens: int, seconds: float) -> float:
        if tokens < _MIN_TOKENS or seconds <= 0:
            return rate
        if name in self._guesses:
            self._guesses.discard(name)
            return tokens / seconds
        return (1 - _WEIGHT) * rate + _WEIGHT * tokens / seconds
