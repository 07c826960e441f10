"""Who is connected: sessions, their engines and tokens, and the namespaces they stated."""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from kmesh import errors
from kmesh.keys import Namespace
from kmesh.layout import LAYOUT_VERSION, PROTOCOL_VERSION
from kmesh.v1 import sessions_pb2
from kmesh_spand.control.limits import MAX_TEXT

_MAX_NAMESPACES = 4096
_MAX_FIELD = 4096


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel said at connect."""

    pid: int
    uid: int


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One session. ``token`` is a secret: never logged."""

    id: int
    peer: Peer
    role: int
    engine_id: str
    client_name: str
    client_version: str
    opened_ms: int
    token: str = field(repr=False)
    #: Whether it stated its engine's namespace: the engine is known while such sessions live.
    stated: bool = False


@dataclass(slots=True)
class _Engine:
    namespace: Namespace
    sessions: int = 0


class Registry:
    """All open sessions. Ids are never reused in an epoch."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self._by_handle: dict[str, Member] = {}
        self._engines: dict[tuple[int, str], _Engine] = {}
        self._namespaces: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        self._last = 0

    def open(self, hello: sessions_pb2.Hello, peer: Peer, now_ms: int) -> Member:
        """Lets a session in.

        Raises:
            RequestError: something in Hello is wrong; ``field`` names it.
        """
        _check_versions(hello)
        for name in ("engine_id", "client_name", "client_version"):
            if len(getattr(hello, name)) > MAX_TEXT:
                raise errors.InvalidArgument(
                    f"longer than {MAX_TEXT} characters", field=f"hello.{name}"
                )
        engine = hello.role in (sessions_pb2.ROLE_SCHEDULER, sessions_pb2.ROLE_WORKER)
        if not engine and hello.role != sessions_pb2.ROLE_TOOL:
            raise errors.InvalidArgument(f"{hello.role} is no role", field="hello.role")
        if engine and not hello.engine_id:
            raise errors.InvalidArgument("an engine's session needs one", field="hello.engine_id")
        namespace = _namespace(hello) if engine or hello.namespace else None
        if namespace is not None:
            if hello.engine_id:
                self._join(peer.uid, hello.engine_id, namespace)
            self._remember(namespace)
        self._last += 1
        # The first part finds the session, the second is compared in constant time.
        handle = secrets.token_urlsafe(9)
        member = Member(
            id=self._last,
            peer=peer,
            role=hello.role,
            engine_id=hello.engine_id,
            client_name=hello.client_name,
            client_version=hello.client_version,
            opened_ms=now_ms,
            token=f"{handle}.{secrets.token_urlsafe(32)}",
            stated=namespace is not None and bool(hello.engine_id),
        )
        self.members[member.id] = self._by_handle[handle] = member
        if member.stated:
            self._engines[peer.uid, hello.engine_id].sessions += 1
        return member

    def close(self, session: int) -> None:
        """Forgets a session; its engine with the engine's last."""
        member = self.members.pop(session, None)
        if member is None:
            return
        self._by_handle.pop(member.token.partition(".")[0], None)
        if member.stated:
            engine = self._engines[member.peer.uid, member.engine_id]
            engine.sessions -= 1
            if engine.sessions == 0:
                del self._engines[member.peer.uid, member.engine_id]

    def by_token(self, token: str) -> Member:
        """The session that a gRPC call names.

        Raises:
            Unauthenticated: there is none.
        """
        member = self._by_handle.get(token.partition(".")[0])
        if member is None or not hmac.compare_digest(member.token.encode(), token.encode()):
            raise errors.Unauthenticated("no open session has this token", field="kmesh-session")
        return member

    def namespace_fields(self, digest: bytes) -> dict[str, str]:
        """What an engine said of a namespace; empty if it was derived from a stated one."""
        return self._namespaces.get(digest, {})

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        """Fields by digest of the namespaces that engines stated, a copy."""
        return dict(self._namespaces)

    def _join(self, uid: int, engine_id: str, namespace: Namespace) -> None:
        engine = self._engines.setdefault((uid, engine_id), _Engine(namespace))
        differing = engine.namespace.differing(namespace)
        if differing:
            raise errors.NamespaceMismatch(
                "differs from what another session of this engine said",
                field=f"hello.namespace.{differing[0]}",
            )

    def _remember(self, namespace: Namespace) -> None:
        digest = namespace.digest()
        self._namespaces[digest] = namespace.fields()
        self._namespaces.move_to_end(digest)
        if len(self._namespaces) > _MAX_NAMESPACES:
            self._namespaces.popitem(last=False)


def _check_versions(hello: sessions_pb2.Hello) -> None:
    for name, ours in (("protocol_version", PROTOCOL_VERSION), ("layout_version", LAYOUT_VERSION)):
        theirs = getattr(hello, name)
        if theirs != ours:
            raise errors.VersionMismatch(
                f"the daemon speaks {ours}, the client {theirs}", field=f"hello.{name}"
            )


def _namespace(hello: sessions_pb2.Hello) -> Namespace:
    fields = dict(hello.namespace)
    for name, text in fields.items():
        if len(text) > _MAX_FIELD:
            raise errors.InvalidArgument(
                f"longer than {_MAX_FIELD} characters", field=f"hello.namespace.{name[:MAX_TEXT]}"
            )
    try:
        return Namespace.from_fields(fields)
    except ValueError as failed:
        name, _, text = str(failed).partition(": ")
        raise errors.InvalidArgument(text, field=f"hello.namespace.{name[:MAX_TEXT]}") from None
