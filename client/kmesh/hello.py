"""What a client says first: who it is, and what it can use."""

from __future__ import annotations

import enum
import os

import kmesh
from kmesh import negotiation
from kmesh.handles import COMMON, Preferences
from kmesh.keys import Namespace
from kmesh.layout import LAYOUT_VERSION, PROTOCOL_VERSION
from kmesh.v1 import sessions_pb2


class Role(enum.IntEnum):
    """What a session is for; numbers as ``kmesh.v1.Role``."""

    SCHEDULER = 1
    WORKER = 2
    TOOL = 3


def hello(
    role: Role,
    engine_id: str,
    namespace: Namespace | None,
    client_name: str,
    handles: Preferences = COMMON,
) -> sessions_pb2.Hello:
    """The first message of a connection."""
    return sessions_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        layout_version=LAYOUT_VERSION,
        role=sessions_pb2.Role.ValueType(role),
        engine_id=engine_id,
        client_name=client_name,
        client_version=kmesh.__version__,
        namespace=namespace.fields() if namespace else {},
        pid=os.getpid(),
        handles=negotiation.preferences(handles),
        notices=True,
    )
