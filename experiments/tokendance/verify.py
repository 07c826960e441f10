"""Verifies a bundle with the second decoder: nothing of KMesh is imported.

Golden vectors of docs/recipe-format.md, the hashes of all files, every member bit for bit, and
that what was changed is refused. ``python -m experiments.tokendance.verify [FOLDER]``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tokendance.decoder import Reader, Refused, Segment, decode, root

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "recipe-format.md"
DTYPES = {"bfloat16": 1, "float16": 2, "float32": 3}
FORMS = ("addressable", "cold")

Base = dict[bytes, Segment]


class VerifyError(Exception):
    """A bundle does not hold what it says."""


# ---- reading ---------------------------------------------------------------------------


def tensors(path: Path) -> dict[str, bytes]:
    """The tensors of a safetensors file as bytes, by name."""
    file = path.read_bytes()
    size = int.from_bytes(file[:8], "little")
    entries = json.loads(file[8 : 8 + size])
    data = file[8 + size :]
    return {
        name: data[slice(*entry["data_offsets"])]
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def segment(span: dict[str, Any], payload: bytes) -> Segment:
    """A segment as the bundle describes it."""
    return Segment(
        key=bytes.fromhex(span["key"]),
        namespace=bytes.fromhex(span["namespace"]),
        dtype=DTYPES[span["dtype"]],
        layers=tuple(span["layers"]),
        heads=tuple(span["heads"]),
        head_dim=span["head_dim"],
        tokens=span["tokens"],
        position=span["position"],
        generation=span["generation"],
        payload=payload,
    )


def golden_vectors(page: str) -> Iterator[bytes]:
    """The files that the page shows as dumps; lines of zero bytes are left out there."""
    file = bytearray()
    for line in [*page.splitlines(), "    000  00"]:
        where, _, data = line.strip().partition("  ")
        if not line.startswith("    ") or len(where) != 3 or set(data) - set("0123456789abcdef "):
            continue
        if where == "000" and file:
            yield bytes(file)
            file = bytearray()
        at = int(where, 16)
        file += bytes(at - len(file)) + bytes.fromhex(data)


# ---- what must hold ----------------------------------------------------------------------


def verify_golden(page: str) -> int:
    """Both vectors give what the page's tables say; how many there are."""
    keys = "3f80 4000 4040 4080 8000 7fc1 7f80 0001 3f00 bfc0 0000 0000 3f80 3f80 4000 4000"
    values = " ".join(f"{257 * i:04x}" for i in range(1, 17))
    member = (
        "1111 2222 3333 4444 c000 3f80 4040 4080 7fff 7fff 7f80 0001 3fc1 3f00 0000 8000"
        " bf80 3e80 4000 4000 5555 6666 7777 8888 " + values
    )
    span = Segment(
        b"A" * 32, b"N" * 32, 1, (0, 1), (0, 1), 4, 4, 10, 3, _numbers(f"{keys} {values}")
    )
    cold = b"".join(struct.pack("<H", 0x3F00 + i) for i in range(32)) + b"\x80\x40" * 32
    wanted: tuple[tuple[bytes, Base], ...] = ((_numbers(member), {span.key: span}), (cold, {}))
    found = list(golden_vectors(page))
    if len(found) != len(wanted):
        raise VerifyError(f"the page has {len(found)} golden vectors, not {len(wanted)}")
    for number, (file, (payload, base)) in enumerate(zip(found, wanted, strict=True)):
        if decode(file, base)[1] != payload:
            raise VerifyError(f"golden vector {number} gives something else")
    return len(found)


def verify_hashes(folder: Path, manifest: dict[str, Any]) -> int:
    """Every file has the SHA-256 that the manifest says; how many there are."""
    for name, digest in manifest["sha256"].items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise VerifyError(f"{name} has other bytes than the manifest says")
    return len(manifest["sha256"])


