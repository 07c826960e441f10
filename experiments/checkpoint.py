"""The checkpoint of a profile: chosen once, by MODEL, and the same one in every step after that."""

from __future__ import annotations

import os
from pathlib import Path

from experiments.profile import CHECKPOINT, CONFIG, Profile, ProfileError
from kmesh.errors import ConfigError
from kmesh_vllm.content import files_digest, model_files
from tools import prepare_model

_AGAIN = "run `make defconfig-tokendance-model`, with MODEL=PATH if it is not the demo's model"


def chosen() -> tuple[str, str]:
    """Folder and digest of the checkpoint that MODEL names, or of the demo's model.

    Raises:
        ProfileError: MODEL is no folder with weights.
    """
    given = os.environ.get("MODEL", "")
    path = _folder(given) if given else prepare_model.TARGET
    if not given and not prepare_model.is_prepared():
        return str(path), ""
    return str(path), _digest(path)


def is_there(config: Profile) -> bool:
    """Whether nothing has to be prepared before the profile's checkpoint, or the demo's model where
    it has none, can be loaded."""
    other = config.checkpoint and Path(config.checkpoint) != prepare_model.TARGET
    return bool(other) or prepare_model.is_prepared()


def path_of(config: Profile) -> str:
    """The profile's checkpoint, prepared if it is the demo's model.

    Raises:
        ProfileError: MODEL names another one, or other weights lie there than when it was chosen.
    """
    assert config.model == CHECKPOINT
    path, given = Path(config.checkpoint), os.environ.get("MODEL", "")
    if given and _folder(given) != path:
        raise ProfileError(f"{CONFIG.name} names {path}, MODEL another checkpoint: {_AGAIN}")
    if not is_there(config):
        prepare_model.convert(prepare_model.gguf_file(), prepare_model.TARGET)
    if config.checkpoint_digest and _digest(path) != config.checkpoint_digest:
        raise ProfileError(f"{path} is not what it was when it was chosen: {_AGAIN}")
    return str(path)


def _folder(given: str) -> Path:
    path = Path(given).expanduser().resolve()
    if not path.is_dir():
        raise ProfileError(f"MODEL: {given} is no directory; a checkpoint's folder is needed")
    return path


def _digest(path: Path) -> str:
    try:
        return files_digest(model_files(path))
    except (ConfigError, OSError):
        raise ProfileError(f"{path}: no checkpoint's weights are there: {_AGAIN}") from None
