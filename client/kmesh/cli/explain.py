"""``kmesh explain``: where a prompt's stored prefix ends, and why there."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kmesh.cli import render
from kmesh.cli.app import EXIT_USAGE, AsJson, app, connected, pick
from kmesh.cli.render import age
from kmesh.cli.rpc import Tool
from kmesh.keys import Namespace
from kmesh.v1 import admin_pb2

_WORDS = {
    admin_pb2.VERDICT_WRITING: "is being written now, not committed yet",
    admin_pb2.VERDICT_UNVERIFIED: "is of before a restart, and is verified before it is served",
    admin_pb2.VERDICT_SUSPECT: "was reported as corrupt, and is being read again",
    admin_pb2.VERDICT_ON_DISK: "is on disk, and is brought to memory for who asks for it",
    admin_pb2.VERDICT_NEVER: "was never stored",
}
_CAUSES = {
    admin_pb2.CAUSE_PRESSURE: "evicted to make room",
    admin_pb2.CAUSE_OPERATOR: "evicted by an operator",
    admin_pb2.CAUSE_CORRUPT: "dropped because its bytes were corrupt",
    admin_pb2.CAUSE_RECOVERY: "dropped at a restart: its record did not hold",
    admin_pb2.CAUSE_ABORTED: "given up by its writer before the commit",
    admin_pb2.CAUSE_COPY_FAILED: "not stored: the copy failed",
    admin_pb2.CAUSE_DISK: "not brought from disk: its file could not be read, or was not right",
}


@app.command()
def explain(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="Text; needs --tokenizer.")] = "",
    tokens: Annotated[
        Path | None,
        typer.Option(help="File of token ids: a JSON list, or separated by spaces; - is stdin."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or the folder of a model that has one.")
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="Digest in hex, or its beginning; not needed if there is one.")
    ] = "",
    field: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE: asks under that namespace with this field instead."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Says how much of a prompt is served, and why the rest misses."""
    if prompt and tokens:
        raise typer.BadParameter("both PROMPT and --tokens are given: one of them is asked about")
    if not prompt and not tokens:
        raise typer.BadParameter("either PROMPT or --tokens is needed")
    ids = read_tokens(tokens) if tokens else tokenize(prompt, tokenizer)
    with connected(context) as tool:
        request = admin_pb2.ExplainRequest(tokens=ids)
        _choose(tool, request, namespace, _fields(field or []))
        answer = tool.explain(request)
    if as_json:
        render.print_json(explain_json(answer))
    else:
        _print(answer)


