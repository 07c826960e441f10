"""Compares a result with the targets: one line each."""

from __future__ import annotations

import enum
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TargetError(ValueError):
    """``targets.toml`` contradicts itself."""


@dataclass(frozen=True, slots=True)
class Target:
    """What one row should reach.

    Attributes:
        row: name of the row.
        text: what it is, for people.
        unit: of the row and of the bounds.
        at_most, at_least: at most one of them; a row without is shown only.
        adr: page that explains why it falls short.
        part: of the benchmark, where parts can be measured one by one; the rows' ``benchmark``.
    """

    row: str
    text: str
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    adr: str = ""
    part: str = ""

    def __post_init__(self) -> None:
        if self.at_most is not None and self.at_least is not None:
            raise TargetError(f"{self.row}: both at_most and at_least")
        if self.adr and self.shown_only:
            raise TargetError(f"{self.row}: an ADR, but nothing to reach")

    @property
    def shown_only(self) -> bool:
        return self.at_most is None and self.at_least is None

    def holds(self, value: float) -> bool:
        """Whether a figure reaches the target; one that is shown only always does."""
        return not (
            (self.at_most is not None and value > self.at_most)
            or (self.at_least is not None and value < self.at_least)
        )

    def bound(self) -> str:
        """The target as it is written in a table."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g} {self.unit}"
        if self.at_least is not None:
            return f"≥ {self.at_least:g} {self.unit}"
        return "shown"


class Verdict(enum.Enum):
    """What became of one target."""

    HOLDS = "holds"
    SHOWN = "shown"
    UNAVAILABLE = "not on this machine"
    EXPLAINED = "falls short, explained"
    SHORT = "FALLS SHORT"
    MISSING = "MISSING"

    @property
    def fails(self) -> bool:
        return self in (Verdict.SHORT, Verdict.MISSING)


@dataclass(frozen=True, slots=True)
class Line:
    """One target, judged."""

    target: Target
    value: float | None
    verdict: Verdict
    note: str

    def __str__(self) -> str:
        measured = "–" if self.value is None else f"{self.value:.4g} {self.target.unit}"
        text = f"{self.target.row:28} {measured:>16}   {self.target.bound():>18}   "
        return f"{text}{self.verdict.value}{f' ({self.note})' if self.note else ''}"


def read_targets(path: Path) -> list[Target]:
    """The targets of a TOML file.

    Raises:
        TargetError: it names a row twice, or a target contradicts itself.
    """
    targets = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["target"]:
        try:
            targets.append(Target(**entry))
        except TypeError as wrong:
            raise TargetError(f"{entry.get('row', '?')}: {wrong}") from None
    names = [target.row for target in targets]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise TargetError(f"named twice: {', '.join(sorted(twice))}")
    return targets


def judge(target: Target, row: Mapping[str, Any] | None, root: Path) -> Line:
    """Compares one row with its target.

    Args:
        row: of the result file, or None if it has none of that name.
        root: where ADRs are looked for.
    """
    if row is None:
        return Line(target, None, Verdict.MISSING, "")
    value, note = row["value"], row["note"]
    if value is None:
        verdict = Verdict.UNAVAILABLE if target.shown_only else Verdict.MISSING
        return Line(target, None, verdict, note)
    if row["unit"] != target.unit:
        return Line(target, None, Verdict.MISSING, f"its unit is {row['unit']}")
    if target.shown_only:
        return Line(target, value, Verdict.SHOWN, "")
    if target.holds(value):
        return Line(target, value, Verdict.HOLDS, "")
    if target.adr and (root / target.adr).is_file():
        return Line(target, value, Verdict.EXPLAINED, target.adr)
    return Line(target, value, Verdict.SHORT, f"no {target.adr}" if target.adr else "")


def judge_all(result: Mapping[str, Any], targets: Sequence[Target], root: Path) -> list[Line]:
    """A line for each target, and one for each row that has none."""
    rows = {row["row"]: row for row in result["raw"]["rows"]}
    lines = [judge(target, rows.get(target.row), root) for target in targets]
    known = {target.row for target in targets}
    for name in rows.keys() - known:
        unit = rows[name]["unit"]
        stray = Target(name, "", unit)
        lines.append(Line(stray, rows[name]["value"], Verdict.MISSING, "no target names this row"))
    return lines


def lacking(result: Mapping[str, Any], targets: Sequence[Target]) -> list[str]:
    """Parts of which a result has no row at all: they were not measured, or failed."""
    measured = {"", *(row.get("benchmark", "") for row in result["raw"]["rows"])}
    return list(dict.fromkeys(t.part for t in targets if t.part not in measured))


def main(path: Path, targets: Path, root: Path, make: str = "bench") -> int:
    """Prints a line for each target; returns 1 if one falls short unexplained or is missing.

    Args:
        make: target of the Makefile that measures.
    """
    if not path.is_file():
        print(f"{path} is not there: run `make {make}` first")
        return 1
    result = json.loads(path.read_text(encoding="utf-8"))
    machine = result["hardware"]
    print(
        f"{result['label']}: {machine['cpu']}, {machine['cpus']} CPUs, {result['date']},"
        f" commit {result['commit'][:12]}{'' if result['clean'] else ' and changes'}"
        f"{', QUICK' if result['quick'] else ''}"
    )
    known = read_targets(targets)
    lines = judge_all(result, known, root)
    for line in lines:
        print(line)
    failing = sum(line.verdict.fails for line in lines)
    for part in lacking(result, known):
        print(
            f"{part}: this part is not in the file: it was not measured with the others, or failed."
            f" `make {make} BENCH_ARGS='--parts {part}'` adds it to the last run, at the same"
            " commit, on the same machine and with the same --rounds"
        )
    print(f"{len(lines) - failing} of {len(lines)} in order")
    return 1 if failing else 0
