"""Keys whose leaders died, left alone for a while: a prompt that kills engines."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kmesh_spand.core.flight import Who


@dataclass(slots=True)
class _Death:
    """``held_ms`` is how long the key is left alone, 0 after a first death; ``at_ms`` the last."""

    at_ms: int
    held_ms: int = 0


class Deaths:
    """The second death within ``memory_ms`` holds a key, each further one twice as long.

    Args:
        memory_ms: after this long without a death (and without being held) a key is forgotten.
        first_ms, longest_ms: how long a key is held after its second death, and at most.
        limit: keys that are remembered; the oldest are forgotten first.
    """

    def __init__(self, memory_ms: int, first_ms: int, longest_ms: int, limit: int) -> None:
        self._memory_ms = memory_ms
        self._first_ms = first_ms
        self._longest_ms = longest_ms
        self._limit = limit
        self._keys: OrderedDict[tuple[Who, bytes], _Death] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, who: Who, key: bytes, now_ms: int) -> None:
        """A leader died that was to compute this key next."""
        name = who, key
        known = self._keys.pop(name, None)
        if known is None or known.at_ms + known.held_ms + self._memory_ms <= now_ms:
            self._keys[name] = _Death(now_ms)
        else:
            held = min(known.held_ms * 2 or self._first_ms, self._longest_ms)
            self._keys[name] = _Death(now_ms, held)
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def held(self, who: Who, key: bytes, now_ms: int) -> bool:
        """Whether this key is to be left alone now."""
        known = self._keys.get((who, key))
        return known is not None and now_ms < known.at_ms + known.held_ms
