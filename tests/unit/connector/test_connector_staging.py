"""Staging that a worker is given: its pages are there before a step would wait for each of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mini_engine import HEADS, until
from test_connector_halves import Make, prompt, stored_by

from kmesh.session import Session
from kmesh.testing import FakeDaemon
from kmesh_vllm import saving


def mapped(address: int) -> int:
    """Bytes of the mapping that begins there whose pages this process has touched."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(f"{address:08x}-") for line in lines)
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def test_a_first_store_has_all_pages_of_staging_touched_behind_it(
    engine: Make, daemon: FakeDaemon
) -> None:
    one = engine("a")
    stored_by(one, daemon, prompt(128))
    saver = one.workers[0]._saver
    assert saver is not None
    given = saver._reserver._given
    assert given is not None
    staging = given[1]
    assert staging.size == one.settings.staging_bytes
    until(lambda: mapped(staging.address) == staging.size)


def test_who_touches_staging_keeps_no_later_store_waiting(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, go = engine("a"), threading.Event()
    monkeypatch.setattr(one.workers[0]._mover, "touch_staging", lambda _: go.wait(60))
    try:
        for seed in (1, 2):
            stored_by(one, daemon, prompt(128, seed))
        assert "store_skipped_late" not in one.workers[0].counts.take()
    finally:
        go.set()


def test_what_a_step_stores_is_committed_piece_by_piece(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the daemon is at work while the rest is put."""
    commit, pieces = Session.commit_async, []

    def noted(self: Session, reservations: Sequence[int], *rest: Any, **more: Any) -> Any:
        pieces.append(len(reservations))
        return commit(self, reservations, *rest, **more)

    one = engine("a")
    size = one.identity.geometry(HEADS).payload_bytes(64)
    monkeypatch.setattr(saving, "_PUT_BYTES", 2 * size)
    monkeypatch.setattr(Session, "commit_async", noted)
    stored_by(one, daemon, prompt(5 * 64))
    assert pieces == [2, 2, 1]
    monkeypatch.setattr(saving, "_PUT_BYTES", 1)
    stored_by(one, daemon, prompt(2 * 64, 1))
    assert pieces == [2, 2, 1, 1, 1]


def test_what_the_staging_holds_stays_when_it_is_touched(daemon: FakeDaemon) -> None:
    with daemon.connect() as session:
        staging = session.staging(5 << 20)
        with staging.view() as view:
            view[:: 1 << 16] = bytes(range(80))
            staging.touch()
            assert mapped(staging.address) == staging.size
            assert bytes(view[:: 1 << 16]) == bytes(range(80))
        del staging
