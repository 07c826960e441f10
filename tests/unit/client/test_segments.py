"""A request's segments: built, read back, resolved from characters, and refused by field."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmesh.errors import KMeshError, SegmentError
from kmesh.segments import (
    MAX_NAME_BYTES,
    MAX_SEGMENTS,
    Segment,
    SegmentedPrompt,
    Unit,
    parse,
    split,
)

NAMES = st.text("ab-16 é漢", min_size=1, max_size=20)
#: Length, id or None, whether it is private.
PIECES = st.lists(
    st.tuples(st.integers(1, 40), st.none() | NAMES, st.booleans()), min_size=1, max_size=8
)


def built(pieces: list[tuple[int, str | None, bool]], family: str = "") -> SegmentedPrompt:
    prompt = SegmentedPrompt(family or None)
    for length, name, private in pieces:
        prompt = prompt.with_private(length) if private else prompt.with_shared(length, name or "")
    return prompt


def attempt(
    what: Callable[[], SegmentedPrompt | None],
) -> SegmentedPrompt | SegmentError | None:
    """What it gives, or by what it is refused."""
    try:
        return what()
    except SegmentError as refused:
        return refused


def tokens_of(prompt: SegmentedPrompt) -> list[int]:
    """A prompt in which equal ids name equal tokens, as far as they have equal lengths."""
    tokens: list[int] = []
    for segment in prompt.segments:
        seed = sum(segment.id.encode()) if segment.id else segment.begin
        tokens += [(seed * 31 + i) % 5000 for i in range(segment.length)]
    return tokens


@given(PIECES, st.just("") | NAMES)
def test_what_is_built_is_read_back(
    pieces: list[tuple[int, str | None, bool]], family: str
) -> None:
    seen: dict[str, int] = {}
    pieces = [
        (seen.setdefault(name, length) if name and not private else length, name, private)
        for length, name, private in pieces
    ]
    prompt = built(pieces, family)
    params = json.loads(json.dumps(prompt.to_params()))
    assert parse(params, tokens_of(prompt)) == prompt
    assert prompt.length == sum(length for length, _, _ in pieces)
    assert len(prompt.shared) == sum(not private for _, _, private in pieces)
    # The other way to write it: where each begins and ends.
    for item, segment in zip(params["kmesh"]["segments"], prompt.segments, strict=True):
        item["tokens"] = [segment.begin, segment.end]
    assert parse(params, tokens_of(prompt)) == prompt


def test_the_form_of_a_request() -> None:
    prompt = SegmentedPrompt("round-17").with_private(96).with_shared(416, "minutes-16")
    assert prompt.to_params() == {
        "kmesh": {
            "family": "round-17",
            "segments": [{"tokens": 96, "private": True}, {"tokens": 416, "id": "minutes-16"}],
        }
    }
    assert prompt.segments == (Segment(0, 96, private=True), Segment(96, 512, "minutes-16"))
    assert SegmentedPrompt("f").to_params() == {"kmesh": {"family": "f"}}


def test_nothing_said_is_nothing() -> None:
    assert parse(None, [1]) is None
    assert parse({}, [1]) is None
    assert parse({"do_remote_prefill": True}, [1]) is None
    assert parse({"kmesh": {}}, [1]) == SegmentedPrompt()
    assert parse({"kmesh": {"family": "f"}}, [1]) == SegmentedPrompt("f")


HUGE = 10**5000
WRONG: list[tuple[Any, str, str]] = [
    ({"kmesh": []}, "kmesh", "an array, not an object"),
    ({"kmesh": None}, "kmesh", "null"),
    ({"kmesh": {"segmnts": []}}, "kmesh.segmnts", "none of family, segments"),
    ({"kmesh": {"a b": 1}}, "kmesh", "a field is none of"),
    ({"kmesh": {"\ud800": 1}}, "kmesh", "a field is none of"),
    ({"kmesh": {"x" * 10**6: 1}}, "kmesh", "a field is none of"),
    ({"kmesh": {"family": 17}}, "kmesh.family", "int, not a string"),
    ({"kmesh": {"family": ""}}, "kmesh.family", "empty"),
    ({"kmesh": {"family": "a\nb"}}, "kmesh.family", "printable"),
    ({"kmesh": {"family": "\ud800"}}, "kmesh.family", "printable"),
    ({"kmesh": {"family": "x" * 10**6}}, "kmesh.family", "128 bytes"),
    ({"kmesh": {"family": "é" * 65}}, "kmesh.family", "longer than 128 bytes"),
    ({"kmesh": {"segments": {}}}, "kmesh.segments", "an object, not an array"),
    ({"kmesh": {"segments": []}}, "kmesh.segments", "0, not between 1"),
    ({"kmesh": {"segments": [{"tokens": 1}] * 2000}}, "kmesh.segments", "2000, not between"),
    ({"kmesh": {"segments": [10]}}, "kmesh.segments[0]", "int, not an object"),
    ({"kmesh": {"segments": [{"tokens": 10}, "rest"]}}, "kmesh.segments[1]", "a string"),
    ({"kmesh": {"segments": [{"tokens": 8}]}}, "kmesh.segments", "8 tokens, but the prompt has 10"),
    ({"kmesh": {"segments": [{"tokens": 11}]}}, "kmesh.segments[0].tokens", "ends at 11"),
    (
        {"kmesh": {"segments": [{"tokens": 9}, {"tokens": HUGE}]}},
        "kmesh.segments[1].tokens",
        "more than 64 bits",
    ),
    ({"kmesh": {"segments": [{"tokens": -HUGE}]}}, "kmesh.segments[0].tokens", "at least 1"),
    ({"kmesh": {"segments": [{"tokens": 0}]}}, "kmesh.segments[0].tokens", "at least 1"),
    ({"kmesh": {"segments": [{"tokens": True}]}}, "kmesh.segments[0].tokens", "bool"),
    ({"kmesh": {"segments": [{"tokens": 10.0}]}}, "kmesh.segments[0].tokens", "float"),
    ({"kmesh": {"segments": [{"tokens": "10"}]}}, "kmesh.segments[0].tokens", "a string"),
    ({"kmesh": {"segments": [{"tokens": None}]}}, "kmesh.segments[0].tokens", "null"),
    ({"kmesh": {"segments": [{"tokens": [0, 5, 9]}]}}, "kmesh.segments[0].tokens", "3 numbers"),
    ({"kmesh": {"segments": [{"tokens": [0, HUGE]}]}}, "kmesh.segments[0].tokens", "64 bits"),
    ({"kmesh": {"segments": [{"tokens": [0, "x"]}]}}, "kmesh.segments[0].tokens", "a string"),
    ({"kmesh": {"segments": [{"tokens": [1, 10]}]}}, "kmesh.segments[0].tokens", "a gap behind 0"),
    (
        {"kmesh": {"segments": [{"tokens": 4}, {"tokens": [6, 10]}]}},
        "kmesh.segments[1].tokens",
        "begins at 6: a gap behind 4",
    ),
    (
        {"kmesh": {"segments": [{"tokens": 4}, {"tokens": [3, 10]}]}},
        "kmesh.segments[1].tokens",
        "begins at 3: overlaps what ends at 4",
    ),
    (
        {"kmesh": {"segments": [{"tokens": [0, 4]}, {"tokens": [-HUGE, 10]}]}},
        "kmesh.segments[1].tokens",
        "overlaps",
    ),
    ({"kmesh": {"segments": [{"chars": 40}]}}, "kmesh.segments[0].chars", "where the tokenizer is"),
    (
        {"kmesh": {"segments": [{"tokens": 10, "len": 1}]}},
        "kmesh.segments[0].len",
        "none of tokens",
    ),
    ({"kmesh": {"segments": [{"private": True}]}}, "kmesh.segments[0].tokens", "missing"),
    ({"kmesh": {"segments": [{"id": "never"}]}}, "kmesh.segments[0].id", "not known"),
    ({"kmesh": {"segments": [{"tokens": 10, "id": 7}]}}, "kmesh.segments[0].id", "int"),
    ({"kmesh": {"segments": [{"tokens": 10, "private": 1}]}}, "kmesh.segments[0].private", "int"),
    (
        {"kmesh": {"segments": [{"tokens": 10, "private": True, "id": "x"}]}},
        "kmesh.segments[0].id",
        "a private segment has none",
    ),
    (
        {"kmesh": {"segments": [{"tokens": 5, "id": "a"}, {"tokens": 5, "id": "a"}]}},
        "kmesh.segments[1].id",
        "other tokens here than segment 0",
    ),
    (
        {"kmesh": {"segments": [{"tokens": 5, "id": "a"}, {"id": "a"}]}},
        "kmesh.segments[1].id",
        "other tokens here than segment 0",
    ),
    ([], "kv_transfer_params", "an array, not an object"),
    ("kmesh", "kv_transfer_params", "a string"),
]


# Python writes down no number as long as some of these.
@pytest.mark.parametrize(("params", "field", "why"), WRONG, ids=map(str, range(len(WRONG))))
def test_what_is_wrong_is_refused_by_its_field(params: Any, field: str, why: str) -> None:
    with pytest.raises(SegmentError) as refused:
        parse(params, list(range(10)))
    assert refused.value.field == field
    assert why in refused.value.why
    assert str(refused.value) == f"{field}: {refused.value.why}"
    # It goes back to the client, as UTF-8, and into logs.
    assert len(str(refused.value).encode()) < 300
    assert str(refused.value).isprintable()


BUILT: list[tuple[Callable[[], object], str, str]] = [
    (lambda: SegmentedPrompt(""), "kmesh.family", "is empty"),
    (lambda: SegmentedPrompt(17), "kmesh.family", "is int, not a string"),  # type: ignore[arg-type]
    (lambda: SegmentedPrompt("f", [Segment(0, 4)]), "kmesh.segments", "an array, not a tuple"),  # type: ignore[arg-type]
    (lambda: SegmentedPrompt("f", ((0, 4),)), "kmesh.segments[0]", "not a Segment"),  # type: ignore[arg-type]
    (lambda: SegmentedPrompt("f", unit="chars"), "unit", "a string, not a Unit"),  # type: ignore[arg-type]
    (lambda: SegmentedPrompt().with_private("4"), "kmesh.segments[0].tokens", "a string, not a"),  # type: ignore[arg-type]
    (lambda: SegmentedPrompt().with_shared(4.0), "kmesh.segments[0].tokens", "is float, not a"),  # type: ignore[arg-type]
    (lambda: SegmentedPrompt().with_shared(4, 16), "kmesh.segments[0].id", "is int"),  # type: ignore[arg-type]
    (lambda: SegmentedPrompt().with_shared(4, None), "kmesh.segments[0].id", "is null"),  # type: ignore[arg-type]
    (lambda: SegmentedPrompt("f", (Segment(0, 4, private=1),)), "kmesh.segments[0].private", "int"),  # type: ignore[arg-type]
    (lambda: TEXT.resolve(None), "offsets", "is null, not a list"),  # type: ignore[arg-type]
    (lambda: TEXT.resolve([None]), "offsets[0]", "no pair"),  # type: ignore[list-item]
    (lambda: TEXT.resolve([(0, 2), (2, "4")]), "offsets[1]", "no pair"),  # type: ignore[list-item]
    (lambda: TEXT.resolve([(0, 2), (2, 3, 4)]), "offsets[1]", "no pair"),  # type: ignore[list-item]
]
TEXT = SegmentedPrompt(unit=Unit.CHARS).with_shared(4)


@pytest.mark.parametrize(("build", "field", "why"), BUILT, ids=map(str, range(len(BUILT))))
def test_what_is_built_wrong_is_refused_by_its_field(
    build: Callable[[], object], field: str, why: str
) -> None:
    with pytest.raises(SegmentError) as refused:
        build()
    assert refused.value.field == field
    assert why in refused.value.why


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["kmesh", "minutes"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["tokens", "chars", "id", "private", "family", "segments", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.just({}) | st.dictionaries(st.just("kmesh"), JSON) | JSON, st.integers(0, 20))
def test_anything_is_read_or_refused(params: Any, count: int) -> None:
    prompt = attempt(lambda: parse(params, list(range(count))))
    if isinstance(prompt, SegmentError):
        assert prompt.field
        assert str(prompt).isprintable()
        return
    assert prompt is None or not prompt.segments or prompt.length == count


@given(PIECES, st.data())
def test_a_change_anywhere_is_noticed(
    pieces: list[tuple[int, str | None, bool]], data: st.DataObject
) -> None:
    prompt = built([(length, None, private) for length, _, private in pieces])
    items: Any = prompt.to_params()["kmesh"]["segments"]
    number = data.draw(st.integers(0, len(items) - 1))
    items[number]["tokens"] += data.draw(st.integers(-50, 50).filter(bool))
    with pytest.raises(SegmentError, match=r"^kmesh\.segments"):
        parse({"kmesh": {"segments": items}}, range(prompt.length))


def test_an_id_says_the_length_once() -> None:
    params = {"kmesh": {"segments": [{"tokens": 3, "id": "a"}, {"tokens": 2}, {"id": "a"}]}}
    prompt = parse(params, [7, 8, 9, 1, 2, 7, 8, 9])
    assert prompt is not None
    assert [(s.begin, s.end) for s in prompt.segments] == [(0, 3), (3, 5), (5, 8)]


def test_an_id_that_is_known_needs_no_length_and_may_change() -> None:
    said: Any = {"kmesh": {"segments": [{"tokens": 1}, {"id": "a"}]}}
    known = {"a": [7, 8]}
    prompt = parse(said, [1, 7, 8], known.get)
    assert prompt is not None
    assert prompt.segments[1] == Segment(1, 3, "a")
    for tokens in ([1, 7, 9], [1, 7]):
        with pytest.raises(SegmentError, match=r"segments\[1\]\.id: .* other tokens here than"):
            parse(said, tokens, known.get)
    said["kmesh"]["segments"][1]["tokens"] = 2
    assert parse(said, [1, 7, 9], known.get) is not None, "an id names what its request says"


def test_builders_refuse_what_requests_may_not_say() -> None:
    for length in (0, -1, True, 2.0, "3", 1 << 32, HUGE):
        with pytest.raises(SegmentError, match=r"^kmesh\.segments\[0\]\.tokens: "):
            SegmentedPrompt().with_shared(length)  # type: ignore[arg-type]
    with pytest.raises(SegmentError, match=r"^kmesh\.family: "):
        SegmentedPrompt("x" * (MAX_NAME_BYTES + 1))
    with pytest.raises(SegmentError, match=r"^kmesh\.segments\[1\]\.id: "):
        SegmentedPrompt().with_shared(1).with_shared(1, "\n")
    with pytest.raises(SegmentError, match=r"^kmesh\.segments\[1\]\.tokens: .*gap"):
        SegmentedPrompt(None, (Segment(0, 1), Segment(2, 3)))
    with pytest.raises(SegmentError, match=r"^kmesh\.segments\[0\]\.id: a private"):
        SegmentedPrompt(None, (Segment(0, 1, "a", private=True),))
    full = SegmentedPrompt(None, tuple(Segment(i, i + 1) for i in range(MAX_SEGMENTS)))
    with pytest.raises(SegmentError, match=r"^kmesh\.segments: more than"):
        full.with_shared(1)
    assert issubclass(SegmentError, KMeshError)


# Characters


def chars(*pieces: tuple[str, bool]) -> SegmentedPrompt:
    prompt = SegmentedPrompt("f", unit=Unit.CHARS)
    for text, private in pieces:
        prompt = prompt.with_private(len(text)) if private else prompt.with_shared(len(text), "s")
    return prompt


def test_characters_become_tokens() -> None:
    prompt = chars(("ab", True), ("cdef", False))
    # A mark, three tokens, a character of two tokens, a mark.
    offsets = [(0, 0), (0, 2), (2, 3), (3, 5), (5, 6), (5, 6), (0, 0)]
    found = prompt.resolve(offsets)
    assert found.family == "f"
    assert found.unit is Unit.TOKENS
    assert found.segments == (Segment(0, 2, private=True), Segment(2, 7, "s"))
    assert prompt.to_params()["kmesh"]["segments"] == [
        {"chars": 2, "private": True},
        {"chars": 4, "id": "s"},
    ]


@pytest.mark.parametrize("first_private", [True, False])
def test_a_token_over_an_edge_is_the_private_segments(first_private: bool) -> None:
    prompt = chars(("abc", first_private), ("def", not first_private))
    found = prompt.resolve([(0, 2), (2, 4), (4, 6)])
    assert found.segments[0].end == (2 if first_private else 1)
    # Between two of a kind it is that in which it begins.
    both = chars(("abc", first_private), ("def", first_private))
    assert both.resolve([(0, 2), (2, 4), (4, 6)]).segments[0].end == 2


def test_characters_that_do_not_fit_are_refused() -> None:
    prompt = chars(("abc", True), ("def", False))
    for offsets, why in [
        ([(0, 6)], r"segments\[1\]\.chars: no token"),
        ([(0, 3), (3, 7)], r"segments: 6 characters, but the text has 7"),
        ([(0, 3), (9, 12)], r"segments: 6 characters, but the text has 12"),
        ([(3, 6), (0, 3)], r"offsets\[1\]: begins before token 0"),
        ([], r"segments\[0\]\.chars: no token"),
    ]:
        with pytest.raises(SegmentError, match=why):
            prompt.resolve(offsets)
    with pytest.raises(SegmentError, match="in tokens already"):
        SegmentedPrompt().with_shared(1).resolve([(0, 1)])
    with pytest.raises(SegmentError, match="0 characters"):
        SegmentedPrompt(unit=Unit.CHARS).resolve([(0, 1)])


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6),
    st.lists(st.integers(1, 4), max_size=40),
)
def test_every_token_has_one_segment(pieces: list[tuple[int, bool]], sizes: list[int]) -> None:
    prompt = chars(*(("x" * length, private) for length, private in pieces))
    offsets, at = [], 0
    for size in sizes:
        end = min(at + size, prompt.length)
        if end > at:
            offsets.append((at, end))
        at = end
    found = attempt(lambda: prompt.resolve(offsets))
    if isinstance(found, SegmentError):
        assert "no token begins in it" in found.why
        return
    assert found is not None
    assert found.length == len(offsets)
    for segment, text in zip(found.segments, prompt.segments, strict=True):
        for begin, end in offsets[segment.begin : segment.end]:
            assert begin < text.end
            assert end > text.begin
            if not text.private:
                # What is shared holds nothing of its private neighbours.
                touched = [s for s in prompt.segments if s.begin < end and s.end > begin]
                assert not any(s.private for s in touched)


# Separators


def test_separators_end_segments() -> None:
    prompt = split([5, 6, 99, 7, 98, 98, 8], {98, 99, 50}, "f")
    assert prompt is not None
    assert prompt.family == "f"
    assert [(s.begin, s.end) for s in prompt.segments] == [(0, 3), (3, 5), (5, 6), (6, 7)]
    assert not any(s.private or s.id for s in prompt.segments)
    assert split([99], {99}) == SegmentedPrompt(None, (Segment(0, 1),))
    assert split([1, 2], {99}) is None
    assert split([], {99}) is None


def test_too_many_separators_are_refused() -> None:
    assert split([99] * MAX_SEGMENTS, {99}) is not None
    with pytest.raises(SegmentError, match=r"^prompt: .*more than 1024"):
        split([99] * MAX_SEGMENTS + [1], {99})
    with pytest.raises(SegmentError, match=r"^prompt: "):
        split([98, 99] * 10**5, {98, 99})


@given(st.lists(st.integers(0, 5), max_size=60), st.sets(st.integers(0, 5), max_size=3))
def test_separators_and_counts_say_the_same(prompt: list[int], separators: set[int]) -> None:
    found = split(prompt, separators)
    assert (found is None) == (not separators & set(prompt))
    if found is not None:
        assert parse(found.to_params(), prompt) == found
        for segment in found.segments[:-1]:
            inside = prompt[segment.begin : segment.end]
            assert inside[-1] in separators
            assert not separators & set(inside[:-1])


def test_only_the_standard_library_is_loaded() -> None:
    import subprocess

    code = "import sys, kmesh.segments; print(*{m.partition('.')[0] for m in sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"blake3", "google", "numpy"} & set(out.stdout.split())
