"""Short names for what most tests ask and compare."""

from __future__ import annotations

from world import key

from kmesh_spand.core import effects as fx

A, B, C, D, E, F = (key(name) for name in "abcdef")


def reasons(answer: fx.AcquireResult | fx.ReserveResult) -> list[int]:
    return list(answer.reason)


def refused(answer: fx.Result | None) -> tuple[int, str]:
    assert isinstance(answer, fx.Refused)
    return answer.code, answer.field
