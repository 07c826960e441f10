"""What the demo saw, what follows from it, and whether that is what KMesh promises."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

MIN_RESTORED = 0.9


@dataclass(frozen=True, slots=True)
class Row:
    """One request to one engine; tokens are prompt tokens, ``ttft`` is in seconds."""

    request: int
    engine: str
    prompt_tokens: int
    computed: int
    restored: int
    cached_tokens: int
    ttft: float
    text: str


@dataclass(slots=True)
class Report:
    """A whole run.

    Attributes:
        shared_tokens: prefix that all prompts have in common.
        token_bytes: KV bytes of one token, all layers.
        rows: requests to the engines with the connector, in the order in which they were sent.
        control: the same requests without the connector.
        daemon: what the daemon said after the last request.
    """

    model: str
    shared_tokens: int
    token_bytes: int
    rows: list[Row] = field(default_factory=list)
    control: list[Row] = field(default_factory=list)
    daemon: dict[str, Any] = field(default_factory=dict)

    def control_of(self, row: Row) -> Row:
        """The control's answer to the same request."""
        return next(other for other in self.control if other.request == row.request)

    def same_text(self, row: Row) -> bool:
        return row.text == self.control_of(row).text

    @property
    def engines(self) -> list[str]:
        """Names of the engines with the connector, in order of use."""
        return list(dict.fromkeys(row.engine for row in self.rows))

    @property
    def daemon_bytes(self) -> int:
        return int(self.daemon["span_bytes"])

    @property
    def unshared_bytes(self) -> int:
        """If every request of every engine kept its own KV state."""
        return sum(row.prompt_tokens for row in self.rows) * self.token_bytes

    @property
    def engine_bytes(self) -> int:
        """If every engine kept its own state, and shared the common prefix inside itself."""
        tokens = 0
        for engine in self.engines:
            own = [
                row.prompt_tokens - self.shared_tokens for row in self.rows if row.engine == engine
            ]
            tokens += self.shared_tokens + sum(own)
        return tokens * self.token_bytes

    def problems(self) -> list[str]:
        """Where the run fell short, one sentence each."""
        found = []
        for row in self.rows:
            name = f"{row.engine}, request {row.request}"
            if row.computed + row.restored != row.prompt_tokens:
                found.append(
                    f"{name}: {row.computed} tokens computed and {row.restored} restored "
                    f"are not {row.prompt_tokens}"
                )
            if row.restored != row.cached_tokens:
                found.append(
                    f"{name}: metrics say {row.restored} tokens restored, "
                    f"the answer says {row.cached_tokens}"
                )
            if not row.text.strip():
                found.append(f"{name}: the answer is empty")
            if not self.same_text(row):
                found.append(
                    f"{name}: {row.text!r} is not the control's {self.control_of(row).text!r}"
                )
            if row.engine != self.engines[0] and row.restored < MIN_RESTORED * self.shared_tokens:
                found.append(
                    f"{name}: {row.restored} of {self.shared_tokens} shared tokens restored, "
                    f"less than {MIN_RESTORED:.0%}"
                )
        counters, restored = self.daemon["counters"], sum(row.restored for row in self.rows)
        leased = int(counters["spans_hits"]) * int(self.daemon["span_tokens"])
        if leased < restored:
            found.append(f"{restored} tokens restored, but the daemon gave leases on {leased}")
        if int(counters["spans_corrupt"]):
            found.append(f"the daemon found {counters['spans_corrupt']} spans corrupt")
        for row in self.control:
            if row.restored or row.cached_tokens:
                found.append(f"control, request {row.request}: it restored something")
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it, raw figures first."""
        return {
            "model": self.model,
            "shared_tokens": self.shared_tokens,
            "token_bytes": self.token_bytes,
            "requests": [{**asdict(row), "same_text": self.same_text(row)} for row in self.rows],
            "control": [asdict(row) for row in self.control],
            "daemon": self.daemon,
            "bytes": {
                "daemon": self.daemon_bytes,
                "a_copy_for_each_engine": self.engine_bytes,
                "a_copy_for_each_request": self.unshared_bytes,
            },
            "problems": self.problems(),
        }
