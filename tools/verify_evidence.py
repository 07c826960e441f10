"""Recomputes what evidence files claim, and compares the figures in the documents with them.

A figure in a document is followed by a comment that says where it comes from:

    restored 98.9 % <!-- evidence: demo.restored_share_min_percent -->

The number before the comment must be what ``evidence/demo.json`` gives, rounded as it is shown.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "evidence"
DOCUMENTS = ("*.md", "docs/**/*.md", "benchmarks/*.md")
REQUIRED = ("kind", "label", "date", "command", "commit", "hardware", "versions", "raw", "derived")
LABELS = ("functional, CPU", "trend", "data-centre")

_MARK = re.compile(r"<!-- evidence: ([\w-]+)\.(\w+) -->")
_NUMBER = re.compile(r"((?:(?<=[\s|(])-)?\d[\d,]*(?:\.\d+)?)[^\d\n]{0,24}$")


def derive_demo(raw: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a demo run, from its requests and the daemon's words alone."""
    shared, token_bytes = raw["shared_tokens"], raw["token_bytes"]
    rows, control = raw["requests"], {row["request"]: row for row in raw["control"]}
    first = rows[0]["engine"]
    second = [row for row in rows if row["engine"] != first]
    own = sum(row["prompt_tokens"] - shared for row in rows)
    copies = len({row["engine"] for row in rows})
    ratios = [row["ttft"] / control[row["request"]]["ttft"] for row in second]
    return {
        "requests": len(rows),
        "same_text": sum(row["text"] == control[row["request"]]["text"] for row in rows),
        "shared_tokens": shared,
        "restored_share_min_percent": 100
        * min(shared, *(row["restored"] for row in second))
        / shared,
        "computed_max": max(row["computed"] for row in second),
        "ttft_second_engine_median_s": _median([row["ttft"] for row in second]),
        "ttft_control_median_s": _median([row["ttft"] for row in raw["control"]]),
        "ttft_ratio_max": max(ratios),
        "daemon_mib": int(raw["daemon"]["span_bytes"]) / 2**20,
        "engines_mib": (copies * shared + own) * token_bytes / 2**20,
        "requests_mib": sum(row["prompt_tokens"] for row in rows) * token_bytes / 2**20,
    }


def derive_bench(raw: Mapping[str, Any]) -> dict[str, float]:
    """Each row's figure, from its raw samples and the name of what was done with them."""
    figures = {}
    for row in raw["rows"]:
        if row["reduce"]:
            series = [one["values"] for one in row["series"].values()]
            figures[row["row"]] = _REDUCE[row["reduce"]](*series[:3])
    return figures


def _p99(values: list[float], *_: object) -> float:
    ordered = sorted(values)
    return next(v for i, v in enumerate(ordered, 1) if 100 * i >= 99 * len(ordered))


#: As the rows name it; what is shown beside the first two series is left out.
_REDUCE: dict[str, Callable[..., float]] = {
    "median": lambda ours, *_: _median(ours),
    "p99": _p99,
    "max": lambda ours, *_: sorted(ours)[-1],
    "median of a/b": lambda a, b, *_: _median([x / y for x, y in zip(a, b, strict=True)]),
    "median a / median b": lambda a, b, *_: _median(a) / _median(b),
    "sum a / sum b": lambda a, b, *_: math.fsum(a) / math.fsum(b),
    "median a - median b": lambda a, b, *_: _median(a) - _median(b),
    "median a - median b - 1.1 median c": lambda a, b, c, *_: (
        _median(a) - _median(b) - 1.1 * _median(c)
    ),
    "min / mean": lambda a, *_: sorted(a)[0] * len(a) / math.fsum(a),
}


def derive_gpu_memory(raw: Mapping[str, Any]) -> dict[str, float]:
    """Counts of a run of the GPU tests, and times that they took down."""
    tests = raw["tests"]
    recorded = [test["recorded"] for test in tests]
    doctor = [check for one in recorded for check in one.get("doctor", ())]
    times = {
        name: _median(values)
        for one in recorded
        for name, values in one.items()
        if name.endswith("_ms")
    }
    return {
        "tests": len(tests),
        "passed": sum(test["outcome"] == "passed" for test in tests),
        "tests_that_watched_vram": sum("vram_before" in one for one in recorded),
        "tests_that_changed_vram": sum(
            one["vram_before"] != one["vram_after"] for one in recorded if "vram_before" in one
        ),
        "doctor_checks": len(doctor),
        "doctor_ok": sum(check["level"] == "ok" for check in doctor),
        **times,
    }


