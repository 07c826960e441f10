"""A workload's siblings in a daemon: what is held is what the codec says, to the byte."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from daemon_process import Daemon
from test_cli import as_json

from experiments.profile import PROFILES
from experiments.tokendance import codec, kept
from experiments.tokendance.cutting import Parts, grid, len_of
from experiments.tokendance.kept import Kept
from experiments.tokendance.workload import Workload
from kmesh.families import Family
from kmesh.layout import Shard
from kmesh.segments import SegmentedPrompt
from kmesh.session import Role, Session

SMALL = dataclasses.replace(PROFILES["tokendance-cpu"], layers=4, prompts=3)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return codec.controlled(SMALL)


@pytest.fixture(scope="module")
def arm(workload: Workload, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What ``codec.json`` says of the siblings in spans."""
    folder = tmp_path_factory.mktemp("bundle")
    codec.Run(SMALL, folder).run_spans("controlled", workload)
    arms: dict[str, dict[str, object]] = json.loads((folder / "codec.json").read_text())["arms"]
    return arms["spans"]


def test_spans_are_the_members_cut(workload: Workload) -> None:
    whole = list(workload.siblings(0))
    parts = Parts(workload.shape, workload.segments)
    cut = list(parts.members(iter(whole)))
    assert len(cut) == sum(len(grid(len_of(member))) for member in whole)
    assert sum(span.tokens for member in cut for span in member.provenance) == 2 * 416
    assert [one.description.tokens for one in parts.segments] == [64] * 6 + [32]
    assert sum(member.computed for member in cut) == 2 * 96
    for member in whole:
        mine = [one for one in cut if one.name.startswith(f"{member.name}/")]
        assert [one.description.position for one in mine] == list(range(0, 512, 64))
        assert (np.concatenate([one.state for one in mine], axis=3) == member.state).all()


def test_a_daemon_holds_what_the_codec_says(
    spand: Daemon, workload: Workload, arm: dict[str, object]
) -> None:
    shape, (segment,) = workload.shape, workload.segments
    shard = Shard(0, shape.layers, 0, shape.heads)
    primer, start = workload.prompts[0], workload.prompts[0].starts[0]
    said = SegmentedPrompt("round").with_private(start).with_shared(416, "passage")
    said = said.with_private(len(primer.tokens) - said.length)
    with Session.connect(spand.socket_dir, role=Role.TOOL, timeout=30) as session:
        tokens = primer.tokens.tolist()
        house = Kept(session, "round", shape.namespace, shard, said, tokens)
        house.put_passage(segment.state)
        assert (house.passage(segment.state) == segment.state).all()
        session.families.declare(
            Family("round", shape.namespace, "bfloat16", 64, (shard,), house.base, shape.rotary)
        )
        prompts = [prompt.tokens.tolist() for prompt in workload.prompts[1:]]
        siblings = house.put(zip(workload.siblings(0), prompts, strict=True))
        house.join(siblings)
        count = sum(len(one.payloads) for one in siblings)
        assert house.same(siblings) == count == 16
        held = kept.sizes(
            lambda *command: as_json(*command, socket_dir=spand.socket_dir),
            "round",
            siblings,
            house.base,
            arm,
        )
    assert kept.problems(held) == []
    totals = kept.totals(held)
    assert totals["recipes"] == held["status"]["mirrors"] > 8
    assert totals["memory"] == held["status"]["slab_used"] == held["family"]["used_bytes"]
    assert totals["stored"] == held["family"]["stored_bytes"] < totals["memory"]
    # What is off by a byte, or kept as something else, is noticed.
    for change, complaint in (
        (lambda it: it["spans"][3].update(bytes=it["spans"][3]["bytes"] + 1), "by codec.json"),
        (lambda it: it["spans"][3].update(recipe=not it["spans"][3]["recipe"]), "by codec.json"),
        (lambda it: it["status"].update(mirror_bytes=1), "kmesh status says 1 bytes"),
        (lambda it: it["family"].update(recipe_bytes=1), "differ about bytes"),
        (
            lambda it: it["family"]["of_members"][0].update(used_bytes=1),
            "kmesh families says used_bytes 1",
        ),
    ):
        wrong = copy.deepcopy(held)
        change(wrong)
        assert any(complaint in problem for problem in kept.problems(wrong)), complaint


def test_what_no_span_holds_is_no_part(workload: Workload, tmp_path: Path) -> None:
    (segment,) = workload.segments
    short = dataclasses.replace(segment.description, tokens=410)
    uneven = dataclasses.replace(segment, description=short, state=segment.state[:, :, :, :410])
    with pytest.raises(ValueError, match="multiple of 16"):
        _ = Parts(workload.shape, [uneven]).segments
