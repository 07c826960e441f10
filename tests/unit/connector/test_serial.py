"""One thread that does one thing after another."""

from __future__ import annotations

import gc
import weakref

import pytest

from kmesh_vllm.serial import SerialExecutor


class Given:
    """What a call is given."""


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_call_was_given_is_gone_with_it(fails: bool) -> None:
    """Also what one was given that failed, and without a look for garbage."""
    serial, given = SerialExecutor("test"), Given()
    alive = weakref.ref(given)

    def call(_given: Given) -> int:
        return 1 // (not fails)

    was = gc.isenabled()
    gc.disable()
    try:
        future = serial.submit(call, given)
        if fails:
            with pytest.raises(ZeroDivisionError):
                future.result(30)
        else:
            assert future.result(30) == 1
        # The thread lets go of one call when it takes the next.
        serial.submit(int).result(30)
        del future, given
        assert alive() is None
    finally:
        if was:
            gc.enable()
        serial.shutdown()
