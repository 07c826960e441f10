"""Prints the contract as generated code knows it: every name, number and type, one a line.

``tests/data/descriptors.txt`` is its output as of the last deliberate change:

    python tools/describe_proto.py > tests/data/descriptors.txt
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto

PROTO = Path(__file__).resolve().parent.parent / "proto" / "kmesh" / "v1"
_KINDS = FieldDescriptorProto.DESCRIPTOR.enum_types_by_name["Type"]


def describe() -> str:
    """All files of kmesh.v1, by name."""
    lines: list[str] = []
    for path in sorted(PROTO.glob("*.proto")):
        module = importlib.import_module(f"kmesh.v1.{path.stem}_pb2")
        lines += _file(module.DESCRIPTOR)
    return "\n".join(lines) + "\n"


def _file(file: FileDescriptor) -> Iterator[str]:
    yield f"file {file.name} package {file.package}"
    for enum in file.enum_types_by_name.values():
        yield f"enum {enum.full_name}"
        yield from (f"  {value.number} {value.name}" for value in enum.values)
    for message in file.message_types_by_name.values():
        yield from _message(message)
    for service in file.services_by_name.values():
        yield f"service {service.full_name}"
        for method in service.methods:
            streams = ("stream " if method.client_streaming else "") + method.input_type.full_name
            answers = ("stream " if method.server_streaming else "") + method.output_type.full_name
            yield f"  {method.name}({streams}) returns ({answers})"


def _message(message: Descriptor) -> Iterator[str]:
    yield f"message {message.full_name}"
    for field in message.fields:
        yield f"  {field.number} {field.name}: {_type(field)}"
    for nested in message.nested_types:
        yield from _message(nested)


def _type(field: FieldDescriptor) -> str:
    kind = _KINDS.values_by_number[field.type].name.removeprefix("TYPE_").lower()
    named = field.message_type or field.enum_type
    words = [named.full_name if named else kind]
    if field.is_repeated:
        words.insert(0, "repeated")
        if field.is_packed:
            words.append("packed")
    if field.containing_oneof:
        words.append(f"in oneof {field.containing_oneof.name}")
    return " ".join(words)


if __name__ == "__main__":
    sys.stdout.write(describe())
