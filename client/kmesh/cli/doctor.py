"""``kmesh doctor``: every claim is proved by doing it."""

from __future__ import annotations

import grp
import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from kmesh import errors, negotiation
from kmesh.cli import checks, disk, gpu, render
from kmesh.cli.checks import Check, attempt
from kmesh.cli.render import size, table
from kmesh.cli.rpc import Tool, healthy
from kmesh.handles import HandleKind, Offer, Tier
from kmesh.keys import Namespace
from kmesh.layout import TILE_BYTES, Shard
from kmesh.packets import SOCKET_NAME
from kmesh.session import ReserveBatch
from kmesh.store import put_spans, read_span
from kmesh.v1 import common_pb2

#: Of the namespace in which the pattern is stored; it holds nothing of an engine.
DOCTOR = Namespace("kmesh doctor", "", "float32", 1, 1, 1)
SHARD = Shard(0, 1, 0, 1)
#: More than one tile, and no whole number of anything.
_PATTERN_BYTES = TILE_BYTES + 4242

_FORGET = f"kmesh evict --namespace {DOCTOR.digest().hex()}"
_WITH_SESSION = ("slabs", "pattern", "handles", "dma_buf", "cgroup")
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


@dataclass(frozen=True, slots=True)
class Report:
    """What was found. ``refusal`` says why there was no session, if there was none."""

    checks: list[Check]
    refusal: errors.KMeshError | None = None

    @property
    def passed(self) -> bool:
        return all(check.level != "fail" for check in self.checks)

    def as_json(self) -> dict[str, object]:
        return {"ok": self.passed, "checks": [check.as_json() for check in self.checks]}

    def print(self, out: Console) -> None:
        rows = [
            (
                check.name,
                f"[{_COLOURS[check.level]}]{check.level}[/]",
                _plain(check.seen) + (f"\n→ {_plain(check.fix)}" if check.fix else ""),
            )
            for check in self.checks
        ]
        out.print(table("", ("check", "", "seen"), rows))


def examine(
    socket_dir: str, timeout: float, gpus: Sequence[str] = (), directory: str = ""
) -> Report:
    """Makes every check that can be made, also when no daemon answers.

    Args:
        gpus: numbers or UUIDs of GPUs that are tried too.
        directory: for a disk tier, that is tried too; empty: none.
    """
    found = [
        attempt("native", checks.native, "reinstall kmesh"),
        attempt("proc", checks.proc, "mount /proc"),
        attempt("memfd", checks.memfd),
        attempt("memlock", checks.memlock),
        attempt("open files", checks.open_files),
        attempt("hugepages", checks.hugepages),
        attempt("numa", checks.numa_nodes),
        attempt("udmabuf", checks.udmabuf),
        attempt("driver", checks.gpu),
    ]
    if directory:
        found.append(attempt("disk", partial(disk.examine, directory)))
    try:
        tool = Tool(socket_dir, timeout, DOCTOR)
    except errors.KMeshError as refused:
        found.append(_no_session(socket_dir, refused))
        if isinstance(refused, errors.DaemonUnavailable):
            found.append(Check("health", "skip", "no daemon"))
        elif _is_kept_out(refused):
            found.append(Check("health", "skip", "its socket can't be reached either"))
        else:
            found.append(attempt("health", partial(_health, socket_dir, timeout)))
        found += [Check(name, "skip", "no session") for name in _WITH_SESSION]
        for name in gpus:
            found += gpu.examine(name, None)
        return Report(found, refused)
    with tool:
        welcome = tool.session.welcome
        seen = f"session {welcome.session_id} with daemon {welcome.daemon_version} at {socket_dir}"
        found.append(Check("socket", "ok", f"{seen}, uid {os.getuid()} is allowed"))
        found.append(attempt("health", partial(_health, socket_dir, timeout, tool)))
        key, payload = os.urandom(32), os.urandom(_PATTERN_BYTES)
        # First of the two: with several uids a slab is ours only when something of ours is in it.
        pattern = attempt("pattern", partial(_pattern, tool, socket_dir, key, payload))
        found += [attempt("slabs", partial(_slabs, tool)), pattern]
        found.append(attempt("handles", partial(_handles, tool)))
        found.append(attempt("dma_buf", partial(_dma_buf, tool, key, payload)))
        found += _forgotten(tool, key)
        found.append(attempt("cgroup", partial(_cgroup, tool)))
        for name in gpus:
            found += gpu.examine(name, tool.session, timeout=timeout)
    return Report(found)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _no_session(socket_dir: str, refused: errors.KMeshError) -> Check:
    if _is_kept_out(refused):
        fix = _way_in(socket_dir)
    elif isinstance(refused, errors.PermissionDenied):
        fix = f"allow uid {os.getuid()} in the daemon's allow_uids, or run as its user"
    elif isinstance(refused, errors.VersionMismatch):
        fix = "install the same version of kmesh here and for the daemon"
    else:
        fix = f"start one: kmesh-spand --socket-dir {socket_dir}, or name its --socket-dir here"
    return Check("socket", "fail", str(refused), fix)


