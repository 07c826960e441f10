"""Where the connector's log lines go: into the engine's log, in its form."""

from __future__ import annotations

import logging

_OURS = ("kmesh", "kmesh_vllm")


def join(engine: str = "vllm") -> None:
    """Lets our loggers write as the engine's does, unless the application configured logging.

    vLLM configures its own loggers alone. Ours would say warnings without time and process, and
    nothing of what is well, such as that a daemon was found.
    """
    theirs = logging.getLogger(engine)
    for name in _OURS:
        ours = logging.getLogger(name)
        if not ours.hasHandlers():
            ours.setLevel(theirs.level)
            for handler in theirs.handlers:
                ours.addHandler(handler)
