"""The wait rule: what it says of single cases, and what herds that follow it come to."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import pytest

from kmesh_vllm.rates import Rates
from kmesh_vllm.waiting import STORING, Outlook, goes_on, own, remaining, worth_waiting

#: A document of 8,000 tokens that takes two seconds alone, and a tenth of one to restore.
FRESH = Outlook(
    whole=8_000,
    missing=8_000,
    covered=8_000,
    ahead=8_000,
    landed=0,
    computed=0,
    seen=0,
    landing=0.0,
    age=0.0,
    quiet=0.0,
    pause=0.0,
    beside=False,
    waited=0.0,
    left=60.0,
    queue=1,
    prefill=4_000.0,
    restore=80_000.0,
    patience=3,
)


def case(**changes: float) -> Outlook:
    return dataclasses.replace(FRESH, **changes)  # type: ignore[arg-type]


def landing(seconds: float) -> Outlook:
    """An eighth was seen to land within so many seconds, long after the leader began."""
    return case(
        missing=7_000, covered=7_000, age=4.0, waited=2.0, landed=1_000, ahead=7_000, seen=1_000,
        landing=seconds,
    )  # fmt: skip


def short(seconds: float) -> Outlook:
    """4,096 tokens that take a tenth of a second alone, of which 704 landed within so many."""
    return case(
        whole=4_096, missing=3_392, covered=3_392, ahead=3_392, prefill=43_000.0, age=0.16,
        waited=0.16, landed=704, seen=704, landing=seconds,
    )  # fmt: skip


def slow(**changes: float) -> Outlook:
    """A half was computed in three times what the whole takes alone, by an engine on this one's
    device.
    """
    known = {
        "computed": 4_000, "landed": 4_000, "ahead": 4_000, "missing": 4_000, "covered": 4_000,
        "age": 6.0, "waited": 6.0, "quiet": 0.1, "pause": 0.5, "beside": True,
    }  # fmt: skip
    return case(**(known | changes))


@pytest.mark.parametrize(
    ("outlook", "waits"),
    [
        (case(), True),
        # One that came a moment after the leader, and one that came late.
        (case(age=1.0), True),
        (case(age=1.9, landed=7_000, ahead=1_000), True),
        # As slow as patience has it, and slower.
        (case(missing=7_000, covered=7_000, age=2.0, landed=1_000, ahead=7_000), True),
        (case(missing=7_000, covered=7_000, age=2.6, landed=1_000, ahead=7_000), False),
        # It landed all that this request saw within a moment, and may have paused for a while.
        (landing(0.2), True),
        (landing(0.7), False),
        # Nothing was heard of the leader for too long.
        (case(age=6.0, waited=6.0, quiet=6.0), True),
        (case(age=6.2, waited=6.2, quiet=6.2), False),
        # A short document, whose leader has begun to store.
        (short(0.03), True),
        (short(0.15), False),
        (case(age=3.0, waited=3.0), True),
        # The flight brings little of what is missing: it costs nothing to wait for it.
        (case(covered=1_000, ahead=1_000), True),
        # It brings what little is missing, but only after all the rest.
        (case(whole=500, missing=500, covered=500, ahead=8_000), False),
        # Restoring is slower than computing.
        (case(restore=1_000.0), False),
        # The request has no time left.
        (case(left=1.0), False),
        (case(left=0.0), False),
        # It has waited already, for flights that came to nothing.
        (case(waited=3.9), True),
        (case(waited=4.2), False),
        # Those who wait here would compute one after the other.
        (case(waited=4.0, queue=4), True),
        # It is slow, and its device is not ours; or it is, and it is quiet; or slower than that.
        (slow(beside=False), False),
        (slow(), True),
        (slow(quiet=2.0, age=6.5, waited=6.5), False),
        (slow(age=40.0, waited=40.0), False),
        # It has computed all that is missing, which lands.
        (case(age=6.3, waited=6.3, computed=8_000, quiet=0.1, pause=2.0), True),
        (case(age=6.3, waited=6.3, computed=8_000, quiet=4.3, pause=2.0), False),
        # The same where computing is done sooner than the last steps are.
        (
            case(
                age=6.3,
                waited=6.3,
                landed=6_000,
                ahead=2_000,
                missing=2_000,
                covered=2_000,
                computed=7_900,
                quiet=0.1,
                pause=0.5,
            ),
            True,
        ),
    ],
)
def test_cases(outlook: Outlook, waits: bool) -> None:
    assert worth_waiting(outlook) is waits


def test_silence_makes_a_leader_slow() -> None:
    assert remaining(case()) == 2.0
    assert remaining(case(age=1.5)) == 0.5
    assert remaining(case(age=6.0)) == 0.0
    half = {"landed": 4_000, "ahead": 4_000}
    assert remaining(case(age=1.0, **half)) == 1.0
    assert remaining(case(age=4.0, **half)) == 3.0
    assert remaining(case(age=40.0, **half)) == 27.0
    # What is computed has to land yet, at the pace at which that is seen, or soon.
    done = {"computed": 8_000, **half}
    assert remaining(case(age=1.0, quiet=0.2, **done)) == pytest.approx(0.1)
    assert remaining(case(age=1.0, quiet=0.2, seen=4_000, landing=0.6, **done)) == 0.6


def test_a_leader_goes_on_until_it_is_quiet_for_several_of_its_pauses() -> None:
    assert not goes_on(case())
    assert goes_on(case(computed=1, pause=0.5, quiet=1.7))
    assert goes_on(case(landed=1, pause=0.5, quiet=1.7))
    assert not goes_on(case(computed=1, pause=0.5, quiet=1.8))


def test_on_a_shared_device_everybody_is_as_slow_as_the_leader() -> None:
    half = {"computed": 4_000, "landed": 4_000, "ahead": 4_000, "missing": 4_000}
    # As the leader, in so far as a quarter of the whole at this engine's own rate is believed.
    assert own(case(age=2.5, **half)) == 1.0
    assert own(case(age=2.5, beside=True, **half)) == 4.0
    # Nobody is believed to be slowed down any more than four times by others.
    assert own(case(age=1e3, beside=True, **half)) == 8.0
    # A leader that is faster makes nobody faster.
    assert own(case(age=0.1, beside=True, **half)) == 2.0


def test_rates_follow_what_is_measured() -> None:
    rates = Rates()
    before = rates.prefill, rates.restore
    rates.prefilled(100, 1.0)
    rates.prefilled(10_000, 0.0)
    rates.restored(10, 1.0)
    assert (rates.prefill, rates.restore) == before
    for _ in range(30):
        rates.prefilled(10_000, 1.0)
        rates.restored(200_000, 1.0)
    assert rates.prefill == pytest.approx(10_000, rel=0.01)
    assert rates.restore == pytest.approx(200_000, rel=0.01)


TICK = 0.02
ALONE = 2.0


@dataclass
class Runner:
    """One engine with the document, and what it does with it."""

    name: int
    speed: float  # of its prefill; 1 is as its own rate says
    dies: float  # seconds after it began to lead
    stores: bool
    arrives: float
    state: str = "new"
    began: float = 0.0
    waited: float = 0.0
    since: float = 0.0
    ended: float | None = None
    done: float = 0.0  # tokens that it has
    computed: float = 0.0  # … by its own work
    whole: int = 0

    def outlook(self, air: Air, now: float, queue: int) -> Outlook:
        age = now - air.began
        missing = 8_000 - int(air.landed)
        waited = self.waited + now - self.since
        return case(
            whole=self.whole,
            missing=missing,
            covered=missing,
            ahead=missing,
            landed=int(air.landed - air.found),
            quiet=age,
            seen=0,
            landing=0.0,
            age=age,
            waited=waited,
            left=60.0 - waited,
            queue=queue,
        )


@dataclass
class Air:
    """The flight of the document, as the daemon keeps it, and what is stored of it.

    ``found`` was there when its present leader began.
    """

    leader: Runner | None = None
    began: float = 0.0
    landed: float = 0.0
    found: float = 0.0
    waiters: list[Runner] = field(default_factory=list)
    deaths: int = 0
    held: bool = False


def herd(runners: list[Runner], chunk: int = 1_000) -> Air:
    """Lets them all come and want one document; until each has it or is dead."""
    air, now = Air(), 0.0

    def lead(runner: Runner) -> None:
        runner.state, runner.began, runner.done = "leads", now, air.landed
        air.leader, air.began, air.found = runner, now, air.landed

    def compute(runner: Runner) -> None:
        runner.state, runner.began, runner.done = "alone", now, air.landed
        runner.waited += now - runner.since

    def fail() -> None:
        assert air.leader is not None
        air.leader.state, air.leader, air.deaths = "dead", None, air.deaths + 1
        air.held = air.deaths >= 2
        if air.held:
            for runner in air.waiters:
                compute(runner)
            air.waiters.clear()
        elif air.waiters:
            runner = air.waiters.pop(0)
            runner.waited += now - runner.since
            lead(runner)

    while any(runner.state != "dead" and runner.ended is None for runner in runners):
        now += TICK
        assert now < 600, "somebody never ended"
        for runner in runners:
            if runner.state == "new" and runner.arrives <= now:
                runner.since = now
                if air.held:
                    compute(runner)
                elif air.leader is None and air.landed < 8_000:
                    lead(runner)
                else:
                    runner.state, runner.whole = "waits", 8_000 - int(air.landed)
                    air.waiters.append(runner)
            if runner.state in ("leads", "alone") and runner.ended is None:
                runner.done += TICK * 4_000 * runner.speed
                runner.computed += TICK * 4_000 * runner.speed
                if runner.state == "leads" and now - runner.began >= runner.dies:
                    fail()
                    continue
                if runner.state == "leads" and runner.stores:
                    air.landed = max(air.landed, runner.done // chunk * chunk)
                if runner.done >= 8_000:
                    runner.ended = now
                    if air.leader is runner:
                        air.leader = None
                        if not runner.stores:
                            for other in air.waiters:
                                compute(other)
                            air.waiters.clear()
        for runner in list(air.waiters):
            if air.landed >= 8_000:
                air.waiters.remove(runner)
                runner.state, runner.ended = "restored", now + 8_000 / 80_000
            elif not worth_waiting(runner.outlook(air, now, 1)):
                air.waiters.remove(runner)
                compute(runner)
    return air


def crowd(count: int, **first: float) -> list[Runner]:
    """All come at once; the first is as said."""
    rest = [Runner(n, 1.0, 1e9, True, 0.01 * n) for n in range(1, count)]
    leader = {"speed": 1.0, "dies": 1e9, "stores": True, "arrives": 0.0} | first
    return [Runner(0, **leader), *rest]  # type: ignore[arg-type]


def computed(runners: list[Runner]) -> float:
    """How often the document was computed."""
    return sum(runner.computed for runner in runners) / 8_000


def slowest(runners: list[Runner]) -> float:
    return max(r.ended - r.arrives for r in runners if r.ended is not None)


def test_a_herd_computes_once() -> None:
    runners = crowd(32)
    herd(runners)
    assert [runner.state for runner in runners] == ["leads"] + ["restored"] * 31
    assert computed(runners) == pytest.approx(1.0, abs=0.02)
    assert slowest(runners) <= 1.15 * ALONE


@pytest.mark.parametrize("speed", [0.9, 0.7, 0.5])
def test_a_leader_that_is_somewhat_slow_is_waited_for(speed: float) -> None:
    runners = crowd(8, speed=speed)
    herd(runners)
    assert all(runner.state == "restored" for runner in runners[1:])


@pytest.mark.parametrize("speed", [0.2, 0.05, 0.001])
def test_a_leader_that_is_too_slow_holds_nobody_up_for_long(speed: float) -> None:
    runners = crowd(8, speed=speed)
    runners[0].ended = 1e9  # Whatever becomes of it.
    herd(runners)
    assert all(runner.state == "alone" for runner in runners[1:])
    assert slowest(runners[1:]) <= (3 + 1) * ALONE + STORING


def test_a_leader_that_dies_is_replaced_and_all_is_computed_once_more_at_most() -> None:
    runners = crowd(8, dies=1.5)
    herd(runners)
    assert [r.state for r in runners] == ["dead", "leads"] + ["restored"] * 6
    # What it had stored is not computed again.
    assert computed(runners) <= 1.3
    assert slowest(runners[1:]) <= 2.2 * ALONE


def test_what_kills_each_leader_ends_in_computing_alone() -> None:
    runners = crowd(8, dies=0.5)
    runners[1].dies = 0.5
    herd(runners)
    assert [r.state for r in runners] == ["dead", "dead"] + ["alone"] * 6
    assert slowest(runners[2:]) <= 2 * ALONE


def test_a_leader_that_stores_nothing_makes_no_convoy() -> None:
    runners = crowd(8, stores=False)
    herd(runners)
    assert all(runner.state == "alone" for runner in runners[1:])
    # One after the other it would be eight times as long.
    assert slowest(runners) <= 2.2 * ALONE


@pytest.mark.parametrize("seed", range(20))
def test_nobody_starves_in_a_crowd_of_all_kinds(seed: int) -> None:
    chance = random.Random(seed)
    runners = [
        Runner(
            n,
            chance.choice([0.05, 0.5, 1.0, 1.0, 2.0]),
            chance.choice([0.3, 1e9, 1e9]),
            chance.random() < 0.8,
            chance.uniform(0, 3),
        )
        for n in range(12)
    ]
    herd(runners)
    for runner in runners:
        if runner.ended is not None:
            own = ALONE / runner.speed
            assert runner.ended - runner.arrives <= 3 * ALONE + STORING + own + 5 * TICK, runner
