"""Recipes that the GPU's kernels make, run by the CPU, are those of the CPU's encoder."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from codec_cases import Family, Geometry, recovered
from cpu_device import CpuDevice
from gpu_families import ELEMENTS, Placed, encoded, families, nearly, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kmesh.codec import Encoder, Op, Provenance, Recipe, XorCode, decode
from kmesh.codec.assignment import Piece
from kmesh.codec.gpu import GpuBytes, GpuEncoder, GpuSegment
from kmesh.codec.judging import ExpectingPlanner
from kmesh.codec.passes import Marks, worth_limit
from kmesh.codec.records import UNIT
from kmesh.errors import RecipeError, RecipeMismatch, UnsupportedError
from kmesh.kernels.rotary import Rotary
from kmesh.layout import TILE_BYTES


@pytest.fixture
def device(kernels: ctypes.CDLL) -> Iterator[CpuDevice]:
    made = CpuDevice(kernels)
    yield made
    assert not made.busy
    assert not made.runtime.held


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    family=families(), off=st.sampled_from([0, 4]), multiprocessors=st.integers(1, 5),
    threads=st.sampled_from([1, 1, 5, 32]),
)  # fmt: skip
def test_any_member_gives_the_same_recipe(
    kernels: ctypes.CDLL, family: Family, off: int, multiprocessors: int, threads: int
) -> None:
    device = CpuDevice(kernels, multiprocessors, threads)
    same(device, family, off=off)
    assert not device.busy
    assert not device.runtime.held


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("pairs", [64, 40, 31])
def test_keys_are_turned_as_the_cpu_turns_them(
    device: CpuDevice, dtype: str, interleaved: bool, pairs: int
) -> None:
    geometry = Geometry(dtype=dtype, heads=2, head_dim=128)
    rotary = geometry.rotary(interleaved=interleaved, pairs=pairs)
    family = recovered(geometry, pairs, segments=[150, 90], own=[20, 7, 9], rotary=rotary)
    assert family.state.nbytes > 2 * TILE_BYTES
    ops = same(device, family).recipe.ops
    assert set(ops["kind"]) == {Op.LITERAL, Op.REF, Op.REF_ROT}
    assert ops["tokens"][ops["kind"] == Op.LITERAL].tolist() == [20, 7, 9] * 2


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_tokens_that_were_computed_anew_are_written_out(device: CpuDevice, dtype: str) -> None:
    family = recovered(Geometry(dtype=dtype, head_dim=40), 2, segments=[300], anew=0.15)
    recipe = same(device, family).recipe
    assert 50 < len(recipe.ops) < 300


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("off", [0, 4])
def test_small_differences_are_packed_as_the_cpu_packs_them(
    device: CpuDevice, dtype: str, off: int
) -> None:
    family = recovered(Geometry(dtype=dtype, heads=3, head_dim=20), 2, segments=[90, 30])
    ops = same(device, nearly(family, 0.5, 9, 4), off=off).recipe.ops
    differing = ops[ops["kind"] == Op.XOR]
    assert set(differing["code"]) == {XorCode.SPARSE}
    assert differing["turn"].any()
    assert not differing["turn"].all()


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (1, 6), (2, 64), (3, 10)])
def test_a_difference_is_worth_it_up_to_the_same_element(
    device: CpuDevice, dtype: str, heads: int, head_dim: int
) -> None:
    geometry = Geometry(dtype=dtype, layers=1, heads=heads, head_dim=head_dim)
    family = recovered(geometry, 6, segments=[40], own=[4, 4])
    limit = worth_limit(family.member)
    for token, changed in ((10, limit), (20, min(limit + 1, heads * head_dim))):
        at = np.arange(changed)
        family.state[0, :, at // head_dim, token, at % head_dim] ^= 1
    same(device, family)


@pytest.mark.parametrize(("head_dim", "off", "vector"), [(16, 0, 16), (16, 4, 4), (10, 0, 4)])
def test_vectors_are_as_large_as_everything_is_aligned(
    device: CpuDevice, head_dim: int, off: int, vector: int
) -> None:
    names = started(device)
    same(device, recovered(Geometry(head_dim=head_dim), 3, segments=[30]), off=off)
    assert names == [f"gather_{vector}", f"verify_{vector}"]


def started(device: CpuDevice) -> list[str]:
    """Kernels that are started from now on."""
    names: list[str] = []
    device.before = lambda name: names.append(name.removeprefix("kmesh_encode_"))
    return names


def test_what_provenance_says_is_written_at_once(device: CpuDevice) -> None:
    """Only what is wrong takes another pass; one more if differences are worth it."""
    once = ["gather_16", "verify_16"]
    family = recovered(Geometry(head_dim=16), 3, segments=[100, 60])
    names = started(device)
    same(device, family)
    assert names == once
    names.clear()
    family.state[0, 1, :, 50] ^= 0x5A5A
    same(device, family)
    assert names == [*once, "tell", *once]
    names.clear()
    family.state[1, 0, 0, 60, :3] ^= 0x5A5A
    same(device, family)
    assert names == [*once, "tell", "pack", *once, "unpack"]


def test_pieces_that_continue_one_another_are_one_op(device: CpuDevice) -> None:
    """Also where they are given in another order."""
    family = recovered(Geometry(head_dim=16), 3, segments=[100])
    (whole,) = family.provenance
    parts = [
        dataclasses.replace(
            whole, token=whole.token + at, source=whole.source + at, tokens=min(30, 100 - at)
        )
        for at in (60, 0, 90, 30)
    ]
    found = same(device, dataclasses.replace(family, provenance=tuple(parts)))
    assert len(found.recipe.ops) == 2 * 3
    # A hole, and one that does not continue.
    del parts[0]
    found = same(device, dataclasses.replace(family, provenance=tuple(parts)))
    assert len(found.recipe.ops) == 2 * 5


@pytest.mark.parametrize("plane", [0, 1])
def test_a_layer_of_its_own(device: CpuDevice, plane: int) -> None:
    family = recovered(Geometry(layers=3, heads=1, head_dim=8), 3, segments=[60])
    family.state[1, plane, :, 20] ^= 0x5A5A
    lists = same(device, family).recipe.runs["list"].tolist()
    assert lists == ([0, 1, 2, 1, 0, 1] if plane == 0 else [0, 1, 0, 2, 0, 1])


@pytest.mark.parametrize("kernel", [1, 2])
def test_keys_that_another_kernel_turned_are_written_out(device: CpuDevice, kernel: int) -> None:
    family = recovered(Geometry(head_dim=16), 3, segments=[80, 50])
    told = tuple(dataclasses.replace(one, kernel=kernel) for one in family.provenance)
    recipe = same(device, dataclasses.replace(family, provenance=told)).recipe
    assert (Op.REF_ROT in recipe.ops["kind"]) == (kernel == 1)


@pytest.mark.parametrize("shared", [0, 2, 30])
def test_what_shares_too_little_refers_to_nothing(device: CpuDevice, shared: int) -> None:
    family = recovered(Geometry(head_dim=16), 3, segments=[100], own=[30, 30])
    part = family.state[:, :, :, 30 + shared : 130]
    part[:] = Geometry(head_dim=16).draw(np.random.default_rng(1), 100 - shared)
    assert same(device, family).depends == (shared == 30)


def test_a_member_without_literals(device: CpuDevice) -> None:
    recipe = same(device, recovered(Geometry(head_dim=16), 3, segments=[100], own=[0, 0])).recipe
    assert recipe.head["literal_bytes"] == 0


def test_one_token_and_one_row(device: CpuDevice) -> None:
    same(device, recovered(Geometry(layers=1, heads=1, head_dim=2), 3, segments=[1], own=[0, 0]))


# ---- verification ----------------------------------------------------------------------


def change_once(
    device: CpuDevice, kernel: str, address: int, times: int = 1, bits: int = 1, run: int = 0
) -> None:
    """Flips bits before a kernel runs, for so many of its runs, the first of them that one."""
    runs = itertools.count()

    def before(name: str) -> None:
        if name.startswith(kernel) and run <= next(runs) < run + times:
            ctypes.c_uint8.from_address(address).value ^= bits

    device.before = before


def test_what_does_not_come_back_is_written_out(device: CpuDevice) -> None:
    family = recovered(Geometry(head_dim=16), 3, segments=[100], own=[5, 4])
    family.state[0, 1, :, 50] ^= 0x5A5A
    placed = Placed(device, family)
    # Run 2 begins with another row when the recipe is decoded that has what was found then: no
    # reference to that row holds.
    kept = family.base.segments[0].rows
    changed = placed.base.segments[0].address + 2 * kept[0].nbytes
    change_once(device, "kmesh_encode_verify", changed, run=1)
    encoder = GpuEncoder(placed.base, family.rotary, device=device)
    with encoder.encode(family.member, placed.payload, family.provenance, 0) as found:
        assert found.refused == 1
        recipe = found.recipe
    assert decode(found.data, family.base).tobytes() == family.state.tobytes()
    literal = [
        recipe.ops[recipe.lists["first"][number]]["tokens"] for number in recipe.runs["list"]
    ]
    assert literal == [5, 5, 6, 5]
    placed.free()


@pytest.mark.parametrize(
    ("kind", "byte"), [(Op.LITERAL, 0), (Op.LITERAL, 5 * 64 - 1), (Op.XOR, 0), (Op.XOR, -1)]
)
@pytest.mark.parametrize("run", [0, 3])
def test_data_that_were_damaged_are_noticed(
    device: CpuDevice, kind: Op, byte: int, run: int
) -> None:
    """Rows, a difference's bitmap, and its last element."""
    family = nearly(recovered(Geometry(head_dim=16), 3, segments=[100]), 1.0, 1, 3)
    recipe = same(device, family).recipe
    begin, end = _list_of(recipe, run)
    op = next(one for one in recipe.ops[begin:end] if one["kind"] == kind)
    at = len(recipe.file) - len(recipe.stored) + int(recipe.runs["offset"][run])
    data = recipe.file[at + int(op["data"]) * UNIT :][: int(op["size"]) * UNIT]
    within = byte if byte >= 0 else int(np.flatnonzero(data)[-1])
    # For one as provenance says, for one by what was found, and for one with literals instead.
    held = [device.runtime.malloc(2 * len(recipe.file)) for _ in range(3)]
    damaged = held[1] + at + int(op["data"]) * UNIT + within
    change_once(device, "kmesh_encode_verify", damaged, run=1)
    placed, rooms = Placed(device, family), iter(held)
    found = GpuEncoder(placed.base, family.rotary, device=device).encode(
        family.member, placed.payload, family.provenance, 0, place=lambda _size: next(rooms)
    )
    assert found.refused == 1
    assert decode(found.data, family.base).tobytes() == family.state.tobytes()
    assert next(rooms, None) is None
    for address in held:
        device.runtime.free(address)
    placed.free()


