"""In whose memory an engine's spans are looked for, and in whose they are stored."""

from __future__ import annotations

from collections.abc import Callable


class Tiers:
    """Devices are UUIDs of GPUs, and "" for the daemon's host memory.

    Which GPU a worker has, and what that can read, is the worker's to say: it comes with a step.
    Until then an engine of the tier "gpu" doesn't know where to look.

    Args:
        tier: the setting, "host" or "gpu".
        timeout: seconds that questions wait for the workers' word.
    """

    def __init__(self, tier: str, timeout: float, clock: Callable[[], float]) -> None:
        self._host = tier == "host"
        self._timeout = timeout
        self._clock = clock
        self._until: float | None = None
        self._recipes: tuple[str, ...] = ()
        self._look: tuple[str, ...] | None = ("",) if self._host else None

    def hear(self, devices: tuple[str, ...]) -> None:
        """All workers can read the memory of these."""
        self._look = tuple(d for d in devices if not d) if self._host else devices

    def hear_recipes(self, devices: tuple[str, ...]) -> None:
        """All workers restore recipes out of the memory of these GPUs."""
        self._recipes = devices

    def recipes(self, device: str) -> bool:
        """Whether recipes may be asked for there: those in host memory are decoded at worst."""
        return not device or device in self._recipes

    @property
    def look(self) -> tuple[str, ...]:
        """Where to look, in this order."""
        return self._look or ()

    def wait(self) -> bool:
        """Whether to ask again, since the workers have said nothing yet."""
        if self._look is not None:
            return False
        if self._until is None:
            self._until = self._clock() + self._timeout
        return self._clock() < self._until

    @property
    def store(self) -> str | None:
        """Where workers store; None: it is not known yet."""
        if self._host:
            return ""
        return self._look[0] if self._look else None
