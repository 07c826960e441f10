"""Every metric of a daemon is seen at a value that means something, and is written down."""

from __future__ import annotations

import json
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import disk_metrics
import pytest
import yaml
from metric_uses import Seen, flights, full_pools, ordinary_use, recipes, tenants
from trouble_metrics import gpus, poor_machines, restarts, sealed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def disks(seen: Seen) -> None:
    with tempfile.TemporaryDirectory(prefix="kmesh-") as base:
        disk_metrics.everything(Path(base), seen.look)


#: Each with daemons of its own, the longest first.
PARTS = (
    poor_machines, ordinary_use, recipes, disks, full_pools, tenants, sealed, gpus, restarts,
    flights,
)  # fmt: skip


@pytest.fixture(scope="module")
def seen() -> Seen:
    """Three parts at a time: most of their time they wait for what a daemon does in its time."""
    found = Seen()
    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(part, found) for part in PARTS]:
            done.result()
    return found


def test_every_metric_says_something(seen: Seen) -> None:
    assert len(seen.values) > 100
    assert not {name for name, value in seen.values.items() if not value}


def families(values: dict[str, float]) -> set[str]:
    """Names as documents write them: no prefix, no labels, no ending of a counter."""
    found = set()
    for name in values:
        short = name.partition("{")[0].removeprefix("kmesh_")
        found.add(re.sub(r"_(total|sum|count)$", "", short))
    return found


def test_every_metric_is_written_down(seen: Seen) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    written = set(re.findall(r"`([a-z_]+)`", text))
    for name in families(seen.values):
        assert name in written or name.startswith(("requests_", "refused_")), name
    for reason in re.findall(r'reason="(\w+)"', " ".join(seen.values)):
        assert reason in written, reason


def test_documented_metrics_exist(seen: Seen) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text().partition("## The connector's")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    known = families(seen.values) | set(re.findall(r'reason="(\w+)"', " ".join(seen.values)))
    for name in re.findall(r"`([a-z_]+)`", " ".join(rows)):
        assert name in known, name


def _names_in(text: str) -> set[str]:
    return set(re.findall(r"\bkmesh_[a-z_]+", text))


def _exported(seen: Seen) -> set[str]:
    plain = {name.partition("{")[0] for name in seen.values}
    return plain | {name[: -len("count")] + "bucket" for name in plain if name.endswith("_count")}


def test_the_dashboard_shows_what_exists(seen: Seen) -> None:
    board = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    assert len(queries) > 15
    named = _names_in(" ".join(queries))
    assert named
    assert named <= _exported(seen)
    assert all(any(_names_in(query)) for query in queries)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_alerts_ask_for_what_exists(seen: Seen) -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus-rules.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    names = _names_in(" ".join(alert["expr"] for alert in alerts))
    assert names <= _exported(seen)
    assert {"kmesh_ready", "kmesh_spans_corrupt_total", "kmesh_worker_restarts_total"} <= names
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"]))) <= {
            "instance",
            "reason",
            "slab",
        }
