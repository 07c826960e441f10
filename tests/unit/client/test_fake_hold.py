"""The fake daemon keeps answers back for as long as a test wants."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kmesh import errors
from kmesh.layout import Shard
from kmesh.testing import FakeDaemon

SHARD = Shard(0, 2, 0, 2)


def test_held_answers_come_in_order_when_the_block_ends() -> None:
    with FakeDaemon() as daemon, daemon.connect() as session:
        order: list[int] = []
        with daemon.hold("acquire"):
            futures = [session.acquire_async(os.urandom(32), [SHARD]) for _ in range(3)]
            for number, future in enumerate(futures):
                future.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
            # Other requests are answered meanwhile, and all of these have been received by then.
            session.ping()
            assert not order
            with pytest.raises(ValueError, match="acquire is held"), daemon.hold("acquire"):
                pass
            assert session.pending == 3
        for future in futures:
            assert future.result(30).hits == 0
        assert order == [0, 1, 2]
        session.acquire(os.urandom(32), [SHARD]).release()


def test_what_is_held_at_the_end_is_closed() -> None:
    """The answer has a descriptor; what is left of it fails this test."""
    with (
        FakeDaemon() as daemon,
        daemon.connect() as session,
        ThreadPoolExecutor(1) as pool,
        daemon.hold("attach_slab"),
    ):
        waiting = pool.submit(session.slab, 0)
        while not session.pending:
            time.sleep(0.005)
        session.ping()
        daemon.close()
        with pytest.raises(errors.ConnectionClosed):
            waiting.result(30)
