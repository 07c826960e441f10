"""The folder that a run leaves: tensors, recipes, and a manifest with the SHA-256 of each file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kmesh.codec import SpanDescription

_DTYPES = {"uint8": "U8", "uint16": "BF16"}


class Bundle:
    """Writes a bundle; ``close`` writes its manifest last.

    Args:
        folder: made if it is not there. Files of an earlier bundle are replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("*.safetensors"), *folder.glob("*.json")):
            old.unlink()

    def tensors(self, name: str, tensors: dict[str, npt.NDArray[Any]]) -> None:
        """A safetensors file: a length, JSON and data. uint16 are bits of bfloat16."""
        path = self._folder / f"{name}.safetensors"
        entries, end = {}, 0
        for key, tensor in tensors.items():
            begin, end = end, end + tensor.nbytes
            entries[key] = {
                "dtype": _DTYPES[tensor.dtype.name],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        head = json.dumps(entries).encode()
        head += b" " * (-len(head) % 8)
        with path.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for tensor in tensors.values():
                file.write(np.ascontiguousarray(tensor).data)
        self._note(path)

    def document(self, name: str, content: dict[str, Any]) -> None:
        """A JSON file."""
        path = self._folder / f"{name}.json"
        path.write_text(json.dumps(content, indent=1) + "\n")
        self._note(path)

    def close(self, content: dict[str, Any]) -> None:
        """Writes ``manifest.json``."""
        text = json.dumps({**content, "sha256": self._files}, indent=1)
        (self._folder / "manifest.json").write_text(text + "\n")

    def _note(self, path: Path) -> None:
        self._files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()


def described(span: SpanDescription) -> dict[str, Any]:
    """A description as the manifest has it."""
    shard = span.shard
    return {
        "key": span.key.hex(),
        "namespace": span.namespace.hex(),
        "dtype": span.dtype,
        "layers": [shard.layer_begin, shard.layer_end],
        "heads": [shard.head_begin, shard.head_end],
        "head_dim": span.head_dim,
        "tokens": span.tokens,
        "position": span.position,
        "generation": span.generation,
    }
