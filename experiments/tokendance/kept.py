"""Siblings of a workload in a daemon: stored, joined to a family, and what the CLI says of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from experiments.tokendance.cutting import grid, len_of, part
from experiments.tokendance.workload import Member, State
from kmesh.families import Recovered
from kmesh.keys import KEY_BYTES, KeyChain
from kmesh.layout import TILE_BYTES, Shard, tiles
from kmesh.memory import Staging
from kmesh.segmentkeys import keyed_segments
from kmesh.segments import SegmentedPrompt
from kmesh.session import ReserveBatch, Session
from kmesh.store import put_spans, read_span

#: Seconds in which a family's spans must have become what they can.
SETTLE_TIMEOUT = 120.0
STAGING = 32 << 20
_STORED = (0, 4)

T = TypeVar("T")


class Cli(Protocol):
    """Runs a command of ``kmesh`` with ``--json``."""

    def __call__(self, *command: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Stored:
    """One sibling as spans: their keys, 32 bytes each, and their payloads."""

    member: Member
    tokens: Sequence[int]
    keys: bytes
    payloads: list[bytes]

    def key(self, number: int) -> str:
        """In hexadecimal."""
        return self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES].hex()


class Kept:
    """One family in a daemon.

    Args:
        family: its name; it is declared with the passage's spans as base by somebody.
        namespace, shard: of all that is stored.
        said: the prompt that computed the passage, its one shared segment.
        tokens: of that prompt.
    """

    def __init__(
        self,
        session: Session,
        family: str,
        namespace: bytes,
        shard: Shard,
        said: SegmentedPrompt,
        tokens: Sequence[int],
    ) -> None:
        self._session, self._family = session, family
        self._namespace, self._shard = namespace, shard
        self._grid = session.welcome.span_tokens, session.welcome.sub_tokens
        span, sub = self._grid
        (self._passage,) = keyed_segments(said, tokens, namespace, span_tokens=span, sub_tokens=sub)
        self._staging: Staging = session.staging(STAGING)

    @property
    def base(self) -> bytes:
        """Keys of the passage's spans."""
        return b"".join(span.key for span in self._passage.spans)

    def put_passage(self, state: State) -> None:
        """Stores the passage, where no engine does."""
        spans, begin = self._passage.spans, self._passage.segment.begin
        payloads = [
            part(state, span.begin - begin, span.begin - begin + span.tokens).tobytes()
            for span in spans
        ]
        self._put(
            self.base,
            [span.tokens for span in spans],
            [span.begin for span in spans],
            payloads,
            spans[-1].sub_keys,
        )

    def passage(self, like: State) -> State:
        """The passage's state as it is stored, of the shape of ``like``.

        Raises:
            LookupError: not all of it is stored, or not in the frame of the prompt.
        """
        layers, planes, heads, _, dim = like.shape
        spans = self._passage.spans
        pieces = []
        with self._session.acquire(self.base, [self._shard], positions=True) as lease:
            if lease.hits < len(spans) or list(lease.start) != [one.begin for one in spans]:
                raise LookupError(f"{lease.hits} of {len(spans)} spans of the passage are stored")
            for number, span in enumerate(spans):
                payload = np.frombuffer(read_span(self._session, lease, number), np.uint16)
                pieces.append(payload.reshape(layers, planes, heads, span.tokens, dim))
        return np.concatenate(pieces, axis=3)

    def put(self, members: Iterable[tuple[Member, Sequence[int]]]) -> list[Stored]:
        """Stores siblings dense, under the keys of their prompts (token ids)."""
        span, sub = self._grid
        stored = []
        for member, tokens in members:
            chain = KeyChain(self._namespace, span_tokens=span, sub_tokens=sub)
            chain.extend(tokens)
            places = grid(len_of(member), span, sub)
            keys, sub_keys = chain.keys, b""
            tail = places[-1][1] - places[-1][0]
            if tail < span:
                *shorter, last = chain.sub_keys(chain.spans, tail)
                keys, sub_keys = keys + last, b"".join(shorter)
            payloads = [part(member.state, begin, end).tobytes() for begin, end in places]
            counts, starts = [e - b for b, e in places], [begin for begin, _ in places]
            self._put(keys, counts, starts, payloads, sub_keys)
            stored.append(Stored(member, tokens, keys, payloads))
        return stored

    def join(self, siblings: Sequence[Stored]) -> None:
        """Has them kept as recipes, and waits until all are that can be.

        Raises:
            TimeoutError: that never ended.
        """
        key = self.base[:KEY_BYTES]
        for one in siblings:
            recovered = [
                Recovered(told.token, told.tokens, key, told.source)
                for told in one.member.provenance
            ]
            self._session.families.join(
                self._family, one.member.name, one.keys, self._namespace, recovered=recovered
            )

        def settled() -> bool:
            members = self._session.families.describe(self._family).members
            return all(m.base + m.mirrors + m.refused == m.spans for m in members)

        wait_for(settled, "spans become recipes")

    def same(self, siblings: Sequence[Stored]) -> int:
        """How many spans come back bit for bit, from whatever they are kept as."""
        count = 0
        for one in siblings:
            with self._session.acquire(one.keys, [self._shard], recipes=True) as lease:
                for number, payload in enumerate(one.payloads[: lease.hits]):
                    count += read_span(self._session, lease, number) == payload
        return count

    def _put(
        self,
        keys: bytes,
        tokens: Sequence[int],
        starts: Sequence[int],
        payloads: Sequence[bytes],
        sub_keys: bytes,
    ) -> None:
        batch = ReserveBatch(
            self._namespace,
            self._shard,
            keys,
            tokens,
            starts,
            [len(payload) for payload in payloads],
            sub_keys,
        )
        reasons = put_spans(self._session, self._staging, batch, payloads)
        if set(reasons) - set(_STORED):
            raise LookupError(f"the daemon did not take all spans: reasons {reasons}")


