"""What the pages say of keys and of requests' segments holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kmesh.errors import SegmentError
from kmesh.segments import MAX_NAME_BYTES, MAX_SEGMENTS, Segment, SegmentedPrompt, parse

ROOT = Path(__file__).parents[3]
KEYS = (ROOT / "docs" / "keys.md").read_text()
_PAGE = (ROOT / "docs" / "families.md").read_text()
FAMILIES = _PAGE.partition("## From an orchestrator")[2].partition("### ")[0]


def test_the_keys_page_has_the_golden_vectors() -> None:
    cases = json.loads((ROOT / "tests" / "data" / "keys.json").read_text())
    (case,) = [case for case in cases if case["name"] == "one span"]
    said = dict(re.findall(r"^\| ([a-z0-9 ]+) \| `([0-9a-f]{64})` \|$", KEYS, re.MULTILINE))
    expected = case["expected"]
    assert said == {
        "digest": expected["digest"],
        "prefix root": expected["root"],
        "prefix key 0": expected["keys"][0],
        "segment root": expected["segment_root"],
        "segment key 0": expected["segment_keys"][0],
    }
    words = [(i * 2654435761) & 0xFFFFFFFF for i in range(64)]
    assert case["tokens"] == words, "the page says how they are made"


def spoken(text: str) -> Any:
    """The ``kv_transfer_params`` of an example."""
    return json.loads("{" + text + "}")["kv_transfer_params"]


def test_the_requests_of_the_families_page_are_read() -> None:
    page = re.sub(r"```.*?```", "", FAMILIES, flags=re.DOTALL)
    request, response = re.findall(r"(?:^    .*\n)+", page, re.MULTILINE)
    prompt = parse(spoken(request), range(512))
    assert prompt == SegmentedPrompt("round-17").with_private(96).with_shared(416, "minutes-16")
    refused = spoken(response)["kmesh"]["refused"]
    wrong = {"kmesh": {"segments": [{"tokens": 96}, {"tokens": [100, 512]}]}}
    try:
        parse(wrong, range(512))
    except SegmentError as error:
        said = {"field": error.field, "why": error.why}
    assert said == refused
    assert f"up to {MAX_SEGMENTS:,} segments" in FAMILIES
    assert f"1 to {MAX_NAME_BYTES} bytes" in FAMILIES


def test_the_example_of_the_families_page_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", FAMILIES, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "families.md", "exec"), names)  # noqa: S102 - it is our own page
    body = names["body"]
    prompt = parse(body["kv_transfer_params"], body["prompt"])
    assert prompt is not None
    assert prompt.family == "round-17"
    # The space between the two is the private segment's, and so is the word over it.
    own, minutes = prompt.segments
    assert own == Segment(0, own.end, private=True)
    assert minutes == Segment(own.end, len(body["prompt"]), "minutes-16")
    assert json.loads(json.dumps(body)) == body
