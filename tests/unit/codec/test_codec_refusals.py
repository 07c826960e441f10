"""What the format calls wrong is refused, by both decoders, with the field named."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from codec_cases import Family, Geometry, recovered
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.tokendance import decoder as second
from experiments.tokendance.verify import golden_vectors, sealed, verify_golden
from kmesh.codec import Base, Encoder, Form, Recipe, Segment, decode
from kmesh.errors import RecipeChecksumError, RecipeError, RecipeFormatError, RecipeMismatch

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "recipe-format.md").read_text()
GOLDEN = [ROOT / "tests/data/recipes" / f"golden-{form}.kmr" for form in ("addressable", "cold")]


def _encode(family: Family, form: Form = Form.ADDRESSABLE) -> bytes:
    encoder = Encoder(family.base, family.rotary, form=form)
    return encoder.encode(family.member, family.state, family.provenance).data


@pytest.fixture(scope="module")
def family() -> Family:
    return recovered(Geometry(head_dim=64), 1, segments=[64, 40], own=[20, 7, 9])


@pytest.fixture(scope="module")
def file(family: Family) -> bytes:
    return _encode(family)


# ---- golden vectors -----------------------------------------------------------------------


def test_golden_files_are_those_of_the_page() -> None:
    assert [path.read_bytes() for path in GOLDEN] == list(golden_vectors(PAGE))


def test_the_second_decoder_passes_the_golden_vectors() -> None:
    assert verify_golden(PAGE) == 2


def test_golden_vectors_decode_to_what_the_page_says() -> None:
    geometry = Geometry(layers=1, heads=1, head_dim=4)
    keys = [0x3F80, 0x4000, 0x4040, 0x4080, 0x8000, 0x7FC1, 0x7F80, 1]
    keys += [0x3F00, 0xBFC0, 0, 0, 0x3F80, 0x3F80, 0x4000, 0x4000]
    values = [257 * i for i in range(1, 17)]
    state = np.array([*keys, *values], dtype="<u2")
    described = geometry.describe(b"A" * 32, 4, 10, namespace=b"N" * 32, generation=3)
    shard = type(described.shard)(0, 1, 0, 1)
    described = type(described)(described.key, described.namespace, "bfloat16", shard, 4, 4, 10, 3)
    out = decode(GOLDEN[0].read_bytes(), Base([Segment(described, state)]))
    member = [0x1111, 0x2222, 0x3333, 0x4444, 0xC000, 0x3F80, 0x4040, 0x4080]
    member += [0x7FFF, 0x7FFF, 0x7F80, 1, 0x3FC1, 0x3F00, 0, 0x8000]
    member += [0xBF80, 0x3E80, 0x4000, 0x4000, 0x5555, 0x6666, 0x7777, 0x8888]
    assert out.view("<u2").tolist() == [*member, *values]
    cold = decode(GOLDEN[1].read_bytes())
    assert cold.view("<u2").tolist() == [*range(0x3F00, 0x3F20), *[0x4080] * 32]


# ---- bytes that were changed ------------------------------------------------------------------

_HEAD = {
    "magic": (0, b"KMRECIPF"),
    "version": (8, b"\x02\x00"),
    "form": (10, b"\x03"),
    "dtype": (11, b"\x04"),
    "block_tokens": (12, b"\x11\x00"),
    "reserved": (14, b"\x01"),
    "tokens": (16, bytes(4)),
    "position": (20, b"\xff\xff\xff\x7f"),
    "layer_end": (26, b"\x03\x00"),
    "head_end": (30, b"\x01\x00"),
    "head_dim": (32, struct.pack("<I", 8193)),
    "segments": (36, struct.pack("<I", 65536)),
    "turns": (40, struct.pack("<I", 65536)),
    "pairs": (44, struct.pack("<I", 33)),
    "lists": (52, bytes(4)),
    "chunks": (56, b"\x01"),
    "literal_bytes": (64, struct.pack("<Q", 2**62)),
    "stored_bytes": (72, None),
    "file_bytes": (80, bytes(8)),
}


@pytest.mark.parametrize("field", _HEAD)
def test_fields_of_the_head(field: str, file: bytes, family: Family) -> None:
    at, value = _HEAD[field]
    changed = bytearray(file)
    if value is None:
        # The literals take one unit less, but nothing else says so.
        value = struct.pack("<Q", struct.unpack_from("<Q", file, at)[0] - 16)
        changed[at : at + 8] = value
        struct.pack_into("<Q", changed, 248, second.root(bytes(changed[:248])))
        bad = bytes(changed)
    else:
        changed[at : at + len(value)] = value
        bad = sealed(changed)
    with pytest.raises(RecipeFormatError) as refused:
        Recipe(bad)
    assert refused.value.field == field
    with pytest.raises(second.Refused) as again:
        second.Reader(bad)
    assert again.value.field == field


def _table(file: bytes, name: str) -> int:
    """Where a table begins."""
    recipe = Recipe(file)
    at = 256
    for one in ("segments", "turns", "lists", "ops", "runs", "chunks"):
        if one == name:
            return at
        at += getattr(recipe, one).nbytes
    return len(file) - len(recipe.stored)


def _op(number: int, at: int, form: str) -> Callable[[bytes], tuple[int, str]]:
    return lambda file: (_table(file, "ops") + 32 * number + at, form)


# Ops 0, 2, 4 of K are literal, 1 and 3 are turned; those of V are 5 to 9.
_TABLES: dict[str, tuple[Callable[[bytes], tuple[int, str]], int, str]] = {
    "segment without tokens": (lambda f: (256 + 80, "<I"), 0, "segments.tokens"),
    "segment too far": (lambda f: (256 + 84, "<I"), 2**31, "segments.position"),
    "segment with reserved bytes": (lambda f: (256 + 88, "<Q"), 1, "segments.reserved"),
    "turn by nothing": (lambda f: (_table(f, "turns"), "<i"), 0, "turns.delta"),
    "another kernel": (lambda f: (_table(f, "turns") + 4, "<H"), 2, "turns.kernel"),
    "pairs of a third kind": (lambda f: (_table(f, "turns") + 6, "<B"), 2, "turns.interleaved"),
    "turn with reserved bytes": (lambda f: (_table(f, "turns") + 7, "<B"), 1, "turns.reserved"),
    "list that begins late": (lambda f: (_table(f, "lists"), "<I"), 1, "lists.first"),
    "list without ops": (lambda f: (_table(f, "lists") + 4, "<I"), 0, "lists.count"),
    "list past the table": (lambda f: (_table(f, "lists") + 12, "<I"), 6, "lists.count"),
    "ops that no list has": (lambda f: (_table(f, "lists") + 12, "<I"), 4, "lists.count"),
    "LOWRANK": (_op(1, 0, "<B"), 5, "ops.kind"),
    "no kind": (_op(1, 0, "<B"), 0, "ops.kind"),
    "code of a reference": (_op(1, 1, "<B"), 1, "ops.code"),
    "no turn of a turned one": (_op(1, 2, "<H"), 0, "ops.turn"),
    "turn of a literal": (_op(0, 2, "<H"), 1, "ops.turn"),
    "turn that is not there": (_op(1, 2, "<H"), 3, "ops.turn"),
    "segment that is not there": (_op(1, 4, "<I"), 2, "ops.segment"),
    "segment of a literal": (_op(0, 4, "<I"), 1, "ops.segment"),
    "gap between ops": (_op(1, 8, "<I"), 21, "ops.token"),
    "op without tokens": (_op(1, 12, "<I"), 0, "ops.tokens"),
    "op past the member": (_op(0, 12, "<I"), 2**32 - 1, "ops.tokens"),
    "source past the segment": (_op(6, 16, "<I"), 1, "ops.source"),
    "source far past the segment": (_op(6, 16, "<I"), 2**32 - 1, "ops.source"),
    "source of a literal": (_op(0, 16, "<I"), 1, "ops.source"),
    "data elsewhere": (_op(2, 20, "<I"), 0, "ops.data"),
    "data of the wrong size": (_op(0, 24, "<I"), 1, "ops.size"),
    "data of a reference": (_op(1, 24, "<I"), 1, "ops.size"),
    "op with reserved bytes": (_op(0, 28, "<I"), 1, "ops.reserved"),
    "list that is not there": (lambda f: (_table(f, "runs"), "<I"), 2, "runs.list"),
    "values that are turned": (lambda f: (_table(f, "runs") + 24, "<I"), 0, "runs.list"),
    "run with reserved bytes": (lambda f: (_table(f, "runs") + 4, "<I"), 1, "runs.reserved"),
    "run elsewhere": (lambda f: (_table(f, "runs") + 8, "<Q"), 64, "runs.offset"),
    "run of another length": (lambda f: (_table(f, "runs") + 16, "<Q"), 64, "runs.length"),
}


@pytest.mark.parametrize("what", _TABLES)
def test_fields_of_tables(what: str, file: bytes, family: Family) -> None:
    where, value, field = _TABLES[what]
    at, form = where(file)
    changed = bytearray(file)
    struct.pack_into(form, changed, at, value)
    bad = sealed(changed)
    with pytest.raises(RecipeFormatError) as refused:
        decode(bad, family.base)
    assert refused.value.field == field
    with pytest.raises(second.Refused) as again:
        second.decode(bad, family.second_base)
    assert again.value.field == field


def test_a_wrong_distance(file: bytes, family: Family) -> None:
    changed = bytearray(file)
    at = _table(file, "turns")
    struct.pack_into("<i", changed, at, struct.unpack_from("<i", file, at)[0] + 1)
    with pytest.raises(RecipeFormatError) as refused:
        decode(sealed(changed), family.base)
    assert refused.value.field == "turns.delta"


@pytest.mark.parametrize("form", Form)
def test_any_cut(form: Form, family: Family) -> None:
    whole = _encode(family, form)
    for length in [0, 1, 7, 255, 256, 300, *range(400, len(whole), 4096), len(whole) - 1]:
        with pytest.raises(RecipeError):
            decode(whole[:length], family.base)
    with pytest.raises(RecipeFormatError, match="file_bytes"):
        decode(whole + b"\0", family.base)


@pytest.mark.parametrize("form", Form)
def test_any_flipped_bit(form: Form, family: Family) -> None:
    whole = _encode(family, form)
    rng = np.random.default_rng(1)
    for at in [*range(0, 640, 3), *rng.integers(0, len(whole), 200).tolist()]:
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        with pytest.raises(RecipeError):
            decode(bytes(changed), family.base)


def test_a_flipped_bit_under_new_sums_does_not_pass_the_payloads(
    file: bytes, family: Family
) -> None:
    changed = bytearray(file)
    changed[_table(file, "literals") + 9] ^= 1
    with pytest.raises(RecipeChecksumError) as refused:
        decode(sealed(changed), family.base)
    assert refused.value.field == "payload_root"


@settings(max_examples=300, deadline=None)
@given(data=st.data(), form=st.sampled_from(Form))
def test_decoders_agree_on_what_they_refuse(data: st.DataObject, form: Form) -> None:
    """Anything may be written over a recipe, with sums that are right again."""
    family = recovered(Geometry(head_dim=8), 2, segments=[20, 18], own=[3, 2, 1], anew=0.2)
    file = bytearray(_encode(family, form))
    end = len(file) - len(Recipe(bytes(file)).stored)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.one_of(st.integers(0, 183), st.integers(256, end + 40)))
        size = data.draw(st.sampled_from([1, 2, 4]))
        value = data.draw(st.one_of(st.binary(min_size=size, max_size=size), st.just(bytes(size))))
        at = min(at, len(file) - size)
        file[at : at + size] = value
    stored = struct.unpack_from("<Q", file, 72)[0]
    bad = sealed(file) if stored <= len(file) - 256 else bytes(file)
    limit = 1 << 20
    try:
        wanted = second.decode(bad, family.second_base, max_bytes=limit)[1]
    except second.Refused:
        with pytest.raises(RecipeError):
            decode(bad, family.base, max_bytes=limit)
    else:
        assert decode(bad, family.base, max_bytes=limit).tobytes() == wanted


# ---- bombs ------------------------------------------------------------------------------------


def _cold_with(frame: bytes, raw: int, claims: int | None = None) -> bytes:
    """The golden cold file with another frame for the high bytes of K."""
    file = bytearray(GOLDEN[1].read_bytes())
    del file[0x1E0:0x1EA]
    file[0x1E0:0x1E0] = frame
    struct.pack_into("<I", file, 0x160, claims or len(frame))
    struct.pack_into("<I", file, 0x158, raw)
    struct.pack_into("<Q", file, 72, len(file) - 0x1C0)
    struct.pack_into("<Q", file, 80, len(file))
    return sealed(file)


@pytest.mark.parametrize("size", [31, 33, 1 << 30])
def test_a_frame_that_claims_another_size_gets_no_memory(size: int) -> None:
    # One block of a run of zeros, repeated: few bytes that say they are many.
    frame = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", size) + b"\x03\x01\x00\x00"
    tracemalloc.start()
    try:
        with pytest.raises(RecipeFormatError) as refused:
            decode(_cold_with(frame, 64))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert refused.value.field == "chunks.stored"


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"no frame at all", id="no frame"),
        pytest.param(b"\x28\xb5\x2f\xfd\x20\x20", id="cut"),
        pytest.param(zstandard.compress(bytes(31))[:20], id="short"),
        pytest.param(
            zstandard.ZstdCompressor(write_content_size=False).compress(bytes(32)),
            id="says no size",
        ),
        pytest.param(zstandard.compress(bytes(32)) + b"more", id="something behind it"),
    ],
)
def test_what_is_no_frame_of_that_size(frame: bytes) -> None:
    assert len(frame) < 32
    for refuse in (
        lambda: decode(_cold_with(frame, 64)),
        lambda: second.decode(_cold_with(frame, 64), {}),
    ):
        with pytest.raises((RecipeFormatError, second.Refused)) as refused:
            refuse()
        assert refused.value.field == "chunks.stored"


@pytest.mark.parametrize("raw", [0, 8, 48, 80, 2**20 + 16])
def test_chunks_that_do_not_add_up(raw: int) -> None:
    frame = b"\x28\xb5\x2f\xfd\x20\x20\x03\x01\x00\x3f"
    bad = _cold_with(frame, raw)
    for refuse in (lambda: decode(bad), lambda: second.decode(bad, {})):
        with pytest.raises((RecipeFormatError, second.Refused)) as refused:
            refuse()
        assert refused.value.field in ("chunks.raw", "chunks.stored", "literal_bytes")


@pytest.mark.parametrize(
    ("at", "value", "field"),
    [
        pytest.param(4, 0, "chunks.stored", id="a plane without bytes"),
        pytest.param(12, 1, "chunks.stored", id="a third plane"),
        pytest.param(20, 1, "chunks.reserved", id="reserved bytes"),
        pytest.param(4, 31, "stored_bytes", id="less than is stored"),
    ],
)
def test_fields_of_chunks(at: int, value: int, field: str) -> None:
    file = bytearray(GOLDEN[1].read_bytes())
    struct.pack_into("<I", file, 0x158 + at, value)
    bad = sealed(file)
    for refuse in (lambda: decode(bad), lambda: second.decode(bad, {})):
        with pytest.raises((RecipeFormatError, second.Refused)) as refused:
            refuse()
        assert refused.value.field == field


def test_a_plane_that_is_longer_than_its_chunk() -> None:
    bad = _cold_with(bytes(33), 64)
    for refuse in (lambda: decode(bad), lambda: second.decode(bad, {})):
        with pytest.raises((RecipeFormatError, second.Refused)) as refused:
            refuse()
        assert refused.value.field == "chunks.stored"


def test_a_payload_larger_than_wanted_gets_no_memory() -> None:
    """A thousand references to the same tokens are a small recipe of a large member."""
    geometry = Geometry(layers=1, heads=1, head_dim=64)
    rng = np.random.default_rng(1)
    state = geometry.draw(rng, 64)
    base = Base([Segment(geometry.describe(b"segment", 64), state)])
    large = np.tile(state, (1, 1, 1, 256, 1))
    member = geometry.describe(b"member", 64 * 256)
    recipe = Encoder(base).encode(member, large)
    assert len(recipe.data) < large.nbytes / 100
    assert decode(recipe.data, base).tobytes() == large.tobytes()
    tracemalloc.start()
    try:
        with pytest.raises(RecipeMismatch) as refused:
            decode(recipe.data, base, max_bytes=large.nbytes - 1)
        assert tracemalloc.get_traced_memory()[1] < large.nbytes / 4
    finally:
        tracemalloc.stop()
    assert refused.value.field == "tokens"


# ---- sparse differences -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "value"),
    [
        pytest.param(0, 0x12, id="a bit past the end"),
        pytest.param(0, 0x06, id="more elements than there are data for"),
        pytest.param(0, 0x00, id="an element that no bit names"),
        pytest.param(5, 0x00, id="an element that does not differ"),
        pytest.param(15, 0x01, id="bytes behind the data"),
    ],
)
def test_sparse_differences_that_contradict_themselves(at: int, value: int) -> None:
    file = bytearray(GOLDEN[0].read_bytes())
    file[0x2A0 + at] = value
    geometry = Geometry(layers=1, heads=1, head_dim=4)
    described = geometry.describe(b"A" * 32, 4, 10, namespace=b"N" * 32, generation=3)
    described = type(described)(
        described.key,
        described.namespace,
        "bfloat16",
        type(described.shard)(0, 1, 0, 1),
        4,
        4,
        10,
        3,
    )
    keys = "803f004040408040 0080c17f807f0100 003fc0bf00000000 803f803f00400040"
    payload = bytes.fromhex(keys) + bytes(i for i in range(1, 17) for _ in (0, 1))
    base = Base([Segment(described, payload)])
    bad = sealed(file)
    with pytest.raises(RecipeFormatError) as refused:
        decode(bad, base)
    assert refused.value.field == "ops.data"
