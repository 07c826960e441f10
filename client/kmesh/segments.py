"""What a request says of its segments: which runs of its prompt others share, and its family.

The form in a request's body, beside ``prompt``::

    "kv_transfer_params": {"kmesh": {"family": "round-17", "segments": [
        {"tokens": 96, "private": true}, {"tokens": 416, "id": "minutes-16"}]}}

The same, built; with lengths in characters where the tokenizer is at hand::

    SegmentedPrompt("round-17").with_private(96).with_shared(416, "minutes-16").to_params()

    text = SegmentedPrompt("round-17", unit=Unit.CHARS)
    text.with_private(len(role)).with_shared(len(minutes), "minutes-16").resolve(offsets)

Segments follow each other without gaps and make up the whole prompt. ``parse`` reads what came in
a request and trusts nothing of it. Only the standard library is needed.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kmesh.errors import SegmentError

#: Segments of a request, at most.
MAX_SEGMENTS = 1024
#: Bytes of a family's name or a segment's id in UTF-8, at most.
MAX_NAME_BYTES = 128
#: Positions are 32 bits.
MAX_POSITION = 0xFFFFFFFF

_PLACE = "kmesh"
_FIELDS = ("family", "segments")
_ITEM_FIELDS = ("tokens", "chars", "id", "private")

#: Says which tokens an id named last, None if it is not known.
Known = Callable[[str], Sequence[int] | None]


class Unit(enum.Enum):
    """What positions count; the name of the field that holds them."""

    TOKENS = "tokens"
    CHARS = "chars"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a prompt.

    Attributes:
        begin, end: half-open, counted from the prompt's start.
        id: the orchestrator's name of the content, or empty.
        private: nobody else has it: it gets no key of its own.
    """

    begin: int
    end: int
    id: str = ""
    private: bool = False

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class SegmentedPrompt:
    """A prompt's segments, in order, without gaps from its start on.

    Attributes:
        family: name of the family that the request belongs to; None: of none.
        segments: at most ``MAX_SEGMENTS``.
        unit: what their positions count. Requests are in tokens.

    Raises:
        SegmentError: names the field that is not what it should be.
    """

    family: str | None = None
    segments: tuple[Segment, ...] = ()
    unit: Unit = Unit.TOKENS

    def __post_init__(self) -> None:
        if self.family is not None:
            _name(self.family, f"{_PLACE}.family")
        if not isinstance(self.unit, Unit):
            raise SegmentError(f"is {_kind(self.unit)}, not a Unit", field="unit")
        if not isinstance(self.segments, tuple):
            what = _kind(self.segments)
            raise SegmentError(f"is {what}, not a tuple", field=f"{_PLACE}.segments")
        if len(self.segments) > MAX_SEGMENTS:
            raise SegmentError(f"more than {MAX_SEGMENTS}", field=f"{_PLACE}.segments")
        at = 0
        for number, segment in enumerate(self.segments):
            here = _item(number)
            if not isinstance(segment, Segment):
                raise SegmentError(f"is {_kind(segment)}, not a Segment", field=here)
            _range((segment.begin, segment.end), at, MAX_POSITION, f"{here}.{self.unit.value}")
            if type(segment.private) is not bool:
                what = _kind(segment.private)
                raise SegmentError(f"is {what}, not true or false", field=f"{here}.private")
            if segment.id != "":
                _name(segment.id, f"{here}.id")
                if segment.private:
                    raise SegmentError("a private segment has none", field=f"{here}.id")
            at = segment.end

    @property
    def length(self) -> int:
        """Tokens, or characters, of all segments."""
        return self.segments[-1].end if self.segments else 0

    @property
    def shared(self) -> tuple[Segment, ...]:
        """The segments that have keys of their own."""
        return tuple(segment for segment in self.segments if not segment.private)

    def with_private(self, length: int) -> SegmentedPrompt:
        """With a segment more, which nobody else has."""
        return self._with(length, "", True)

    def with_shared(self, length: int, id: str = "") -> SegmentedPrompt:
        """With a segment more, which other requests may have at any position."""
        return self._with(length, id, False)

    def resolve(self, offsets: Sequence[tuple[int, int]]) -> SegmentedPrompt:
        """The same segments in tokens, by where a tokenizer says that each token lies.

        A token belongs to the segment in which it begins; one that reaches from a private segment
        into a shared one, or the other way round, belongs to the private one, so that what is
        shared has the same tokens everywhere. A token of no characters (a mark that the tokenizer
        adds) belongs to the segment of the token before it, or else to the first.

        Args:
            offsets: [begin, end) in characters of each token of the whole text, as ``tokenizers``
                and ``transformers`` give it (``return_offsets_mapping``).

        Raises:
            SegmentError: the segments are in tokens, do not make up the text, or one of them has no
                token; or the offsets are none, or not in order.
        """
        if self.unit is not Unit.CHARS:
            raise SegmentError("the segments are in tokens already", field="unit")
        lengths = [0] * len(self.segments)
        number = last = furthest = 0
        for index, (begin, end) in enumerate(_offsets(offsets)):
            if begin < end:
                if begin < last:
                    raise SegmentError(
                        f"begins before token {index - 1}", field=f"offsets[{index}]"
                    )
                last, furthest = begin, max(furthest, end)
                number = self._owner(begin, end, number)
            if number < len(lengths):
                lengths[number] += 1
        if furthest > self.length or not self.segments:
            raise SegmentError(
                f"{self.length} characters, but the text has {furthest}", field=f"{_PLACE}.segments"
            )
        prompt = SegmentedPrompt(self.family)
        for number, (segment, length) in enumerate(zip(self.segments, lengths, strict=True)):
            if not length:
                raise SegmentError("no token begins in it", field=f"{_item(number)}.chars")
            prompt = prompt._with(length, segment.id, segment.private)
        return prompt

    def to_params(self) -> dict[str, dict[str, object]]:
        """The value of ``kv_transfer_params`` in a request."""
        items: list[dict[str, object]] = []
        for segment in self.segments:
            item: dict[str, object] = {self.unit.value: segment.length}
            if segment.id:
                item["id"] = segment.id
            if segment.private:
                item["private"] = True
            items.append(item)
        said: dict[str, object] = {} if self.family is None else {"family": self.family}
        return {_PLACE: said | {"segments": items}} if items else {_PLACE: said}

    def _with(self, length: int, id: str, private: bool) -> SegmentedPrompt:
        field = f"{_item(len(self.segments))}.{self.unit.value}"
        begin = self.length
        begin, end = _range(length, begin, MAX_POSITION, field)
        return dataclasses.replace(
            self, segments=(*self.segments, Segment(begin, end, id, private))
        )

    def _owner(self, begin: int, end: int, first: int) -> int:
        """Number of the segment of a token; not before ``first``."""
        segments = self.segments
        while first < len(segments) and segments[first].end <= begin:
            first += 1
        if first < len(segments) and not segments[first].private:
            reaches = first + 1
            while reaches < len(segments) and segments[reaches].begin < end:
                if segments[reaches].private:
                    return reaches
                reaches += 1
        return first