def _list_of(recipe: Recipe, run: int) -> tuple[int, int]:
    first, count = recipe.lists[recipe.runs["list"][run]].tolist()
    return first, first + count


def test_literals_that_never_come_back_are_an_error(device: CpuDevice) -> None:
    family = recovered(Geometry(head_dim=16), 3, segments=[100])
    room = device.runtime.malloc(1 << 20)
    ctypes.memmove(room, b"KMRECIPE", 8)
    placed = Placed(device, family)
    encoder = GpuEncoder(placed.base, family.rotary, device=device)
    data = Encoder(family.base, family.rotary).encode(
        family.member, family.state, family.provenance
    )
    change_once(device, "kmesh_encode_verify", room + len(data.data) - 20, 99)
    with pytest.raises(RecipeError, match="literals don't come back"):
        encoder.encode(
            family.member, placed.payload, family.provenance, 0, place=lambda _size: room
        )
    # A recipe without a head is none.
    assert ctypes.string_at(room, 8) != b"KMRECIPE"
    placed.free()
    device.runtime.free(room)


def test_a_row_that_nobody_compares_is_an_error(device: CpuDevice) -> None:
    family = recovered(Geometry(head_dim=16), 3, segments=[100])
    recipe = same(device, family).recipe
    number = int(np.flatnonzero(recipe.ops["kind"] == Op.REF)[0])
    ops_at = recipe.ops.ctypes.data - recipe.file.ctypes.data
    room = device.runtime.malloc(len(recipe.file))
    at = room + ops_at + number * recipe.ops.itemsize
    change_once(device, "kmesh_encode_verify", at, bits=Op.REF ^ Op.XOR)
    with (
        pytest.raises(RecipeError, match="bytes were compared"),
        encoded(device, family, place=lambda _size: room),
    ):
        pass
    device.runtime.free(room)


