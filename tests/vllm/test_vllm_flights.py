"""Two engines miss the same document at the same moment: it is computed once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from daemon_process import Daemon
from driver import Engine, Result, settled, tokens, transfer

DOCUMENT, TAIL, NEW = 2048, 64, 2
#: However long the leader takes on a machine whose cores others spin on.
WAIT = {"flight_patience": 1_000_000, "flight_wait_ms": 300_000}


@pytest.fixture(scope="module")
def engines(start: Callable[..., Engine], shared_spand: Daemon) -> list[Engine]:
    """Both start side by side; their schedulers are in their processes, to count tokens there."""
    found = [
        start(
            transfer=transfer(shared_spand.socket_dir, **WAIT),
            max_model_len=4096,
            max_num_batched_tokens=1024,
        )
        for _ in range(2)
    ]
    for engine in found:
        engine.call("count_tokens", wait=400)
    return found


def leads(engine: Engine, daemon: Daemon, prompts: list[list[int]]) -> None:
    """The engine has these requests, and computes what they have in common for others too."""
    before = daemon.status().counters["flight_leads"]
    for n, prompt in enumerate(prompts):
        engine.call("add", name=f"r{n}", prompt=prompt, max_tokens=NEW)
    # It claims in the background; a step computes half of the document at most.
    while daemon.status().counters["flight_leads"] == before:
        engine.call("step")


def waits(engine: Engine, daemon: Daemon, prompts: list[list[int]]) -> None:
    """Another engine gets these, and waits."""
    before = daemon.status().counters["flight_joins"]
    engine.begin("generate", prompts=prompts, max_tokens=NEW)
    daemon.wait_status(lambda s: s.counters["flight_joins"] > before, seconds=120)


def test_a_document_is_computed_once_for_both(
    control: Engine, engines: list[Engine], shared_spand: Daemon
) -> None:
    document = tokens(DOCUMENT, seed=901)
    mine, theirs = (
        [document + tokens(TAIL, seed=seed + n) for n in range(4)] for seed in (910, 920)
    )
    first, second = engines
    before = dict(shared_spand.status().counters)
    leads(first, shared_spand, mine)
    waits(second, shared_spand, theirs)
    done = first.call("run", seconds=300, wait=400)
    results = [Result(**done[f"r{n}"]) for n in range(4)]
    restored = [Result(**result) for result in second.end(400)]
    computed = [engine.call("tokens") for engine in engines]
    # The first has the document, the second what the first has stored.
    own = 4 * (TAIL + NEW)
    assert DOCUMENT <= computed[0] <= DOCUMENT + own, computed
    assert computed[1] <= own, computed
    assert not any(result.restored for result in results)
    assert sorted(result.restored for result in restored) == [0, 0, 0, DOCUMENT]
    settled(shared_spand)
    after = shared_spand.status().counters
    assert after["flight_leads"] == before["flight_leads"] + 1
    # A wait ends with each part that is there, and another one begins.
    assert after["flight_shared"] > before["flight_shared"]
    # Half of it may have been there when the second engine came.
    shared = after["flight_shared_tokens"] - before["flight_shared_tokens"]
    assert DOCUMENT / 2 <= shared <= DOCUMENT
    for result, prompt in zip(results + restored, mine + theirs, strict=True):
        assert result.same(control.one(prompt, max_tokens=NEW))


def test_a_leader_whose_request_is_aborted_hands_over(
    control: Engine, engines: list[Engine], shared_spand: Daemon
) -> None:
    prompt = tokens(DOCUMENT, seed=902)
    first, second = engines
    before = shared_spand.status().counters["flight_promotions"]
    leads(first, shared_spand, [prompt])
    waits(second, shared_spand, [prompt])
    first.call("abort", name="r0")
    (result,) = (Result(**r) for r in second.end(400))
    assert shared_spand.status().counters["flight_promotions"] == before + 1
    assert result.same(control.one(prompt, max_tokens=NEW))
    assert first.call("settle")["requests"] == 0
    settled(shared_spand)
