"""Engines that share a GPU and want one new document: a model of the herd measured on an H200.

Time goes on in milliseconds. What computes on a device shares it evenly, and a step's tokens are
computed when the step has ended. Then they are stored: after a while the first lands, and the
others behind it at a pace of their own. Who waits thinks every 50 ms, and follows the rule given.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kmesh_vllm.waiting import Outlook

TICK, THINK = 0.001, 0.05
#: Tokens of a span, and tokens a second that one engine computes and restores there alone.
SPAN, PREFILL, RESTORE = 64, 44_400.0, 400_000.0

Rule = Callable[[Outlook], bool]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a herd meets. Times are seconds, rates tokens a second.

    Attributes:
        tokens: of the document.
        step: that the leader computes in one step.
        engines: the first one leads, the others wait.
        rates: what each waiting engine believes to compute a second.
        slow: how many times as long as alone the device takes, for whoever computes on it.
        speed: of the leader, for reasons that are its own.
        jitter: by how much each step is longer, in turn.
        latency: from the end of a step to the first of its spans that lands.
        landing: rate at which spans land then.
        beside: all engines are on one device.
        reports: the leader tells what it has computed.
        dies, hangs: when the leader does, after it began.
        preempted: when it begins anew, with what it has stored.
    """

    tokens: int = 4096
    step: int = 8192
    engines: int = 4
    rates: tuple[float, ...] = (PREFILL,) * 3
    slow: float = 1.2
    speed: float = 1.0
    jitter: tuple[float, ...] = (0.0,)
    latency: float = 0.035
    landing: float = 80_000.0
    beside: bool = True
    reports: bool = True
    dies: float = 1e9
    hangs: float = 1e9
    preempted: float = 1e9