def derive_chaos(raw: Mapping[str, Any]) -> dict[str, float]:
    """Sums over chaos runs; what must be nothing is worked out from the ledgers at their ends."""
    runs = raw["runs"]
    ends = [run["ledger"] for run in runs]
    held = ("leases", "reservations", "staging_bytes", "leased_bytes", "used_bytes_of_nothing")
    times = [seconds for run in runs for seconds in run["daemon"]["recovery_seconds"]]
    return {
        "runs": len(runs),
        "seconds": sum(run["seconds"] for run in runs),
        "faults": sum(sum(run["faults"].values()) for run in runs),
        "kinds_of_faults": len({name for run in runs for name in run["faults"]}),
        "operations": sum(run["clients"]["ops"] for run in runs),
        "spans_read": sum(run["clients"]["read_ok"] for run in runs),
        "gib_read": sum(run["clients"]["read_bytes"] for run in runs) / 2**30,
        "clients_started": sum(run["clients"]["lives"] for run in runs),
        "daemons_started": sum(run["daemon"]["lives"] for run in runs),
        "processes_died": sum(sum(run["daemon"]["deaths"].values()) for run in runs),
        "spans_recovered": sum(run["daemon"]["counters_seen"]["spans_recovered"] for run in runs),
        "corruptions_found": sum(run["corruptions_explained"] for run in runs),
        "unexplained": sum(
            run["reports"].get("broken", 0)
            + run["reports"].get("corrupt", 0)
            - run["corruptions_explained"]
            for run in runs
        ),
        "latest_call_s": max(run["latest_call_seconds"] for run in runs),
        "left": sum(end[name] for end in ends for name in held),
        "ledger_off_bytes": sum(
            abs(end["span_bytes"] - end["listed_bytes"])
            + abs(end["used_bytes"] - 65536 * end["listed_tiles"])
            for end in ends
        ),
        "recovery_median_s": _median(times),
        "recovery_max_s": max(times),
    }


def derive_model_check(raw: Mapping[str, Any]) -> dict[str, float]:
    """Sums over random walks through the core."""
    checks = raw["checks"]
    reached = {name for one in checks for name, count in one["reached"].items() if count}
    return {
        "checks": len(checks),
        "seeds": len({one["seed"] for one in checks}),
        "steps": sum(one["steps"] for one in checks),
        "rounds": sum(one["rounds"] for one in checks),
        "rounds_failed": sum(len(one["failed_rounds"]) for one in checks),
        "not_reached": len({*raw["must_reach"]} - reached),
        "counters_reached": len(reached),
        "minutes": sum(one["seconds"] for one in checks) / 60,
    }


def derive_codec(raw: Mapping[str, Any]) -> dict[str, float]:
    """Sizes of families against dense ones, and how fast one thread encoded and decoded."""
    figures: dict[str, float] = {}
    for kind in ("generated", "captured"):
        part = raw[kind]
        figures[f"{kind}_members"] = sum(len(arm["members"]) for arm in part["arms"].values())
        figures[f"{kind}_refused"] = part["verified"]["refused"]
        for name, arm in part["arms"].items():
            base = [part["segments"][one] for one in arm["segments"]]
            found = _derive_arm(list(arm["members"].values()), base)
            prefix = f"{kind}_{name.replace('-', '_')}"
            figures.update({f"{prefix}_{key}": value for key, value in found.items()})
    for name, row in raw["speed"].items():
        figures[f"{name}_gb_s"] = row["bytes"] / _median(row["seconds"]) / 1e9
    return figures


