"""Real vLLM engines whose KV cache is on a GPU: what one process stores, another restores."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from daemon_process import Daemon, wait_for

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))

from driver import Engine, Result, settled, tokens, transfer

from benchmarks.gpu.recovered import Passage
from kmesh.cuda import driver as cuda
from kmesh.cuda.device import Device, see_all
from kmesh.kernels.rotary import Rotary
from kmesh.layout import Shard
from kmesh.session import Role, Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="no NVIDIA GPU"),
]

BLOCK = 16
LAYERS, HEADS, DIM = 4, 2, 64
WHOLE = Shard(0, LAYERS, 0, HEADS)
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def nvml() -> Iterator[Callable[[], int]]:
    """Bytes of the GPU that are used, by whoever."""
    # As the daemon counts.
    see_all()
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    yield lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    pynvml.nvmlShutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real, random weights; heads as large as attention on a GPU has them."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from tiny_model import write_model

    path = tmp_path_factory.mktemp("model")
    write_model(path, layers=LAYERS, heads=4, kv_heads=HEADS, head_dim=DIM)
    return path


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="kmesh-") as base:
        one = Daemon(
            Path(base) / "s",
            host_memory="512MiB",
            staging_memory="256MiB",
            gpu="0",
            gpu_memory="512MiB",
        )
        one.wait_populated()
        yield one
        try:
            one.stop()
        finally:
            one.kill()
        one.check_log()


@pytest.fixture(scope="module")
def start(model: Path, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts engines with the connector; they end with the module, unless closed before."""
    cache = tmp_path_factory.mktemp("cache")
    engines: list[Engine] = []

    def begin(connector: dict[str, Any] | None = None, **arguments: Any) -> Engine:
        usual: dict[str, Any] = {
            "dtype": "bfloat16",
            "block_size": BLOCK,
            "num_gpu_blocks_override": 1200,
            "max_model_len": 4096,
            "max_num_batched_tokens": 1024,
            "attention_backend": "FLASH_ATTN",
            "gpu_memory_utilization": 0.1,
            "transfer": transfer(daemon.socket_dir, **(connector or {})),
            "env": {
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                "TRITON_CACHE_DIR": str(cache / "triton"),
                # As the daemon counts.
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            },
        }
        engines.append(Engine(model, cache=cache, **{**usual, **arguments}))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def storing(start: Start) -> Engine:
    return start(hash_seed=1)


@pytest.fixture(scope="module")
def restoring(start: Start) -> Engine:
    """Another process, with another hash seed."""
    return start(hash_seed=2)


@pytest.fixture(scope="module")
def looking(start: Start) -> Engine:
    """An engine that stores nothing."""
    return start({"store": False})


@pytest.fixture(scope="module")
def on_gpu(start: Start) -> tuple[Engine, Engine]:
    """Two engines that store in the daemon's memory on their GPU."""
    words = {"tier": "gpu", "gpu_recipes": True}
    return start(words, hash_seed=3), start(words, hash_seed=4)


@pytest.fixture(scope="module", autouse=True)
def _up(storing: Engine, restoring: Engine, on_gpu: tuple[Engine, Engine]) -> None:
    """All start side by side."""
    for engine in (storing, restoring, *on_gpu):
        engine.up()
    # What the first context of this process leaves is not left by a test.
    see_all()
    Device(cuda.load(), "0").close()


