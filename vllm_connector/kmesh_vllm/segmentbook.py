"""Which tokens a segment's id named last, and which tokens a segment span's key was seen with."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from kmesh.segmentkeys import KeyedSegment

#: Token ids in all, of either kind; 16 MiB.
_MAX_TOKENS = 1 << 21
#: Names of either kind. One takes some 400 bytes, however few tokens it has.
_MAX_NAMES = 1 << 15


class _Shelf:
    """Token ids by name; those that were not used for longest make room."""

    def __init__(self, max_tokens: int, max_names: int) -> None:
        self._max = max_tokens
        self._max_names = max_names
        self._held = 0
        self._by_name: OrderedDict[bytes, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: bytes) -> array[int] | None:
        found = self._by_name.get(name)
        if found is not None:
            self._by_name.move_to_end(name)
        return found

    def put(self, name: bytes, tokens: Sequence[int]) -> None:
        old = self._by_name.pop(name, None)
        self._held -= len(old) if old is not None else 0
        if len(tokens) > self._max:
            return
        self._by_name[name] = array("I", tokens)
        self._held += len(tokens)
        while self._held > self._max or len(self._by_name) > self._max_names:
            self._held -= len(self._by_name.popitem(last=False)[1])


class SegmentBook:
    """Bounded; an id may name other tokens later, and is a new segment then.

    Args:
        max_tokens: that are remembered by id, and as many by key.
        max_names: ids, and as many keys.
    """

    def __init__(self, max_tokens: int = _MAX_TOKENS, max_names: int = _MAX_NAMES) -> None:
        self._ids = _Shelf(max_tokens, max_names)
        self._keys = _Shelf(max_tokens, max_names)

    def __len__(self) -> int:
        """Ids and keys that are remembered."""
        return len(self._ids) + len(self._keys)

    def named(self, namespace: bytes, id: str) -> Sequence[int] | None:
        """Token ids that an id named last, in the same namespace; None if it is not known."""
        return self._ids.get(namespace + id.encode())

    def same(self, key: bytes, tokens: Sequence[int]) -> bool:
        """Whether a span's key was seen with these tokens, or never."""
        known = self._keys.get(key)
        return known is None or known == array("I", tokens)

    def learn(self, namespace: bytes, keyed: KeyedSegment, token_ids: Sequence[int]) -> None:
        """Remembers a segment of a prompt with these tokens.

        A key that was seen with other tokens keeps them: what is stored under it is theirs.
        """
        segment = keyed.segment
        if segment.id:
            tokens = token_ids[segment.begin : segment.end]
            self._ids.put(namespace + segment.id.encode(), tokens)
        for span in keyed.spans:
            if self._keys.get(span.key) is None:
                self._keys.put(span.key, token_ids[span.begin : span.end])