def _derive_arm(
    members: list[Mapping[str, Any]], base: list[Mapping[str, Any]]
) -> dict[str, float]:
    """A base counts once, and only where a member needs it."""
    dense = sum(row["dense_bytes"] for row in members)
    own = [row["dense_bytes"] // row["tokens"] * row["computed_tokens"] for row in members]
    recipes = [row["addressable"]["bytes"] for row in members]
    figures = {
        "dense_bytes": dense,
        # A span of which all was recovered has nothing to compare with.
        "overhead_percent": max(100 * (r / o - 1) for r, o in zip(recipes, own, strict=True) if o),
        "times_least": min(row["dense_bytes"] / r for row, r in zip(members, recipes, strict=True)),
        "depending": sum(row["addressable"]["depends_on_base"] for row in members),
        "cold_base_ratio": sum(one["cold_bytes"] for one in base)
        / sum(one["dense_bytes"] for one in base),
    }
    for form, kept in (("addressable", "dense_bytes"), ("cold", "cold_bytes")):
        stored = sum(row[form]["bytes"] for row in members)
        figures[f"{form}_members_ratio"] = stored / dense
        if any(row[form]["depends_on_base"] for row in members):
            stored += sum(one[kept] for one in base)
        figures[f"{form}_bytes"], figures[f"{form}_ratio"] = stored, stored / dense
    for plane in ("k", "v"):
        figures[f"cold_{plane}_ratio"] = sum(
            row["cold"][f"{plane}_bytes"] for row in members
        ) / sum(row[f"dense_{plane}_bytes"] for row in members)
    if all("divergence_from_full_prefill" in row for row in members):
        figures["divergence_max"] = max(row["divergence_from_full_prefill"] for row in members)
        figures["divergence_min"] = min(row["divergence_from_full_prefill"] for row in members)
        figures["same_first_token"] = sum(row["same_first_token"] for row in members)
    return figures


def derive_round(raw: Mapping[str, Any]) -> dict[str, float]:
    """What a family of a real model's siblings takes in a daemon, and what engines made of it."""
    rows, base, status = raw["held"]["spans"], raw["held"]["base"], raw["held"]["status"]
    recipes = [row for row in rows if row["recipe"]]
    dense = sum(row["dense_bytes"] for row in rows)
    stored, memory = (
        sum(size(row["bytes"]) for row in (*rows, *base)) for size in (int, _whole_tiles)
    )
    out_of = {"dense spans": {}, "recipes": {}}  # type: dict[str, dict[tuple[str, str], Any]]
    for answer in raw["answers"]:
        out_of[answer["form"]][answer["engine"], answer["member"]] = answer
    restored = out_of["recipes"].values()
    said = {member["member"]: member for member in raw["held"]["family"]["of_members"]}
    siblings = {row["member"] for row in rows}
    return {
        "siblings": len(siblings),
        "spans": len(rows),
        "recipes": len(recipes),
        "recipes_as_codec": sum(row["bytes"] == row["codec"]["bytes"] for row in recipes),
        "spans_same": raw["same"],
        "dense_bytes": dense,
        "base_bytes": sum(row["bytes"] for row in base),
        "recipe_bytes": sum(row["bytes"] for row in recipes),
        "stored_bytes": stored,
        "stored_ratio": stored / dense,
        "memory_bytes": memory,
        "memory_ratio": memory / dense,
        "families_off_bytes": sum(
            abs(
                said[name][field] - sum(size(row["bytes"]) for row in rows if row["member"] == name)
            )
            for name in siblings
            for field, size in (("stored_bytes", int), ("used_bytes", _whole_tiles))
        ),
        "status_off_bytes": abs(
            status["mirror_bytes"] - sum(member["recipe_bytes"] for member in said.values())
        ),
        "requests": len(raw["answers"]),
        "same_tokens": sum(
            answer["tokens"] == out_of["dense spans"][who]["tokens"]
            for who, answer in out_of["recipes"].items()
        ),
        "first_as_reference": sum(
            answer["tokens"][0] == raw["first"][answer["member"]] for answer in restored
        ),
        "restored_share_min_percent": min(
            100 * answer["restored"] / answer["prompt_tokens"] for answer in restored
        ),
        "made_dense": raw["after"]["counters"]["densified"],
        "mirrors_left": raw["after"]["mirrors"] - status["mirrors"],
    }


def _whole_tiles(size: int) -> int:
    return -(-size // 65536) * 65536


DERIVE: dict[str, Callable[[Mapping[str, Any]], dict[str, float]]] = {
    "chaos": derive_chaos,
    "demo": derive_demo,
    "model-check": derive_model_check,
    "bench": derive_bench,
    "codec": derive_codec,
    "round": derive_round,
    "gpu-memory": derive_gpu_memory,
}


def derive(evidence: Mapping[str, Any]) -> dict[str, float]:
    """What follows from an evidence file's raw figures; KeyError for a kind that is unknown."""
    return {
        name: round(value, 6) for name, value in DERIVE[evidence["kind"]](evidence["raw"]).items()
    }


def check_file(evidence: Mapping[str, Any]) -> list[str]:
    """What is wrong with one evidence file."""
    missing = [key for key in REQUIRED if key not in evidence]
    if missing:
        return [f"lacks {', '.join(missing)}"]
    if evidence["label"] not in LABELS:
        return [f"label {evidence['label']!r} is none of {LABELS}"]
    if evidence["kind"] not in DERIVE:
        return [f"nothing is known about kind {evidence['kind']!r}"]
    found = []
    again = derive(evidence)
    for name in sorted(again.keys() | evidence["derived"].keys()):
        claimed, have = evidence["derived"].get(name), again.get(name)
        if claimed is None or have is None or not math.isclose(claimed, have, rel_tol=1e-6):
            found.append(f"{name} is {have} from the raw figures, the file claims {claimed}")
    return found


def check_document(text: str, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Marked figures of a document that are not what the evidence gives."""
    found = []
    for mark in _MARK.finditer(text):
        name, key = mark.groups()
        number = _NUMBER.search(text, 0, mark.start())
        if number is None:
            found.append(f"no number before the mark {name}.{key}")
            continue
        value = files.get(name, {}).get("derived", {}).get(key)
        if value is None:
            found.append(f"no evidence {name}.{key}")
            continue
        shown = number[1].replace(",", "")
        digits = len(shown.partition(".")[2])
        if f"{value:.{digits}f}" != shown:
            found.append(f"{number[1]} is shown for {name}.{key}, which is {value}")
    return found


def _median(values: list[float]) -> float:
    middle = sorted(values)
    half = len(middle) // 2
    return middle[half] if len(middle) % 2 else (middle[half - 1] + middle[half]) / 2


def main() -> int:
    files = {path.stem: json.loads(path.read_text()) for path in sorted(EVIDENCE.glob("*.json"))}
    found = [
        f"evidence/{name}.json: {it}" for name, file in files.items() for it in check_file(file)
    ]
    marks = 0
    for pattern in DOCUMENTS:
        for path in sorted(ROOT.glob(pattern)):
            text = path.read_text()
            marks += len(_MARK.findall(text))
            found += [f"{path.relative_to(ROOT)}: {it}" for it in check_document(text, files)]
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(f"{len(files)} evidence files and {marks} figures in documents agree")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
