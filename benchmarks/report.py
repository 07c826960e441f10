"""The table that a run ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.check import Target


def table(result: Mapping[str, Any], targets: Sequence[Target]) -> Table:
    """A line for each row of a result, with its target if it has one."""
    machine = result["hardware"]
    found = Table(
        title=f"{machine['cpu']}, {machine['cpus']} CPUs, Linux {machine['kernel']},"
        f" {result['date']} · {result['label']}{' · QUICK' if result['quick'] else ''}",
        title_justify="left",
    )
    for name, side in (("figure", "left"), ("measured", "right"), ("target", "right")):
        found.add_column(name, justify=side)  # type: ignore[arg-type]
    found.add_column("n", justify="right")
    found.add_column("of what")
    by_row = {target.row: target for target in targets}
    for row in result["raw"]["rows"]:
        target = by_row.get(row["row"])
        found.add_row(
            row["row"],
            measured(row),
            target.bound() if target else "",
            str(max((series["n"] for series in row["series"].values()), default=0)),
            row["note"],
        )
    return found


def measured(row: Mapping[str, Any]) -> str:
    """A row's figure with its unit, and its interval where it has one."""
    if row["value"] is None:
        return "–"
    text = f"{row['value']:.4g} {row['unit']}"
    if row["interval"]:
        low, high = row["interval"]
        text += f" [{low:.4g}, {high:.4g}]"
    return text
