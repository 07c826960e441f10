"""16-bit KV state comes back bit for bit: a restore gives what vLLM's own prefix cache gives.

In 16 bits a full prefill and a prefix-cached one differ in vLLM itself, so the peer here is the
engine's own cache, which computes exactly the tokens that a restore leaves.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from daemon_process import Daemon
from driver import Engine, settled, tokens, transfer


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_restored_state_is_the_cached_state(
    start: Callable[..., Engine], shared_spand: Daemon, dtype: str
) -> None:
    prompt = tokens(500, seed=71)
    before = shared_spand.status().spans
    engine = start(transfer=transfer(shared_spand.socket_dir), dtype=dtype)
    try:
        assert engine.one(prompt).restored == 0
        settled(shared_spand, before + 8)
        cached = engine.one(prompt)
        assert (cached.restored, cached.cached) == (0, 480)
        engine.call("reset")
        restored = engine.one(prompt)
        assert (restored.restored, restored.cached) == (480, 480)
        assert restored.tokens == cached.tokens
        assert restored.logprobs == cached.logprobs
    finally:
        engine.close()
