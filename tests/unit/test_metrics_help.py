"""The metrics page's HELP lines and the tables of docs/metrics.md have the same sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kmesh_spand.control import metrichelp
from kmesh_spand.control.metrichelp import Table

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def _plain(text: str) -> str:
    """Without what Markdown adds."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


@pytest.mark.parametrize(
    ("title", "table"),
    [
        ("Gauges", metrichelp.GAUGES),
        ("Histograms", metrichelp.HISTOGRAMS),
        ("Counters", metrichelp.COUNTERS),
    ],
)
def test_the_document_repeats_the_sentences(title: str, table: Table) -> None:
    part = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", part, re.MULTILINE)
    assert {tuple(re.findall(r"`([^`]+)`", names)): _plain(text) for names, text in rows} == table
    assert len(rows) == len(table)


def test_a_name_finds_its_sentence() -> None:
    assert metrichelp.gauge("sessions") == "open sessions"
    assert metrichelp.gauge("span_bytes") == (
        "spans, span_bytes: stored spans, and the bytes of their payloads"
    )
    # A gauge and a counter of one name.
    assert metrichelp.gauge("disk_waits") != metrichelp.counter("disk_waits")
    assert metrichelp.counter("requests_acquire").startswith("requests by their name")
    assert metrichelp.counter("refused_stale").startswith("calls and connections")
