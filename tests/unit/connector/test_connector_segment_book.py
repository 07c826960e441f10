"""What is remembered of shared segments: bounded, and compared token by token."""

from __future__ import annotations

from segment_cases import DIGEST, MINUTES, OWN, SAID, Make, computes, keyed, until
from test_connector_halves import prompt

from kmesh.segments import SegmentedPrompt
from kmesh.testing import FakeDaemon
from kmesh_vllm import segmentbook
from kmesh_vllm.segmentbook import SegmentBook


def test_the_book_is_bounded_and_forgets_what_was_not_used() -> None:
    book = SegmentBook(max_tokens=300)
    said = SegmentedPrompt().with_shared(100, "a")
    for name in ("a", "b", "c"):
        tokens = prompt(100, seed=ord(name))
        said = SegmentedPrompt().with_shared(100, name)
        book.learn(DIGEST, keyed(said, tokens)[0], tokens)
    assert book.named(DIGEST, "a") is not None
    book.learn(DIGEST, keyed(SegmentedPrompt().with_shared(100, "d"), prompt(100))[0], prompt(100))
    assert book.named(DIGEST, "b") is None
    assert list(book.named(DIGEST, "a") or ()) == prompt(100, seed=ord("a"))
    big = prompt(301)
    book.learn(DIGEST, keyed(SegmentedPrompt().with_shared(301, "a"), big)[0], big)
    assert book.named(DIGEST, "a") is None, "an id never names what it named before"
    assert len(book) <= 3 + 300 // 16


def test_short_segments_do_not_fill_the_book() -> None:
    """A name takes more than the few tokens that it may have."""
    book = SegmentBook(max_names=10)
    said = SegmentedPrompt()
    for number in range(30):
        said = said.with_shared(16, f"id-{number}")
    tokens = prompt(30 * 16)
    for one in keyed(said, tokens):
        book.learn(DIGEST, one, tokens)
    assert len(book) == 20
    assert book.named(DIGEST, "id-19") is None
    assert list(book.named(DIGEST, "id-29") or ()) == tokens[-16:]


def test_the_book_compares_tokens() -> None:
    book = SegmentBook()
    tokens = prompt(70)
    (one,) = keyed(SegmentedPrompt().with_shared(70), tokens)
    assert book.same(one.spans[0].key, [1] * 64), "never seen"
    book.learn(DIGEST, one, tokens)
    assert book.same(one.spans[0].key, tokens[:64])
    assert not book.same(one.spans[0].key, [*tokens[:63], 1])
    assert not book.same(one.spans[0].key, tokens[:63])
    # The first keeps the key.
    book.learn(DIGEST, one, [1] * 70)
    assert book.same(one.spans[0].key, tokens[:64])


def test_a_chance_hit_is_no_hit(patient: Make, daemon: FakeDaemon) -> None:
    tokens = [*OWN, *MINUTES]
    computes(patient("a"), "r", tokens, SAID.to_params())
    until(lambda: daemon.spans == 7)
    other = patient("b")
    (minutes,) = keyed(SAID, tokens)
    other.scheduler.segmenting.book._keys.put(minutes.spans[0].key, [1] * 64)
    other.scheduler.add("s", tokens, DIGEST, params=SAID.to_params())
    other.scheduler.plan([("s", list(range(1, 9)), 0, 237)], [])
    assert other.scheduler.counts.take()["segment_misses"] == 1
    assert segmentbook._MAX_TOKENS >= 1 << 20
