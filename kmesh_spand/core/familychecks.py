"""Requests about families that make no sense are refused before anything is changed."""

from __future__ import annotations

from collections.abc import Container, Sequence

from kmesh.layout import DTYPE_BYTES
from kmesh_spand.core.batch import KEY_BYTES
from kmesh_spand.core.checks import check_flight_shards, invalid, too_many
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.family import Run
from kmesh_spand.core.requests import Declare
from kmesh_spand.core.results import Refused
from kmesh_spand.core.tenants import SALT_BYTES

NAME_BYTES = 128
_HEAD_DIM_MAX = 8192
_PAIRS_MAX = 1024
_U32 = 0xFFFF_FFFF


def check_declare(event: Declare, config: CoreConfig) -> Refused | None:
    """Why a Declare is refused."""
    if refused := _check_name("family", event.family):
        return refused
    if len(event.salt) not in (0, SALT_BYTES):
        return invalid("salt", f"must be empty or {SALT_BYTES} bytes")
    if len(event.namespace) != KEY_BYTES:
        return invalid("namespace", f"must be {KEY_BYTES} bytes")
    if event.dtype not in DTYPE_BYTES:
        return invalid("dtype", f"is none of {', '.join(DTYPE_BYTES)}")
    if not 0 < event.head_dim <= _HEAD_DIM_MAX:
        return invalid("head_dim", f"must be 1 to {_HEAD_DIM_MAX}")
    if refused := check_flight_shards(event.shards, config):
        return refused
    count, uneven = divmod(len(event.base), KEY_BYTES)
    if uneven or not count:
        return invalid("base", f"no multiple of {KEY_BYTES} bytes, or none")
    if refused := too_many("base", count, config.max_base):
        return refused
    if len(event.frequencies) > min(_PAIRS_MAX, event.head_dim // 2):
        return invalid("rotary.frequencies", f"over {_PAIRS_MAX}, or than the pairs of a head")
    if not all(0 < frequency < 1e6 for frequency in event.frequencies):
        return invalid("rotary.frequencies", "must be positive numbers, below a million")
    return None


def check_member(
    name: str, keys: bytes, runs: Sequence[Run], base: Container[bytes], config: CoreConfig
) -> Refused | None:
    """Why a member is refused, whatever its family has already."""
    if refused := _check_name("member", name):
        return refused
    count, uneven = divmod(len(keys), KEY_BYTES)
    if uneven:
        return invalid("keys", f"length is no multiple of {KEY_BYTES}")
    if refused := too_many("keys", count, config.max_batch):
        return refused
    if refused := too_many("provenance", len(runs), config.max_runs):
        return refused
    end = 0
    for number, run in enumerate(runs):
        at = f"provenance[{number}]"
        if run.base not in base:
            return invalid(f"{at}.base", "is not in the family's base")
        if not run.tokens:
            return invalid(f"{at}.tokens", "none")
        if run.position < end:
            return invalid(f"{at}.position", "is among the tokens of the run before")
        end = run.position + run.tokens
        if end > _U32:
            return invalid(f"{at}.tokens", "end beyond 32 bits")
    return None


def _check_name(field: str, name: str) -> Refused | None:
    if not 0 < len(name.encode()) <= NAME_BYTES or not name.isprintable():
        return invalid(field, f"must be 1 to {NAME_BYTES} bytes that can be printed")
    return None
