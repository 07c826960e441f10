"""A client of a chaos run: it does what engines do through the public client, and checks each byte.

What it does follows from seed, number and life, and from how much it has done: neither from time
nor from answers. It ends when it is told to (SIGTERM), or after a look at everything (--audit).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from chaos_content import (
    FAMILIES,
    FULL,
    GROUP,
    GROUPS,
    HEAD_DIM,
    NAMESPACE,
    SALTS,
    SHARDS,
    SPAN_TOKENS,
    SUB_TOKENS,
    Name,
    kin,
    tail,
)
from chaos_member import CALL_SECONDS, Held, Member
from chaos_pulse import Pulse
from leaks import mapped_memfds, open_fds

import kmesh
import kmesh.mirrors
from kmesh.families import Family, MirrorFate
from kmesh.session import Session
from kmesh.v1 import common_pb2

#: Leases that are kept for a while.
HELD = 3
_PR_SET_PDEATHSIG = 1


class Engine(Member):
    """What it does, one operation after the other."""

    ending = False

    # Operations. Each takes its decisions from ``rng`` before it asks anybody.

    def step(self, number: int) -> None:
        options = self.options
        rng = random.Random(f"{options.seed}/{options.number}/{options.life}/{number}")
        operations: tuple[tuple[Callable[[random.Random], None], int], ...] = (
            (self.store, 30),
            (self.store_tail, 8),
            (self.read, 34),
            (self.read_tail, 8),
            (self.hold, 6),
            (self.abandon, 4),
            (self.report_falsely, 2),
            (self.burst, 2),
            (self.probe, 4),
            (self.be_family, 8),
            (self.read_family, 8),
            (self.leave, 1),
        )
        chosen = rng.choices([one for one, _ in operations], [w for _, w in operations])[0]
        self.pulse.count("ops")
        with self.survive(chosen.__name__):
            chosen(rng)
        for held in list(self.held):
            held.left -= 1
            if held.left <= 0 or held.session.closed:
                self.held.remove(held)
                with self.survive("held"):
                    self._again(held)

    def _names(self, rng: random.Random, count: int) -> tuple[list[Name], str]:
        """Names of full spans, with one salt, and where they are."""
        salt, place = rng.randrange(len(SALTS)), rng.choice(self.places)
        # Some are popular.
        most = rng.choice((FULL // 8, FULL, FULL))
        return [Name(n, SPAN_TOKENS, salt) for n in rng.sample(range(most), count)], place

    def store(self, rng: random.Random) -> None:
        names, place = self._names(rng, rng.randint(1, 6))
        self.put(names, b"", rng.randrange(len(SHARDS)), place)

    def store_tail(self, rng: random.Random) -> None:
        name = tail(rng.randrange(FAMILIES), SUB_TOKENS * rng.randint(1, 3), rng.randrange(2))
        shorter = range(SUB_TOKENS, name.tokens, SUB_TOKENS)
        sub_keys = b"".join(Name(name.number, tokens, name.salt).key for tokens in shorter)
        self.put([name], sub_keys, rng.randrange(len(SHARDS)), rng.choice(self.places))

    def read(self, rng: random.Random) -> None:
        names, place = self._names(rng, rng.randint(1, 8))
        held, _ = self.acquire(names, place, rng.random() < 0.3, 0)
        with held.lease:
            self.check(held)

    def read_tail(self, rng: random.Random) -> None:
        name = tail(rng.randrange(FAMILIES), SUB_TOKENS * rng.randint(1, 3), rng.randrange(2))
        held, _ = self.acquire([name], rng.choice(self.places), False, 0)
        with held.lease:
            self.check(held)

    def hold(self, rng: random.Random) -> None:
        names, place = self._names(rng, rng.randint(1, 4))
        left = rng.randint(2, 60)
        if len(self.held) < HELD:
            held, hits = self.acquire(names, place, False, left)
            if hits:
                self.held.append(held)

    def be_family(self, rng: random.Random) -> None:
        """A base and a member are stored, declared and joined, in any order; or it is dissolved."""
        group, salt = rng.randrange(GROUPS), rng.randrange(len(SALTS))
        names = [kin(group, number, salt) for number in (0, rng.randrange(1, GROUP))]
        rng.shuffle(names)
        first, fate = rng.random() < 0.5, rng.choice([None, None, None, *MirrorFate])
        stored = [(name, shard) for name in names for shard in range(len(SHARDS))]
        session = self.session_of(self.worker)
        if first:
            self._join(session, group, names, salt)
        for name, shard in stored:
            self.put([name], b"", shard, "")
        if not first:
            self._join(session, group, names, salt)
        if fate is not None:
            with self.pulse.calling("dissolve", CALL_SECONDS):
                session.families.dissolve(f"group-{group}", fate, salt=SALTS[salt])
            self.pulse.count("dissolved")

    def _join(self, session: Session, group: int, names: list[Name], salt: int) -> None:
        base, space = kin(group, 0, salt), NAMESPACE.digest()
        family = Family(
            f"group-{group}", space, "float32", HEAD_DIM, SHARDS, base.key, salt=SALTS[salt]
        )
        with self.pulse.calling("families", 3 * CALL_SECONDS):
            session.families.declare(family)
            for name in names:
                session.families.join(
                    family.name, str(name.number), name.key, space, salt=family.salt
                )
        self.pulse.count("joined")

    def read_family(self, rng: random.Random) -> None:
        group, salt, recipes = rng.randrange(GROUPS), rng.randrange(2), rng.random() < 0.7
        names = [kin(group, number, salt) for number in range(GROUP)]
        held, _ = self.acquire(names, "", False, 0, recipes)
        with held.lease:
            self.check(held)

    def _again(self, held: Held) -> None:
        """What was leased is still what it was, whatever was stored meanwhile."""
        if not held.session.closed:
            with held.lease:
                self.pulse.count("held_ok", self.check(held))

    def abandon(self, rng: random.Random) -> None:
        names, place = self._names(rng, rng.randint(1, 4))
        shard, tidy = rng.randrange(len(SHARDS)), rng.random() < 0.7
        session = self.session_of(self.worker)
        batch, _ = self.batch(names, b"", shard, place)
        with self.pulse.calling("reserve", CALL_SECONDS):
            reserved = session.reserve(batch)
        self.pulse.count("abandoned", sum(map(bool, reserved.reservation)))
        if tidy:
            with self.pulse.calling("abort", CALL_SECONDS):
                session.abort([one for one in reserved.reservation if one])

    def report_falsely(self, rng: random.Random) -> None:
        names, place = self._names(rng, 1)
        held, hits = self.acquire(names, place, False, 0)
        with held.lease, self.pulse.calling("report_corrupt", CALL_SECONDS):
            if hits:
                entry = next(n for n, reason in enumerate(held.lease.reason) if not reason)
                self.pulse.count("false_reports", held.session.report_corrupt(held.lease, [entry]))

    def burst(self, rng: random.Random) -> None:
        names, place = self._names(rng, 8)
        session = self.session_of(self.scheduler)
        keys, salt = b"".join(name.key for name in names), SALTS[names[0].salt]
        with self.pulse.calling("burst", CALL_SECONDS):
            futures = [
                session.acquire_async(keys, SHARDS, prefix=False, salt=salt, device=place)
                for _ in range(30)
            ]
            failed = [future.exception() for future in futures]
        for future, error in zip(futures, failed, strict=True):
            if error is None:
                future.result().release()
        self.pulse.count("bursts")
        for error in failed:
            if error is not None:
                raise error

    def probe(self, rng: random.Random) -> None:
        names, _ = self._names(rng, 8)
        session = self.session_of(self.scheduler)
        session.index.probe(b"".join(n.key for n in names), [shard.code() for shard in SHARDS])
        self.pulse.count("probes")

    def leave(self, rng: random.Random) -> None:
        """Ends a session as it is, with whatever it holds."""
        session = self.session_of(rng.choice((self.scheduler, self.worker)))
        with self.pulse.calling("close", CALL_SECONDS):
            session.close()
        self.pulse.count("left")

    def audit(self) -> None:
        """Stores once more, and reads everything that this user may have stored."""
        names = [[Name(n, SPAN_TOKENS, salt) for n in range(FULL)] for salt in range(len(SALTS))]
        tails = [
            [tail(family, tokens, salt) for family in range(FAMILIES)]
            for salt in range(len(SALTS))
            for tokens in range(SUB_TOKENS, SPAN_TOKENS, SUB_TOKENS)
        ]
        until = time.monotonic() + 60
        stored = self.pulse.counts()["store_ok"]
        for number in itertools.count():
            if self.pulse.counts()["store_ok"] > stored:
                break
            if time.monotonic() > until:
                self.broken("nothing can be stored within a minute")
                return
            # A salt of a user has a place of its own, or none: one of them has.
            self.put([Name(number % FULL, SPAN_TOKENS, number % len(SALTS))], b"", 0, "")
            time.sleep(0.02)
        groups = [
            [kin(group, number, salt) for group in range(GROUPS) for number in range(GROUP)]
            for salt in range(len(SALTS))
        ]
        wanted = [(place, some, False) for place in self.places for some in (*names, *tails)]
        wanted += [("", some, recipes) for recipes in (True, False) for some in groups]
        for place, some, recipes in wanted:
            pending = True
            while pending:
                held, _ = self.acquire(some, place, False, 0, recipes)
                with held.lease:
                    self.check(held)
                    pending = common_pb2.REASON_PENDING in held.lease.reason
                if pending and time.monotonic() > until:
                    self.broken(f"still pending after a minute, {place or 'host'}: {some[0]}")
                    return
                time.sleep(0.05 * pending)


def main() -> int:
    """Returns the exit status: 0, or 3 after something that must never be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sockets")
    parser.add_argument("pulse", type=Path)
    for name in ("seed", "number", "life", "uid", "gpus", "lie"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--audit", action="store_true")
    options = parser.parse_args()
    pulse = Pulse(options.pulse)
    # What is imported late is imported now: the user may not be let to where Python lies.
    assert kmesh.__version__
    if options.uid != os.getuid():
        os.setgroups([])
        os.setresgid(options.uid, options.uid, options.uid)
        os.setresuid(options.uid, options.uid, options.uid)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    before = open_fds()
    engine = Engine(options, pulse)

    def end(*_: object) -> None:
        engine.ending = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A life that was killed at its start has said nothing.
    pulse.count("lives", options.life - pulse.counts()["lives"])
    if options.audit:
        engine.scheduler.wait(30)
        engine.worker.wait(30)
        engine.audit()
    number = 0
    while not (engine.ending or engine.wrong or options.audit):
        number += 1
        engine.step(number)
    engine.close()
    gc.collect()
    left = open_fds() - before
    if left or mapped_memfds():
        engine.broken(f"left in the client: {dict(left)}, mapped {dict(mapped_memfds())}")
    pulse.close()
    return 3 if engine.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
