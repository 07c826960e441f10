"""The session socket's protocol spoken from its description alone.

It shares nothing with ``kmesh.session`` but the generated messages, so that it can check both.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
from pathlib import Path
from typing import Any

from kmesh.v1 import common_pb2, session_socket_pb2, sessions_pb2, spans_pb2

NAMESPACE = {
    "model": "tiny",
    "weights": "w",
    "dtype": "float32",
    "layers": "2",
    "kv_heads": "1",
    "head_dim": "8",
    "rope": "",
    "adapter": "",
    "salt": "",
    "reset": "",
}
DIGEST = bytes(range(32))
SHARD = common_pb2.Shard(layer_begin=0, layer_end=2, head_begin=0, head_end=1)


class Refused(Exception):
    """The daemon's answer has a status."""

    def __init__(self, status: common_pb2.Status) -> None:
        super().__init__(f"{common_pb2.Code.Name(status.code)} {status.field}: {status.message}")
        self.code = status.code
        self.field = status.field
        self.message = status.message


class RawClient:
    """One blocking connection. Owns the fds it was given, until ``close``."""

    def __init__(self, socket_dir: Path, *, hello: bool = True, **fields: Any) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(30)
        try:
            self.sock.connect(str(socket_dir / "session.sock"))
        except BaseException:
            self.sock.close()
            raise
        self.fds: list[int] = []
        self.staging: mmap.mmap | None = None
        self.epoch = 0
        self.last_id = 0
        self.welcome = sessions_pb2.Welcome()
        if hello:
            try:
                self.welcome = self.hello(**fields)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        self.sock.close()
        if self.staging is not None:
            self.staging.close()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds.clear()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, **body: Any) -> int:
        """Sends a request, returns its id."""
        self.last_id += 1
        request = session_socket_pb2.Request(id=self.last_id, **body)
        self.sock.send(request.SerializeToString())
        return self.last_id

    def receive(self) -> tuple[session_socket_pb2.Response, list[int]]:
        """The next answer and its fds; EOFError when the daemon hung up."""
        data, ancillary, flags, _ = self.sock.recvmsg(1 << 20, 256, socket.MSG_CMSG_CLOEXEC)
        assert not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
        if not data:
            raise EOFError
        fds = array.array("i")
        for _level, _kind, content in ancillary:
            fds.frombytes(content)
        self.fds += fds
        response = session_socket_pb2.Response.FromString(data)
        self.epoch = response.epoch
        return response, list(fds)

    def call(self, **body: Any) -> tuple[Any, list[int]]:
        """One request and its answer."""
        number = self.send(**body)
        response, fds = self.receive()
        if response.HasField("status"):
            raise Refused(response.status)
        assert response.id == number, (response.id, number)
        return getattr(response, response.WhichOneof("body")), fds

    def hello(self, **fields: Any) -> sessions_pb2.Welcome:
        values = {
            "protocol_version": 1,
            "layout_version": 1,
            "role": sessions_pb2.ROLE_TOOL,
            "client_name": "rawclient",
        }
        values.update(fields)
        try:
            return self.call(hello=sessions_pb2.Hello(**values))[0]
        except (BrokenPipeError, ConnectionResetError):
            # It hung up and read nothing; what it said before is behind this error.
            raise Refused(self.receive()[0].status) from None

    def attach_staging(self, size: int) -> mmap.mmap:
        handle, fds = self.call(attach_staging=sessions_pb2.AttachStaging(size=size))
        assert (handle.size, len(fds)) == (size, 1)
        self.staging = mmap.mmap(fds[0], size)
        return self.staging

    def attach_slab(self, slab: int) -> tuple[sessions_pb2.SlabHandle, int]:
        handle, fds = self.call(attach_slab=sessions_pb2.AttachSlab(slab=slab))
        assert len(fds) == 1
        return handle, fds[0]

    def reserve(
        self, keys: list[bytes], length: int, salt: bytes = b"", device: str = ""
    ) -> spans_pb2.ReserveResponse:
        count = len(keys)
        return self.call(
            reserve=spans_pb2.ReserveRequest(
                namespace=DIGEST,
                shard=SHARD,
                keys=b"".join(keys),
                tokens=[64] * count,
                start=[64 * n for n in range(count)],
                length=[length] * count,
                salt=salt,
                device=device,
            )
        )[0]

    def commit(self, reservations: list[int], offsets: list[int]) -> list[int]:
        request = spans_pb2.CommitRequest(reservation=reservations, staging_offset=offsets)
        return list(self.call(commit=request)[0].reason)

    def store(self, key: bytes, payload: bytes, salt: bytes = b"", device: str = "") -> int:
        """Reserve, write, commit; returns the Reason."""
        if self.staging is None:
            self.attach_staging(max(1 << 20, -(-len(payload) // 4096) * 4096))
        assert self.staging is not None
        reserved = self.reserve([key], len(payload), salt, device)
        if reserved.reason[0]:
            return int(reserved.reason[0])
        self.staging[: len(payload)] = payload
        return self.commit(list(reserved.reservation), [0])[0]

    def acquire(
        self, keys: list[bytes], *, prefix: bool = False, salt: bytes = b"", device: str = ""
    ) -> spans_pb2.AcquireResponse:
        request = spans_pb2.AcquireRequest(
            keys=b"".join(keys), shards=[SHARD], prefix=prefix, salt=salt, device=device
        )
        return self.call(acquire=request)[0]

    def release(self, lease: int) -> spans_pb2.ReleaseResponse:
        return self.call(release=spans_pb2.ReleaseRequest(leases=[lease]))[0]

    def read(self, key: bytes, salt: bytes = b"") -> bytes | int:
        """The bytes stored under a key, read through a mapping, or the Reason why not."""
        found = self.acquire([key], salt=salt)
        if found.reason[0]:
            return int(found.reason[0])
        try:
            _, fd = self.attach_slab(found.slab[0])
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as slab:
                return slab[found.offset[0] : found.offset[0] + found.length[0]]
        finally:
            self.release(found.lease)


def engine(role: int, engine_id: str = "e1", **namespace: str) -> dict[str, Any]:
    """Fields of an engine's Hello."""
    return {"role": role, "engine_id": engine_id, "namespace": {**NAMESPACE, **namespace}}
