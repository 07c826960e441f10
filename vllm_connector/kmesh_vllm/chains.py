"""Keys of prompts that begin alike: what siblings share is hashed once."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from kmesh.keys import KeyChain

#: Tokens by which a prompt that may begin like another one is found.
_FIRST = 16


class Chains:
    """For each beginning the longest chain, as long as its request is known."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[bytes, tuple[int, ...]], KeyChain]
        self._known = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._known)

    def extend(self, chain: KeyChain, namespace: bytes, tokens: Sequence[int]) -> None:
        """Gives an empty chain a prompt's tokens, and the keys that another one has already."""
        beginning = namespace, tuple(tokens[:_FIRST])
        known = self._known.get(beginning)
        chain.extend(tokens, known)
        if chain.spans > (known.spans if known is not None else 0):
            self._known[beginning] = chain
