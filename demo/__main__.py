"""Runs the demo; see the README. Exit status 0 means that KMesh did what it promises."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from demo import daemon, engine, evidence
from demo.processes import Process, ProcessFailed
from demo.progress import console, step
from demo.prompts import QUESTIONS, messages, shared_tokens
from demo.report import Report, Row
from demo.show import show
from tools import prepare_model

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".demo"
MAX_TOKENS = 32


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    signal.signal(signal.SIGTERM, _terminated)
    LOGS.mkdir(exist_ok=True)
    try:
        report = run(prepared_model())
    except (ProcessFailed, OSError) as failed:
        console.print(f"✗ {failed}\nlogs are in {LOGS}", markup=False, style="red")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has ended")
        return 130
    if arguments.evidence:
        evidence.write(arguments.evidence, report)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 120))
    return 1 if report.problems() else 0


def prepared_model() -> str:
    """Path or hub id of the model, prepared if it is the demo's own."""
    path = prepare_model.model_path()
    if not os.environ.get("MODEL") and not prepare_model.is_prepared():
        with step("preparing the model (once)"):
            prepare_model.convert(prepare_model.gguf_file(), prepare_model.TARGET)
    return path


def run(model: str) -> Report:
    """Starts everything, asks everything, ends everything."""
    with ExitStack() as stack:
        socket_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kmesh-demo-")))
        spand, process = stack.enter_context(daemon.run(LOGS, socket_dir))
        with step("kmesh-spand starts"):
            process.wait_ready(spand.is_ready, daemon.START_TIMEOUT)
        servers = [
            stack.enter_context(engine.serve(name, model, LOGS, socket_dir=socket_dir))
            for name in ("engine A", "engine B")
        ]
        wait_healthy(servers)
        with step("the questions become tokens"):
            prompts = [servers[0][0].tokenize(messages(question)) for question in QUESTIONS]
            report = Report(model, shared_tokens(prompts), token_bytes(model))
        for server, _ in servers:
            for row in ask(server, prompts):
                report.rows.append(row)
                report.daemon = spand.settle()
    with ExitStack() as stack:
        control = stack.enter_context(engine.serve("control", model, LOGS, socket_dir=None))
        wait_healthy([control])
        report.control.extend(ask(control[0], prompts))
    return report


def wait_healthy(servers: Sequence[tuple[engine.Engine, Process]]) -> None:
    """Waits for vLLM servers that were started together; ProcessFailed if one does not come up."""
    for server, process in servers:
        with step(f"{server.name}: vLLM starts, and says how far it is in {process.log}"):
            process.wait_ready(server.is_healthy, engine.START_TIMEOUT)


def ask(server: engine.Engine, prompts: Sequence[Sequence[int]]) -> Iterator[Row]:
    """Sends the prompts one at a time."""
    for number, prompt in enumerate(prompts, 1):
        with step(f"{server.name}: request {number} of {len(prompts)}"):
            done = server.complete(prompt, MAX_TOKENS)
        yield Row(
            request=number,
            engine=server.name,
            prompt_tokens=done.prompt_tokens,
            computed=done.computed,
            restored=done.restored,
            cached_tokens=done.cached_tokens,
            ttft=done.ttft,
            text=done.text,
        )


def token_bytes(model: str) -> int:
    """KV bytes of one token in float32, all layers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * heads * width * 4)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo DEMO_ARGS='...'", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--evidence", type=Path, metavar="FILE", help="write the run down as evidence"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