def verify_bases(folder: Path, result: dict[str, Any]) -> dict[str, Base]:
    """All bases; the cold recipe of each segment gives the segment."""
    bases: dict[str, Base] = {}
    for path, row in result["segments"].items():
        base, _, name = path.partition("/")
        stored = tensors(folder / f"base-{base}.safetensors")
        dense = stored[name]
        cold = stored[f"cold/{name}"]
        if decode(cold, {})[1] != dense:
            raise VerifyError(f"the cold form of {path} gives something else")
        _same(path, row, dense_bytes=len(dense), cold_bytes=len(cold))
        one = segment(row["span"], dense)
        bases.setdefault(base, {})[one.key] = one
    return bases


def verify_arm(folder: Path, name: str, arm: dict[str, Any], base: Base) -> int:
    """Every member of an arm comes back, from either form; how many bytes were compared."""
    dense = tensors(folder / f"members-{name}.safetensors")
    recipes = tensors(folder / f"recipes-{name}.safetensors")
    compared = 0
    for member, row in arm["members"].items():
        for form in FORMS:
            file = recipes[f"{form}/{member}"]
            recipe, payload = decode(file, base)
            if payload != dense[member]:
                raise VerifyError(f"{name}/{member}, {form}: other bytes came out")
            if recipe.head["key"].hex() != row["span"]["key"]:
                raise VerifyError(f"{name}/{member}, {form}: the recipe is another member's")
            _same(f"{name}/{member}", row[form], bytes=len(file), ops=len(recipe.ops))
            compared += len(payload)
        _same(f"{name}/{member}", row, dense_bytes=len(dense[member]))
    return compared


def _same(what: str, row: dict[str, Any], **seen: int) -> None:
    for name, value in seen.items():
        if row[name] != value:
            raise VerifyError(f"{what}: codec.json says {name} {row[name]}, it is {value}")


# ---- what must be refused ------------------------------------------------------------------


def sealed(file: bytearray) -> bytes:
    """All roots of the file computed anew, as by somebody who meant the change."""
    begin = len(file) - struct.unpack_from("<Q", file, 72)[0]
    struct.pack_into("<Q", file, 168, root(bytes(file[256:begin])))
    struct.pack_into("<Q", file, 176, root(bytes(file[begin:])))
    struct.pack_into("<Q", file, 248, root(bytes(file[:248])))
    return bytes(file)


