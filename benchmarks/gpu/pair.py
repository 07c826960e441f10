"""`python -m benchmarks.gpu.pair run`: two GPUs of one host.

One base in host memory for restores on both at once, each by a process of its own; spans in the
memory of the other GPU; and engines: tensor parallel 2, and a herd of two. Parts may be measured in
several calls (`--parts`): the file keeps the others' rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import check
from benchmarks.gpu.__main__ import evidence
from benchmarks.results import Row, unavailable
from benchmarks.spand import ROOT

RESULT = ROOT / ".bench" / "gpu-pair.json"
TARGETS = Path(__file__).with_name("pair-targets.toml")

#: Seconds from an order to the moment at which both begin, and that an answer may take.
_LEAD, _ANSWER = 0.02, 300.0
_RATIO = "median of a/b"
#: ``cudaErrorPeerAccessAlreadyEnabled``.
_ENABLED = 704


def _restorer(conn: Connection, gpu: int, filled: Any) -> None:
    """A process that restores from the common base on one GPU, when it is told to."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    from benchmarks.gpu import rig
    from kmesh.kernels.chooser import Route
    from kmesh.kernels.cuda import Restorer

    slab = rig.Slab(rig.Driver(), rig.LARGE, 0, filled)
    pages = rig.Pages(rig.LARGE, 1)
    loads = [pages.load(slab.parts(slab.device), 1)]
    restorer = Restorer(pages.layout)
    scratch = rig.cupy.empty(rig.LARGE.bytes, dtype=rig.cupy.uint8)
    with rig.new_stream() as stream:

        def restore(route: Route) -> None:
            done = restorer.restore(loads, stream, memory=rig.Memory.HOST, route=route).wait()
            if any(any(status) for load in done for status in load):
                raise RuntimeError("a restore went wrong")

        def copy() -> None:
            rig.runtime.memcpyAsync(scratch.data.ptr, slab.device, rig.LARGE.bytes, 1, stream)
            rig.runtime.streamSynchronize(stream)

        calls: dict[str, Callable[[], None]] = {
            "kernel": lambda: restore(Route.KERNEL),
            "copies": lambda: restore(Route.COPY),
            "copy": copy,
        }
        for call in calls.values():
            call()
        conn.send(pages.equal(slab, 1))
        while (order := conn.recv()) is not None:
            name, at = order
            while time.monotonic() < at:
                pass
            begin = time.monotonic()
            calls[name]()
            conn.send((begin, time.monotonic()))
    slab.close()


@contextmanager
def _processes(filled: Any) -> Iterator[list[Connection]]:
    """One process for each GPU, ready."""
    context = multiprocessing.get_context("spawn")
    ours, started = [], []
    try:
        for gpu in range(2):
            here, there = context.Pipe()
            process = context.Process(target=_restorer, args=(there, gpu, filled), daemon=True)
            process.start()
            there.close()
            ours.append(here)
            started.append(process)
        for conn in ours:
            if not _answer(conn):
                raise RuntimeError("the pages are not what the spans hold")
        yield ours
        for conn in ours:
            conn.send(None)
    finally:
        for process in started:
            process.join(30)
            process.kill()
        for conn in ours:
            conn.close()


def _answer(conn: Connection) -> Any:
    if not conn.poll(_ANSWER):
        raise RuntimeError("a process gave no answer")
    return conn.recv()


def _together(conns: Sequence[Connection], name: str) -> float:
    """Seconds from the first one's begin to the last one's end."""
    at = time.monotonic() + _LEAD
    for conn in conns:
        conn.send((name, at))
    spans = [_answer(conn) for conn in conns]
    return float(max(end for _, end in spans) - min(begin for begin, _ in spans))


def host(rounds: int) -> Iterator[Row]:
    """One base, two restores at once, against one after the other and what the host gives."""
    from benchmarks.gpu import rig

    names = {
        "kernel": "restored by the kernel",
        "copies": "restored by the copy engine",
        "copy": "only copied",
    }
    both: dict[str, list[float]] = {}

    fd = os.memfd_create("kmesh-bench")
    try:
        with _processes(rig.fill(fd, rig.LARGE, 1)) as conns:
            for name, what in names.items():
                taken: dict[str, list[float]] = {"one after the other": [], "at once": []}
                for number in range(-3, rounds):
                    apart = sum(_together([conn], name) for conn in conns)
                    at_once = _together(conns, name)
                    if number >= 0:
                        taken["one after the other"].append(apart)
                        taken["at once"].append(at_once)
                note = f"235 MB from the same memory to each GPU, {what}; 2 is twice one GPU's rate"
                yield Row(f"pair_host_{name}", "ratio", _RATIO, taken, note)
                both[name] = taken["at once"]
        for name in ("kernel", "copies"):
            series = {"only copied": both["copy"], names[name]: both[name]}
            note = f"both at once, {names[name]}: share of what the host gives two copy engines"
            yield Row(f"pair_host_{name}_share", "ratio", "median a / median b", series, note)
    finally:
        os.close(fd)


def _open_access(runtime: Any, to: int) -> None:
    """Lets the current GPU reach another one's memory; it may do so already."""
    try:
        runtime.deviceEnablePeerAccess(to)
    except runtime.CUDARuntimeError as wrong:
        if wrong.status != _ENABLED:
            raise


