"""Requests that make no sense are refused whole, before anything is changed."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from kmesh.layout import STAGING_ALIGN, Shard
from kmesh_spand.core.batch import KEY_BYTES
from kmesh_spand.core.codes import Code
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.requests import Acquire, Claim, Reserve
from kmesh_spand.core.results import Refused
from kmesh_spand.core.tenants import SALT_BYTES

_U32 = 0xFFFF_FFFF
#: Characters of the name of what a flight is computed on.
_PLACE = 64


def invalid(field: str, message: str) -> Refused:
    """The refusal of one field."""
    return Refused(Code.INVALID_ARGUMENT, message, field)


def too_many(field: str, count: int, limit: int) -> Refused | None:
    """A refusal if a batch is over the limit."""
    if count > limit:
        return Refused(Code.TOO_LARGE, f"{count} entries, at most {limit} are allowed", field)
    return None


def check_acquire(event: Acquire, config: CoreConfig) -> Refused | None:
    """Why an Acquire is refused."""
    if len(event.keys) % KEY_BYTES:
        return invalid("keys", f"length is no multiple of {KEY_BYTES}")
    if not event.shards:
        return invalid("shards", "at least one is needed")
    if len(event.salt) not in (0, SALT_BYTES):
        return invalid("salt", f"must be empty or {SALT_BYTES} bytes")
    for code in event.shards:
        if not is_shard(code):
            return invalid("shards", "a range is empty or out of bounds")
    entries = len(event.keys) // KEY_BYTES * len(event.shards)
    return too_many("keys", max(entries, len(event.shards)), config.max_batch)


def check_reserve(event: Reserve, config: CoreConfig) -> Refused | None:
    """Why a Reserve is refused."""
    count, uneven = divmod(len(event.keys), KEY_BYTES)
    if uneven:
        return invalid("keys", f"length is no multiple of {KEY_BYTES}")
    if refused := too_many("keys", count, config.max_batch):
        return refused
    if len(event.namespace) != KEY_BYTES:
        return invalid("namespace", f"must be {KEY_BYTES} bytes")
    if len(event.salt) not in (0, SALT_BYTES):
        return invalid("salt", f"must be empty or {SALT_BYTES} bytes")
    if not is_shard(event.shard):
        return invalid("shard", "a range is empty or out of bounds")
    for field in ("tokens", "start", "length"):
        values: Sequence[int] = getattr(event, field)
        if len(values) != count:
            return invalid(field, f"{len(values)} values for {count} keys")
    sub_keys = 0
    for tokens in event.tokens:
        if not 0 < tokens <= config.span_tokens or tokens % config.sub_tokens:
            return invalid(
                "tokens",
                f"must be a multiple of {config.sub_tokens}, at most {config.span_tokens}",
            )
        sub_keys += sub_key_count(tokens, config)
    if count and (min(event.start) < 0 or max(event.start) > _U32):
        return invalid("start", "must fit in 32 bits")
    if count and min(event.length) < 1:
        return invalid("length", "must be positive")
    if len(event.sub_keys) != sub_keys * KEY_BYTES:
        return invalid("sub_keys", f"{sub_keys} keys are needed for these tokens")
    return None


def check_claim(event: Claim, config: CoreConfig) -> Refused | None:
    """Why a Claim is refused."""
    count, uneven = divmod(len(event.keys), KEY_BYTES)
    if uneven:
        return invalid("keys", f"length is no multiple of {KEY_BYTES}")
    if not count:
        return invalid("keys", "at least one is needed")
    if refused := too_many("keys", count, config.max_batch):
        return refused
    if len(event.salt) not in (0, SALT_BYTES):
        return invalid("salt", f"must be empty or {SALT_BYTES} bytes")
    return check_flight_shards(event.shards, config) or check_place(event.place)


def check_place(place: str) -> Refused | None:
    """Why the name of what a flight is computed on is refused."""
    if len(place) > _PLACE:
        return invalid("place", f"must have at most {_PLACE} characters")
    return None


def check_flight_shards(shards: Sequence[int], config: CoreConfig) -> Refused | None:
    """Why the shards of a Claim or an Await are refused."""
    if not shards:
        return invalid("shards", "at least one is needed")
    if refused := too_many("shards", len(shards), config.max_flight_shards):
        return refused
    if len(set(shards)) < len(shards):
        return invalid("shards", "one occurs twice")
    if not all(is_shard(code) for code in shards):
        return invalid("shards", "a range is empty or out of bounds")
    return None


def check_commit(
    offsets: Sequence[int], lengths: Sequence[int], staging_size: int
) -> Refused | None:
    """Why staging offsets are refused; lengths are of the reservations, 0 for unknown ones."""
    for entry, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if offset < 0 or offset > staging_size or length > staging_size - offset:
            return invalid(f"staging_offset[{entry}]", "the span ends outside the staging memory")
        if offset % STAGING_ALIGN:
            return invalid(f"staging_offset[{entry}]", f"is no multiple of {STAGING_ALIGN}")
    return None


def sub_key_count(tokens: int, config: CoreConfig) -> int:
    """Sub-keys that a span of so many tokens comes with."""
    return tokens // config.sub_tokens - 1 if tokens < config.span_tokens else 0


@functools.lru_cache(1024)
def is_shard(code: int) -> bool:
    """Whether a number is the code of a ``layout.Shard``."""
    if not 0 <= code < 1 << 64:
        return False
    try:
        Shard.from_code(code)
    except ValueError:
        return False
    return True