@dataclass
class Herd:
    """What becomes of them.

    Attributes:
        leader: number of the engine that leads; None once it has computed all or nobody does.
        left: when each engine that left did.
        ended: when each had the document, computed or restored.
        computed: tokens that all have computed together.
    """

    scene: Scene
    rule: Rule
    leader: int | None = 0
    now: float = 0.0
    left: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    computed: float = 0.0
    _waiting: set[int] = field(default_factory=set)
    _alone: dict[int, float] = field(default_factory=dict)
    _began: float = 0.0
    _signs: list[float] = field(default_factory=list)
    _base: int = 0
    _reached: int = 0  # tokens that the leader has computed
    _landed: int = 0
    _credit: float = 0.0
    _stored: deque[tuple[float, int]] = field(default_factory=deque)
    _work: Iterator[float] = field(default_factory=lambda: iter(()))
    _step: tuple[float, int] | None = None  # tokens' worth of work left, where it ends
    _saw: dict[int, float] = field(default_factory=dict)

    def run(self) -> Herd:
        """Until everybody has the document, or is dead or hangs."""
        self._waiting = set(range(1, self.scene.engines))
        self._lead(0)
        think = {n: THINK + 0.002 * n for n in self._waiting}
        while self._waiting or self._alone or self._leads():
            self.now += TICK
            assert self.now < 120, "somebody never ended"
            self._compute()
            self._land()
            if self.leader == 0 and self.now - self._began >= self.scene.dies:
                self._replace()
            for number in sorted(self._waiting):
                if self._landed >= self.scene.tokens:
                    self._waiting.discard(number)
                    self.ended[number] = self.now + self.scene.tokens / RESTORE
                elif self.now >= think[number]:
                    think[number] = self.now + THINK
                    if not self.rule(self._outlook(number)):
                        self._waiting.discard(number)
                        self.left[number] = self.now
                        self._alone[number] = float(self.scene.tokens - self._landed)
        return self

    @property
    def documents(self) -> float:
        """How often it was computed."""
        return self.computed / self.scene.tokens

    def _leads(self) -> bool:
        return self.leader is not None and not self._hangs()

    def _hangs(self) -> bool:
        return self.leader == 0 and self.now - self._began >= self.scene.hangs

    def _lead(self, number: int) -> None:
        self.leader, self._began, self._signs = number, self.now, []
        self._base = self._reached = self._landed
        self._stored.clear()
        self._step = None

    def _replace(self) -> None:
        if self._waiting:
            first = min(self._waiting)
            self._waiting.discard(first)
            self._lead(first)
        else:
            self.leader = None

    def _compute(self) -> None:
        scene = self.scene
        leads = self._leads()
        sharers = len(self._alone) + leads if scene.beside else 1
        worth = TICK * PREFILL / scene.slow / max(sharers, 1)
        if leads:
            assert self.leader is not None
            self.computed += self._on(worth * (scene.speed if self.leader == 0 else 1.0))
        for number in list(self._alone):
            done = min(worth, self._alone[number])
            self.computed += done
            self._alone[number] -= done
            if self._alone[number] <= 0:
                del self._alone[number]
                self.ended[number] = self.now

    def _on(self, worth: float) -> float:
        """The leader goes on; returns the tokens of a step that has ended."""
        scene = self.scene
        if self._step is None:
            size = min(scene.step, scene.tokens - self._reached)
            turn = self._reached // max(scene.step, 1) % len(scene.jitter)
            self._step = size * (1 + scene.jitter[turn]), self._reached + size
        left, end = self._step
        left -= worth
        self._step = left, end
        if left > 0:
            return 0
        tokens, self._reached, self._step = end - self._reached, end, None
        self._stored.append((self.now + scene.latency, end))
        if scene.reports:
            self._signs.append(self.now)
        if end >= scene.tokens:
            assert self.leader is not None
            self.ended[self.leader], self.leader = self.now, None
        elif self.now - self._began >= scene.preempted and self.leader == 0:
            self._replace()
        return tokens

    def _land(self) -> None:
        self._credit += TICK * self.scene.landing
        if not self._stored or self.now < self._stored[0][0]:
            self._credit = 0
            return
        end = self._stored[0][1]
        while self._credit >= SPAN and self._landed < end:
            self._landed += SPAN
            self._credit -= SPAN
            self._signs.append(self.now)
        if self._landed >= end:
            self._stored.popleft()

    def _outlook(self, number: int) -> Outlook:
        scene, missing = self.scene, self.scene.tokens - self._landed
        if self._landed:
            self._saw.setdefault(number, self.now)
        age = self.now - self._began
        signs = [self._began, *self._signs]
        return Outlook(
            whole=scene.tokens,
            missing=missing,
            covered=missing,
            ahead=missing,
            landed=self._landed - self._base,
            computed=self._reached - self._base if scene.reports else 0,
            seen=self._landed,
            landing=self.now - self._saw.get(number, self.now),
            age=age,
            quiet=self.now - signs[-1],
            pause=max((b - a for a, b in itertools.pairwise(signs)), default=0.0),
            beside=scene.beside,
            waited=self.now,
            left=60.0 - self.now,
            queue=1,
            prefill=scene.rates[number % len(scene.rates)],
            restore=RESTORE,
            patience=3,
        )


def measured_rule(outlook: Outlook) -> bool:
    """The rule that the H200 was measured with: all of a flight's time counts alike, and storing
    takes none.
    """
    landed, ahead, prefill = outlook.landed, outlook.ahead, outlook.prefill
    if landed:
        believed = (landed + ahead) / 4
        left = ahead * (outlook.age + believed / prefill) / (landed + believed)
    else:
        left = max(ahead / prefill - outlook.age, outlook.age / 2)
    finish = left + outlook.covered / outlook.restore
    return outlook.waited + finish <= outlook.patience * outlook.whole / prefill


def paced_rule(outlook: Outlook) -> bool:
    """The rule after it: the pace of landing counts, and storing may take a quarter of a second."""
    landed, ahead, prefill = outlook.landed, outlook.ahead, outlook.prefill
    if landed:
        believed = (landed + ahead) / 4
        left = ahead * (outlook.age + believed / prefill) / (landed + believed)
        if outlook.seen:
            left = min(left, ahead * outlook.landing / outlook.seen)
    else:
        left = max(ahead / prefill - outlook.age, outlook.age / 2)
    finish = left + outlook.covered / outlook.restore
    return outlook.waited + finish <= outlook.patience * outlook.whole / prefill + 0.25


def herds(scenes: Iterable[Scene], rule: Rule) -> list[Herd]:
    """Each of the scenes, played."""
    return [Herd(scene, rule).run() for scene in scenes]
