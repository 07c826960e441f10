"""Short names for what most tests ask and compare."""

from __future__ import annotations

from contents import key

from kmesh_spand.core import results as rs

A, B, C, D, E, F = (key(name) for name in "abcdef")


def reasons(answer: rs.AcquireResult | rs.ReserveResult) -> list[int]:
    return list(answer.reason)


def refused(answer: rs.Result | None) -> tuple[int, str]:
    assert isinstance(answer, rs.Refused)
    return answer.code, answer.field
