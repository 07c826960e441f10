"""The connector's lines are in the engine's log."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from kmesh_vllm import logs

OURS = [logging.getLogger(name) for name in ("kmesh", "kmesh_vllm")]


@pytest.fixture
def engine() -> Iterator[io.StringIO]:
    """A log as vLLM configures it."""
    text, theirs = io.StringIO(), logging.getLogger("an engine")
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("the engine: %(levelname)s %(message)s"))
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    levels = [ours.level for ours in OURS]
    yield text
    theirs.removeHandler(handler)
    for ours, level in zip(OURS, levels, strict=True):
        ours.removeHandler(handler)
        ours.setLevel(level)


def test_lines_are_in_the_engines_log_once(
    engine: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.join("an engine")
    logs.join("an engine")  # A process may hold both halves.
    for ours in OURS:
        ours.info("found")
        ours.debug("too much")
    assert engine.getvalue() == "the engine: INFO found\n" * 2


def test_an_applications_own_logging_is_left_alone(
    engine: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    logs.join("an engine")
    for ours in OURS:
        assert not ours.handlers
        ours.warning("for the application")
    assert engine.getvalue() == ""
