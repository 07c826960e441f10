"""Times requests and copies: histograms, the log of slow calls, and spans of a trace."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kmesh import errors
from kmesh.keys import KEY_BYTES
from kmesh_spand import logs
from kmesh_spand.control.histogram import BYTES, SECONDS, Histogram

if TYPE_CHECKING:
    from kmesh_spand.tracing import Tracer

logger = logging.getLogger(__name__)

#: Requests whose handling time is kept, and that have a span in a trace.
TIMED = ("acquire", "reserve", "commit")
#: Takes as long as others compute: never slow.
_WAITS = "await_flight"


@dataclass(slots=True)
class Call:
    """One request while it is handled. ``wire`` is the number that its client gave it."""

    name: str
    session: int
    number: int
    wire: int
    began: float
    span: Any = None


@dataclass(slots=True)
class CopyMark:
    """One copy while the store worker has it."""

    job: int
    length: int
    session: int
    request: int
    began: float
    span: Any = None


class Observer:
    """Told when requests and copies begin and end. All on the event loop.

    Args:
        slow_ms: calls that take longer are logged; 0: none.
        tracer: makes spans; None: no trace.

    Attributes:
        requests: handling times by request, in seconds.
        copy_seconds: what the store worker took for a copy.
        copy_wait_seconds: the same with the time that it waited for its turn.
        copy_bytes: lengths of copies.
        slow_calls: calls that took longer than ``slow_ms``.
    """

    def __init__(self, slow_ms: int, tracer: Tracer | None = None) -> None:
        self.requests = {name: Histogram(SECONDS) for name in TIMED}
        self.copy_seconds = Histogram(SECONDS)
        self.copy_wait_seconds = Histogram(SECONDS)
        self.copy_bytes = Histogram(BYTES)
        self.slow_calls = 0
        self._slow = slow_ms / 1000 or float("inf")
        self._tracer = tracer
        # Of timed requests that are pending: the parents of their copies.
        self._spans: dict[int, Any] = {}

    def begin(self, name: str, session: int, number: int, wire: int, body: Any) -> Call:
        """A request came; its number is unique within the epoch."""
        call = Call(name, session, number, wire, time.perf_counter())
        if self._tracer is not None and name in self.requests:
            attributes = {"kmesh.session": session, "kmesh.request": number, "kmesh.wire": wire}
            if name == "commit":
                attributes["kmesh.entries"] = len(body.reservation)
            else:
                attributes["kmesh.entries"] = len(body.keys) // KEY_BYTES
            call.span = self._spans[number] = self._tracer.start(f"kmesh.{name}", attributes)
        return call

    def end(self, call: Call, body: Any, failed: errors.RequestError | None) -> None:
        """It was answered."""
        seconds = time.perf_counter() - call.began
        timed = self.requests.get(call.name)
        if timed is not None:
            timed.observe(seconds)
        if call.span is not None:
            del self._spans[call.number]
            if failed is not None:
                call.span.set_attribute("kmesh.code", type(failed).__name__)
            elif body is not None:
                good = sum(1 for reason in body.reason if not reason)
                call.span.set_attribute("kmesh.good_entries", good)
            call.span.end()
        if seconds >= self._slow and call.name != _WAITS:
            self.slow_calls += 1
            logger.warning("slow call", extra=_told(call, seconds, failed))
        elif logger.isEnabledFor(logging.DEBUG):
            logger.debug("call", extra=_told(call, seconds, failed))

    def drop(self, call: Call) -> None:
        """Its session ended before it was answered."""
        if call.span is not None:
            del self._spans[call.number]
            call.span.set_attribute("kmesh.code", "SessionClosed")
            call.span.end()

    def copy_begins(self, job: int, length: int) -> CopyMark:
        """A copy is sent to the store worker, because of the request that is being handled."""
        session, request = logs.current()
        mark = CopyMark(job, length, session, request, time.perf_counter())
        if self._tracer is not None:
            attributes = {
                "kmesh.session": session,
                "kmesh.request": request,
                "kmesh.job": job,
                "kmesh.bytes": length,
            }
            mark.span = self._tracer.start("kmesh.copy", attributes, self._spans.get(request))
        return mark

    def copy_ends(self, mark: CopyMark, seconds: float | None) -> None:
        """The store worker answered, having copied for so long, or the copy failed (None)."""
        if seconds is not None:
            self.copy_seconds.observe(seconds)
            self.copy_wait_seconds.observe(time.perf_counter() - mark.began)
            self.copy_bytes.observe(mark.length)
        if mark.span is not None:
            if seconds is None:
                mark.span.set_attribute("kmesh.code", "CopyFailed")
            else:
                mark.span.set_attribute("kmesh.worker_seconds", seconds)
            mark.span.end()

    def close(self) -> None:
        """Hands over the spans that were not exported yet."""
        if self._tracer is not None:
            self._tracer.close()


def _told(call: Call, seconds: float, failed: errors.RequestError | None) -> dict[str, Any]:
    return {
        "session": call.session,
        "request": call.number,
        "wire": call.wire,
        "kind": call.name,
        "ms": round(seconds * 1000, 3),
        "code": "OK" if failed is None else type(failed).__name__,
    }