@pytest.mark.parametrize(
    ("kernel", "run"), [("verify", 0), ("pack", 0), ("gather", 1), ("verify", 1)]
)
@pytest.mark.parametrize("token", [0, 50])
def test_a_payload_that_changes_meanwhile_is_an_error(
    device: CpuDevice, kernel: str, run: int, token: int
) -> None:
    """Of a literal, and of a token that is near what the base has."""
    family = nearly(recovered(Geometry(head_dim=16), 3, segments=[100]), 1.0, 1, 3)
    placed = Placed(device, family)
    encoder = GpuEncoder(placed.base, family.rotary, device=device)
    address = placed.payload.address + token * family.member.row_bytes
    change_once(device, f"kmesh_encode_{kernel}", address, run=run)
    if (kernel, run, token) == ("verify", 0, 50):
        # Nothing has read it yet.
        with encoder.encode(family.member, placed.payload, family.provenance, 0) as found:
            decoded = decode(found.data, family.base)
        assert decoded.tobytes() == ctypes.string_at(placed.payload.address, placed.payload.size)
        assert decoded.tobytes() != family.state.tobytes()
    else:
        with pytest.raises(RecipeError, match="changed") as raised:
            encoder.encode(family.member, placed.payload, family.provenance, 0)
        assert raised.value.field == "payload_root"
    placed.free()


