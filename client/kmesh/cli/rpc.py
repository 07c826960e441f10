"""A tool's way to the daemon: a session for its token, and gRPC for the questions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from kmesh import errors
from kmesh.families import Description
from kmesh.keys import Namespace
from kmesh.session import Role, Session
from kmesh.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    families_pb2,
    families_pb2_grpc,
    flights_pb2,
    flights_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
)

GRPC_NAME = "grpc.sock"
#: ``HealthCheckResponse`` with status SERVING, as it lies on the wire.
_SERVING = b"\x08\x01"
#: Spans asked for in one List call.
_PAGE = 1000
#: Members asked for in one Describe call.
_MEMBERS = 200
#: Seconds that an eviction may take, however large.
_LONG = 600.0

T = TypeVar("T")

_REFUSALS: dict[grpc.StatusCode, type[errors.RequestError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Exhausted,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.UNIMPLEMENTED: errors.VersionMismatch,
    grpc.StatusCode.OUT_OF_RANGE: errors.TooLarge,
    grpc.StatusCode.ABORTED: errors.Stale,
    grpc.StatusCode.FAILED_PRECONDITION: errors.VersionMismatch,
    grpc.StatusCode.INTERNAL: errors.InternalError,
}


class Tool:
    """A session of role TOOL and a gRPC channel; a context manager.

    Args:
        namespace: of what the session is going to store, so that the daemon can name it.

    Raises:
        DaemonUnavailable: nobody answers.
        RequestError: the daemon refuses us.
    """

    def __init__(self, socket_dir: str, timeout: float, namespace: Namespace | None = None) -> None:
        self.timeout = timeout
        self.session = Session.connect(
            socket_dir,
            role=Role.TOOL,
            namespace=namespace,
            client_name="kmesh CLI",
            timeout=timeout,
        )
        self._channel = _channel(socket_dir)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self._sessions = sessions_pb2_grpc.SessionsStub(self._channel)
        self._families = families_pb2_grpc.FamiliesStub(self._channel)
        self._flights = flights_pb2_grpc.FlightsStub(self._channel)

    def __enter__(self) -> Tool:
        return self

    def __exit__(self, *exc: object) -> None:
        self._channel.close()
        self.session.close()

    def status(self) -> admin_pb2.StatusResponse:
        answer: admin_pb2.StatusResponse = self._ask(self._admin.Status, admin_pb2.StatusRequest())
        return answer

    def namespaces(self, remembered: bool = False) -> list[admin_pb2.NamespaceInfo]:
        """Every namespace of which something is stored, or was (``remembered``)."""
        request = admin_pb2.ListRequest(limit=1, remembered=remembered)
        return list(self._ask(self._admin.List, request).namespaces)

    def listed(self, namespace: bytes, limit: int) -> tuple[list[admin_pb2.SpanInfo], int]:
        """At most ``limit`` spans, and how many more there are; as ``spans``."""
        found = list(self.spans(namespace, limit + 1))
        if len(found) <= limit:
            return found, 0
        stored = sum(s.spans for s in self.namespaces() if namespace in (b"", s.digest))
        return found[:limit], max(1, stored - limit)

    def spans(self, namespace: bytes, limit: int) -> Iterator[admin_pb2.SpanInfo]:
        """At most ``limit`` spans; of all namespaces when ``namespace`` is empty."""
        token = ""
        while limit > 0:
            request = admin_pb2.ListRequest(
                namespace=namespace, limit=min(limit, _PAGE), page_token=token
            )
            answer = self._ask(self._admin.List, request)
            yield from answer.spans
            limit -= len(answer.spans)
            token = answer.next_page_token
            if not token:
                return

    def sessions(self) -> list[sessions_pb2.SessionInfo]:
        """Every open session, this one too."""
        request = sessions_pb2.ListSessionsRequest()
        return list(self._ask(self._sessions.List, request).sessions)

    def flights(
        self, limit: int
    ) -> tuple[list[flights_pb2.FlightInfo], list[flights_pb2.FetchInfo]]:
        """At most ``limit`` flights, and at most as many fetches from disk, the oldest first."""
        found: list[flights_pb2.FlightInfo] = []
        fetches: list[flights_pb2.FetchInfo] = []
        token = ""
        while len(found) < limit:
            request = flights_pb2.ListFlightsRequest(
                limit=min(limit - len(found), _PAGE), page_token=token
            )
            answer = self._ask(self._flights.List, request)
            found.extend(answer.flights)
            fetches.extend(answer.fetches)
            token = answer.next_page_token
            if not token:
                break
        return found, fetches

    def families(self, device: str = "") -> list[families_pb2.FamilyInfo]:
        """All families that we may see, the oldest first, with their spans on a device."""
        found: list[families_pb2.FamilyInfo] = []
        token = ""
        while True:
            request = families_pb2.ListFamiliesRequest(page_token=token, device=device)
            answer = self._ask(self._families.List, request)
            found.extend(answer.families)
            token = answer.next_page_token
            if not token:
                return found

    def family(self, number: int, limit: int, device: str = "") -> Description:
        """A family, with at most ``limit`` members."""
        members: list[families_pb2.MemberInfo] = []
        token = ""
        while True:
            request = families_pb2.DescribeFamilyRequest(
                id=number,
                limit=min(limit - len(members), _MEMBERS),
                page_token=token,
                device=device,
            )
            answer = self._ask(self._families.Describe, request)
            members.extend(answer.members)
            token = answer.next_page_token
            if not token or len(members) >= limit:
                return Description(answer.family, tuple(members))

    def explain(self, request: admin_pb2.ExplainRequest) -> admin_pb2.ExplainResponse:
        """Why a prompt misses."""
        answer: admin_pb2.ExplainResponse = self._ask(self._admin.Explain, request)
        return answer

    def remove(self, keys: bytes) -> int:
        """Evicts what this tool has stored; how many spans could not be removed."""
        # What was released before is released when this has been answered.
        self.session.ping(self.timeout)
        answer = self.evict(admin_pb2.EvictRequest(keys=keys))
        return answer.leased + answer.busy

    def evict(self, request: admin_pb2.EvictRequest) -> admin_pb2.EvictResponse:
        """Takes as long as it takes."""
        answer: admin_pb2.EvictResponse = self._ask(self._admin.Evict, request, _LONG)
        return answer

    def drain(self, request: admin_pb2.DrainRequest) -> Iterator[admin_pb2.DrainProgress]:
        """How a drain goes on."""
        return self._stream(self._admin.Drain, request)

    def watch(self, request: admin_pb2.WatchRequest) -> Iterator[admin_pb2.WatchResponse]:
        """What happens, until the session ends."""
        return self._stream(self._admin.Watch, request)

    def call(self, path: str, request: Message, answer: type[T], stream: bool) -> Iterator[T]:
        """Any method, by its path (``/kmesh.v1.Admin/Status``)."""
        kind = self._channel.unary_stream if stream else self._channel.unary_unary
        read = answer.FromString  # type: ignore[attr-defined]
        method = kind(path, lambda message: message.SerializeToString(), read)
        if stream:
            return self._stream(method, request)
        return iter([self._ask(method, request)])

    def _ask(self, method: Callable[..., T], request: Message, timeout: float = 0) -> T:
        try:
            return method(request, timeout=timeout or self.timeout, metadata=self._metadata)
        except grpc.RpcError as failed:
            raise _error(failed) from None

    def _stream(self, method: Callable[..., Iterator[T]], request: Message) -> Iterator[T]:
        stream = method(request, metadata=self._metadata)
        try:
            yield from stream
        except grpc.RpcError as failed:
            raise _error(failed) from None
        finally:
            stream.cancel()  # type: ignore[attr-defined]

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("kmesh-session", self.session.welcome.token),)


def healthy(socket_dir: str, timeout: float) -> bool:
    """What gRPC's health service says of the daemon; needs no session.

    Raises:
        DaemonUnavailable: it does not answer.
    """
    with _channel(socket_dir) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            return bool(check(b"", timeout=timeout) == _SERVING)
        except grpc.RpcError as failed:
            raise _error(failed) from None


def _channel(socket_dir: str) -> grpc.Channel:
    path = os.path.join(os.path.abspath(socket_dir), GRPC_NAME)
    # A proxy set for the web must not be asked for a local socket.
    return grpc.insecure_channel(f"unix:{path}", options=[("grpc.enable_http_proxy", 0)])


def _error(failed: grpc.RpcError) -> errors.KMeshError:
    code = failed.code()
    refusal = _REFUSALS.get(code)
    if refusal is not None:
        return refusal(failed.details() or code.name)
    return errors.DaemonUnavailable(f"gRPC: {failed.details() or code.name}")