def changes(file: bytes, base: Base) -> Iterator[tuple[str, set[str], Callable[[], object]]]:
    """What must be refused: its name, the fields that may be named, and what decodes it."""
    recipe = Reader(file)
    head = recipe.head
    turns_at = 256 + 96 * head["segments"]
    runs_at = turns_at + (8 + 8 * head["pairs"]) * head["turns"] + 8 * head["lists"]
    runs_at += 32 * head["ops"]
    literals_at = len(file) - head["stored_bytes"]
    key = recipe.segments[0][0]
    named = base[key]

    def with_bytes(at: int, new: bytes, seal: bool) -> Callable[[], object]:
        changed = bytearray(file)
        changed[at : at + len(new)] = new
        return lambda: decode(sealed(changed) if seal else bytes(changed), base)

    def cut_to(length: int) -> Callable[[], object]:
        return lambda: decode(file[:length], base)

    def with_base(**fields: Any) -> Callable[[], object]:
        return lambda: decode(file, {**base, key: replace(named, **fields)})

    flipped = bytes([file[literals_at + 5] ^ 4])
    yield "a flipped payload bit", {"stored_root"}, with_bytes(literals_at + 5, flipped, False)
    yield (
        "a flipped payload bit, sealed again",
        {"payload_root"},
        with_bytes(literals_at + 5, flipped, True),
    )
    for length in (0, 100, 256, literals_at, len(file) - 1):
        yield f"a file cut to {length} bytes", {"file_bytes"}, cut_to(length)
    other = np.frombuffer(named.payload, dtype=np.uint8).copy()
    other[len(other) // 2] ^= 1
    yield "a master with other bytes", {"segments.root"}, with_base(payload=other.tobytes())
    yield "a master that is not there", {"segments.key"}, lambda: decode(file, {})
    yield (
        "a master of another model",
        {"segments.namespace"},
        with_base(namespace=bytes(32)),
    )
    yield "a stale generation", {"segments.generation"}, with_base(generation=2)
    planes = other.reshape(recipe.layers, 2, -1)[:, ::-1].tobytes()
    yield "a master with swapped planes", {"segments.root"}, with_base(payload=planes)
    delta = struct.pack("<i", recipe.turns[0][0] + 1)
    yield "a wrong distance", {"tables_root"}, with_bytes(turns_at, delta, False)
    yield "a wrong distance, sealed again", {"turns.delta"}, with_bytes(turns_at, delta, True)
    sine = struct.pack("<f", 0.5)
    yield (
        "the table of another distance, sealed again",
        {"payload_root"},
        with_bytes(turns_at + 12, sine, True),
    )
    kernel = with_bytes(turns_at + 4, b"\x02\x00", True)
    yield "another kernel version, sealed again", {"turns.kernel"}, kernel
    lists = struct.pack("<I", recipe.runs[1][0]), struct.pack("<I", recipe.runs[0][0])
    both = bytearray(file)
    both[runs_at : runs_at + 4], both[runs_at + 24 : runs_at + 28] = lists
    yield (
        "swapped planes of a layer, sealed again",
        {"runs.list", "runs.length", "payload_root"},
        lambda: decode(sealed(both), base),
    )
    length = min(recipe.runs[0][3], recipe.runs[1][3])
    first, second = (literals_at + run[2] for run in recipe.runs[:2])
    swapped = bytearray(file)
    swapped[first : first + length] = file[second : second + length]
    swapped[second : second + length] = file[first : first + length]
    yield (
        "swapped literals of K and V, sealed again",
        {"payload_root"},
        lambda: decode(sealed(swapped), base),
    )


def verify_refusals(folder: Path, arm: str, base: Base) -> int:
    """Everything that was changed is refused for the reason that it should be."""
    recipes = tensors(folder / f"recipes-{arm}.safetensors")
    file = next(file for name, file in recipes.items() if name.startswith("addressable/"))
    count = 0
    for what, fields, attempt in changes(file, base):
        try:
            attempt()
        except Refused as refused:
            if refused.field not in fields:
                raise VerifyError(f"{what} was refused for {refused.field}") from None
        else:
            raise VerifyError(f"{what} was not refused")
        count += 1
    return count


def verify(folder: Path) -> dict[str, int]:
    """All of it; counts of what was compared. VerifyError says what does not hold."""
    manifest = json.loads((folder / "manifest.json").read_text())
    counts = {
        "golden_vectors": verify_golden(PAGE.read_text()),
        "files": verify_hashes(folder, manifest),
        "members": 0,
        "bytes": 0,
        "refused": 0,
    }
    result = json.loads((folder / "codec.json").read_text())
    bases = verify_bases(folder, result)
    for name, arm in result["arms"].items():
        counts["bytes"] += verify_arm(folder, name, arm, bases[arm["base"]])
        counts["members"] += len(arm["members"])
    turned = next(name for name in result["arms"] if name.startswith("recompute-"))
    base = bases[result["arms"][turned]["base"]]
    counts["refused"] = verify_refusals(folder, turned, base)
    return counts


def _numbers(text: str) -> bytes:
    return b"".join(struct.pack("<H", int(word, 16)) for word in text.split())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.tokendance.verify", description=__doc__
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".tokendance")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    given = parser.parse_args(argv)
    try:
        counts = verify(given.folder)
    except FileNotFoundError as error:
        print(f"{error.filename} is not there: run `make tokendance-codec`", file=sys.stderr)
        return 2
    except (VerifyError, Refused) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(counts))
    else:
        print(
            f"{counts['golden_vectors']} golden vectors and {counts['files']} files hold;"
            f" {counts['members']} members came back bit for bit from both forms"
            f" ({counts['bytes']:,} bytes); {counts['refused']} changes were refused"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
