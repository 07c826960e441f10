"""Every error that KMesh raises, in one tree.

KMeshError
├── ConfigError            a setting or an argument is wrong
├── UnsupportedError       this model, engine or machine is not served; says why
├── CudaError              the CUDA driver refused a call; has call, code and name
├── ConnectionClosed       the session ended (daemon gone, or closed by us)
│   └── DaemonUnavailable  no daemon answers on the socket
├── ProtocolError          the peer broke the protocol
├── CorruptionError        bytes do not match their checksum
├── SegmentError           a request's segments can't be used; has field and why
├── RecipeError            a family's recipe can't be made or used; has field
│   ├── RecipeFormatError  these bytes are no recipe that this version reads
│   ├── RecipeMismatch     a recipe and what it is used with do not belong together
│   └── RecipeChecksumError   (a CorruptionError too)
└── RequestError           the daemon refused a call; has code and field
    ├── InvalidArgument    ├── NotFound           ├── PermissionDenied
    ├── Unauthenticated    ├── VersionMismatch    ├── NamespaceMismatch
    ├── Exhausted          ├── TooLarge           ├── DeadlineExceeded
    ├── Draining           ├── Stale              ├── Unavailable
    └── InternalError
"""

from __future__ import annotations


class KMeshError(Exception):
    """Base of all errors of KMesh."""


class ConfigError(KMeshError):
    """A setting or an argument is wrong; the message names it."""


class UnsupportedError(KMeshError):
    """This model, engine version or machine is not served; the message says why."""


class CudaError(KMeshError):
    """The CUDA driver refused a call.

    Attributes:
        call: the driver's function.
        code: number of ``CUresult``. name: the same in words.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name or 'unknown error'} ({code})")
        self.call = call
        self.code = code
        self.name = name


class ConnectionClosed(KMeshError):
    """The session is over; leases and reservations that it held are gone."""


class DaemonUnavailable(ConnectionClosed):
    """No daemon answers on the socket."""


class ProtocolError(KMeshError):
    """The peer broke the protocol; the connection was closed."""


class CorruptionError(KMeshError):
    """Bytes that were read do not match their checksum."""


class SegmentError(KMeshError):
    """What a request says of its segments can't be used.

    Attributes:
        field: dotted path in the request's ``kv_transfer_params``, such as
            ``kmesh.segments[1].tokens``.
        why: the rest of the message.
    """

    def __init__(self, why: str, *, field: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


class RecipeError(KMeshError):
    """A recipe can't be made or used.

    Attributes:
        field: of ``docs/recipe-format.md``, such as ``ops.source``.
        record: number of the record of that table, 0 where there is one only.
    """

    def __init__(self, message: str, *, field: str, record: int = 0) -> None:
        table, _, rest = field.partition(".")
        super().__init__(f"{table}[{record}].{rest}: {message}" if rest else f"{field}: {message}")
        self.field = field
        self.record = record


class RecipeFormatError(RecipeError):
    """These bytes are no recipe that this version reads."""


class RecipeMismatch(RecipeError):
    """A recipe and the base, span or geometry that it is used with do not belong together."""


class RecipeChecksumError(RecipeError, CorruptionError):
    """Bytes of a recipe, or those that it gave, do not match their checksum."""


class RequestError(KMeshError):
    """The daemon refused a call.

    Attributes:
        code: number of ``kmesh.v1.Code``.
        field: dotted path of the field at fault, or an empty string.
    """

    code: int = 13

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field


class InvalidArgument(RequestError):
    code = 1


class NotFound(RequestError):
    code = 2


class PermissionDenied(RequestError):
    code = 3


class Unauthenticated(RequestError):
    code = 4


class VersionMismatch(RequestError):
    code = 5


class NamespaceMismatch(RequestError):
    code = 6


class Exhausted(RequestError):
    code = 7


class TooLarge(RequestError):
    code = 8


class DeadlineExceeded(RequestError):
    code = 9


class Draining(RequestError):
    code = 10


class Stale(RequestError):
    code = 11


class Unavailable(RequestError):
    code = 12


class InternalError(RequestError):
    code = 13


_BY_CODE: dict[int, type[RequestError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        NotFound,
        PermissionDenied,
        Unauthenticated,
        VersionMismatch,
        NamespaceMismatch,
        Exhausted,
        TooLarge,
        DeadlineExceeded,
        Draining,
        Stale,
        Unavailable,
        InternalError,
    )
}


def from_code(code: int, message: str, field: str = "") -> RequestError:
    """The error for a ``kmesh.v1.Code``; unknown codes give ``InternalError``."""
    return _BY_CODE.get(code, InternalError)(message, field=field)
