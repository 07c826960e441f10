"""The device worker's recipes, made by the GPU's kernels: those are compiled for a GPU, and then
run by the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from fake_cuda import MIB, FakeDriver, Gpu, refuse_nth
from recipe_bench import LENGTH, NAMESPACE, SHARD, GpuBench, HostBench

from kmesh.cuda import nvrtc
from kmesh.cuda.driver import Attribute
from kmesh.errors import CudaError
from kmesh.kernels.reference import turn
from kmesh.kernels.rotary import Rotary
from kmesh_spand import gpurecipes, ipc, jobmessages, messages

ROTARY = Rotary.from_parameters(
    {"rope_theta": 10000.0}, head_dim=64, interleaved=False, dtype="bfloat16"
)
SHAPE = (SHARD.layers, 2, SHARD.heads, 64, 64)
SHIFT = 16
#: Tokens 16 to 47 of the member are tokens 0 to 31 of the base.
PIECES = ((SHIFT, 32, 0, 0),)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[pytest.MonkeyPatch], None]:
    """Compiles once for all tests, really."""
    made: dict[str, bytes] = {}
    compile_text = nvrtc.Compiler.compile

    def kept(self: nvrtc.Compiler, text: str, name: str, options: tuple[str, ...]) -> bytes:
        if name not in made:
            made[name] = compile_text(self, text, name, options)
        return made[name]

    return lambda patch: patch.setattr(nvrtc.Compiler, "compile", kept)


@pytest.fixture
def bench(
    kernels: ctypes.CDLL,
    compiled: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[GpuBench]:
    compiled(monkeypatch)
    made = GpuBench(FakeDriver(kernels=lambda: kernels))
    yield made
    made.close()


def family() -> tuple[bytes, bytes]:
    """A base, and a member that has a part of it, turned."""
    rng = np.random.default_rng(5)
    base, own = (rng.integers(0x3C00, 0x3F80, SHAPE, dtype=np.uint16) for _ in range(2))
    own[:, :, :, SHIFT : SHIFT + 32] = base[:, :, :, :32]
    keys = np.ascontiguousarray(base[:, 0, :, :32])
    turned = turn(keys.reshape(-1, 64).view(np.uint8), ROTARY, SHIFT)
    own[:, 0, :, SHIFT : SHIFT + 32] = turned.view(np.uint16).reshape(keys.shape)
    return base.tobytes(), own.tobytes()


def both(bench: GpuBench | HostBench) -> tuple[jobmessages.Payload, jobmessages.Payload, bytes]:
    base, own = family()
    return bench.put(b"base", 0, base), bench.put(b"own", LENGTH, own), own


def made_by(bench: GpuBench | HostBench) -> tuple[ipc.AnyMessage, jobmessages.Payload, bytes]:
    base, own, payload = both(bench)
    return bench.encode(own, [base], PIECES, ROTARY.frequencies), base, payload


def read(bench: GpuBench | HostBench, answer: ipc.AnyMessage) -> bytes:
    """A recipe that was encoded, out of its range."""
    assert isinstance(answer, jobmessages.Encoded), answer
    assert answer.used == [0]
    bench.recipes.keep(jobmessages.KeepRecipe(answer.job, 0, 2 * LENGTH, answer.length))
    return bytes(bench.store.view(0, 2 * LENGTH, answer.length))


def test_the_gpu_makes_the_recipe_that_the_processor_makes(bench: GpuBench) -> None:
    answer, base, payload = made_by(bench)
    data = read(bench, answer)
    assert not bench.fallbacks
    assert bench.driver.launched == ["kmesh_encode_gather_16", "kmesh_encode_verify_16"]
    host = HostBench()
    expected, _, _ = made_by(host)
    assert data == read(host, expected)
    host.close()
    mirror = bench.put(b"own", 4 * LENGTH, data)
    assert bench.verify(mirror).length == LENGTH
    root = bench.verify(mirror).root
    job = jobmessages.Densify(9, mirror, [base], 0, 6 * LENGTH, LENGTH, root)
    assert bench.recipes.densify(job) == jobmessages.Densified(9, True)
    assert bytes(bench.store.view(0, 6 * LENGTH, LENGTH)) == payload


def test_it_compiles_once_and_reads_its_base_once(bench: GpuBench) -> None:
    base, own, _ = both(bench)
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    changed = jobmessages.Payload(**{**fields, "generation": base.generation + 1})
    copies = []
    for segment in (base, base, base, changed, changed):
        bench.driver.calls.clear()
        assert isinstance(
            bench.encode(own, [segment], PIECES, ROTARY.frequencies), jobmessages.Encoded
        )
        copies.append(bench.driver.calls.count("copy_async"))
        assert bench.driver.calls.count("load_module") == (len(copies) == 1)
    assert [number - min(copies) for number in copies] == [1, 0, 0, 1, 0]


def test_another_way_of_turning_is_another_family(bench: GpuBench) -> None:
    """The same base and namespace: only how pairs lie differs."""
    base, own, _ = both(bench)
    turned = bench.encode(own, [base], PIECES, ROTARY.frequencies)
    assert isinstance(turned, jobmessages.Encoded)
    job = jobmessages.Encode(
        7, own, NAMESPACE, "bfloat16", 64, SHARD.code(), [base], list(ROTARY.frequencies), True,
        list(PIECES),
    )  # fmt: skip
    other = bench.recipes.encode(job)
    assert isinstance(other, jobmessages.Encoded)
    assert other.length > turned.length, "keys that are not turned so are written out"


@pytest.mark.parametrize("what", ["span", "base"])
def test_memory_that_changed_makes_no_recipe(bench: GpuBench, what: str) -> None:
    base, own, _ = both(bench)
    where = own if what == "span" else base
    bench.damage(where.offset + 9, b"\x55")
    answer = bench.encode(own, [base], PIECES, ROTARY.frequencies)
    assert answer == jobmessages.EncodeSpoiled(1, what == "span", [0] if what == "base" else [])


def test_what_is_found_by_content_is_found_by_the_processor(bench: GpuBench) -> None:
    base, own, payload = both(bench)
    answer = bench.encode(own, [base])
    assert isinstance(answer, jobmessages.Encoded)
    assert bench.fallbacks == [messages.Fallback("encode", 0)]
    assert not bench.driver.launched
    mirror = bench.put(b"own", 4 * LENGTH, read(bench, answer))
    job = jobmessages.Densify(9, mirror, [base], 0, 6 * LENGTH, LENGTH, own.root)
    assert bench.recipes.densify(job) == jobmessages.Densified(9, True)
    assert bytes(bench.store.view(0, 6 * LENGTH, LENGTH)) == payload


def test_a_base_that_is_too_large_for_the_processor(
    bench: GpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpurecipes, "MOST_BYTES", 2 * LENGTH - 1)
    base, own, _ = both(bench)
    answer = bench.encode(own, [base])
    assert isinstance(answer, jobmessages.NotEncoded)
    assert "without the GPU" in answer.why
    assert isinstance(bench.encode(own, [base], PIECES, ROTARY.frequencies), jobmessages.Encoded)


class Elsewhere(FakeDriver):
    """Its GPU sees registered memory at other addresses than this process."""

    def device_pointer(self, address: int) -> int:
        return super().device_pointer(address) + 4096


@pytest.mark.parametrize("lacking", ["no compiler", "an unknown GPU", "memory", "addresses"])
def test_without_what_the_gpu_needs_the_processor_encodes(
    kernels: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lacking: str,
) -> None:
    """It is said once, and counted each time."""
    gpu = Gpu()
    if lacking == "no compiler":
        monkeypatch.setattr(nvrtc, "_candidates", lambda _major: ())
    elif lacking == "an unknown GPU":
        gpu = Gpu(attributes={Attribute.COMPUTE_MAJOR: 1})
    driver = Elsewhere if lacking == "addresses" else FakeDriver
    bench = GpuBench(driver(gpu, kernels=lambda: kernels))
    both(bench)
    held = bench.driver.ledger()["streams"]
    if lacking == "memory":
        bench.driver.refuse = full("allocate")
    host = HostBench()
    expected, _, _ = made_by(host)
    wanted = read(host, expected)
    host.close()
    for _ in range(3):
        answer, _, _ = made_by(bench)
        assert read(bench, answer) == wanted
    assert len(bench.fallbacks) == 3
    # Where there is no hope of kernels, nothing is kept for them.
    hopeful = lacking in ("memory", "addresses")
    assert bench.driver.ledger()["streams"] == held + hopeful
    (said,) = [r for r in caplog.records if "encoded by the processor" in r.getMessage()]
    reason = {
        "no compiler": "libnvrtc.so.13 or libnvrtc.so.12",
        "an unknown GPU": "does not compile: ",
        "memory": "OUT_OF_MEMORY",
        "addresses": "sees registered memory at another address",
    }
    assert reason[lacking] in said.getMessage()
    bench.close()


def full(call: str) -> Callable[[str], None]:
    """For ``refuse``: no memory of the GPU is left for that call."""

    def refuse(name: str) -> None:
        if name == call:
            raise CudaError(name, 2, "CUDA_ERROR_OUT_OF_MEMORY")

    return refuse


def test_kernels_that_find_no_memory_are_kept_for_when_there_is_some(
    bench: GpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled once, with one stream, however often they can't be loaded."""
    compiled: list[str] = []
    compile_text = nvrtc.Compiler.compile

    def counted(self: nvrtc.Compiler, text: str, name: str, options: tuple[str, ...]) -> bytes:
        compiled.append(name)
        return compile_text(self, text, name, options)

    monkeypatch.setattr(nvrtc.Compiler, "compile", counted)
    base, own, _ = both(bench)
    streams = bench.driver.ledger()["streams"]
    bench.driver.refuse = full("load_module")
    for _ in range(3):
        assert isinstance(
            bench.encode(own, [base], PIECES, ROTARY.frequencies), jobmessages.Encoded
        )
    assert (len(bench.fallbacks), bench.driver.launched) == (3, [])
    bench.driver.refuse = None
    assert isinstance(bench.encode(own, [base], PIECES, ROTARY.frequencies), jobmessages.Encoded)
    assert len(bench.fallbacks) == 3
    assert bench.driver.launched
    assert compiled == ["encode.cu"]
    assert bench.driver.ledger()["streams"] == streams + 1


