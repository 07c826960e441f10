"""The report as tables for a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from demo.report import MIN_RESTORED, Report


def show(report: Report, console: Console) -> None:
    """Prints the requests, the bytes, and what fell short."""
    console.print(_requests(report))
    console.print(_bytes(report))
    problems = report.problems()
    for problem in problems:
        console.print(f"✗ {problem}", style="red", markup=False)
    if not problems:
        console.print(
            f"[green]✓[/green] every text is the control's; {report.engines[-1]} restored at least "
            f"{MIN_RESTORED:.0%} of the shared tokens of every request"
        )


def _requests(report: Report) -> Table:
    table = Table(title=f"{report.shared_tokens} prompt tokens are shared by all requests")
    for name in ("request", "engine"):
        table.add_column(name)
    for name in ("prompt tokens", "computed", "restored from KMesh", "first token, s"):
        table.add_column(name, justify="right")
    table.add_column("same text as control")
    rows = [*report.rows, *report.control]
    for row in rows:
        controls = row in report.control
        same = "-" if controls else "yes" if report.same_text(row) else "[red]NO[/red]"
        table.add_row(
            str(row.request),
            row.engine,
            f"{row.prompt_tokens}",
            f"{row.computed}",
            "-" if controls else f"{row.restored}",
            f"{row.ttft:.2f}",
            same,
            end_section=row.request == len(report.control),
        )
    return table


def _bytes(report: Report) -> Table:
    table = Table(title="KV state of these requests")
    table.add_column("kept as")
    table.add_column("MiB", justify="right")
    table.add_column("daemon's share", justify="right")
    for name, size in (
        ("spans in the daemon (measured)", report.daemon_bytes),
        ("a copy in each engine (computed)", report.engine_bytes),
        ("a copy for each request (computed)", report.unshared_bytes),
    ):
        table.add_row(name, f"{size / 2**20:.1f}", f"{report.daemon_bytes / size:.0%}")
    return table
