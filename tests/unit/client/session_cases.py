"""What tests of sessions share: waiting, counting, and a peer that says what the test wants."""

from __future__ import annotations

import array
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kmesh.fake_state import create_memfd
from kmesh.index import IndexWriter, index_size
from kmesh.layout import Shard
from kmesh.mapping import Mapping
from kmesh.session import Session
from kmesh.v1 import session_socket_pb2 as frames
from kmesh.v1 import sessions_pb2

MEMFD = 1
SHARD = Shard(0, 2, 0, 2)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


class Raw:
    """A peer that says what the test wants, after it has let a session in."""

    EPOCH = 5

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.ours.settimeout(30)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(Session, theirs, sessions_pb2.Hello(), 30.0)
            welcome = sessions_pb2.Welcome(
                max_message_bytes=4096, max_batch=8, span_tokens=64, sub_tokens=16
            )
            self.reply(welcome=welcome)
            size = index_size(64)
            fd = create_memfd("index", size)
            IndexWriter(Mapping(fd, size, writable=True), self.EPOCH)
            self.reply([fd], index=sessions_pb2.IndexHandle(kind=MEMFD, size=size))
            os.close(fd)
            self.session = future.result()

    def reply(self, fds: list[int] | None = None, **body: object) -> None:
        request = frames.Request.FromString(self.ours.recv(65536))
        response = frames.Response(id=request.id, epoch=self.EPOCH, **body)  # type: ignore[arg-type]
        self.send(response.SerializeToString(), fds or [])

    def send(self, packet: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.ours.sendmsg([packet], rights)
