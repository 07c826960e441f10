"""``kmesh export``: one span's pages as a DMA-BUF, for a NIC, storage or another program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Annotated, NamedTuple

import typer

from kmesh import errors
from kmesh.cli.app import app, complain, connected
from kmesh.cli.raw import outcome
from kmesh.cli.rpc import Tool
from kmesh.handles import SpanHandle
from kmesh.keys import KEY_BYTES
from kmesh.layout import Shard

#: Where the command finds the descriptor.
FD_NUMBER = 3
_DIGITS = 2 * KEY_BYTES
_EVERY = 1 << 31
_HOST = "host"


@app.command()
def export(
    context: typer.Context,
    span: Annotated[str, typer.Argument(help="Its key in hex, or the beginning of it.")],
    command: Annotated[list[str], typer.Argument(help="Command and its arguments, after --.")],
    dma_buf: Annotated[
        bool, typer.Option("--dma-buf", help="As a DMA-BUF, which the command can write.")
    ] = False,
    layers: Annotated[str, typer.Option(help="Of a key with several parts: BEGIN:END.")] = "",
    heads: Annotated[str, typer.Option(help="Of a key with several parts: BEGIN:END.")] = "",
    device: Annotated[
        str, typer.Option(help="Of a key in several memories: UUID of a GPU, or host.")
    ] = "",
    salt: Annotated[
        str,
        typer.Option(
            "--salt-digest",
            envvar="KMESH_SALT_DIGEST",
            help="Digest of the salt under which it was stored, 64 hex digits.",
        ),
    ] = "",
) -> None:
    """Runs a command that finds a span's pages, as a DMA-BUF, at file descriptor 3.

    The span is leased until the command ends. Whoever has the descriptor can write the span.
    """
    if not dma_buf:
        raise typer.BadParameter("the kind of handle is missing: --dma-buf is the only one")
    digest = _hex(salt, "--salt-digest")
    if len(digest) not in (0, 32):
        raise typer.BadParameter("a digest has 64 hex digits", param_hint="--salt-digest")
    wanted = _Wanted(_range(layers, "--layers"), _range(heads, "--heads"), device)
    with connected(context) as tool:
        key, shard, where = _pick(tool, span.lower(), wanted)
        with tool.session.acquire(
            key, [shard], timeout=tool.timeout, salt=digest, device=where
        ) as lease:
            if not lease.hits:
                raise errors.NotFound(
                    f"span {key.hex()[:16]} is not served to this user, or not without its salt"
                )
            handle = tool.session.export_span(lease, 0, timeout=tool.timeout)
            status = _run(tool, command, handle, key)
    raise typer.Exit(status)


def _run(tool: Tool, command: list[str], handle: SpanHandle, key: bytes) -> int:
    """The command's exit code. Closes the handle."""
    ours = {
        "KMESH_DMA_BUF_FD": str(FD_NUMBER),
        "KMESH_DMA_BUF_SIZE": str(handle.size),
        "KMESH_SPAN_LENGTH": str(handle.length),
        "KMESH_SPAN_KEY": key.hex(),
    }
    program = [sys.executable, "-m", "kmesh.cli.spawn"]
    try:
        process = subprocess.Popen(
            [*program, str(handle.fd), str(FD_NUMBER), str(os.getpid()), *command],
            env={**os.environ, **ours},
            pass_fds=(handle.fd,),
        )
    finally:
        os.close(handle.fd)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, _: process.send_signal(caught))

    def lost() -> None:
        if process.poll() is None:
            complain(errors.ConnectionClosed("the daemon went away, and the lease with it"))
            process.terminate()

    tool.session.on_close(lost)
    return outcome(process)


class _Wanted(NamedTuple):
    """What was said of the span beside its key; None and empty where nothing was."""

    layers: tuple[int, int] | None
    heads: tuple[int, int] | None
    device: str

    def fits(self, shard: Shard, device: str) -> bool:
        return (
            self.layers in (None, (shard.layer_begin, shard.layer_end))
            and self.heads in (None, (shard.head_begin, shard.head_end))
            and self.device in ("", device or _HOST)
        )


def _pick(tool: Tool, beginning: str, wanted: _Wanted) -> tuple[bytes, Shard, str]:
    """The only span whose key begins like this, of this part of the model, and its device."""
    _hex(beginning + "0" * (len(beginning) % 2), "SPAN")
    if len(beginning) == _DIGITS and wanted.layers and wanted.heads:
        # All of it was said: nothing is to be looked for.
        where = "" if wanted.device == _HOST else wanted.device
        return bytes.fromhex(beginning), _shard(wanted.layers, wanted.heads), where
    found = set()
    for span in tool.spans(b"", _EVERY):
        shard = Shard(span.layer_begin, span.layer_end, span.head_begin, span.head_end)
        if span.key.hex().startswith(beginning) and wanted.fits(shard, span.device):
            found.add((span.key, shard, span.device))
    if len(found) == 1:
        return found.pop()
    if len({key for key, _, _ in found}) == 1:
        parts = sorted(
            f"--layers {s.layer_begin}:{s.layer_end} --heads {s.head_begin}:{s.head_end} "
            f"--device {device or _HOST}"
            for _, s, device in found
        )
        raise typer.BadParameter(f"this key has several parts: {'; '.join(parts)}")
    count = f"{len(found)} spans" if found else "no span"
    raise typer.BadParameter(f"{count} begins with {beginning!r}")


def _shard(layers: tuple[int, int], heads: tuple[int, int]) -> Shard:
    try:
        return Shard(*layers, *heads)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None


def _range(text: str, name: str) -> tuple[int, int] | None:
    begin, _, end = text.partition(":")
    if not text:
        return None
    if not (begin.isdigit() and end.isdigit()):
        raise typer.BadParameter(f"{text!r} is not BEGIN:END", param_hint=name)
    return int(begin), int(end)


def _hex(text: str, name: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise typer.BadParameter("no hex digits", param_hint=name) from None
