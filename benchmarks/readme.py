"""The README's table of figures, as Markdown, from a result file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.check import Line, Target, Verdict, judge_all

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_SIGNIFICANT = 3


class MarkerError(ValueError):
    """A document has not exactly one place for the table."""


def markdown(result: Mapping[str, Any], name: str, targets: Sequence[Target], root: Path) -> str:
    """The machine, and a line for each target.

    Each figure carries the mark by which ``make verify-evidence`` compares it with its file.

    Args:
        name: of the evidence file, without its ending.
        root: where ADRs are looked for.
    """
    machine = result["hardware"]
    head = (
        f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['memory_gib']:.0f} GiB, "
        f"Linux {machine['kernel'].partition('-')[0]}; "
        f"{result['date']}, commit {result['commit'][:12]}"
        f"{'' if result['clean'] else ' with changes'}; "
        f"[evidence/{name}.json](evidence/{name}.json) ({result['label']}"
        f"{', quick' if result['quick'] else ''})."
    )
    intervals = {row["row"]: row["interval"] for row in result["raw"]["rows"]}
    lines = [head, "", "| figure | measured | target | |", "| --- | ---: | ---: | --- |"]
    for line in judge_all(result, targets, root):
        target = line.target
        bound = "" if target.shown_only else target.bound()
        text = f"{target.text or target.row} (`{target.row}`)"
        lines.append(
            f"| {text} | {_measured(line, name, intervals)} | {bound} | {_verdict(line)} |"
        )
    return "\n".join(lines)


def _measured(line: Line, name: str, intervals: Mapping[str, Sequence[float] | None]) -> str:
    if line.value is None:
        return "–"
    row = line.target.row
    text = f"{figure(line.value)} {line.target.unit} <!-- evidence: {name}.{row} -->"
    if interval := intervals.get(row):
        text += " (95 %: {} to {})".format(*(figure(bound) for bound in interval))
    return text


def _verdict(line: Line) -> str:
    if line.verdict is Verdict.EXPLAINED:
        return f"falls short, [explained]({line.target.adr})"
    return line.verdict.value


def figure(value: float) -> str:
    """A number with three significant digits, never with an exponent."""
    if not value:
        return "0"
    digits = _SIGNIFICANT - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(digits, 0)}f}"


def placed(document: str, text: str) -> str:
    """The document with ``text`` between its markers.

    Raises:
        MarkerError: it has not exactly one pair of them.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise MarkerError(f"not exactly one {BEGIN} and one {END}")
    before, rest = document.split(BEGIN)
    if END not in rest:
        raise MarkerError(f"{END} comes before {BEGIN}")
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"