def sizes(
    cli: Cli, family: str, siblings: Sequence[Stored], base: bytes, codec: dict[str, Any]
) -> dict[str, Any]:
    """What ``kmesh`` says is held of a family, beside the sizes of ``codec.json``.

    Args:
        codec: its arm of spans.
    """
    status, drawn, listed = cli("status"), cli("families", family), cli("ls", "--limit", "100000")
    spans = {span["key"]: span for span in listed["spans"]}
    rows = []
    for one in siblings:
        for number, payload in enumerate(one.payloads):
            span = spans[one.key(number)]
            row = codec["members"][f"{one.member.name}/{number}"]
            rows.append(
                {
                    "member": one.member.name,
                    "span": number,
                    "tokens": span["tokens"],
                    "dense_bytes": len(payload),
                    "bytes": span["length"],
                    "recipe": span["dense_length"] is not None,
                    "codec": {
                        "dense_bytes": row["dense_bytes"],
                        "bytes": row["addressable"]["bytes"],
                        "depends_on_base": row["addressable"]["depends_on_base"],
                    },
                }
            )
    names = ("families", "mirrors", "mirror_bytes", "mirror_dense_bytes", "mirror_used_bytes")
    keys = [base[at : at + KEY_BYTES].hex() for at in range(0, len(base), KEY_BYTES)]
    return {
        "status": {
            **{name: status[name] for name in names},
            "base_spans": status["base_spans"],
            "slab_used": sum(slab["used"] for slab in status["slabs"]),
            "counters": {
                name: status["counters"].get(f"spans_{name}", 0)
                for name in ("encodes", "densified", "encode_failed", "corrupt")
            },
        },
        "family": {name: drawn[name] for name in drawn if name not in _NOT_SIZES},
        "base": [{"tokens": spans[key]["tokens"], "bytes": spans[key]["length"]} for key in keys],
        "spans": rows,
    }


_NOT_SIZES = ("namespace", "tenant", "shards", "age_ms", "id")


def expected(row: dict[str, Any]) -> tuple[bool, int]:
    """Whether a span should be a recipe by what the codec made of it, and its bytes."""
    codec = row["codec"]
    recipe = codec["depends_on_base"] and tiles(codec["bytes"]) < tiles(codec["dense_bytes"])
    return (True, codec["bytes"]) if recipe else (False, codec["dense_bytes"])


def problems(held: dict[str, Any]) -> list[str]:
    """Where what is held is not what the codec says, one sentence each."""
    found = []
    rows, family, status = held["spans"], held["family"], held["status"]
    for row in rows:
        recipe, size = expected(row)
        if (row["recipe"], row["bytes"]) != (recipe, size):
            found.append(
                f"{row['member']}/{row['span']}: {row['bytes']} bytes"
                f" ({'a recipe' if row['recipe'] else 'dense'}), by codec.json {size}"
                f" ({'a recipe' if recipe else 'dense'})"
            )
    said = {member["member"]: member for member in family["of_members"]}
    for name in dict.fromkeys(row["member"] for row in rows):
        mine = [row for row in rows if row["member"] == name]
        wanted = {
            "dense_bytes": sum(row["dense_bytes"] for row in mine),
            "stored_bytes": sum(row["bytes"] for row in mine),
            "recipe_bytes": sum(row["bytes"] for row in mine if row["recipe"]),
            "used_bytes": sum(_memory(row["bytes"]) for row in mine),
        }
        for field, value in wanted.items():
            if said[name][field] != value:
                found.append(
                    f"{name}: kmesh families says {field} {said[name][field]}, its spans {value}"
                )
    recipes = sum(row["bytes"] for row in rows if row["recipe"])
    others = sum(
        member["recipe_bytes"]
        for name, member in said.items()
        if name not in {row["member"] for row in rows}
    )
    if not recipes:
        found.append("no span of a sibling is a recipe")
    if status["families"] == 1 and status["mirror_bytes"] != recipes + others:
        found.append(
            f"kmesh status says {status['mirror_bytes']} bytes of recipes, they have"
            f" {recipes + others}"
        )
    if status["mirror_bytes"] != family["recipe_bytes"]:
        found.append("kmesh status and kmesh families differ about bytes of recipes")
    return found


def totals(held: dict[str, Any]) -> dict[str, int]:
    """Of the siblings, and of the base that they need."""
    rows, base = held["spans"], held["base"]
    return {
        "dense": sum(row["dense_bytes"] for row in rows),
        "recipes": sum(row["recipe"] for row in rows),
        "recipe_bytes": sum(row["bytes"] for row in rows if row["recipe"]),
        "stored": sum(row["bytes"] for row in (*rows, *base)),
        "memory": sum(_memory(row["bytes"]) for row in (*rows, *base)),
        "base": sum(row["bytes"] for row in base),
    }


def wait_for(check: Callable[[], T], what: str) -> T:
    """Asks until the answer is true; TimeoutError if that does not come."""
    deadline = time.monotonic() + SETTLE_TIMEOUT
    while not (found := check()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {SETTLE_TIMEOUT:.0f} s")
        time.sleep(0.05)
    return found


def _memory(size: int) -> int:
    return tiles(size) * TILE_BYTES