def peer(rounds: int) -> Iterator[Row]:
    """Spans in the first GPU's memory to pages on the second, against a copy between them."""
    from benchmarks.gpu import rig
    from benchmarks.timing import in_turn
    from kmesh.cuda import driver as cuda
    from kmesh.cuda.device import Device
    from kmesh.cuda.memory import DeviceMemory
    from kmesh.kernels.chooser import Route
    from kmesh.kernels.cuda import Restorer

    size = rig.LARGE.bytes
    with rig.cupy.cuda.Device(0):
        source = rig.cupy.empty(size, dtype=rig.cupy.uint8)
    with rig.cupy.cuda.Device(1), Device(cuda.load(), "1") as device:
        peers = device.peers()
        if not peers:
            yield unavailable("pair_peer", "ratio", "these GPUs do not reach each other")
            return
        # Otherwise the copy that we compare with goes through the host.
        _open_access(rig.runtime, 0)
        slab = rig.Slab(rig.Driver(), rig.LARGE, 1)
        pages = rig.Pages(rig.LARGE, 1)
        target = rig.cupy.empty(size, dtype=rig.cupy.uint8)
        step = device.granularity
        with (
            DeviceMemory.create(device, -(-slab.size // step) * step, min(peers.values())) as far,
            rig.new_stream() as stream,
        ):
            loads = [pages.load(slab.copied_to(far.address), 1)]
            restorer = Restorer(pages.layout, device=1)

            def restore() -> None:
                done = restorer.restore(
                    loads, stream, memory=rig.Memory.GPU, route=Route.KERNEL
                ).wait()
                if any(any(status) for load in done for status in load):
                    raise RuntimeError("a restore went wrong")

            def copy() -> None:
                rig.runtime.memcpyPeerAsync(target.data.ptr, 1, source.data.ptr, 0, size, stream)
                rig.runtime.streamSynchronize(stream)

            restore()
            if not pages.equal(slab, 1):
                raise RuntimeError("the pages are not what the spans hold")
            taken = in_turn({"copy": copy, "kernel": restore}, rounds, warm=3)
            note = "235 MB on GPU 0 to pages on GPU 1, mapped there; every byte compared"
            yield Row("pair_peer", "ratio", _RATIO, taken, note)
            yield Row("pair_peer_copy", "GB/s", "median", {
                "copy": [size / took / 1e9 for took in taken["copy"]]
            }, "a copy from GPU 0 to GPU 1")  # fmt: skip
        slab.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (something failed or falls short) or 2 (wrong usage)."""
    from benchmarks.gpu import pair_engines as by_engines

    parts: dict[str, Callable[[int], Iterator[Row]]] = {
        "host": host,
        "peer": peer,
        "parallel": by_engines.parallel,
        "parallel8": lambda rounds: by_engines.parallel(rounds, by_engines.EIGHT),
        "parallel128": lambda rounds: by_engines.parallel(rounds, by_engines.LONG),
        "herd": by_engines.herd,
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pair", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure and write JSON")
    running.add_argument("--rounds", type=int, default=21, help="samples of a series [21]")
    running.add_argument(
        "--out", type=Path, default=RESULT,
        help="parts that are not measured now stay, if they were at the same commit",
    )  # fmt: skip
    running.add_argument("--parts", nargs="+", default=list(parts), choices=list(parts))
    checking = commands.add_parser("check", help="compare a result with pair-targets.toml")
    checking.add_argument("result", nargs="?", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    if options.command == "check":
        return check.main(options.result, TARGETS, ROOT, "bench-gpu-pair")
    return run({name: parts[name] for name in options.parts}, options.rounds, options.out)


def run(parts: Mapping[str, Callable[[int], Iterator[Row]]], rounds: int, out: Path) -> int:
    """Measures parts and writes after each: what they have measured is worth having, whatever
    becomes of the next. Returns the exit status."""
    from benchmarks.gpu.rig import Driver

    # Nothing can be written down without it: better to know before engines start.
    driver = Driver().version()
    failed = []
    for name, measure in parts.items():
        found = []
        try:
            for row in measure(rounds):
                found.append({"benchmark": name, **row.to_json()})
                value = "–" if row.value is None else f"{row.value:.4g}"
                print(f"{row.name:30} {value:>9} {row.unit:6} {row.note}", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        made = evidence(found, quick=rounds < 9, driver=driver)
        made["command"] = f"python -m benchmarks.gpu.pair run --rounds {rounds}"
        write(merged(made, name, out), out)
    print(f"written to {out}", *(f"; {part} failed" for part in failed))
    return 1 if failed else 0


def merged(made: dict[str, Any], part: str, out: Path) -> dict[str, Any]:
    """A part's result, with what the file has of other parts, if code and machine are the same."""
    same = ("command", "quick", "commit", "clean", "hardware", "versions")
    if not out.is_file():
        return made
    before = json.loads(out.read_text("utf-8"))
    if any(before.get(name) != made[name] for name in same):
        return made
    kept = [row for row in before["raw"]["rows"] if row["benchmark"] != part]
    found = kept + made["raw"]["rows"]
    figures = {row["row"]: round(row["value"], 6) for row in found if row["value"] is not None}
    return {**made, "raw": {"rows": found}, "derived": figures}


def write(result: dict[str, Any], out: Path) -> None:
    """Writes an evidence file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
