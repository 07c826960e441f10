"""Writes runs of both profiles down as evidence: see evidence/README.md for the form."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo.evidence import command, functional
from experiments import profile
from experiments.tokendance import verify
from experiments.tokendance.workload import Shape, Workload
from kmesh.codec import Base, Encoder, Form, Provenance, Recipe, Segment, decode

ROUNDS = 9


def write(path: Path, generated: Path, captured: Path) -> None:
    """From two bundles, both verified here first; times are taken now."""
    from tools.verify_evidence import derive

    evidence: dict[str, Any] = {
        **functional("codec", command("python -m experiments.tokendance", sys.argv[1:])),
        "note": "sizes are exact; times are processor time, while other programs used the machine",
        "versions": profile.versions(),
        "raw": {
            name: {**_sizes(folder), "verified": verify.verify(folder)}
            for name, folder in (("generated", generated), ("captured", captured))
        },
    }
    evidence["raw"]["speed"] = speed()
    evidence["raw"]["load_1min"] = round(os.getloadavg()[0], 2)
    evidence["derived"] = derive(evidence)
    path.write_text(json.dumps(evidence, indent=1) + "\n")


def _sizes(folder: Path) -> dict[str, Any]:
    """What ``codec.json`` says, without keys; tokens instead of whole descriptions."""
    result = json.loads((folder / "codec.json").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    rows = [row for arm in result["arms"].values() for row in arm["members"].values()]
    for row in (*result["segments"].values(), *rows):
        row["tokens"] = row.pop("span")["tokens"]
    return {
        "profile": manifest["profile"],
        "seed": manifest["seed"],
        "source": manifest["source"],
        "segments": result["segments"],
        "arms": result["arms"],
    }


def speed() -> dict[str, Any]:
    """Processor seconds of one thread: encoding, which decodes and compares too, and decoding."""
    workload = Workload(Shape(24, 2, 64, 10000.0), [3328], 768, 2, 1)
    (segment,), shape = workload.segments, workload.shape
    base = Base([Segment(segment.description, segment.state)])
    member = next(workload.siblings(0))
    (told,) = member.provenance
    same = member.state.copy()
    same[:, 0, :, told.token : told.token + told.tokens] = segment.state[:, 0]
    # A sibling in the segment's own frame, of which nothing is turned.
    frame = dataclasses.replace(member.description, position=1000)
    described = dataclasses.replace(segment.description, position=1000 + told.token)
    framed = Encoder(Base([Segment(described, segment.state)]), shape.rotary)
    still = Provenance(told.token, told.tokens, told.segment, 0, 0)
    warm = Encoder(base, shape.rotary)
    cold = Encoder(base, shape.rotary, form=Form.COLD)
    parsed = {
        encoder: Recipe(encoder.encode(member.description, member.state, [told]).data)
        for encoder in (warm, cold)
    }
    calls: dict[str, Callable[[], object]] = {
        "encode_turned": lambda: warm.encode(member.description, member.state, [told]),
        "encode_same_frame": lambda: framed.encode(frame, same, [still]),
        "encode_by_content": lambda: framed.encode(frame, same),
        "encode_cold": lambda: cold.encode(member.description, member.state, [told]),
        "decode_turned": lambda: decode(parsed[warm], base),
        "decode_cold": lambda: decode(parsed[cold], base),
    }
    taken: dict[str, Any] = {name: {"bytes": member.state.nbytes, "seconds": []} for name in calls}
    for number in range(-1, ROUNDS):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            if number >= 0:
                taken[name]["seconds"].append(round(time.thread_time() - began, 6))
    return taken
