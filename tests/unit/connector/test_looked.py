"""What siblings share of a look-up, and which of them brings what."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kmesh.index import Probe
from kmesh.keys import KEY_BYTES, KeyChain
from kmesh_vllm.flights import Flights
from kmesh_vllm.lookup import Hit, Looked, longest_hit
from kmesh_vllm.quarantine import Quarantine
from kmesh_vllm.requests import RequestState
from kmesh_vllm.sharding import Sharding

SHARDINGS = Sharding(2, 4, 1).alternatives()


class Stored:
    """An index of keys in the first sharding, which counts how often it is asked."""

    def __init__(self, keys: set[bytes]) -> None:
        self.keys = keys
        self.asked = 0

    def probe(
        self, keys: bytes, shard_codes: Sequence[int], *, prefix: bool = True, device: str = ""
    ) -> Probe:
        self.asked += 1
        hits = 0
        if tuple(shard_codes) == SHARDINGS[0].codes:
            while keys[hits * KEY_BYTES : (hits + 1) * KEY_BYTES] in self.keys:
                hits += 1
        return Probe(hits, array("I"))


def chain(tokens: int) -> KeyChain:
    made = KeyChain(bytes(32))
    made.extend(list(range(tokens)))
    return made


def look(index: Stored, tokens: int, **more: Any) -> Hit | None:
    return longest_hit(
        chain(tokens), index, SHARDINGS, span_tokens=64, sub_tokens=16, block_tokens=16,
        limit=tokens, avoid=Quarantine(1.0), **more,
    )  # fmt: skip


def test_siblings_ask_an_index_once_until_it_changes() -> None:
    whole = chain(192)
    index = Stored({whole.keys[:32], whole.keys[32:64]})
    looked = Looked()
    first = look(index, 200, known=looked.known(1, 7))
    assert first == Hit(SHARDINGS[0], 2, 0) == look(Stored(index.keys), 200)
    asked = index.asked
    assert look(index, 200, known=looked.known(1, 7)) == first
    # Only for what is shorter than a span, which siblings may have of their own.
    assert index.asked - asked == 1
    index.keys.add(whole.keys[64:])
    assert look(index, 200, known=looked.known(1, 7)) == first
    for at in ((1, 8), (2, 8)):
        asked = index.asked
        assert look(index, 200, known=looked.known(*at)) == Hit(SHARDINGS[0], 3, 0)
        assert index.asked - asked > 1


def test_what_is_remembered_of_an_index_has_a_bound() -> None:
    looked = Looked()
    for number in range(3 * Looked.MOST):
        looked.known(1, 1)[bytes([number % 256, number // 256]), (), ""] = number
        assert len(looked.known(1, 1)) < Looked.MOST + 1


def test_who_brings_all_alone_and_who_comes_beside_land_alike() -> None:
    flights = Flights()
    one, other, third = (RequestState(name, [], bytes(32)) for name in "abc")
    flights.take_off(one, (b"1", b"2"))
    flights.land(one)
    assert not len(flights)
    flights.take_off(one, (b"1", b"2"))
    flights.take_off(other, (b"2", b"3"))
    flights.land(one)
    assert len(flights) == 1
    # Alone again, with keys of its own, as they come.
    flights.take_off(other, (b"3", b"4"))
    flights.take_off(third, (b"4", b"5"))
    flights.land(other)
    assert len(flights) == 1
    flights.land(third)
    assert not len(flights)
