"""One log line for each event, as text or JSON, on stderr."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar, Token

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_about: ContextVar[tuple[int, int]] = ContextVar("about", default=(0, 0))


class about:
    """Lines that are logged inside carry these, unless they name their own.

    A class of its own, because every request enters it and a generator takes twice as long.
    """

    __slots__ = ("_now", "_token")

    def __init__(self, session: int, request: int = 0) -> None:
        self._now = session, request
        self._token: Token[tuple[int, int]]

    def __enter__(self) -> None:
        self._token = _about.set(self._now)

    def __exit__(self, *_: object) -> None:
        _about.reset(self._token)


def current() -> tuple[int, int]:
    """Session and request that are being handled; 0 is none."""
    return _about.get()


def _extras(record: logging.LogRecord) -> dict[str, object]:
    found = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    session, request = _about.get()
    if session:
        found.setdefault("session", session)
    if request:
        found.setdefault("request", request)
    return found


class TextFormatter(logging.Formatter):
    """``time level process: message key=value …``"""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {self._process}: "
        text += record.getMessage()
        for name, value in _extras(record).items():
            text += f" {name}={value}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object on one line; what was given as ``extra`` is a key each."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        line.update(_extras(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(process: str, *, level: str, form: str) -> logging.Logger:
    """Sets up logging of this process and returns the logger of KMesh's daemon."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if form == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What libraries say while they work is of no use to an operator.
    for name in ("asyncio", "grpc", "opentelemetry"):
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    return logging.getLogger("kmesh_spand")