def test_a_payload_that_comes_to_differ_more_writes_no_further(device: CpuDevice) -> None:
    """Than its differences were given room for."""
    family = recovered(Geometry(head_dim=16), 3, segments=[100], own=[0, 0])
    family.state[:, :, :, 40, :2] ^= 1
    size = same(device, family).size
    placed = Placed(device, family)
    room = device.runtime.malloc(size)
    ctypes.memset(room, 0x5C, size + 64)
    (op,) = {40 * family.member.row_bytes}

    def before(name: str) -> None:
        if name == "kmesh_encode_pack":
            for run in range(family.member.runs * family.member.shard.heads):
                at = run * family.member.tokens * family.member.row_bytes + op
                ctypes.memset(placed.payload.address + at, 0xA6, family.member.row_bytes)

    device.before = before
    with pytest.raises(RecipeError, match="changed"):
        GpuEncoder(placed.base, family.rotary, device=device).encode(
            family.member, placed.payload, family.provenance, 0, place=lambda _size: room
        )
    assert ctypes.string_at(room + size, 64) == b"\x5c" * 64
    device.runtime.free(room)
    placed.free()


def test_differences_in_no_token_end_in_an_error() -> None:
    """Instead of another pass, and another."""
    member = recovered(Geometry(head_dim=16), 3, segments=[100], own=[0, 0]).member
    piece = Piece(0, member.tokens, 0, 0)
    planner = ExpectingPlanner(member, ([piece], [piece]), None)
    nothing = np.zeros((member.runs, -(-member.tokens // 32)), dtype=np.uint32)
    equal = np.full_like(nothing, 0xFFFFFFFF)
    equal[:, -1] = (1 << member.tokens % 32) - 1
    plans = planner.again(planner.plans(), Marks(equal, nothing))
    with pytest.raises(RecipeError, match="no token"):
        planner.again(plans, Marks(equal, nothing))


def test_a_gpu_that_refuses_leaves_nothing(device: CpuDevice) -> None:
    family = nearly(recovered(Geometry(head_dim=16), 3, segments=[100]), 0.5, 1, 3)
    placed = Placed(device, family)
    encoder = GpuEncoder(placed.base, family.rotary, device=device)

    for kernel in (
        "gather_16",
        "verify_16",
        "pack",
        "unpack",
        "tell",
    ):

        def refuse(name: str, kernel: str = kernel) -> None:
            if name == f"kmesh_encode_{kernel}":
                raise RuntimeError("refused")

        device.before = refuse
        with pytest.raises(RuntimeError, match="refused"):
            encoder.encode(family.member, placed.payload, family.provenance, 0)
    placed.free()


# ---- refusals --------------------------------------------------------------------------


def test_what_the_kernels_do_not_serve_says_why(device: CpuDevice) -> None:
    def refused(match: str, family: Family, **more: object) -> None:
        with pytest.raises(UnsupportedError, match=match), encoded(device, family, **more):
            pass

    odd = recovered(Geometry(head_dim=5), 1)
    refused("rows of 10 bytes", odd)
    refused("multiples of 4", recovered(Geometry(head_dim=8), 1), off=2)
    wide = Geometry(dtype="float32", layers=1, heads=1, head_dim=8192)
    refused("rows of 32768 bytes", recovered(wide, 1, segments=[2], own=[0, 0]))
    family = recovered(Geometry(head_dim=8), 1)
    refused("by content on the CPU", dataclasses.replace(family, provenance=()))
    with pytest.raises(UnsupportedError, match="segment 0 of the base is not in a GPU's memory"):
        GpuEncoder(family.base, family.rotary, device=device)


def test_members_that_can_not_be_of_the_family_are_refused(device: CpuDevice) -> None:
    family = recovered(Geometry(head_dim=8), 1)
    member, (given,) = family.member, family.provenance

    def refused(kind: type[RecipeError], field: str, **changes: object) -> None:
        with pytest.raises(kind) as raised, encoded(device, dataclasses.replace(family, **changes)):
            pass
        assert raised.value.field == field

    refused(RecipeError, "payload", state=family.state[:, :, :, 1:])
    refused(RecipeMismatch, "namespace", member=dataclasses.replace(member, namespace=b"x" * 32))
    key = family.base.segments[0].description.key
    refused(RecipeError, "key", member=dataclasses.replace(member, key=key))
    other = dataclasses.replace(given, delta=given.delta + 1)
    refused(RecipeError, "provenance.delta", provenance=(other,))
    unknown = Provenance(given.token, given.tokens, b"?" * 32, 0, given.delta)
    refused(RecipeError, "provenance.segment", provenance=(unknown,))
    refused(RecipeError, "pairs", rotary=None)
    wrong = Rotary(family.rotary.frequencies, False, "float16")
    refused(RecipeError, "dtype", rotary=wrong)


def test_a_place_is_a_multiple_of_64(device: CpuDevice) -> None:
    family = recovered(Geometry(head_dim=8), 1)
    with (
        pytest.raises(RecipeError, match="place"),
        encoded(device, family, place=lambda _size: 4096 + 16),
    ):
        pass


def test_a_segment_that_is_read_has_its_digest_and_root(device: CpuDevice) -> None:
    family = recovered(Geometry(head_dim=8), 1)
    placed = Placed(device, family)
    (kept,) = family.base
    found = GpuSegment.read(
        kept.description, GpuBytes(placed.base.segments[0].address, kept.rows.nbytes), device
    )
    assert (found.digest, found.root) == (kept.digest, kept.root)
    with pytest.raises(RecipeError, match="payload"):
        GpuSegment.read(kept.description, GpuBytes(found.address, 1), device)
    placed.free()
