"""The chosen profile of an experiment: ``make defconfig-*`` writes it to ``.config``."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import evidence
from tools import prepare_model

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / ".config"
GENERATED, CHECKPOINT = "generated", "checkpoint"
PACKAGES = ("kmesh", "numpy", "zstandard", "blake3", "torch", "transformers")


class ProfileError(Exception):
    """``.config`` is not what a profile writes; says what to do."""


@dataclass(frozen=True)
class Profile:
    """What an experiment runs with; everything of it is written into its results.

    Attributes:
        profile: name of the target that wrote it, without ``defconfig-``.
        model: what made the state: ``GENERATED`` if no model runs, or ``CHECKPOINT``.
        seed: of all that is drawn.
        prompts: of the controlled workload: one primes, the others are its siblings.
        prompt_tokens, shared_tokens: of each; what is not shared is its own.
        recompute_percent: shares of the shared tokens that siblings compute anew.
        block_tokens: what the encoder looks at as a block.
        bundle: folder for the results, relative to the repository.
        layers, kv_heads, head_dim, dtype, rope_theta: of the state and its rotary embedding, where
            it is generated; a checkpoint decides them itself.
        checkpoint, checkpoint_digest: the folder of one, and of its files' contents (BLAKE3; empty
            where the demo's model was not prepared yet); of ``CHECKPOINT``.
    """

    profile: str
    model: str
    seed: int
    prompts: int
    prompt_tokens: int
    shared_tokens: int
    recompute_percent: tuple[int, ...]
    block_tokens: int
    bundle: str
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""
    rope_theta: float = 0.0
    checkpoint: str = ""
    checkpoint_digest: str = ""


_DIMENSIONS = frozenset({"layers", "kv_heads", "head_dim", "dtype", "rope_theta"})
_OF_A_CHECKPOINT = frozenset({"checkpoint", "checkpoint_digest"})
#: Fields that a profile with this kind of state does not have.
_ABSENT = {GENERATED: _OF_A_CHECKPOINT, CHECKPOINT: _DIMENSIONS}

_WORKLOAD: dict[str, Any] = {
    "seed": 20261129,
    "prompts": 5,
    "prompt_tokens": 512,
    "shared_tokens": 416,
    "recompute_percent": (0, 5, 15),
    "block_tokens": 16,
    "bundle": ".tokendance",
}
PROFILES = {
    "tokendance-cpu": Profile(
        profile="tokendance-cpu",
        model=GENERATED,
        **_WORKLOAD,
        layers=24,
        kv_heads=2,
        head_dim=64,
        dtype="bfloat16",
        rope_theta=10000.0,
    ),
    "tokendance-model": Profile(
        profile="tokendance-model",
        model=CHECKPOINT,
        **_WORKLOAD,
        checkpoint=str(prepare_model.TARGET),
    ),
}


def write(config: Profile, path: Path = CONFIG) -> None:
    """Writes a profile and where it was chosen, as TOML."""
    lines = [f"# Written by `make defconfig-{config.profile}`; the experiment's targets read it."]
    lines += [f"{key} = {_toml(getattr(config, key))}" for key in _fields(config.model)]
    lines += ["", "[source]", *(f"{key} = {_toml(value)}" for key, value in source().items())]
    lines += ["", "[versions]", *(f"{k} = {_toml(value)}" for k, value in versions().items())]
    path.write_text("\n".join(lines) + "\n")


def read(path: Path = CONFIG) -> tuple[Profile, dict[str, Any]]:
    """The chosen profile, and all that the file says.

    Raises:
        ProfileError: there is no such file, or it names other fields than a profile has.
    """
    try:
        said = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ProfileError(f"no {path.name}: run `make defconfig-tokendance-cpu`") from None
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{path.name}: {error}") from None
    names = _fields(str(said.get("model", "")))
    differing = set(names) ^ (said.keys() - {"source", "versions"})
    if differing:
        raise ProfileError(
            f"{path.name}: {', '.join(sorted(differing))} missing or unknown: "
            "run `make defconfig-tokendance-cpu` or `make defconfig-tokendance-model` again"
        )
    values = {name: said[name] for name in names}
    values["recompute_percent"] = tuple(values["recompute_percent"])
    return Profile(**values), said


def _fields(model: str) -> list[str]:
    absent = _ABSENT.get(model, frozenset())
    return [field.name for field in dataclasses.fields(Profile) if field.name not in absent]


def source() -> dict[str, Any]:
    """The commit, and whether all was committed; a copy without git may not know."""
    try:
        return evidence.source()
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown", "clean": False}


def versions() -> dict[str, str]:
    """Python and the packages that results depend on."""
    return evidence.versions(PACKAGES)


def _toml(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
