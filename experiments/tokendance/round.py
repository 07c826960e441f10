"""A round through real engines: siblings that were recovered from an engine's own state, kept as
recipes by the daemon, and restored out of these by two vLLM servers.

The first server computes the primer and stores its passage once, as a segment. The reference
recovers four siblings from that, outside of the engines, and stores them. Both servers answer each
sibling's prompt out of dense spans, then out of recipes.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from demo import daemon, engine
from demo.__main__ import wait_healthy
from demo.evidence import command, functional
from demo.processes import ProcessFailed
from demo.progress import console, step
from experiments import checkpoint, profile
from experiments.profile import CHECKPOINT, CONFIG, ROOT, Profile, ProfileError
from experiments.tokendance import codec, kept
from experiments.tokendance.kept import Kept, Stored
from experiments.tokendance.roundreport import DENSE, RECIPES, Answer, Report
from kmesh.errors import KMeshError
from kmesh.families import Family
from kmesh.layout import Shard
from kmesh.segments import SegmentedPrompt
from kmesh.session import Role, Session

if TYPE_CHECKING:
    from experiments.tokendance.captured import Captured

LOGS = ROOT / ".demo"
FAMILY = "round"
ENGINES = ("engine A", "engine B")
DTYPE = "bfloat16"
MAX_TOKENS = 16
#: What a reader of the evidence has to know.
NOTE = (
    "what the servers say is compared out of both forms, and its first token with the reference's,"
    " which computes in float32; not with prompts that were computed in full"
)
_ARM = "spans"
_PACKAGES = ("torch", "transformers", "vllm")


def sizes_of(folder: Path) -> dict[str, Any] | None:
    """The arm of ``codec.json`` with siblings in spans; None if there is none."""
    try:
        arms: dict[str, dict[str, Any]] = json.loads((folder / "codec.json").read_text())["arms"]
        return arms.get(_ARM)
    except (FileNotFoundError, KeyError):
        return None


def made_of(folder: Path) -> str:
    """Digest of the checkpoint that a bundle was made of, as far as its manifest says so."""
    try:
        return str(json.loads((folder / "manifest.json").read_text())["checkpoint_digest"])
    except (FileNotFoundError, KeyError):
        return ""


def check(config: Profile, folder: Path) -> dict[str, Any]:
    """What ``sizes_of`` finds in the bundle's folder.

    Raises:
        ProfileError: something that a round needs is not there. Names all of that at once, and the
            one command that makes it.
    """
    lacks, targets = [], []
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        lacks.append(f"packages: {', '.join(missing)}")
        targets.append("env")
    if config.model != CHECKPOINT:
        lacks.append(f"a profile with a model: {CONFIG.name} has {config.profile}")
        targets.append("defconfig-tokendance-model")
    arm = sizes_of(folder)
    if arm is None:
        lacks.append(f"the siblings' sizes: arm {_ARM!r} of {folder.name}/codec.json")
        if not checkpoint.is_there(config):
            lacks.append("the model: it is prepared on the way")
        targets.append("tokendance-codec")
    elif config.checkpoint_digest and made_of(folder) not in ("", config.checkpoint_digest):
        lacks.append(f"{folder.name} of this checkpoint: it was made of another one")
        targets.append("tokendance-codec")
    if arm is None or lacks:
        listed = "".join(f"\n  - {one}" for one in lacks)
        again = f"make {' '.join([*targets, 'tokendance-round'])}"
        raise ProfileError(f"a round needs what is not there:{listed}\nrun `{again}`")
    return arm


def run(config: Profile) -> Report:
    """Starts a daemon and two servers, runs the round, ends everything.

    Raises:
        ProfileError: see ``check``.
        ProcessFailed, OSError, KMeshError, LookupError: the round did not get through.
    """
    arm = check(config, ROOT / config.bundle)
    LOGS.mkdir(exist_ok=True)
    with ExitStack() as stack:
        socket_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kmesh-round-")))
        spand, process = stack.enter_context(daemon.run(LOGS, socket_dir))
        with step("kmesh-spand starts"):
            process.wait_ready(spand.is_ready, daemon.START_TIMEOUT)
        path = checkpoint.path_of(config)
        servers = [
            stack.enter_context(engine.serve(name, path, LOGS, socket_dir=socket_dir, dtype=DTYPE))
            for name in ENGINES
        ]
        with step("the reference loads the model"):
            workload = codec.captured(config)
        wait_healthy(servers)
        session = stack.enter_context(
            Session.connect(
                socket_dir, role=Role.TOOL, client_name="tokendance round", timeout=30.0
            )
        )
        return _round([server for server, _ in servers], session, spand, workload, arm)


def _round(
    engines: Sequence[engine.Engine],
    session: Session,
    spand: daemon.Daemon,
    workload: Captured,
    arm: dict[str, Any],
) -> Report:
    report = Report(Path(workload.path).name)
    said = _said(workload)
    primer = workload.prompts[0].tokens.tolist()
    with step(f"{engines[0].name} computes the primer, and stores its passage"):
        engines[0].complete(primer, MAX_TOKENS, said.to_params())
        declared = kept.wait_for(lambda: _declared(session), "the engine declares the family")
    shard = Shard(*(getattr(declared.shards[0], name) for name in Shard.__slots__))
    house = Kept(session, FAMILY, declared.namespace, shard, said, primer)
    with step("siblings are recovered from it, and stored"):
        (segment,) = workload.segments
        workload.rebase(house.passage(segment.state))
        prompts = [prompt.tokens.tolist() for prompt in workload.prompts[1:]]
        recovered = workload.siblings(0, against_prefill=False)
        siblings = house.put(zip(recovered, prompts, strict=True))
        report.first = {one.member.name: int(one.member.seen["first_token"]) for one in siblings}
    report.answers += _ask(engines, siblings, DENSE)
    with step("they join the family"):
        rotary = workload.shape.rotary
        # The engine, which turns no cached keys, has not said how its model does.
        session.families.declare(
            Family(
                FAMILY,
                declared.namespace,
                declared.dtype,
                declared.head_dim,
                (shard,),
                house.base,
                rotary,
            )
        )
        house.join(siblings)
    report.same = house.same(siblings)
    report.held = kept.sizes(spand.ask, FAMILY, siblings, house.base, arm)
    report.answers += _ask(engines, siblings, RECIPES)
    report.after = kept.sizes(spand.ask, FAMILY, siblings, house.base, arm)["status"]
    return report


def _said(workload: Captured) -> SegmentedPrompt:
    """The primer's segments."""
    prompt, (segment,) = workload.prompts[0], workload.segments
    said = SegmentedPrompt(FAMILY).with_private(prompt.starts[0])
    said = said.with_shared(segment.description.tokens, "passage")
    return said.with_private(len(prompt.tokens) - said.length)


