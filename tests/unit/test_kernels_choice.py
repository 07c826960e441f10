"""What is decided before a kernel runs: the route, chunks of copies, rotations, compilation."""

from __future__ import annotations

import math
import re

import numpy as np
import nvrtc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import rotary

from kmesh import _host
from kmesh.errors import UnsupportedError
from kmesh.kernels import reference, sources
from kmesh.kernels import rotary as rotations
from kmesh.kernels.chooser import Rates, Route, choose
from kmesh.kernels.copying import chunks_of
from kmesh.kernels.cuda import H200, Memory, Restorer, Settings
from kmesh.kernels.host import PagedLayout
from kmesh.kernels.plan import RECORD
from kmesh.kernels.rotary import Rotary

# The route.


def test_small_restores_go_by_the_kernel_and_large_ones_by_copies() -> None:
    assert choose(1 << 20, 1, 16, H200) is Route.KERNEL
    assert choose(6 << 20, 4, 132, H200) is Route.KERNEL
    assert choose(1 << 28, 1, 16, H200) is Route.COPY


@settings(deadline=None)
@given(
    size=st.integers(1, 1 << 40), requests=st.integers(1, 64), blocks=st.integers(1, 1000),
    kernel=st.floats(1e9, 1e11), copy=st.floats(1e9, 1e11),
)  # fmt: skip
def test_the_choice_is_the_faster_route_within_a_hundredth(
    size: int, requests: int, blocks: int, kernel: float, copy: float
) -> None:
    rates = Rates(kernel, kernel / 8, copy, 3e12, 3e10, 2e-5, 1e-4, 4 << 20)
    chosen = choose(size, requests, blocks, rates)
    times = {
        Route.KERNEL: rates.kernel_time(size, requests, blocks),
        Route.COPY: rates.copy_time(size, requests, blocks),
    }
    assert times[chosen] <= min(times.values()) * 1.0102


@settings(deadline=None)
@given(st.integers(1, 1 << 34), st.integers(1, 16))
def test_more_blocks_never_cost_time(size: int, requests: int) -> None:
    for time in (H200.kernel_time, H200.copy_time):
        times = [time(size, requests, blocks) for blocks in (1, 2, 4, 8, 16, 64, 528)]
        assert times == sorted(times, reverse=True)


def test_a_large_payload_is_copied_where_blocks_are_few() -> None:
    assert choose(1 << 30, 1, 1, H200) is Route.COPY


@pytest.mark.parametrize(("size", "requests", "blocks"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_is_not_chosen_for(size: int, requests: int, blocks: int) -> None:
    with pytest.raises(ValueError, match="not all positive"):
        choose(size, requests, blocks, H200)


@pytest.mark.parametrize(
    "wrong", [{"max_ctas": 0}, {"host_ctas": 0}, {"gpu_stages": 0}, {"chunks": 1}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)


def test_without_cupy_it_says_what_to_install() -> None:
    try:
        import cupy  # noqa: F401
    except ImportError:
        layout = PagedLayout((0,), (0,), 16, 16, 16, 16, 1, 1, 16)
        with pytest.raises(UnsupportedError, match=r"\.\[cuda12\]"):
            Restorer(layout)
    else:
        pytest.skip("CuPy is installed")
    assert Memory("host") is Memory.HOST


# Chunks.


def payloads(addresses: list[int], lengths: list[int]) -> np.ndarray:
    records = np.zeros(len(addresses), RECORD)
    records["address"], records["length"] = addresses, lengths
    return records


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5000), max_size=40),
    gaps=st.lists(st.sampled_from([0, 0, 0, 64]), min_size=40, max_size=40),
    room=st.integers(5120, 40000),
    smallest=st.integers(1, 9000),
)
def test_chunks_bring_every_payload_to_where_it_is_said_to_be(
    lengths: list[int], gaps: list[int], room: int, smallest: int
) -> None:
    host, addresses, at = bytearray(), [], 0
    for i, length in enumerate(lengths):
        host += bytes(gaps[i]) + bytes([i + 1]) * length
        addresses.append(at + gaps[i])
        at = len(host)
    chunks = list(chunks_of(payloads(addresses, lengths), room, smallest))
    assert [p for c in chunks for p in range(c.begin, c.end)] == list(range(len(lengths)))
    for chunk in chunks:
        buffer = bytearray(room)
        for to, address, size in chunk.copies:
            assert to + size <= room
            buffer[to : to + size] = host[address : address + size]
        for part, offset in zip(range(chunk.begin, chunk.end), chunk.offsets, strict=True):
            assert offset % 256 == 0
            assert buffer[offset : offset + lengths[part]] == bytes([part + 1]) * lengths[part]