def _is_kept_out(refused: errors.KMeshError) -> bool:
    """By a mode of the file system; the daemon was not asked."""
    return isinstance(refused, errors.PermissionDenied) and refused.field == "socket_dir"


def _way_in(socket_dir: str) -> str:
    after = 'docs/configuration.md, "Who gets in", says how; allow_uids counts after that'
    # A socket's own mode counts where its directory lets us through.
    path, needed = socket_dir, stat.S_IXGRP
    if os.access(socket_dir, os.X_OK):
        path, needed = os.path.join(socket_dir, SOCKET_NAME), stat.S_IWGRP
    try:
        found = os.stat(path)
    except OSError:
        return f"let uid {os.getuid()} through the directories above {socket_dir}; {after}"
    mode = stat.S_IMODE(found.st_mode)
    # Nobody joins root's group for this, and a group without the bit lets nobody in.
    if not (found.st_gid and mode & needed):
        return f"change the group or the mode, {mode:04o}, of {path}: {after}"
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    return f"join the group {group} of {path}, or change its mode, {mode:04o}: {after}"


def _health(socket_dir: str, timeout: float, tool: Tool | None = None) -> Check:
    try:
        serving = healthy(socket_dir, timeout)
    except errors.DaemonUnavailable as silent:
        return Check("health", "fail", str(silent), "look at the daemon's log")
    status = tool.status() if tool is not None else None
    if not serving:
        why = "; ".join(c.text for c in status.not_ready) if status is not None else ""
        seen = "the daemon says NOT_SERVING" + (f": {why}" if why else "")
        return Check("health", "fail", seen, "look at kmesh status and the daemon's log")
    if status is not None and any(c.name == "memory" for c in status.warnings):
        seen = "SERVING, but " + "; ".join(c.text for c in status.warnings if c.name == "memory")
        return Check("health", "warn", seen, "give the daemon's host more memory")
    return Check("health", "ok", "gRPC health says SERVING")


def _slabs(tool: Tool) -> Check:
    """Every slab that this uid is given is exported sealed, and can't be mapped writable."""
    slabs = [slab for slab in tool.status().slabs if slab.kind == HandleKind.MEMFD.name]
    ours = []
    for slab in slabs:
        number = slab.slab
        try:
            handle = tool.session.export_slab(number, tool.timeout)
        except errors.PermissionDenied:
            continue
        ours.append(slab)
        try:
            if not checks.seals(handle.fd):
                return Check("slabs", "fail", f"slab {number} is not sealed")
            if checks.writable(handle.fd, handle.size):
                return Check("slabs", "fail", f"slab {number} can be mapped writable")
        finally:
            os.close(handle.fd)
        tool.session.slab(number, tool.timeout)
    if slabs and not ours:
        return Check("slabs", "skip", f"none of {len(slabs)} holds anything of uid {os.getuid()}")
    huge = sum(slab.hugepages for slab in ours)
    seen = f"{len(ours)} imported: sealed, writable mapping refused; {huge} with huge pages"
    if others := len(slabs) - len(ours):
        seen += f"; {others} hold nothing of uid {os.getuid()}"
    return Check("slabs", "ok", seen)


def _handles(tool: Tool) -> Check:
    """What the daemon gives of each tier, and whether somebody gets less than it asked for."""
    status = tool.status()
    said = []
    for tier, agreed in negotiation.from_messages(status.handles).items():
        given = [
            f"{negotiation.kind_name(offer.kind)} ({words})"
            for offer in agreed.offers
            if (words := _given(offer))
        ]
        refused = [
            f"{negotiation.kind_name(offer.kind)}: {offer.text}"
            for offer in agreed.offers
            if not _given(offer)
        ]
        said.append(f"{tier.name}: {', '.join(given) or 'nothing'}")
        said += [f"not {text}" for text in refused]
    seen = "; ".join(said)
    lesser = sorted({text for client in tool.sessions() for text in render.lesser(client)})
    count = max(status.counters["handle_fallbacks"], len(lesser))
    if count:
        seen += f"; sessions that got a lesser kind than they asked for: {count}"
        fix = "; ".join(lesser) or "the daemon's log says which, and why"
        return Check("handles", "warn", seen, fix)
    return Check("handles", "ok", seen)