def _declared(session: Session) -> Any:
    """The family once the engine has stored its base and joined it; None before."""
    for one in session.families.list():
        if one.name == FAMILY and one.members and one.base_stored == one.base_spans:
            return one
    return None


def _ask(
    engines: Sequence[engine.Engine], siblings: Sequence[Stored], form: str
) -> Iterator[Answer]:
    for server in engines:
        for one in siblings:
            with step(f"{server.name} answers {one.member.name} out of {form}"):
                done = server.complete(one.tokens, MAX_TOKENS)
            yield Answer(
                server.name,
                one.member.name,
                form,
                done.prompt_tokens,
                done.computed,
                done.restored,
                done.tokens,
                done.text,
            )


def write_evidence(path: Path, report: Report) -> None:
    """See evidence/README.md for the form."""
    from tools.verify_evidence import derive

    evidence: dict[str, Any] = {
        **functional("round", command("python -m experiments.tokendance", sys.argv[1:])),
        "note": NOTE,
        "versions": profile.versions(),
        "raw": report.to_json(),
    }
    evidence["derived"] = derive(evidence)
    path.write_text(json.dumps(evidence, indent=1, ensure_ascii=False) + "\n")


def main(
    config: Profile,
    as_json: bool,
    evidence: Path | None,
    show: Callable[[Report], None],
) -> int:
    """Exit status 0 means that all held; 1: it did not, or did not get through."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        report = run(config)
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has ended")
        return 130
    except (ProcessFailed, OSError, KMeshError, LookupError) as failed:
        console.print(f"✗ {failed}\nlogs are in {LOGS}", markup=False, style="red")
        return 1
    except subprocess.CalledProcessError as failed:
        console.print(f"✗ {failed}\n{failed.stderr}", markup=False, style="red")
        return 1
    if evidence:
        write_evidence(evidence, report)
    if as_json:
        print(json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    else:
        show(report)
    for problem in report.problems():
        print(f"✗ {problem}", file=sys.stderr)
    return 1 if report.problems() else 0


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