def test_chunks_get_smaller_towards_the_end_and_neighbours_are_one_copy() -> None:
    size = 1 << 20
    records = payloads([i * size for i in range(64)], [size] * 64)
    chunks = list(chunks_of(records, 16 * size, 4 * size))
    assert [c.end - c.begin for c in chunks] == [16, 16, 16, 8, 4, 4]
    assert [c.size for c in chunks] == [size * (c.end - c.begin) for c in chunks]
    assert all(len(list(c.copies)) == 1 for c in chunks)
    assert _host.payload_bytes(records) == (64 * size, size)


def test_what_fits_no_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        next(chunks_of(payloads([0, 64], [5, 65]), 64, 1))
    with pytest.raises(ValueError, match="whole records"):
        _host.chunks(bytes(100), 64, 1)
    with pytest.raises(ValueError, match="whole records"):
        _host.payload_bytes(bytes(100))
    assert list(chunks_of(payloads([], []), 64, 1)) == []


# Rotations.


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_turned_keys_are_those_of_the_other_position(dtype: str, interleaved: bool) -> None:
    """Against rotations by the whole angles in float64, within the dtype's rounding."""
    dim, position, delta = 64, 1000, 77
    how = rotary(dtype, dim * (4 if dtype == "float32" else 2), interleaved=interleaved)
    plain = np.random.default_rng(1).standard_normal((50, dim))

    def rotated(at: int) -> np.ndarray:
        angles = at * np.array(how.frequencies)
        one = slice(0, dim, 2) if interleaved else slice(0, dim // 2)
        two = slice(1, dim, 2) if interleaved else slice(dim // 2, dim)
        a, b, out = plain[:, one], plain[:, two], np.empty_like(plain)
        out[:, one] = a * np.cos(angles) - b * np.sin(angles)
        out[:, two] = b * np.cos(angles) + a * np.sin(angles)
        return out

    cached = reference._narrow(rotated(position).astype(np.float32), dtype)
    turned = reference._widen(reference.turn(cached, how, delta), dtype)
    error = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    assert np.abs(turned - rotated(position + delta)).max() < error


def test_what_is_not_rotated_stays() -> None:
    how = rotary("bfloat16", 256, part=0.5)
    keys = np.random.default_rng(2).integers(0, 256, (8, 256), dtype=np.uint8)
    turned = reference.turn(keys, how, 5)
    assert (turned[:, 128:] == keys[:, 128:]).all()
    assert (turned[:, :128] != keys[:, :128]).any()


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "mrope", "something new"])
def test_rotations_that_depend_on_more_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=kind):
        Rotary.from_parameters(
            {"rope_theta": 1e4, "rope_type": kind}, head_dim=64, interleaved=False, dtype="float16"
        )


def test_scaled_keys_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="fp8"):
        Rotary((1.0,), False, "fp8_e4m3")