def _given(offer: Offer) -> str:
    return ", ".join(word for word in ("slabs", "spans") if getattr(offer, word))


def _dma_buf(tool: Tool, key: bytes, payload: bytes) -> Check:
    """A span's pages are exported as a DMA-BUF, and read by a second process."""
    agreed = negotiation.from_messages(tool.status().handles)
    offers = agreed[Tier.HOST].offers if Tier.HOST in agreed else ()
    offer = next((o for o in offers if o.kind == HandleKind.DMA_BUF), None)
    if offer is None or not offer.spans:
        seen = offer.text if offer is not None else "this daemon does not export any"
        fix = 'dma_buf = "spans" in the daemon\'s settings, if programs are to get DMA-BUFs'
        return Check("dma_buf", "skip", seen or "slabs are given so, single spans are not", fix)
    with tool.session.acquire(key, [SHARD], timeout=tool.timeout) as lease:
        if not lease.hits:
            return Check("dma_buf", "skip", "the pattern was not stored")
        handle = tool.session.export_span(lease, 0, timeout=tool.timeout)
        try:
            if problem := checks.elsewhere(HandleKind.DMA_BUF, handle.fd, payload):
                return Check("dma_buf", "fail", problem)
        finally:
            os.close(handle.fd)
    seen = f"a span was exported as {size(handle.size)} and read by a second process"
    return Check("dma_buf", "ok", seen)


def _pattern(tool: Tool, socket_dir: str, key: bytes, payload: bytes) -> Check:
    """A random span goes through the daemon and comes back here and in a second process."""
    if tool.status().draining:
        drained = "the daemon is drained: it serves, and takes no spans"
        fix = "kmesh drain --cancel, unless it was drained with --stop: then it ends"
        return Check("pattern", "warn", drained, fix)
    session = tool.session
    tokens = session.welcome.span_tokens
    batch = ReserveBatch(DOCTOR.digest(), SHARD, key, [tokens], [0], [len(payload)])
    reason = put_spans(session, session.staging(len(payload)), batch, [payload])[0]
    if reason:
        name = common_pb2.Reason.Name(common_pb2.Reason.ValueType(reason))
        fix = "look at kmesh status: memory that is full or not ready yet"
        return Check("pattern", "fail", f"the daemon did not store it: {name}", fix)
    with session.acquire(key, [SHARD], timeout=tool.timeout) as lease:
        if not lease.hits or read_span(session, lease, 0) != payload:
            return Check("pattern", "fail", "this process read other bytes than it stored")
    other = subprocess.run(
        [sys.executable, "-m", "kmesh.cli.reader", socket_dir, key.hex(), str(tool.timeout)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=tool.timeout + 30,
        check=False,
    )
    if other.returncode:
        seen = other.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason"]
        return Check("pattern", "fail", f"a second process could not read it: {seen[0]}")
    if bytes.fromhex(json.loads(other.stdout)["payload"]) != payload:
        return Check("pattern", "fail", "a second process read other bytes than were stored")
    return Check(
        "pattern", "ok", f"{len(payload):,} bytes stored, read and verified in two processes"
    )


def _forgotten(tool: Tool, key: bytes) -> list[Check]:
    """Nothing of the pattern stays, as spans of a namespace that no engine has; what went wrong."""
    try:
        left = tool.remove(key)
    except errors.KMeshError as failed:
        return [Check("pattern left", "warn", str(failed), _FORGET)]
    return [Check("pattern left", "warn", "its span is in use", _FORGET)] if left else []


def _cgroup(tool: Tool) -> Check:
    """The memory limit around the daemon holds what it was told to hold."""
    status = tool.status()
    held = sum(slab.size for slab in status.slabs if not slab.device) + status.max_staging_bytes
    pid = tool.session.peer_pid
    try:
        limit = checks.cgroup_limit(pid or "self")
    except OSError:
        limit, pid = checks.cgroup_limit(), 0
    whose = "the daemon's" if pid else "this process's"
    if limit is None:
        return Check("cgroup", "ok", f"no memory limit on {whose} cgroup")
    seen = f"{whose} cgroup allows {size(limit)}; the daemon may hold {size(held)}"
    if limit < held:
        return Check("cgroup", "fail", seen, "raise the limit or lower host_memory")
    if limit < held * 1.1:
        return Check("cgroup", "warn", seen, "leave a tenth for the daemon itself")
    return Check("cgroup", "ok", seen)