def parse(
    params: object, prompt: Sequence[int], known: Known = lambda id: None
) -> SegmentedPrompt | None:
    """What a request says, checked against its prompt; None if it says nothing.

    A segment without ``tokens`` is as long as its id says: by an earlier segment of the same
    request, or by ``known``. A prompt without ``segments`` may still name a family; it has no
    segments then.

    Args:
        params: ``kv_transfer_params`` of the request, whatever it is.
        prompt: token ids.
        known: which tokens an id named last. It may name others now, if their number is said.

    Raises:
        SegmentError: names the field at fault.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise SegmentError(f"is {_kind(params)}, not an object", field="kv_transfer_params")
    if _PLACE not in params:
        return None
    said = _object(params[_PLACE], _PLACE, _FIELDS)
    family = _name(said["family"], f"{_PLACE}.family") if "family" in said else None
    if "segments" not in said:
        return SegmentedPrompt(family)
    items = said["segments"]
    field = f"{_PLACE}.segments"
    if not isinstance(items, list | tuple):
        raise SegmentError(f"is {_kind(items)}, not an array", field=field)
    if not 0 < len(items) <= MAX_SEGMENTS:
        raise SegmentError(f"{len(items)}, not between 1 and {MAX_SEGMENTS}", field=field)
    reader = _Reader(prompt, known)
    segments = tuple(reader.read(number, item) for number, item in enumerate(items))
    if segments[-1].end != len(prompt):
        raise SegmentError(
            f"{segments[-1].end} tokens, but the prompt has {len(prompt)}", field=field
        )
    return SegmentedPrompt(family, segments)


def split(
    prompt: Sequence[int], separators: Collection[int], family: str | None = None
) -> SegmentedPrompt | None:
    """Segments of a prompt that holds separator tokens; None if it holds none.

    Each segment ends with its separator; none is private, none has an id.

    Raises:
        SegmentError: there are more than ``MAX_SEGMENTS``.
    """
    ends: list[int] = []
    for separator in separators:
        at = 0
        # Found by the sequence itself: a look at each token of a long prompt takes a millisecond.
        while len(ends) <= MAX_SEGMENTS:
            try:
                at = prompt.index(separator, at) + 1
            except ValueError:
                break
            ends.append(at)
    if not ends:
        return None
    ends.sort()
    if ends[-1] != len(prompt):
        ends.append(len(prompt))
    if len(ends) > MAX_SEGMENTS:
        raise SegmentError(f"its separators make more than {MAX_SEGMENTS} segments", field="prompt")
    begins = [0, *ends[:-1]]
    return SegmentedPrompt(family, tuple(Segment(b, e) for b, e in zip(begins, ends, strict=True)))


class _Reader:
    """Reads the segments of one request, in order."""

    def __init__(self, prompt: Sequence[int], known: Known) -> None:
        self._prompt = prompt
        self._known = known
        self._at = 0
        self._named: dict[str, tuple[int, Sequence[int]]] = {}

    def read(self, number: int, item: object) -> Segment:
        here = _item(number)
        said = _object(item, here, _ITEM_FIELDS)
        if "chars" in said:
            raise SegmentError(
                "characters are turned into tokens where the tokenizer is,"
                " by SegmentedPrompt.resolve",
                field=f"{here}.chars",
            )
        private = said.get("private", False)
        if type(private) is not bool:
            raise SegmentError(f"is {_kind(private)}, not true or false", field=f"{here}.private")
        id = _name(said["id"], f"{here}.id") if "id" in said else ""
        if id and private:
            raise SegmentError("a private segment has none", field=f"{here}.id")
        earlier = self._named.get(id) if id else None
        if "tokens" in said:
            field = f"{here}.tokens"
            begin, end = _range(said["tokens"], self._at, len(self._prompt), field)
            if earlier is not None and not self._holds(begin, end, earlier[1]):
                raise _other(here, f"segment {earlier[0]}")
        elif not id:
            raise SegmentError("missing, and there is no id that says it", field=f"{here}.tokens")
        else:
            tokens = earlier[1] if earlier is not None else self._known(id)
            if tokens is None:
                raise SegmentError("not known: say its number of tokens once", field=f"{here}.id")
            begin, end = self._at, self._at + len(tokens)
            if not self._holds(begin, end, tokens):
                raise _other(here, f"segment {earlier[0]}" if earlier is not None else "before")
        self._at = end
        if id and earlier is None:
            self._named[id] = number, self._prompt[begin:end]
        return Segment(begin, end, id, private)

    def _holds(self, begin: int, end: int, tokens: Sequence[int]) -> bool:
        return end - begin == len(tokens) and list(self._prompt[begin:end]) == list(tokens)


def _offsets(said: object) -> Iterator[tuple[int, int]]:
    """What a tokenizer says of its tokens; one that is not fast says nothing."""
    if not isinstance(said, Iterable):
        raise SegmentError(f"is {_kind(said)}, not a list", field="offsets")
    for index, pair in enumerate(said):
        field = f"offsets[{index}]"
        try:
            begin, end = pair
            yield operator.index(begin), operator.index(end)
        except (TypeError, ValueError):
            raise SegmentError("is no pair of whole numbers", field=field) from None


def _item(number: int) -> str:
    return f"{_PLACE}.segments[{number}]"


def _other(here: str, than: str) -> SegmentError:
    return SegmentError(f"the prompt has other tokens here than {than}", field=f"{here}.id")


def _object(said: object, field: str, names: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(said, Mapping):
        raise SegmentError(f"is {_kind(said)}, not an object", field=field)
    for name in said:
        if name not in names:
            known = isinstance(name, str) and name.isidentifier() and len(name) <= 32
            raise SegmentError(
                f"{'' if known else 'a field '}is none of {', '.join(names)}",
                field=f"{field}.{name}" if known else field,
            )
    return said


def _name(said: object, field: str) -> str:
    if not isinstance(said, str):
        raise SegmentError(f"is {_kind(said)}, not a string", field=field)
    if not said:
        raise SegmentError("is empty", field=field)
    # A character takes a byte at least: nothing long is encoded to be measured.
    if len(said) > MAX_NAME_BYTES or not said.isprintable():
        raise SegmentError(f"not up to {MAX_NAME_BYTES} bytes of printable text", field=field)
    if len(said.encode(errors="replace")) > MAX_NAME_BYTES:
        raise SegmentError(f"longer than {MAX_NAME_BYTES} bytes", field=field)
    return said


def _range(said: object, at: int, limit: int, field: str) -> tuple[int, int]:
    """[begin, end) of a segment that has to begin at ``at``."""
    if isinstance(said, list | tuple):
        if len(said) != 2:
            raise SegmentError(f"{len(said)} numbers, not begin and end", field=field)
        begin, end = (_number(n, field) for n in said)
        if begin > at:
            raise SegmentError(f"begins at {_shown(begin)}: a gap behind {at}", field=field)
        if begin < at:
            raise SegmentError(
                f"begins at {_shown(begin)}: overlaps what ends at {at}", field=field
            )
    else:
        begin, end = at, at + _number(said, field)
    if end <= begin:
        raise SegmentError("is not at least 1", field=field)
    if end > limit:
        raise SegmentError(f"ends at {_shown(end)}, behind the last of {limit}", field=field)
    return begin, end


def _number(said: object, field: str) -> int:
    # A bool is an int to Python, but not to whoever wrote the request.
    if type(said) is not int:
        raise SegmentError(f"is {_kind(said)}, not a whole number", field=field)
    return said


def _shown(number: int) -> str:
    """As text; Python refuses to write down numbers that are long enough."""
    return str(number) if abs(number) <= 1 << 64 else "a number of more than 64 bits"


def _kind(said: object) -> str:
    names = {"NoneType": "null", "dict": "an object", "list": "an array", "str": "a string"}
    kind = type(said).__name__
    return names.get(kind, kind[:32])
