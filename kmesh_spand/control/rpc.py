"""gRPC on ``grpc.sock``: the same requests as on the session socket, and administration.

A call names its session by the token in metadata. Without one, only health is answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kmesh import errors
from kmesh.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    families_pb2,
    families_pb2_grpc,
    flights_pb2,
    flights_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    spans_pb2,
    spans_pb2_grpc,
)
from kmesh_spand.control.decoding import Decoder
from kmesh_spand.control.handler import Handler
from kmesh_spand.control.limits import MAX_RPC_BYTES, RPC_HELLO_SECONDS, RPC_IDLE_SECONDS
from kmesh_spand.control.operator import Operator
from kmesh_spand.control.registry import Member
from kmesh_spand.control.report import Report

logger = logging.getLogger(__name__)

TOKEN_KEY = "kmesh-session"
_HEALTH_PREFIX = "/grpc.health.v1.Health/"
_SERVICES = (
    "kmesh.v1.Sessions",
    "kmesh.v1.Spans",
    "kmesh.v1.Flights",
    "kmesh.v1.Families",
    "kmesh.v1.Admin",
)

_STATUS = {
    1: grpc.StatusCode.INVALID_ARGUMENT,
    2: grpc.StatusCode.NOT_FOUND,
    3: grpc.StatusCode.PERMISSION_DENIED,
    4: grpc.StatusCode.UNAUTHENTICATED,
    5: grpc.StatusCode.FAILED_PRECONDITION,
    6: grpc.StatusCode.FAILED_PRECONDITION,
    7: grpc.StatusCode.RESOURCE_EXHAUSTED,
    8: grpc.StatusCode.OUT_OF_RANGE,
    9: grpc.StatusCode.DEADLINE_EXCEEDED,
    10: grpc.StatusCode.UNAVAILABLE,
    11: grpc.StatusCode.ABORTED,
    12: grpc.StatusCode.UNAVAILABLE,
    13: grpc.StatusCode.INTERNAL,
}

# grpc has no types of its own.
Context: TypeAlias = Any


def _token(metadata: Any) -> str:
    for key, value in metadata or ():
        if key == TOKEN_KEY and isinstance(value, str):
            return value
    return ""


async def _refuse(context: Context, failed: errors.RequestError) -> None:
    await context.abort(_STATUS[failed.code], str(failed), _trailers(failed))


def _trailers(failed: errors.RequestError) -> tuple[tuple[str, str | bytes], ...]:
    code = common_pb2.Code.Name(common_pb2.Code.ValueType(failed.code))
    return (("kmesh-code", code), ("kmesh-field", failed.field))


class Authenticator(aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call without a session's token, but health."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if not method.startswith(_HEALTH_PREFIX):
            try:
                self._handler.registry.by_token(_token(handler_call_details.invocation_metadata))
            except errors.RequestError as failed:
                self._handler.count_refusal(failed)
                return _refusing(await continuation(handler_call_details), failed)
        return await continuation(handler_call_details)


def _refusing(found: Any, failed: errors.RequestError) -> Any:
    """A handler of the same kind as ``found`` that refuses."""

    async def unary(_request: Any, context: Context) -> None:
        await _refuse(context, failed)

    async def stream(_requests: Any, context: Context) -> Any:
        await _refuse(context, failed)
        yield None

    if found is not None and found.response_streaming:
        if found.request_streaming:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(unary)


class _Service:
    """What all services share."""

    def __init__(self, handler: Handler, report: Report) -> None:
        self._handler = handler
        self._report = report

    def _member(self, context: Context) -> Member:
        return self._handler.registry.by_token(_token(context.invocation_metadata()))

    async def _shown(self, context: Context, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except errors.RequestError as failed:
            await _refuse(context, failed)

    async def _call(self, request: Message, context: Context) -> Any:
        """Calls the handler that the session socket calls."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def done(body: Message | None, _fd: int, failed: errors.RequestError | None) -> None:
            if answer.done():
                return
            if failed is not None:
                answer.set_exception(failed)
            elif body is not None:
                answer.set_result(body)

        remaining = context.time_remaining()
        deadline_ms = 0 if remaining is None else min(max(1, int(remaining * 1000)), 2**31)
        try:
            member = self._member(context)
            self._handler.call(member.id, request, deadline_ms, done)
            return await answer
        except errors.RequestError as failed:
            await _refuse(context, failed)


class Spans(_Service, spans_pb2_grpc.SpansServicer):
    async def Acquire(self, request: spans_pb2.AcquireRequest, context: Context) -> Any:
        return await self._call(request, context)

    async def Release(self, request: spans_pb2.ReleaseRequest, context: Context) -> Any:
        return await self._call(request, context)

    async def Reserve(self, request: spans_pb2.ReserveRequest, context: Context) -> Any:
        return await self._call(request, context)

    async def Commit(self, request: spans_pb2.CommitRequest, context: Context) -> Any:
        return await self._call(request, context)

    async def Abort(self, request: spans_pb2.AbortRequest, context: Context) -> Any:
        return await self._call(request, context)

    async def ReportCorrupt(self, request: spans_pb2.ReportCorruptRequest, context: Context) -> Any:
        return await self._call(request, context)


