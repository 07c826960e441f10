"""The daemon is absent, comes, dies and comes back: the engine serves throughout."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import Daemon
from driver import Engine, settled, tokens, transfer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kmesh-") as base:
        (Path(base) / "s").mkdir(mode=0o700)
        yield Path(base) / "s"


@pytest.fixture(scope="module")
def alone(start: Callable[..., Engine], directory: Path, control: Engine) -> Engine:
    """An engine whose daemon is not there yet."""
    engine = start(transfer=transfer(directory, load_timeout_ms=20_000, retry_after_ms=100))
    control.up()
    return engine.up()


def comes_back(engine: Engine, prompt: list[int], daemon: Daemon, spans: int) -> None:
    """Waits until the engine stores in this daemon."""
    until = time.monotonic() + 30
    while daemon.status().spans < spans:
        assert time.monotonic() < until
        engine.call("reset")
        engine.one(prompt)
        time.sleep(0.2)
    settled(daemon, spans)


def test_absent_then_there_then_killed_then_back(
    control: Engine, alone: Engine, directory: Path
) -> None:
    prompts = [tokens(600, seed=300 + i) for i in range(4)]
    wanted = [control.one(prompt) for prompt in prompts]

    result = alone.one(prompts[0])
    assert result.restored == 0
    assert result.same(wanted[0])

    daemon = Daemon(directory, host_memory="64MiB")
    try:
        comes_back(alone, prompts[0], daemon, 10)
        alone.call("reset")
        result = alone.one(prompts[0])
        assert result.restored == 576
        assert result.same(wanted[0])
        for prompt in prompts:
            alone.one(prompt)
        settled(daemon, 40)
        alone.call("reset")
        # All four are on their way when every process of the daemon is killed.
        alone.begin("generate", prompts=prompts)
        time.sleep(0.05)
        daemon.kill()
        outcomes = alone.end()
        assert [r["tokens"] for r in outcomes] == [w.tokens for w in wanted]
    finally:
        daemon.kill()

    alone.call("reset")
    for prompt, want in zip(prompts, wanted, strict=True):
        result = alone.one(prompt)
        assert result.restored == 0
        assert result.same(want)

    daemon = Daemon(directory, host_memory="64MiB", errors=True)
    try:
        comes_back(alone, prompts[1], daemon, 10)
        alone.call("reset")
        result = alone.one(prompts[1])
        assert result.restored == 576
        assert result.same(wanted[1])
        # Only the control process dies: what is stored outlives it.
        os.kill(daemon.child("control"), signal.SIGKILL)
        alone.call("reset")
        result = alone.one(prompts[1])
        assert result.same(wanted[1])
        until = time.monotonic() + 30
        while alone.one(prompts[1]).restored != 576:
            assert time.monotonic() < until
            alone.call("reset")
            time.sleep(0.2)
        daemon.stop()
        result = alone.one(tokens(300, seed=333))
        assert result.same(control.one(tokens(300, seed=333)))
    finally:
        daemon.kill()
