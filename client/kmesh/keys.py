"""Who a span is: namespaces and chained keys.

A namespace is everything that must be equal for KV bytes to mean the same. Its
digest is the root of a chain, and the key of a span is

    key = BLAKE3(parent key ‖ token ids as u32 ‖ extras)

where the parent of the first span is the chain's root. A span's key therefore
says all tokens before it. Tails shorter than a span have keys of the same form
over their own tokens.

A *segment* is a run of tokens that means the same wherever it stands. Its spans
have keys of a chain of its own, which begins at the segment's first token and at
another root, so that no segment's key is ever a prefix's. Golden vectors are in
``tests/data/keys.json``.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from blake3 import blake3

from kmesh import _host
from kmesh.layout import SPAN_TOKENS, SUB_TOKENS

KEY_BYTES = 32

_NAMESPACE_CONTEXT = "kmesh 2026-11 namespace digest v1"
_ROOT_CONTEXT = "kmesh 2026-11 prefix chain root v1"
_SEGMENT_CONTEXT = "kmesh 2026-11 segment chain root v1"
_SALT_CONTEXT = "kmesh 2026-11 cache salt v1"
_EXTRAS_MARK = struct.pack("<I", 0xFFFFFFFF)
_KEY = struct.Struct(f"{KEY_BYTES}s")


def split(keys: bytes) -> tuple[bytes, ...]:
    """Packed keys, one by one.

    Raises:
        struct.error: they are not 32 bytes each.
    """
    return tuple([key for (key,) in _KEY.iter_unpack(keys)])


def salt_digest(salt: str) -> str:
    """A salt as a namespace holds it: it must never be written down itself."""
    return blake3(salt.encode(), derive_key_context=_SALT_CONTEXT).hexdigest() if salt else ""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for KV bytes to mean the same; a field each.

    Attributes:
        model: name of the model, as a person would say it.
        weights: digest of the weights' content.
        dtype: element type of the KV state, a key of ``layout.DTYPE_BYTES``.
        layers, kv_heads: of the whole model, not of a shard.
        head_dim: elements of one head's K (and of its V).
        rope: rotary embedding parameters as canonical JSON, or empty.
        adapter: digest of a LoRA adapter's content, or empty.
        salt: ``salt_digest`` of the request's cache salt, or empty.
        reset: random word after the engine's weights or cache were reset, or empty.
        pages: how state lies within an engine's blocks where rows are not tokens, or empty. Such
            state is kept as it lies there.
    """

    model: str
    weights: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    rope: str = ""
    adapter: str = ""
    salt: str = ""
    reset: str = ""
    pages: str = ""

    def fields(self) -> dict[str, str]:
        """All fields as text, by name; ``pages`` only where it says something."""
        found = {f.name: str(getattr(self, f.name)) for f in dataclasses.fields(self)}
        if not self.pages:
            del found["pages"]
        return found

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Namespace:
        """Inverse of ``fields``. ValueError names a missing, unknown or malformed field."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise ValueError(f"{name}: unknown namespace field")
        values: dict[str, str | int] = {}
        for name, field in known.items():
            if name == "pages" and name not in fields:
                continue
            if name not in fields:
                raise ValueError(f"{name}: missing namespace field")
            text = fields[name]
            if field.type in (int, "int"):
                if not text.isascii() or not text.isdigit():
                    raise ValueError(f"{name}: not a whole number")
                values[name] = int(text)
            else:
                values[name] = text
        return cls(**values)  # type: ignore[arg-type]

    def digest(self) -> bytes:
        """32 bytes; every field is bound by its name and its length."""
        hasher = blake3(derive_key_context=_NAMESPACE_CONTEXT)
        for name, text in self.fields().items():
            for part in (name.encode(), text.encode()):
                hasher.update(struct.pack("<Q", len(part)))
                hasher.update(part)
        return hasher.digest()

    def differing(self, other: Namespace) -> list[str]:
        """Names of the fields in which two namespaces differ."""
        mine, theirs = self.fields(), other.fields()
        return [name for name in mine | theirs if mine.get(name) != theirs.get(name)]


@lru_cache(maxsize=64)
def chain_root(namespace_digest: bytes) -> bytes:
    """The parent of a chain's first key."""
    return blake3(namespace_digest, derive_key_context=_ROOT_CONTEXT).digest()


def segment_root(namespace_digest: bytes) -> bytes:
    """The parent of the first key of any segment: keys then say a segment's own tokens only."""
    return blake3(namespace_digest, derive_key_context=_SEGMENT_CONTEXT).digest()


@dataclass(frozen=True, slots=True)
class Extra:
    """Content that token ids do not say (an image, say) at tokens [start, start + length)."""

    start: int
    length: int
    identity: bytes