def read_tokens(file: Path) -> list[int]:
    """Token ids of a file, or of standard input. BadParameter says what is wrong."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
        found = json.loads(text) if text.lstrip().startswith("[") else text.split()
    except OSError as failed:
        raise _no_tokens(file, failed.strerror or str(failed)) from None
    except json.JSONDecodeError as wrong:
        raise _no_tokens(file, f"no JSON list: {wrong}") from None
    except UnicodeDecodeError:
        raise _no_tokens(file, "no text, but other bytes") from None
    except ValueError:
        # Python reads no integer of over 4,300 digits.
        raise _no_tokens(file, "an integer in it has too many digits") from None
    if not found:
        raise _no_tokens(file, "no token ids in it")
    return [_token(file, place, item) for place, item in enumerate(found)]


def _token(file: Path, place: int, item: object) -> int:
    """An item of a JSON list, or a word."""
    shown = json.dumps(item)[:40]
    if isinstance(item, str) and re.fullmatch(r"[+-]?[0-9]{1,20}", item):
        item = int(item)
        shown = str(item)
    if not isinstance(item, int) or isinstance(item, bool):
        raise _no_tokens(file, f"index {place}: {shown} is no token id, which are integers")
    if not 0 <= item < 1 << 32:
        raise _no_tokens(file, f"index {place}: {shown} is not from 0 to {(1 << 32) - 1}")
    return item


def _no_tokens(file: Path, why: str) -> typer.BadParameter:
    return typer.BadParameter(f"{file}: {why}", param_hint="--tokens")


def tokenize(prompt: str, path: Path | None) -> list[int]:
    """Token ids of a text, with the special tokens that an engine adds.

    Exits where neither package that could do it is installed.
    """
    if path is None:
        raise typer.BadParameter("PROMPT needs --tokenizer; or give token ids with --tokens")
    if not path.exists():
        raise typer.BadParameter(f"{path}: no such file or directory", param_hint="--tokenizer")
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            kind: Any = importlib.import_module("tokenizers").Tokenizer
            return list(kind.from_file(str(file)).encode(prompt).ids)
        kind = importlib.import_module("transformers").AutoTokenizer
        return list(kind.from_pretrained(str(path), local_files_only=True)(prompt)["input_ids"])
    except ModuleNotFoundError as missing:
        print(
            f"kmesh: PROMPT needs the package {missing.name}: pip install {missing.name}; "
            "or give token ids with --tokens",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_USAGE) from None
    except Exception as wrong:
        raise typer.BadParameter(f"{path}: {wrong}", param_hint="--tokenizer") from None


def _fields(given: Sequence[str]) -> dict[str, str]:
    found = dict(item.partition("=")[::2] for item in given)
    if any("=" not in item for item in given):
        raise typer.BadParameter("not NAME=VALUE", param_hint="--field")
    return found


def _choose(
    tool: Tool, request: admin_pb2.ExplainRequest, beginning: str, changes: Mapping[str, str]
) -> None:
    spaces = tool.namespaces()
    # One that is empty is asked for by name, or where there is no other.
    if not any(space.digest.hex().startswith(beginning.lower()) for space in spaces):
        spaces = tool.namespaces(remembered=True)
    base: Mapping[str, str] = {}
    if beginning and len(beginning) == 64 and not _known(spaces, beginning):
        request.namespace = _digest(beginning)
    elif beginning or len(spaces) == 1:
        space = pick(spaces, beginning)
        request.namespace, base = space.digest, space.fields
    elif not changes:
        count = "there are several namespaces" if spaces else "no namespace is known"
        raise typer.BadParameter(
            f"{count}: name one with --namespace, as `kmesh ls --remembered` lists them, or all"
            " --field"
        )
    if not changes:
        return
    if request.namespace and not base:
        raise typer.BadParameter("only the digest of that namespace is known", param_hint="--field")
    request.namespace = b""
    try:
        request.fields.update(Namespace.from_fields({**base, **changes}).fields())
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong), param_hint="--field") from None


def _known(spaces: Sequence[admin_pb2.NamespaceInfo], digest: str) -> bool:
    return any(space.digest.hex() == digest.lower() for space in spaces)


def _digest(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise typer.BadParameter("no digest in hex", param_hint="--namespace") from None


def explain_json(answer: admin_pb2.ExplainResponse) -> render.Json:
    return {
        "namespace": answer.namespace.hex(),
        "fields": dict(sorted(answer.fields.items())),
        "tokens": answer.tokens,
        "spans": answer.spans,
        "remembered_ms": answer.remembered_ms,
        "shards": [
            {
                "layers": [part.shard.layer_begin, part.shard.layer_end],
                "heads": [part.shard.head_begin, part.shard.head_end],
                "spans": part.spans,
                "tokens": part.tokens,
                "verdict": _name(admin_pb2.Verdict.Name(part.verdict)),
                "cause": _name(admin_pb2.Cause.Name(part.cause)) if part.cause else "",
                "ended_ms": part.ended_ms,
                "key": part.key.hex(),
                "leases": part.leases,
                "mirrors": part.mirrors,
            }
            for part in answer.shards
        ],
        "nearest": [
            {
                "digest": match.digest.hex(),
                "tokens": match.tokens,
                "fields": dict(sorted(match.fields.items())),
                "differing": list(match.differing),
            }
            for match in answer.nearest
        ],
    }


def _name(constant: str) -> str:
    return constant.partition("_")[2].lower()


def _print(answer: admin_pb2.ExplainResponse) -> None:
    fields = ", ".join(f"{name}={text}" for name, text in sorted(answer.fields.items()) if text)
    print(f"namespace {answer.namespace.hex()[:16]}  {fields or '(only its digest is known)'}")
    print(f"prompt    {answer.tokens:,} tokens, {answer.spans:,} full spans")
    for part in answer.shards:
        where = ""
        if part.HasField("shard"):
            shard = part.shard
            where = f"layers {shard.layer_begin}:{shard.layer_end} "
            where += f"heads {shard.head_begin}:{shard.head_end}: "
        recipes = f", {part.mirrors:,} spans of them out of recipes" if part.mirrors else ""
        print(f"{where}{part.tokens:,} tokens are served{recipes}")
        if part.verdict != admin_pb2.VERDICT_SERVED:
            begin = f"  the span at token {part.tokens:,}"
            print(f"{begin} ({part.key.hex()[:16]}) {_why(part, answer.remembered_ms)}")
    for match in answer.nearest:
        print(f"{match.tokens:,} tokens are served under namespace {match.digest.hex()[:16]}")
        for name in match.differing:
            asked, stored = answer.fields[name], match.fields.get(name, "")
            print(f"  {name}: asked {asked or 'none'}, stored {stored or 'none'}")
        if not match.fields:
            print("  only its digest is known, as of a salt, of an adapter, or of little said")


def _why(part: admin_pb2.ShardExplanation, remembered_ms: int) -> str:
    if part.verdict == admin_pb2.VERDICT_ENDED:
        return f"was {_CAUSES[part.cause]}, {age(part.ended_ms)} ago"
    if part.verdict == admin_pb2.VERDICT_UNKNOWN:
        return f"was not stored, or ended more than {age(remembered_ms)} ago"
    return _WORDS[part.verdict]
