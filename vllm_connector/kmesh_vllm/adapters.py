"""LoRA adapters by their content: a name is no identity."""

from __future__ import annotations

import logging
from pathlib import Path

from kmesh_vllm.content import directory_digest, directory_signature

logger = logging.getLogger("kmesh_vllm")


class Adapters:
    """Digests of the adapters that an engine has loaded.

    vLLM loads an adapter when it is first used and keeps it. If its files change later, nobody
    can say which of the two contents a request computes with, so its requests are not cached
    until the adapter is loaded again under a new id or with ``load_inplace``.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, object, str | None]] = {}

    def digest(self, adapter_id: int, path: str, *, reloaded: bool = False) -> str | None:
        """Digest of an adapter's directory, or None if its content is not known for sure.

        Args:
            adapter_id: vLLM's id of the loaded adapter.
            path: its local directory.
            reloaded: the request asks vLLM to load it again.
        """
        directory = Path(path)
        try:
            if not directory.is_dir():
                raise FileNotFoundError(f"{path} is no local directory")
            signature: object = directory_signature(directory)
            known = self._known.get(adapter_id)
            changed = known is not None and known[:2] != (path, signature)
            if known is None or (reloaded and (changed or known[2] is None)):
                known = (path, signature, directory_digest(directory))
                if directory_signature(directory) != signature:
                    known = (path, signature, None)
            elif changed and known[2] is not None:
                logger.warning("adapter %d changed after it was loaded: not cached", adapter_id)
                known = (path, signature, None)
        except OSError as wrong:
            if adapter_id not in self._known:
                logger.warning("adapter %d is not cached: %s", adapter_id, wrong)
            known = (path, None, None)
        self._known[adapter_id] = known
        return known[2]