class KeyChain:
    """The keys of one request, computed once, as far as its tokens are known.

    Args:
        namespace_digest: 32 bytes.
        span_tokens, sub_tokens: as the daemon said them.
        extras: content beyond token ids, in any order.
        root: the parent of the first key, ``chain_root(namespace_digest)`` if None;
            ``segment_root(namespace_digest)`` makes it the chain of one segment, whose tokens and
            extras then count from the segment's first token.

    Raises:
        ValueError: span_tokens is not a multiple of sub_tokens.
    """

    __slots__ = ("__weakref__", "_extras", "_keys", "_root", "_span", "_sub", "_tokens")

    def __init__(
        self,
        namespace_digest: bytes,
        *,
        span_tokens: int = SPAN_TOKENS,
        sub_tokens: int = SUB_TOKENS,
        extras: Iterable[Extra] = (),
        root: bytes | None = None,
    ) -> None:
        if sub_tokens < 1 or span_tokens % sub_tokens:
            raise ValueError(f"span_tokens {span_tokens} is no multiple of {sub_tokens}")
        self._root = chain_root(namespace_digest) if root is None else root
        self._span = span_tokens
        self._sub = sub_tokens
        self._extras = sorted(extras, key=lambda extra: (extra.start, extra.length))
        self._tokens = bytearray()
        self._keys = b""

    @property
    def tokens(self) -> int:
        """Tokens seen so far."""
        return len(self._tokens) // 4

    @property
    def spans(self) -> int:
        """Full spans that have a key."""
        return len(self._keys) // KEY_BYTES

    @property
    def keys(self) -> bytes:
        """Keys of all full spans, 32 bytes each."""
        return self._keys

    def extend(self, token_ids: Sequence[int], like: KeyChain | None = None) -> None:
        """Add tokens; keys of spans that became full are computed.

        Args:
            like: a chain that may begin with the same spans, whose keys are then taken from there.

        Raises:
            OverflowError: a token id does not fit in 32 bits.
        """
        self._tokens += _host.token_words(token_ids)
        step = self._span * 4
        known, end = self.spans, self.tokens // self._span
        while known < end:
            # What holds more than tokens is hashed here, all between in one call.
            first = self._first_with_extras(known, end)
            with memoryview(self._tokens) as tokens:
                run = tokens[known * step : first * step]
                if known or like is None or not self._begins_as(like):
                    self._keys += _host.chain_keys(self.parent(known), run, step)
                else:
                    keys = _host.chain_keys(self._root, run, step, like._tokens, like._keys)
                    # One object: who compares or hashes both has less to do.
                    self._keys = like._keys if keys == like._keys else keys
                if first < end:
                    more = self._extras_between(first * self._span, (first + 1) * self._span)
                    plain = tokens[first * step : (first + 1) * step].tobytes()
                    self._keys += blake3(self.parent(first) + plain + more).digest()
            known = min(first + 1, end)

    def parent(self, span: int) -> bytes:
        """The key before span number ``span``."""
        return self._keys[(span - 1) * KEY_BYTES : span * KEY_BYTES] if span else self._root

    def key(self, span: int, tokens: int | None = None) -> bytes:
        """Key of span number ``span``, or of its first ``tokens`` tokens.

        Raises:
            ValueError: those tokens are not known yet, or not a multiple of sub_tokens.
        """
        if tokens is None or tokens == self._span:
            if not 0 <= span < self.spans:
                raise ValueError(f"span {span} has no key yet")
            return self._keys[span * KEY_BYTES : (span + 1) * KEY_BYTES]
        begin = span * self._span
        if not 0 < tokens < self._span or tokens % self._sub:
            raise ValueError(f"{tokens} tokens are not a part of a span")
        if not 0 <= span <= self.spans or begin + tokens > self.tokens:
            raise ValueError(f"tokens {begin}:{begin + tokens} are not known yet")
        data = self.parent(span) + self._tokens[begin * 4 : (begin + tokens) * 4]
        return blake3(data + self._extras_between(begin, begin + tokens)).digest()

    def sub_keys(self, span: int, tokens: int) -> list[bytes]:
        """Keys of the first sub_tokens, 2·sub_tokens, … of a span, up to ``tokens``."""
        return [self.key(span, n) for n in range(self._sub, tokens + 1, self._sub)]

    def _begins_as(self, other: KeyChain) -> bool:
        """Whether equal first spans have equal keys; content beyond tokens is not compared."""
        return self._root == other._root and self._span == other._span and not other._extras

    def _first_with_extras(self, begin: int, end: int) -> int:
        """The first span of [begin, end) that holds content beyond tokens, or ``end``."""
        for extra in self._extras:
            first = max(extra.start // self._span, begin)
            if first < end and extra.start + extra.length > first * self._span:
                end = first
        return end

    def _extras_between(self, begin: int, end: int) -> bytes:
        parts = []
        for extra in self._extras:
            if extra.start < end and extra.start + extra.length > begin:
                # Relative to the span, and signed: content may begin before it.
                parts.append(
                    struct.pack("<qqI", extra.start - begin, extra.length, len(extra.identity))
                    + extra.identity
                )
        return _EXTRAS_MARK + b"".join(parts) if parts else b""
