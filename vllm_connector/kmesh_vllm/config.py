"""The connector's settings: ``kv_connector_extra_config`` of vLLM's KV transfer config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kmesh.errors import ConfigError

_MAY_BE_ZERO = (
    "max_ctas",
    "min_flight_tokens",
    "min_restore_tokens",
    "staging_bytes",
    "store_buffer_bytes",
)
_TIERS = ("host", "gpu")
_TYPES = {"str": str, "bool": bool, "int": int, "tuple[int, ...]": list}
_MAX_SEPARATORS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """What can be set; see ``docs/vllm.md``.

    Attributes:
        socket_dir: directory of the daemon's sockets.
        load: restore from KMesh.
        store: store in KMesh what prefill makes.
        tier: "host": store in, and restore from, the daemon's host memory; "gpu": store in its
            memory on the engine's own GPU, restore from there or from host memory.
        staging_bytes: staging memory of each worker that stores; 0 is a quarter of what the daemon
            gives a session, at most 64 MiB.
        store_buffer_bytes: GPU memory of each worker through which is stored; 0 is what two
            steps can compute, at most 1 GiB.
        max_ctas: thread blocks that a restore may have on a GPU; 0: as many as are of use.
        calibrate: measure at start what an engine's GPU does with host memory, and choose by that
            how restores get there.
        gpu_recipes: take spans in a GPU's memory as recipes, where families have them: that saves
            memory there, and their restores take longer.
        weights_digest: what the weights are, instead of a digest of their files.
        min_restore_tokens: restores of fewer tokens are left to prefill.
        acquire_timeout_ms: a request waits at most this long for its lease.
        load_timeout_ms: a load that has not begun to copy by then has failed.
        reserve_timeout_ms: a step waits at most this long, after its forward pass, for the
            reservations of what it stores, and as long again for room in its staging.
        retry_after_ms: a span whose load failed is not tried again for this long.
        min_flight_tokens: of misses of at least so many tokens one engine computes and the others
            wait; 0: never.
        flight_patience: a request waits for another's computation while it is to end within so
            many times what it would take alone.
        flight_wait_ms: and at most this long in all.
        segment_separators: token ids that end a segment of a prompt, for requests that do not name
            their segments.
        store_segments: store the shared segments of requests that name a family as spans of their
            own too.
    """

    socket_dir: str
    load: bool = True
    store: bool = True
    tier: str = "host"
    staging_bytes: int = 0
    store_buffer_bytes: int = 0
    max_ctas: int = 0
    calibrate: bool = True
    gpu_recipes: bool = False
    weights_digest: str = ""
    min_restore_tokens: int = 64
    acquire_timeout_ms: int = 1_000
    load_timeout_ms: int = 10_000
    reserve_timeout_ms: int = 1_000
    retry_after_ms: int = 30_000
    min_flight_tokens: int = 512
    flight_patience: int = 3
    flight_wait_ms: int = 60_000
    segment_separators: tuple[int, ...] = ()
    store_segments: bool = True

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Settings:
        """Checks names, types and ranges.

        Raises:
            ConfigError: names the setting at fault.
        """
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in extra:
            if name not in known:
                names = ", ".join(sorted(known))
                raise ConfigError(f"kv_connector_extra_config: {name} is none of {names}")
        if not extra.get("socket_dir"):
            raise ConfigError("kv_connector_extra_config: socket_dir is missing")
        for name, value in extra.items():
            wanted = _TYPES[str(known[name].type)]
            # A bool is an int to Python, but not to whoever wrote the setting.
            if type(value) is not wanted:
                raise ConfigError(
                    f"kv_connector_extra_config: {name} is {type(value).__name__},"
                    f" not {wanted.__name__}"
                )
            if type(value) is int and value < (0 if name in _MAY_BE_ZERO else 1):
                raise ConfigError(f"kv_connector_extra_config: {name} is {value}, too small")
            if isinstance(value, list):
                _check_separators(name, value)
        values: dict[str, Any] = dict(extra)
        if "segment_separators" in values:
            values["segment_separators"] = tuple(values["segment_separators"])
        settings = cls(**values)
        if settings.tier not in _TIERS:
            raise ConfigError(
                f"kv_connector_extra_config: tier is {settings.tier!r}, none of {_TIERS}"
            )
        return settings


def _check_separators(name: str, value: list[Any]) -> None:
    if len(value) > _MAX_SEPARATORS:
        raise ConfigError(
            f"kv_connector_extra_config: {name} has more than {_MAX_SEPARATORS} token ids"
        )
    for token in value:
        if type(token) is not int or not 0 <= token <= 0xFFFFFFFF:
            raise ConfigError(f"kv_connector_extra_config: {name} has {token!r}, no token id")
