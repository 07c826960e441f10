"""Whether to wait for what another engine computes, or to compute it too."""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds that a flight takes beside computing, however short it is: the leader stores when its
#: step has ended, the daemon copies, and a step of this engine begins to restore.
STORING = 0.25


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known when the question is asked. Times are seconds, rates tokens a second.

    Attributes:
        whole: tokens that were missing when this request first waited.
        missing: tokens that it would compute alone, from what is here now.
        covered: of them, tokens that the flight brings.
        ahead: tokens that the flight has yet to land until those are there.
        landed: tokens that its leader has landed.
        seen, landing: of them, those that landed since this request looked on, and for how long it
            has seen them land.
        age: since its leader began.
        waited: for how long this request has waited already, for this flight and for others.
        left: until this request waits no longer in any case.
        queue: requests of this engine that wait for flights, this one included.
        prefill, restore: this engine's own rates.
        patience: how many times as long as alone it may take.
    """

    whole: int
    missing: int
    covered: int
    ahead: int
    landed: int
    seen: int
    landing: float
    age: float
    waited: float
    left: float
    queue: int
    prefill: float
    restore: float
    patience: float


def worth_waiting(outlook: Outlook) -> bool:
    """Whether to wait on.

    All that this request would have taken in the end, with the time that it has waited, must stay
    within ``patience`` times what it would have taken alone, and ``STORING``. So a leader that is
    slow, hangs or dies again and again costs at most that, and then the time alone.
    """
    finish = remaining(outlook) + outlook.covered / outlook.restore
    finish += (outlook.missing - outlook.covered) / outlook.prefill
    most = outlook.patience * alone(outlook) + STORING
    return finish <= outlook.left and outlook.waited + finish <= most


def alone(outlook: Outlook) -> float:
    """Seconds to compute the whole; those who wait here would compute one after the other."""
    return outlook.whole / outlook.prefill * (outlook.queue + 1) / 2


def remaining(outlook: Outlook) -> float:
    """Seconds until the flight has brought what it covers.

    A leader that has landed something goes on as it did, so far as that can be told from steps that
    land much at once: to what was seen, a quarter of the whole at this engine's own rate is added.
    What one step has computed lands faster than that; while it is seen to land, its pace counts.
    One that has landed nothing is believed to be as fast as this engine; past that, what has taken
    so long takes half as long again.
    """
    if outlook.landed:
        believed = (outlook.landed + outlook.ahead) / 4
        seconds = outlook.age + believed / outlook.prefill
        left = outlook.ahead * seconds / (outlook.landed + believed)
        if outlook.seen:
            left = min(left, outlook.ahead * outlook.landing / outlook.seen)
        return left
    return max(outlook.ahead / outlook.prefill - outlook.age, outlook.age / 2)
