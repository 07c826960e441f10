"""``python -m experiments.tokendance``: choose a profile, see what it will do, do it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.progress import step
from experiments import checkpoint, profile
from experiments.profile import CHECKPOINT, GENERATED, PROFILES, ROOT, Profile, ProfileError
from experiments.tokendance import codec, evidence, kept
from experiments.tokendance.workload import Workload, check_unaligned, digest

if TYPE_CHECKING:
    from experiments.tokendance.captured import Captured
    from experiments.tokendance.roundreport import Report


MODELS = {
    GENERATED: "none runs: state is drawn from the seed",
    CHECKPOINT: "a checkpoint computes state on the CPU; a plain reference recovers siblings",
}
ARMS = {
    GENERATED: (
        "primer: the prompt that computed the base",
        "by-content: the same siblings, found by content alone",
        "long: one sibling of 16,384 tokens",
        "gathered: nine siblings of 20,000 tokens, 5.7 % of them own",
    ),
    CHECKPOINT: (
        "computed: the same siblings, all of whose tokens were computed",
        "spans: recompute-0 cut into spans of 64 tokens, as a daemon keeps it",
    ),
}


def plan(config: Profile, said: dict[str, Any]) -> dict[str, Any]:
    """What a run will do, with digests of what it does it to."""
    return {
        "profile": said,
        "executed_kv_reuse": config.model != GENERATED,
        "model": MODELS[config.model],
        "workloads": {
            name: _workload(make(config)) for name, make in codec.WORKLOADS[config.model].items()
        },
        "arms": [
            *(
                f"recompute-{percent}: siblings with {percent} % of their shared tokens anew"
                for percent in config.recompute_percent
            ),
            *ARMS[config.model],
        ],
        "forms": list(codec.FORMS),
        "writes": config.bundle,
    }


def _workload(workload: Workload | Captured) -> dict[str, Any]:
    tokens = [len(prompt.tokens) for prompt in workload.prompts]
    shape = workload.shape
    token_bytes = shape.layers * 2 * shape.heads * shape.head_dim * 2
    return {
        "prompts": len(tokens),
        "tokens": sorted(set(tokens)),
        "segments": [one.description.tokens for one in workload.segments],
        "own_tokens": workload.own,
        "starts": [list(prompt.starts) for prompt in workload.prompts],
        "layers": shape.layers,
        "dense_bytes_of_siblings": sum(tokens[1:]) * token_bytes,
        "token_ids_sha256": digest(workload.prompts),
        "state_sha256": {one.name: one.state_digest() for one in workload.segments},
        "aligned_blocks_compared_none_equal": check_unaligned(workload.prompts),
    }


def show(result: dict[str, Any]) -> None:
    """The totals of a run, for people."""
    print(f"{'arm':14} {'members':>7} {'dense B':>13} {'addressable B':>14} {'':>6} {'cold B':>13}")
    for name, row in codec.totals(result).items():
        print(
            f"{name:14} {row['members']:7} {row['dense']:13,} {row['addressable']:14,}"
            f" {row['addressable_ratio']:6.4f} {row['cold']:13,} {row['cold_ratio']:6.4f}"
        )
    print("stored bytes are with the base where it is needed")


def go_round(config: Profile, as_json: bool, out: Path | None) -> int:
    """The exit status. ProfileError: something is missing, such as the bundle of a model."""
    # Engines and what talks to them are loaded only here.
    from experiments.tokendance import round as through

    return through.main(config, as_json, out, show_round)


def show_round(report: Report) -> None:
    """A round, for people."""
    print(f"{'engine':9} {'sibling':9} {'out of':12} {'restored':>8} {'computed':>8}  next tokens")
    for answer in report.answers:
        print(
            f"{answer.engine:9} {answer.member:9} {answer.form:12} {answer.restored:8,}"
            f" {answer.computed:8,}  {answer.text!r}"
        )
    total = kept.totals(report.held)
    dense = total["dense"]
    print(f"siblings dense             {dense:13,} B")
    for name, text in (
        ("stored", "base, recipes, dense spans"),
        ("memory", "the same, whole tiles"),
    ):
        print(f"{text:26} {total[name]:13,} B  {total[name] / dense:.4f}")
    if not report.problems():
        print(
            f"{total['recipes']} recipes have the bytes that codec.json says; both engines said the"
            " same out of them"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.tokendance", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    choose = commands.add_parser("defconfig", help="write a profile to .config")
    choose.add_argument("profile", choices=sorted(PROFILES))
    for name, text in (("plan", "print what will run"), ("codec", "encode, write the bundle")):
        commands.add_parser(name, help=text).add_argument(
            "--json", action="store_true", help="print JSON instead of lines for people"
        )
    through = commands.add_parser("round", help="siblings through a daemon and two vLLM servers")
    through.add_argument("--json", action="store_true", help="print the report as JSON")
    through.add_argument("--evidence", type=Path, metavar="FILE", help="write the round down")
    record = commands.add_parser("evidence", help="write two verified bundles down as evidence")
    record.add_argument("generated", type=Path, help="bundle of the profile tokendance-cpu")
    record.add_argument("captured", type=Path, help="bundle of the profile tokendance-model")
    record.add_argument("--out", type=Path, required=True, help="file to write")
    given = parser.parse_args(argv)
    if given.command == "evidence":
        evidence.write(given.out, given.generated, given.captured)
        return 0
    try:
        return _run(given)
    except ProfileError as error:
        print(error, file=sys.stderr)
        return 2


def choose(name: str) -> None:
    """Writes the profile of that name to ``.config``, with the checkpoint if it has one."""
    config = PROFILES[name]
    if config.model == CHECKPOINT:
        path, known = checkpoint.chosen()
        config = dataclasses.replace(config, checkpoint=path, checkpoint_digest=known)
    profile.write(config, profile.CONFIG)
    print(
        f"{profile.CONFIG.name}: {name}" + (f", {config.checkpoint}" if config.checkpoint else "")
    )


def _run(given: argparse.Namespace) -> int:
    if given.command == "defconfig":
        choose(given.profile)
        return 0
    config, said = profile.read()
    if given.command == "plan":
        print(json.dumps(plan(config, said), indent=None if given.json else 1))
        return 0
    if given.command == "round":
        return go_round(config, given.json, given.evidence)
    result = codec.Run(config, ROOT / config.bundle, step).run()
    if given.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