def store(engine: Engine, daemon: Daemon, prompt: list[int]) -> Result:
    before = daemon.status().spans
    result = engine.one(prompt)
    settled(daemon, before + len(prompt) // 64 + (len(prompt) % 64 >= 16))
    return result


def own(engine: Engine, prompt: list[int]) -> Result:
    """What the engine says of a prompt that its own prefix cache has."""
    found = engine.one(prompt)
    assert found.restored == 0
    assert found.cached > 0
    return found


def check(result: Result, theirs: Result, restored: int) -> None:
    assert result.restored == restored
    assert result.same(theirs), (result, theirs)


@pytest.mark.parametrize("length", [128, 129, 200, 1025, 3000])
def test_what_one_engine_stores_another_restores(
    storing: Engine, restoring: Engine, daemon: Daemon, length: int
) -> None:
    prompt = tokens(length, seed=length)
    store(storing, daemon, prompt)
    # The same attention over the same pages: not only nearly the same answer.
    wanted = own(storing, prompt)
    known = min(length // 16 * 16, length - 1) // BLOCK * BLOCK
    check(restoring.one(prompt), wanted, known)
    counted = restoring.call("metrics")
    routes = [counted[f"vllm:kmesh_restored_bytes_{route}"] for route in ("kernel", "copy", "gpu")]
    assert sum(routes) == counted["vllm:kmesh_restored_bytes"] > 0
    assert routes[2] == 0


def test_through_the_gpus_own_memory(
    on_gpu: tuple[Engine, Engine], storing: Engine, daemon: Daemon
) -> None:
    one, other = on_gpu
    prompt = tokens(1500, seed=77)
    store(one, daemon, prompt)
    wanted = own(one, prompt)
    check(other.one(prompt), wanted, 1488)
    counted = other.call("metrics")
    assert counted["vllm:kmesh_restored_bytes_gpu"] == counted["vllm:kmesh_restored_bytes"] > 0
    (there,) = [row for row in daemon.status().tenants if row.name.endswith("@gpu0")]
    assert there.spans >= 1500 // 64
    # What lies in host memory alone is found too, and host engines don't see what is on the GPU.
    third = tokens(700, seed=78)
    store(storing, daemon, third)
    check(other.one(third), own(storing, third), 688)
    assert storing.one(prompt).restored == 0


def test_a_corrupt_span_is_computed(looking: Engine, storing: Engine, daemon: Daemon) -> None:
    prompt = tokens(1000, seed=5)
    store(storing, daemon, prompt)
    key = bytes.fromhex(looking.call("keys", prompt=prompt)[7])
    before = daemon.status().spans
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as session:
        with session.acquire(key, [WHOLE]) as lease:
            span = lease.entry(0)
        daemon.flip(span.offset + span.length // 2, span.slab)
        del session.index
    failed = looking.one(prompt)
    # The daemon drops it, so that the next restore ends before it: the same pages are restored,
    # and the same tokens computed behind them, without anything that fails.
    settled(daemon)
    wait_for(lambda: daemon.status().spans == before - 1, 30)
    looking.call("reset")
    wanted = looking.one(prompt)
    assert wanted.restored == 7 * 64
    check(failed, wanted, 7 * 64)


def test_two_engines_at_the_same_time(storing: Engine, restoring: Engine, daemon: Daemon) -> None:
    prompts = [tokens(900 + 50 * i, seed=300 + i) for i in range(6)]
    wanted = []
    for prompt in prompts:
        store(storing, daemon, prompt)
        wanted.append(own(storing, prompt))
    storing.call("reset")
    for engine in (storing, restoring):
        engine.begin("generate", prompts=prompts)
    for engine in (storing, restoring):
        for found, theirs in zip(engine.end(), wanted, strict=True):
            result = Result(**found)
            assert result.restored > 0
            assert result.tokens == theirs.tokens


def test_killed_while_it_restores(
    start: Start, storing: Engine, daemon: Daemon, nvml: Callable[[], int]
) -> None:
    prompts = [tokens(3000, seed=900 + i) for i in range(4)]
    for prompt in prompts:
        store(storing, daemon, prompt)
    settled(daemon)
    before, used = daemon.status(), nvml()
    victim = start(hash_seed=7).up()
    for number, prompt in enumerate(prompts):
        victim.call("add", name=str(number), prompt=prompt)
    victim.begin("run")
    wait_for(lambda: daemon.status().leases, 30)
    os.killpg(victim.pid, signal.SIGKILL)
    wait_for(lambda: not daemon.status().leases, 30)
    after = daemon.status()
    assert (after.leased_bytes, after.reservations) == (0, 0)
    assert after.staging_bytes == before.staging_bytes
    wait_for(lambda: nvml() <= used, 60)
    # Others restore what it was reading.
    storing.call("reset")
    assert storing.one(prompts[0]).restored == 2992
    victim.close()


def test_with_cuda_graphs(start: Start, storing: Engine, daemon: Daemon) -> None:
    prompt = tokens(800, seed=1200)
    store(storing, daemon, prompt)
    wanted = own(storing, prompt)
    graphs = start(
        hash_seed=8,
        enforce_eager=False,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    result = graphs.one(prompt)
    assert result.restored == 784
    assert result.tokens == wanted.tokens
    other = tokens(500, seed=1201)
    store(graphs, daemon, other)
    assert storing.one(other).restored == 496
    graphs.close()


def passage_of(
    engine: Engine, daemon: Daemon, model: Path, seed: int, gpu: Device | None = None
) -> Passage:
    """Six spans that an engine computes."""
    config = json.loads((model / "config.json").read_text())
    parameters = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    rotary = Rotary.from_parameters(parameters, head_dim=DIM, interleaved=False, dtype="bfloat16")
    minutes = tokens(384, seed=seed)
    store(engine, daemon, minutes)
    namespace = bytes.fromhex(engine.call("namespace"))
    return Passage(daemon.socket_dir, namespace, WHOLE, DIM, minutes, rotary, gpu)


def told(engine: Engine) -> dict[str, float]:
    """What an engine has counted, of loads."""
    found = engine.call("metrics")
    prefix = "vllm:kmesh_"
    return {name.removeprefix(prefix): value for name, value in found.items() if prefix in name}


def together(engines: Sequence[Engine], prompts: list[list[int]]) -> dict[Engine, list[Result]]:
    """All prompts at once, in all engines, without what their own caches have."""
    for engine in engines:
        engine.call("reset")
    for engine in engines:
        engine.begin("generate", prompts=prompts)
    return {engine: [Result(**found) for found in engine.end()] for engine in engines}


def test_a_round_of_siblings_out_of_recipes(
    storing: Engine, restoring: Engine, on_gpu: tuple[Engine, Engine], daemon: Daemon, model: Path
) -> None:
    """Two processes say out of recipes what they say out of the same dense spans."""
    engines, tiered = (storing, restoring), on_gpu[1]
    passage = passage_of(storing, daemon, model, seed=2000)
    beginnings = [tokens(64, seed=2100 + i) for i in range(4)]
    passage.store_siblings(beginnings)
    # Too few tokens behind it to be stored.
    prompts = [
        [*own, *passage.tokens, *tokens(10, seed=2200 + i)] for i, own in enumerate(beginnings)
    ]
    dense: dict[Engine, list[Result]] = {}
    for engine in engines:
        dense[engine] = []
        for prompt in prompts:
            engine.call("reset")
            dense[engine].append(engine.one(prompt))
            assert dense[engine][-1].restored == 448
    at_once = together(engines, prompts)
    before = {engine: told(engine) for engine in (*engines, tiered)}
    passage.join("round-2000", beginnings)
    wait_for(lambda: passage.mirrors("round-2000") == 24, 60)
    for engine in engines:
        for prompt, wanted in zip(prompts, dense[engine], strict=True):
            engine.call("reset")
            check(engine.one(prompt), wanted, 448)
    for engine, results in together(engines, prompts).items():
        for result, wanted in zip(results, at_once[engine], strict=True):
            assert (result.restored, wanted.restored) == (448, 448)
            assert result.tokens == wanted.tokens
    # What is in host memory is found from the tier on the GPU, too.
    for prompt, wanted in zip(prompts, dense[storing], strict=True):
        result = tiered.one(prompt)
        assert result.restored == 448
        assert result.tokens == wanted.tokens
    settled(daemon)
    for engine, rounds in ((storing, 2), (restoring, 2), (tiered, 1)):
        after, earlier = told(engine), before[engine]
        mirrored = after["restored_bytes_recipes"] - earlier["restored_bytes_recipes"]
        assert mirrored == rounds * 4 * 384 * LAYERS * 2 * HEADS * DIM * 2
        for name in ("recipes_decoded", "load_failed_corrupt", "load_failed_error"):
            assert after[name] == earlier[name]
    assert daemon.status().counters["spans_densified"] == 0


def test_a_round_of_siblings_out_of_recipes_on_the_gpu(
    on_gpu: tuple[Engine, Engine], daemon: Daemon, model: Path, device: Device
) -> None:
    """Base and recipes lie in the daemon's memory on the GPU, and none is made dense."""
    one, other = on_gpu
    passage = passage_of(one, daemon, model, seed=4500, gpu=device)
    beginnings = [tokens(64, seed=4600 + i) for i in range(4)]
    passage.store_siblings(beginnings)
    prompts = [
        [*own, *passage.tokens, *tokens(10, seed=4700 + i)] for i, own in enumerate(beginnings)
    ]
    dense = []
    for prompt in prompts:
        other.call("reset")
        dense.append(other.one(prompt))
        assert dense[-1].restored == 448
    (at_once,) = together([other], prompts).values()
    before, densified = told(other), daemon.status().counters["spans_densified"]
    passage.join("round-4500", beginnings)
    wait_for(lambda: passage.mirrors("round-4500") == 24, 60)
    for prompt, wanted in zip(prompts, dense, strict=True):
        other.call("reset")
        check(other.one(prompt), wanted, 448)
    (results,) = together([other], prompts).values()
    for result, wanted in zip(results, at_once, strict=True):
        assert (result.restored, wanted.restored) == (448, 448)
        assert result.tokens == wanted.tokens
    settled(daemon)
    after = told(other)
    gained = {name: after[name] - before[name] for name in after}
    mirrored = 2 * 4 * 384 * LAYERS * 2 * HEADS * DIM * 2
    assert gained["restored_bytes_recipes"] == mirrored
    assert gained["restored_bytes_gpu"] == gained["restored_bytes"] == mirrored * 448 // 384
    for name in ("recipes_decoded", "load_failed_corrupt", "load_failed_error"):
        assert gained[name] == 0
    assert daemon.status().counters["spans_densified"] == densified


def test_siblings_whose_base_is_bad(
    looking: Engine, storing: Engine, daemon: Daemon, model: Path
) -> None:
    """Each computes exactly what it can't restore."""
    passage = passage_of(storing, daemon, model, seed=3500)
    beginnings = [tokens(64, seed=3600 + i) for i in range(4)]
    passage.store_siblings(beginnings)
    passage.join("round-3500", beginnings)
    wait_for(lambda: passage.mirrors("round-3500") == 24, 60)
    settled(daemon)
    before = daemon.status().spans
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as session:
        with session.acquire(passage.chain(passage.tokens).key(3), [WHOLE]) as lease:
            span = lease.entry(0)
        daemon.flip(span.offset + span.length // 2, span.slab)
        del session.index
    prompts = [[*own, *passage.tokens, 5, 6, 7] for own in beginnings]
    failed = [looking.one(prompt) for prompt in prompts]
    # The daemon drops the base with its mirrors, so that the next restores end before them.
    settled(daemon)
    wait_for(lambda: daemon.status().spans == before - 5, 30)
    looking.call("reset")
    for prompt, found in zip(prompts, failed, strict=True):
        check(found, looking.one(prompt), 256)
