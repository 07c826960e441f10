"""Whether to wait for what another engine computes, or to compute it too."""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds that a flight takes beside computing, however short it is: the leader stores when its
#: step has ended, the daemon copies, and a step of this engine begins to restore.
STORING = 0.25
#: Engines that may share a device evenly; one that is slower still is slow for another reason.
_SHARERS = 4


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known when the question is asked. Times are seconds, rates tokens a second.

    Attributes:
        whole: tokens that were missing when this request first waited.
        missing: tokens that it would compute alone, from what is here now.
        covered: of them, tokens that the flight brings.
        ahead: tokens that the flight has yet to land until those are there.
        landed: tokens that its leader has landed.
        computed: tokens that its leader has computed, as far as it has said so; they may have
            landed.
        seen, landing: of those that landed, those that did since this request looked on, and for
            how long it has seen them land.
        age: since its leader began.
        quiet: since its leader last computed or landed something, or began.
        pause: the longest that it was quiet until then.
        beside: the leader computes on this engine's own device.
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
    computed: int
    seen: int
    landing: float
    age: float
    quiet: float
    pause: float
    beside: bool
    waited: float
    left: float
    queue: int
    prefill: float
    restore: float
    patience: float


def worth_waiting(outlook: Outlook) -> bool:
    """Whether to wait on.

    All that this request would have taken in the end, with the time that it has waited, must stay
    within ``patience`` times what it would have taken alone, and ``STORING``. So a leader that
    hangs, says nothing or dies again and again costs at most that, and then the time alone.

    A leader that is seen to go on may take longer, as long as computing would take longer still:
    whoever left then would be later for it, and hold up all others who compute on that device.
    """
    finish = remaining(outlook) + outlook.covered / outlook.restore
    finish += (outlook.missing - outlook.covered) / outlook.prefill
    if finish > outlook.left:
        return False
    if outlook.waited + finish <= outlook.patience * alone(outlook) + STORING:
        return True
    return goes_on(outlook) and finish <= own(outlook)


def alone(outlook: Outlook) -> float:
    """Seconds to compute the whole; those who wait here would compute one after the other."""
    return outlook.whole / outlook.prefill * (outlook.queue + 1) / 2


def goes_on(outlook: Outlook) -> bool:
    """Whether the leader has done something, and not been quiet for too long since."""
    done = max(outlook.computed, outlook.landed)
    return done > 0 and outlook.quiet <= outlook.patience * outlook.pause + STORING


def own(outlook: Outlook) -> float:
    """Seconds in which this request would compute what is missing, if it began now.

    On a device that the leader computes on, this engine is as slow as the leader is seen to be, and
    both are twice as slow as that.
    """
    rate = outlook.prefill
    if outlook.beside:
        done, seconds = _pace(outlook)
        rate = min(rate, max(done / seconds, rate / _SHARERS)) / 2
    return outlook.missing / rate


def remaining(outlook: Outlook) -> float:
    """Seconds until the flight has brought what it covers.

    A leader goes on as it did, so far as that can be told from steps that compute much at once: to
    what it did, a quarter of the whole at this engine's own rate is added. What it has computed
    lands at the pace at which it is seen to land. Where it does not say what it has computed, what
    landed stands for that, which a step lands much of at once: its pace counts then, if faster.
    One that has done nothing yet is believed to be as fast as this engine, and past that to end at
    any moment: a document may be one step, of which nothing is seen until it ends.
    """
    landed, ahead, computed = outlook.landed, outlook.ahead, outlook.computed
    if not max(landed, computed):
        return max(ahead / outlook.prefill - outlook.age, 0.0)
    done, seconds = _pace(outlook)
    uncomputed = max(landed + ahead - max(landed, computed), 0)
    left = uncomputed * seconds / done
    landing = outlook.landing / outlook.seen if outlook.seen else 0.0
    if computed:
        left = max(left, (ahead - uncomputed) * landing, outlook.quiet / 2)
    elif outlook.seen:
        left = min(left, ahead * landing)
    return left


def _pace(outlook: Outlook) -> tuple[float, float]:
    """Tokens, and seconds in which they are believed to have been computed."""
    believed = (outlook.landed + outlook.ahead) / 4
    done = max(outlook.landed, outlook.computed)
    return done + believed, outlook.age + believed / outlook.prefill