@pytest.mark.parametrize("call", ["load_module", "allocate"])
def test_want_of_memory_is_no_verdict_on_a_span(
    bench: GpuBench, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It is too large for the processor: the job fails, and may be tried again."""
    monkeypatch.setattr(gpurecipes, "MOST_BYTES", 2 * LENGTH - 1)
    base, own, _ = both(bench)
    bench.driver.refuse = full(call)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        bench.encode(own, [base], PIECES, ROTARY.frequencies)
    bench.driver.refuse = None
    assert isinstance(bench.encode(own, [base], PIECES, ROTARY.frequencies), jobmessages.Encoded)
    assert not bench.fallbacks


def test_a_driver_that_fails_somewhere_leaves_nothing(
    kernels: ctypes.CDLL,
    compiled: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever call it is: the job fails, and the next one gives the same recipe."""
    compiled(monkeypatch)
    host = HostBench()
    expected, _, _ = made_by(host)
    wanted = read(host, expected)
    host.close()
    nth, failed = 0, set[str]()
    while True:
        nth += 1
        bench = GpuBench(FakeDriver(Gpu(total=64 * MIB), kernels=lambda: kernels))
        base, own, _ = both(bench)
        bench.driver.calls.clear()
        bench.driver.refuse = refuse_nth(nth)
        try:
            answer = bench.encode(own, [base], PIECES, ROTARY.frequencies)
        except CudaError as error:
            failed.add(error.call)
            bench.driver.refuse = None
            answer = bench.encode(own, [base], PIECES, ROTARY.frequencies)
            more = True
        else:
            more = len(bench.driver.calls) >= nth
            bench.driver.refuse = None
        assert read(bench, answer) == wanted
        bench.close()
        if not more:
            break
    assert {"launch", "register", "allocate", "copy_async", "fill_async", "load_module"} <= failed
