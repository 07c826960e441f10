"""Bytes that are no message, on the gRPC socket: a refusal instead of an exception."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from kmesh import errors

#: Ends a call with an error: takes its context and the error. Does not return.
Refuse: TypeAlias = Callable[[Any, errors.RequestError], Awaitable[None]]

#: Stands for a request that could not be parsed.
_GARBAGE = object()


class Decoder(aio.ServerInterceptor):  # type: ignore[misc]
    """Lets no request through to a service that could not be parsed, of whatever service.

    Without it the library takes the parser's exception for a bug, and logs a traceback for each
    packet that somebody makes up.
    """

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        found = await continuation(handler_call_details)
        if found is None or found.request_deserializer is None:
            return found
        coders = {
            "request_deserializer": _lenient(found.request_deserializer),
            "response_serializer": found.response_serializer,
        }
        if found.stream_stream is not None:
            behave = self._streaming(found.stream_stream)
            return grpc.stream_stream_rpc_method_handler(behave, **coders)
        if found.unary_stream is not None:
            make = grpc.unary_stream_rpc_method_handler
            if inspect.isasyncgenfunction(found.unary_stream):
                return make(self._yielding(found.unary_stream), **coders)
            return make(self._awaiting(found.unary_stream), **coders)
        if found.unary_unary is not None:
            behave = self._awaiting(found.unary_unary)
            return grpc.unary_unary_rpc_method_handler(behave, **coders)
        return found

    async def _check(self, request: Any, context: Any) -> None:
        if request is _GARBAGE:
            await self._refuse(context, errors.InvalidArgument("bytes that are no such message"))

    def _awaiting(self, inner: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def behave(request: Any, context: Any) -> Any:
            await self._check(request, context)
            return await inner(request, context)

        return behave

    def _yielding(self, inner: Callable[[Any, Any], AsyncIterator[Any]]) -> Any:
        async def behave(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(request, context)
            async for answer in inner(request, context):
                yield answer

        return behave

    def _streaming(self, inner: Callable[[Any, Any], AsyncIterator[Any]]) -> Any:
        async def checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for request in requests:
                await self._check(request, context)
                yield request

        async def behave(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for answer in inner(checked(requests, context), context):
                yield answer

        return behave


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _GARBAGE

    return parsed
