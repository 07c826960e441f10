"""OpenTelemetry spans, for a daemon that was told to make them. Loaded only then."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import IO, Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
)

_EXPORT_MS = 1000


def _line(span: Any) -> str:
    return str(span.to_json(indent=None)) + "\n"


class Tracer:
    """Makes spans and exports them from a thread of its own.

    Args:
        setting: of ``trace``, but not "off"; its form was checked when settings were read.

    Raises:
        OSError: the file can't be written.
        ImportError: "otlp:" without its exporter.
    """

    def __init__(self, setting: str, version: str) -> None:
        kind, _, target = setting.partition(":")
        self._file: IO[str] | None = None
        exporter: SpanExporter
        if kind == "otlp":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            insecure = not target.startswith("https://")
            exporter = OTLPSpanExporter(endpoint=target, insecure=insecure, timeout=2)
        elif kind == "file":
            self._file = open(target, "a", encoding="utf-8")  # noqa: SIM115
            exporter = ConsoleSpanExporter(out=self._file, formatter=_line)
        else:
            exporter = ConsoleSpanExporter(out=sys.stderr, formatter=_line)
        resource = Resource({"service.name": "kmesh-spand", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_MS)
        )
        self._tracer = self._provider.get_tracer("kmesh_spand", version)

    def start(self, name: str, attributes: Mapping[str, Any], parent: Any = None) -> Any:
        """A span that begins now, under ``parent`` if there is one."""
        context = None if parent is None else trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context=context, attributes=attributes)

    def close(self) -> None:
        """Exports what is left, and ends the thread."""
        self._provider.shutdown()
        if self._file is not None:
            self._file.close()
