"""What clients that are broken, or mean, send: made from a seed, and what must come back."""

from __future__ import annotations

import array
import contextlib
import os
import random
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, Message
from rawclient import DIGEST, SHARD

from kmesh.v1 import (
    common_pb2,
    families_pb2,
    flights_pb2,
    session_socket_pb2,
    sessions_pb2,
    spans_pb2,
)

MAX_BYTES = 128 * 1024
# An enum's operators take longer than the calls they are for.
_SEND = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_CUT = int(socket.MSG_CTRUNC | socket.MSG_TRUNC)
_ODD = (0, 1, 2, 7, 63, 64, 65, 4095, 4096, 65536, 2**31 - 1, 2**31, 2**32 - 1)
_WIDE = (*_ODD, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
_ANSWER = session_socket_pb2.Response.FromString


class Hostile:
    """Makes packets. ``learn`` tells it numbers that exist, so that it can misuse them.

    Attributes:
        rng: the one source of chance.
        made: packets of each sort.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.made: Counter[str] = Counter()
        self._keys = [self.rng.randbytes(32) for _ in range(48)]
        self._reservations: deque[int] = deque([1, 2], maxlen=40)
        self._leases: deque[int] = deque([1], maxlen=40)
        self._flights: deque[int] = deque([1], maxlen=8)
        self._sent: deque[bytes] = deque([b"\x08\x01"], maxlen=300)
        self._last = 10
        self.waits: Counter[int] = Counter()

    def learn(self, answer: session_socket_pb2.Response) -> None:
        self._reservations.extend(n for n in answer.reserve.reservation if n)
        if answer.acquire.lease:
            self._leases.append(answer.acquire.lease)
        if answer.claim.flight:
            self._flights.append(answer.claim.flight)

    def batch(self) -> list[bytes]:
        """Packets to be sent in a row. In most batches none ends its connection, or the rest
        would never be looked at."""
        rng = self.rng
        breaks = rng.random() < 0.25
        packets = [self._packet(breaks) for _ in range(rng.randint(4, 14))]
        if rng.random() < 0.1:
            rng.shuffle(packets)
            self.made["reordered"] += len(packets)
        self._sent.extend(p for p in packets if len(p) < 4096)
        return packets

    def _packet(self, breaks: bool) -> bytes:
        while True:
            sort, packet = self._any()
            if breaks or not is_broken(packet):
                self.made[sort] += 1
                return packet

    def _any(self) -> tuple[str, bytes]:
        rng = self.rng
        sort = rng.choices(
            ("good", "replayed", "cut", "flipped", "longer", "spliced", "random", "oversized"),
            (56, 12, 7, 8, 5, 5, 6, 0.3),
        )[0]
        if sort == "replayed":
            return sort, rng.choice(self._sent)
        if sort == "random":
            return sort, rng.randbytes(rng.randint(1, 200))
        good = self.request().SerializeToString()
        if sort == "oversized":
            return sort, good + b"\xfa\x7f\xff\xff\x07" + rng.randbytes(MAX_BYTES)
        return sort, good if sort == "good" else self.spoil(good, sort)

    def spoil(self, good: bytes, sort: str) -> bytes:
        """A packet that was one. It is never empty, which would be the end of a connection."""
        rng = self.rng
        if sort == "cut":
            return good[: rng.randint(1, max(1, len(good) - 1))] or b"\x08"
        if sort == "flipped":
            bits = bytearray(good)
            for _ in range(rng.randint(1, 6)):
                at = rng.randrange(len(bits) or 1)
                bits[at : at + 1] = bytes([(bits[at] if bits else 0) ^ 1 << rng.randrange(8)])
            return bytes(bits)
        if sort == "longer":
            return good + rng.randbytes(rng.randint(1, 40))
        other = rng.choice(self._sent)
        return good[: rng.randint(1, max(1, len(good)))] + other[rng.randrange(len(other)) :]

    def request(self) -> session_socket_pb2.Request:
        """A request that can be parsed; whether it makes sense is another matter."""
        rng = self.rng
        self._last += 1
        made = session_socket_pb2.Request(id=self._last)
        if rng.random() < 0.05:
            made.deadline_ms = rng.choice((1, 2, *_ODD))
        name, body = self.body()
        if name == "await_flight":
            # One byte, so that a flipped bit does not make it a long wait.
            made.deadline_ms = rng.choice((1, 2))
        if name:
            getattr(made, name).CopyFrom(body)
            getattr(made, name).SetInParent()
        return made

    def body(self) -> tuple[str, Message]:
        """A request's name and message; no name for a Request without a body."""
        makers = (
            self._acquire,
            self._reserve,
            self._commit,
            self._release,
            self._abort,
            self._report,
            self._attach,
            self._claim,
            self._fly,
            self._kin,
        )
        return self.rng.choices(makers, (6, 8, 8, 6, 2, 2, 1, 3, 3, 3))[0]()

    def _some(self, kept: deque[int], count: int) -> list[int]:
        rng = self.rng
        return [
            rng.choice(kept) if rng.random() < 0.9 else rng.choice(_WIDE)
            for _ in range(rng.randint(0, count))
        ]

    def _salt(self) -> bytes:
        return self.rng.choices((b"", b"s" * 32, b"t" * 31), (95, 4, 1))[0]

    def _acquire(self) -> tuple[str, Message]:
        rng = self.rng
        keys = b"".join(rng.choices(self._keys, k=rng.randint(0, 6)))
        if rng.random() < 0.02:
            keys = rng.randbytes(rng.choice((1, 31, 33, 32 * 1025)))
        shards = [SHARD] * rng.choice((0, 1, 1, 1, 1, 2))
        if rng.random() < 0.05:
            shards = [common_pb2.Shard(layer_end=rng.choice(_ODD), head_end=rng.choice(_ODD))]
        made = spans_pb2.AcquireRequest(
            keys=keys, shards=shards, prefix=rng.random() < 0.3, salt=self._salt()
        )
        return "acquire", made

    def _reserve(self) -> tuple[str, Message]:
        rng = self.rng
        count = rng.randint(1, 3)
        made = spans_pb2.ReserveRequest(
            namespace=DIGEST,
            shard=SHARD,
            keys=b"".join(rng.choices(self._keys, k=count)),
            tokens=[64] * count,
            start=[64 * n for n in range(count)],
            length=[rng.choice((1, 1000, 65536, 200_000)) for _ in range(count)],
            salt=self._salt(),
        )
        if rng.random() < 0.1:
            made.tokens[0] = rng.choice(_ODD)
            made.sub_keys = b"".join(rng.choices(self._keys, k=rng.randint(0, 4)))
        if rng.random() < 0.1:
            rng.choice((made.length, made.start, made.tokens)).append(rng.choice(_ODD))
        if rng.random() < 0.1:
            made.length[0] = rng.choice(_WIDE)
        return "reserve", made

    def _commit(self) -> tuple[str, Message]:
        rng = self.rng
        numbers = self._some(self._reservations, 3)
        offsets = [rng.choice((0, 64, 4096)) for _ in numbers]
        if rng.random() < 0.1:
            offsets.append(rng.choice(_WIDE))
            if rng.random() < 0.5:
                del offsets[0]
        return "commit", spans_pb2.CommitRequest(reservation=numbers, staging_offset=offsets)

    def _release(self) -> tuple[str, Message]:
        return "release", spans_pb2.ReleaseRequest(leases=self._some(self._leases, 3))

    def _abort(self) -> tuple[str, Message]:
        return "abort", spans_pb2.AbortRequest(reservation=self._some(self._reservations, 3))

    def _report(self) -> tuple[str, Message]:
        rng = self.rng
        lease = rng.choice(self._leases)
        entry = [rng.choice((0, 0, 1, *_ODD)) for _ in range(rng.randint(0, 2))]
        return "report_corrupt", spans_pb2.ReportCorruptRequest(lease=lease, entry=entry)

    def _claim(self) -> tuple[str, Message]:
        rng = self.rng
        keys = b"".join(rng.sample(self._keys, k=rng.randint(0, 6)))
        if rng.random() < 0.05:
            keys = rng.choice((keys + keys, rng.randbytes(31), rng.randbytes(32 * 1025)))
        shards = [SHARD] * rng.choices((0, 1, 2, 70), (1, 20, 1, 1))[0]
        return "claim", flights_pb2.ClaimRequest(keys=keys, shards=shards, salt=self._salt())

    def _fly(self) -> tuple[str, Message]:
        rng = self.rng
        flight = rng.choice(self._flights) if rng.random() < 0.9 else rng.choice(_WIDE)
        waits = flights_pb2.AwaitRequest(flight=flight, covered=rng.randint(0, 3), shards=[SHARD])
        if rng.random() < 0.2:
            waits.first = rng.choice((1, *_ODD))
        cause = flights_pb2.FlightCause.ValueType(rng.choice((1, 2, 3, 4, 5, 99)))
        computed = rng.choice((0, 1, 2, 2**32 - 1))
        return rng.choices(
            (
                ("await_flight", waits),
                ("leave", flights_pb2.LeaveRequest(flight=flight)),
                ("land", flights_pb2.LandRequest(flight=flight, cause=cause)),
                ("progress", flights_pb2.ProgressRequest(flight=flight, computed=computed)),
            ),
            (3, 1, 1, 1),
        )[0]

    def _kin(self) -> tuple[str, Message]:
        rng = self.rng
        keys = b"".join(rng.choices(self._keys, k=rng.randint(0, 4)))
        if rng.random() < 0.05:
            keys = rng.choice((rng.randbytes(31), rng.randbytes(32 * 1025)))
        name = rng.choice(("a", "b", "c", "", "x" * 129, "\x1b"))
        common = {"family": rng.choice(("a", "b", "")), "salt": self._salt()}
        shards = [SHARD] * rng.choices((0, 1, 2), (2, 20, 1))[0]
        runs = [
            families_pb2.Provenance(
                position=rng.choice(_ODD),
                tokens=rng.choice(_ODD),
                base=rng.choice((*self._keys, b"x")),
                source=rng.choice(_ODD),
                kernel=rng.choice((0, 0, 1, 2)),
            )
            for _ in range(rng.choice((0, 0, 1, 3)))
        ]
        frequencies = rng.choice(((), (1.0,), (float("nan"),), (0.5,) * 2000))
        odd = rng.choice(_ODD)
        return rng.choice(
            (
                (
                    "declare_family",
                    families_pb2.DeclareFamilyRequest(
                        **common,
                        namespace=rng.choice((DIGEST, DIGEST, b"x")),
                        dtype=rng.choice(("bfloat16", "bfloat16", "int8")),
                        head_dim=rng.choice((8, 8, 64, odd)),
                        shards=shards,
                        base=keys,
                        rotary=families_pb2.Rotary(frequencies=frequencies),
                    ),
                ),
                (
                    "join_family",
                    families_pb2.JoinFamilyRequest(
                        **common, member=name, namespace=DIGEST, keys=keys, provenance=runs
                    ),
                ),
                (
                    "fork_member",
                    families_pb2.ForkMemberRequest(
                        **common, parent=name, member=name + "'", keys=keys, provenance=runs
                    ),
                ),
                (
                    "dissolve_family",
                    families_pb2.DissolveFamilyRequest(
                        **common, mirrors=families_pb2.MirrorFate.ValueType(rng.randrange(5))
                    ),
                ),
                (
                    "describe_family",
                    families_pb2.DescribeFamilyRequest(**common, limit=odd, page_token=str(odd)),
                ),
                ("list_families", families_pb2.ListFamiliesRequest(limit=odd, page_token=name)),
            )
        )

    def _attach(self) -> tuple[str, Message]:
        rng = self.rng
        size = rng.choice((4096, 262_144, 1 << 20, *_WIDE))
        return rng.choice(
            (
                ("attach_staging", sessions_pb2.AttachStaging(size=size)),
                ("attach_staging", sessions_pb2.AttachStaging(size=262_144)),
                ("attach_slab", sessions_pb2.AttachSlab(slab=rng.choice((0, 0, 1, *_ODD)))),
                ("attach_index", sessions_pb2.AttachIndex()),
                ("ping", sessions_pb2.Ping()),
                ("hello", sessions_pb2.Hello(protocol_version=1, layout_version=1, role=3)),
                ("", sessions_pb2.Ping()),
            )
        )


def is_broken(packet: bytes) -> bool:
    """Whether a packet must end its connection."""
    if len(packet) > MAX_BYTES:
        return True
    try:
        session_socket_pb2.Request.FromString(packet)
    except DecodeError:
        return True
    return False


def receive(sock: socket.socket) -> bytes:
    """One packet, without blocking; its descriptors are closed. Empty at the end."""
    try:
        data, ancillary, flags, _ = sock.recvmsg(1 << 18, 256, _RECEIVE)
    except ConnectionResetError:
        # Said once, when packets of ours were left unread; what was answered before lies behind it.
        return receive(sock)
    assert not flags & _CUT
    for _level, _kind, content in ancillary:
        fds = array.array("i")
        fds.frombytes(content)
        for fd in fds:
            os.close(fd)
    return data


def attack(sock: socket.socket, hostile: Hostile, turn: Callable[[], Any]) -> tuple[int, bool]:
    """Sends a batch on an open session and checks what comes back.

    Args:
        turn: lets the other side work.

    Returns how many packets were sent, and whether the connection is still open.
    """
    owed: Counter[int] = Counter()
    sent, broken = 0, False
    for packet in hostile.batch():
        try:
            sock.send(packet, _SEND)
        except BlockingIOError:
            break
        except OSError:
            # It has ended already, over an earlier packet.
            assert broken, packet.hex()
            break
        sent += 1
        if broken:
            continue
        broken = is_broken(packet)
        if not broken:
            request = session_socket_pb2.Request.FromString(packet)
            # A wait is answered when its flight ends; one whose deadline was cut off, late.
            waits = request.WhichOneof("body") == "await_flight"
            (hostile.waits if waits else owed)[request.id] += 1
    deadline = time.monotonic() + 30
    last_words = False
    while owed or broken:
        turn()
        with contextlib.suppress(BlockingIOError):
            while data := receive(sock):
                answer = _ANSWER(data)
                status = answer.status
                assert status.code != common_pb2.CODE_INTERNAL, answer
                assert status.code == 0 or status.message, answer
                hostile.learn(answer)
                if broken and answer.id == 0 and status.code:
                    last_words = True
                    continue
                expected = owed if owed[answer.id] > 0 else hostile.waits
                assert expected[answer.id] > 0, answer
                expected[answer.id] -= 1
                owed = +owed
            # Deferred answers are lost with a connection that its client has broken.
            assert broken, "hung up on"
            assert last_words, "hung up without a word"
            return sent, False
        assert time.monotonic() < deadline, f"never answered: {owed}"
    return sent, True
