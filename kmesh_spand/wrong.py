"""What is wrong with a setting, in the words of its documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kmesh_spand import units

_MOST_CHARACTERS = 80
_BOUNDS = {
    "greater_than_equal": ("ge", "at least {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "below {}"),
}
#: Beginnings of the library's names of errors, and what was wanted.
_KINDS = {
    "int": "a whole number",
    "finite": "a whole number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a table",
}


def describe(error: Mapping[str, Any], written: object) -> str:
    """One sentence: the value as it was written, and what is allowed.

    Args:
        error: one of pydantic's ``ValidationError.errors()``.
        written: the whole setting, as it stood where it came from.
    """
    kind = str(error["type"])
    if kind == "value_error":
        # What our own checks say names the value already.
        return str(error["ctx"]["error"])
    name, inner = str(error["loc"][0]), len(error["loc"]) > 1
    value = _shown(error["input"] if inner else written)
    if kind in _BOUNDS:
        bound, allowed = _BOUNDS[kind]
        return f"{value} is not {allowed.format(_limit(name, error['ctx'][bound]))}"
    if kind == "literal_error":
        return f"{value} is not {error['ctx']['expected']}"
    wanted = next((text for begin, text in _KINDS.items() if kind.startswith(begin)), "")
    return f"{value} is not {wanted}" if wanted else f"{value}: {error['msg']}"


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str | list | dict) else str(value)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def _limit(name: str, bound: int) -> str:
    if name in units.SIZES:
        return units.format_size(bound)
    return f"{bound:04o}" if name == "socket_mode" else str(bound)