LLAMA3 = {
    "rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_frequencies() -> None:
    def made(**parameters: object) -> tuple[float, ...]:
        return Rotary.from_parameters(
            parameters, head_dim=8, interleaved=False, dtype="float16"
        ).frequencies

    assert made(rope_theta=1e4) == pytest.approx((1.0, 0.1, 0.01, 0.001))
    assert made(rope_theta=1e4, type="linear", factor=4) == pytest.approx(
        (0.25, 0.025, 0.0025, 0.00025)
    )
    assert len(made(rope_theta=1e4, partial_rotary_factor=0.5)) == 2
    plain, scaled = made(rope_theta=5e5), made(**LLAMA3)
    # Waves of up to 2048 tokens stay, those of 8192 and more are stretched eightfold.
    assert scaled[0] == plain[0]
    assert scaled[3] == pytest.approx(plain[3] / 8)
    assert plain[2] / 8 < scaled[2] < plain[2]


@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 0}, {"factor": None}, {"high_freq_factor": 1.0}, {"rope_theta": math.nan},
     {"partial_rotary_factor": 0.0}, {"partial_rotary_factor": 2.0}],
)  # fmt: skip
def test_parameters_that_make_no_sense_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Rotary.from_parameters({**LLAMA3, **change}, head_dim=8, interleaved=False, dtype="float16")


def test_angles_of_long_distances_keep_their_precision() -> None:
    how = rotary("float32", 64)
    table = np.frombuffer(rotations.turns(how, 10**6), dtype=np.float32).reshape(-1, 2)
    assert np.allclose((table.astype(np.float64) ** 2).sum(axis=1), 1, atol=1e-6)
    assert table[0] == pytest.approx((math.cos(1e6), math.sin(1e6)), abs=1e-7)


# Compilation.

#: Registers of a thread with which as many blocks fit as the launch bounds say; of a kernel that
#: moves units one, of 640 threads.
REGISTERS, UNIT_REGISTERS = 80, 96


@pytest.mark.parametrize("program", sources.PROGRAMS)
def test_the_text_for_the_runtime_compiler_is_complete(program: str) -> None:
    text = sources.text(program)
    assert '#include "' not in text
    assert text.count("struct Job {") == 1
    assert re.search(rf"\bkmesh_{program}(_\w+)?_16\b", text)


def test_a_crew_waits_for_each_other_wherever_its_warps_are() -> None:
    """``bar.sync`` is for warps whose threads all run as one, which nothing assures there."""
    for program in sources.PROGRAMS:
        text = sources.text(program)
        assert not re.search(r"\bbar\.sync\b", text)
        assert not re.search(r"\bbarrier\.sync\.aligned\b", text)


def test_registers_leave_room_for_a_block_that_moves_units() -> None:
    """A multiprocessor has 65,536 of them, and gives each thread of a warp eight at a time."""
    (threads,) = re.findall(r"KM_ENTRY\(\w*units\w*, .*, (\d+), 1\)", sources.text("restore"))
    assert 65_536 // int(threads) // 8 * 8 == UNIT_REGISTERS


def text_entries(program: str) -> int:
    """Kernels of a program."""
    return len(re.findall(r"^KM_(UPLOAD_|FETCH_)?ENTRY\(", sources.text(program), re.MULTILINE))


@pytest.mark.timeout(300)
def test_kernels_compile_without_spills(all_kernels: nvrtc.Kernels) -> None:
    found = all_kernels.compiled()
    assert len(found) == len(nvrtc.ARCHITECTURES) * len(sources.PROGRAMS)
    for architecture, program, code, said in found:
        about = f"{program} for {architecture}: {said}"
        assert code == b"\x7fELF".hex(), about
        assert "warning" not in said, about
        registers = re.findall(r"entry function '(\w+)' for '\w+'[^']*?Used (\d+) registers", said)
        spills = re.findall(r"(\d+) bytes spill", said)
        assert registers, about
        assert len(registers) == text_entries(program), about
        for name, count in registers:
            assert int(count) <= (UNIT_REGISTERS if "units" in name else REGISTERS), about
        assert set(spills) == {"0"}, about


def test_the_compiler_refuses_what_is_no_program() -> None:
    with pytest.raises(nvrtc.CompileError, match="nothing_of_the_kind"):
        nvrtc.compile_text("int x = nothing_of_the_kind;", "x.cu", ["-arch=sm_90"])