class Sessions(_Service, sessions_pb2_grpc.SessionsServicer):
    async def Describe(self, request: sessions_pb2.DescribeSessionRequest, context: Context) -> Any:
        return await self._shown(context, lambda: self._report.session(self._member(context)))

    async def List(self, request: sessions_pb2.ListSessionsRequest, context: Context) -> Any:
        return await self._shown(context, lambda: self._report.sessions(self._member(context)))


class Flights(_Service, flights_pb2_grpc.FlightsServicer):
    async def List(self, request: flights_pb2.ListFlightsRequest, context: Context) -> Any:
        return await self._shown(
            context, lambda: self._report.flights(request, self._member(context))
        )


class Families(_Service, families_pb2_grpc.FamiliesServicer):
    async def Declare(self, request: families_pb2.DeclareFamilyRequest, context: Context) -> Any:
        return await self._call(request, context)

    async def Join(self, request: families_pb2.JoinFamilyRequest, context: Context) -> Any:
        return await self._call(request, context)

    async def Fork(self, request: families_pb2.ForkMemberRequest, context: Context) -> Any:
        return await self._call(request, context)

    async def Dissolve(self, request: families_pb2.DissolveFamilyRequest, context: Context) -> Any:
        return await self._call(request, context)

    async def Describe(self, request: families_pb2.DescribeFamilyRequest, context: Context) -> Any:
        return await self._call(request, context)

    async def List(self, request: families_pb2.ListFamiliesRequest, context: Context) -> Any:
        return await self._call(request, context)


class Admin(_Service, admin_pb2_grpc.AdminServicer):
    def __init__(self, handler: Handler, report: Report, operator: Operator) -> None:
        super().__init__(handler, report)
        self._operator = operator

    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> Any:
        return await self._shown(context, lambda: self._report.status(self._member(context)))

    async def List(self, request: admin_pb2.ListRequest, context: Context) -> Any:
        return await self._shown(
            context, lambda: self._report.spans(request, self._member(context))
        )

    def _administrator(self, context: Context) -> Member:
        """The caller, if it may know and end what is anybody's."""
        member = self._member(context)
        if self._report.group(member) is not None:
            raise errors.PermissionDenied(
                "where uids are kept apart, this is for root and the daemon's own user", field="uid"
            )
        return member

    async def Explain(self, request: admin_pb2.ExplainRequest, context: Context) -> Any:
        try:
            self._administrator(context)
            return await self._operator.explain(request)
        except errors.RequestError as failed:
            await _refuse(context, failed)

    async def Evict(self, request: admin_pb2.EvictRequest, context: Context) -> Any:
        try:
            return await self._operator.evict(self._member(context), request)
        except errors.RequestError as failed:
            await _refuse(context, failed)

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> Any:
        try:
            async for progress in self._operator.drain(self._administrator(context), request):
                yield progress
        except errors.RequestError as failed:
            await _refuse(context, failed)

    async def Watch(self, request: admin_pb2.WatchRequest, context: Context) -> Any:
        try:
            async for answer in self._operator.watch(self._administrator(context), request):
                yield answer
        except errors.RequestError as failed:
            await _refuse(context, failed)


class RpcServer:
    """The server on one socket path."""

    def __init__(self, handler: Handler, report: Report, operator: Operator, path: str) -> None:
        self._path = path
        self._mode = handler.settings.socket_mode
        self._handler = handler
        self._health = health.aio.HealthServicer()
        self._server = aio.server(
            interceptors=(Authenticator(handler), Decoder(self._garbage)),
            options=(
                ("grpc.max_receive_message_length", MAX_RPC_BYTES),
                ("grpc.max_concurrent_streams", 256),
                ("grpc.so_reuseport", 0),
                ("grpc.max_connection_idle_ms", RPC_IDLE_SECONDS * 1000),
                ("grpc.server_handshake_timeout_ms", RPC_HELLO_SECONDS * 1000),
            ),
        )
        spans_pb2_grpc.add_SpansServicer_to_server(Spans(handler, report), self._server)
        sessions_pb2_grpc.add_SessionsServicer_to_server(Sessions(handler, report), self._server)
        flights_pb2_grpc.add_FlightsServicer_to_server(Flights(handler, report), self._server)
        families_pb2_grpc.add_FamiliesServicer_to_server(Families(handler, report), self._server)
        admin = Admin(handler, report, operator)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> None:
        """Listens. OSError or RuntimeError if the path can't be bound."""
        before = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
            await self._server.start()
        finally:
            os.umask(before)
        os.chmod(self._path, self._mode)

    async def _garbage(self, context: Context, failed: errors.RequestError) -> None:
        self._handler.counters["protocol_errors"] += 1
        self._handler.count_refusal(failed)
        await _refuse(context, failed)

    async def set_healthy(self, healthy: bool) -> None:
        """What health answers, for the whole and for each service."""
        serving = health_pb2.HealthCheckResponse.ServingStatus
        status = serving.SERVING if healthy else serving.NOT_SERVING
        for name in ("", *_SERVICES):
            await self._health.set(name, status)

    async def stop(self) -> None:
        """Ends it; calls in flight have a moment to finish."""
        await self._server.stop(0.2)
