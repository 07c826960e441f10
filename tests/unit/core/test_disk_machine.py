"""A random walk with a disk below memory: clients that come, die and wait; writes and reads that
end late, badly or never; files that are damaged; restarts and reboots."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from contents import key
from disk_world import DiskWorld
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from test_machine import walks

from kmesh.layout import TILE_BYTES
from kmesh_spand.control.native import NativeBatch
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Reason, Trouble
from kmesh_spand.core.config import DiskConfig
from kmesh_spand.core.diskfile import file_bytes
from kmesh_spand.core.policies import POLICIES
from kmesh_spand.core.tags import tag
from kmesh_spand.core.tenants import Tenancy, tenant_name

ONE = file_bytes(TILE_BYTES, 0)
FULL = [key(("full", n)) for n in range(6)]
TAIL = [key(("tail", tokens)) for tokens in (16, 32, 48)]
SALT = key("salt")
TENANCIES = [Tenancy(groups=(1000,)), Tenancy(groups=(1000, 1001))]
QUOTAS: list[dict[str, int]] = [{}, {"1000": 3 * ONE}, {tenant_name(1000, SALT): 2 * ONE}]
DISK_MUST_REACH = (
    "disk_found",
    "disk_spilled",
    "disk_spill_failed",
    "disk_fetch_leads",
    "disk_fetch_joins",
    "disk_fetch_promotions",
    "disk_fetch_leaves",
    "disk_fetched",
    "disk_fetch_shared",
    "disk_fetch_failed",
    "disk_corrupt",
    "disk_hurried",
    "disk_outages",
    "disk_outage_misses",
    "disk_evicted",
    "disk_discarded",
    "disk_unlink_failed",
    "evicted",
    "hits",
)
seldom = st.sampled_from([False, False, False, True])
mostly = st.sampled_from([True, True, True, False])
mostly_well = st.sampled_from([None] * 9 + [Trouble.IO, Trouble.FULL, Trouble.LOST])
salts = st.sampled_from([b"", b"", SALT])


class DiskMachine(RuleBasedStateMachine):
    reached: ClassVar[Counter[str]] = Counter()
    world: DiskWorld

    @initialize(
        slabs=st.sampled_from([{0: 3, 1: 3}, {0: 2, 1: 2, 2: 4}]),
        tenancy=st.sampled_from(TENANCIES),
        capacity=st.integers(2, 7),
        files=st.integers(4, 12),
        quotas=st.sampled_from(QUOTAS),
        writes=st.integers(1, 2),
        reads=st.integers(1, 2),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def start(
        self,
        slabs: dict[int, int],
        tenancy: Tenancy,
        capacity: int,
        files: int,
        quotas: dict[str, int],
        writes: int,
        reads: int,
        policy: str,
    ) -> None:
        self.uids = list(tenancy.groups)
        self.world = DiskWorld(
            slabs,
            batch=NativeBatch(),
            tenancy=tenancy,
            disk=DiskConfig(
                capacity=capacity * ONE,
                max_files=files,
                max_writes=writes,
                max_reads=reads,
                max_wanted=4,
                hold_ms=50,
                longest_hold_ms=200,
                max_removals=3,
                max_late=2,
                stall_ms=80,
                quotas=quotas,
                policy=policy,
            ),
            max_spans=10,
            max_batch=8,
            max_verify=2,
            max_waits=3,
            patience_ms=100,
        )
        self.world.scan()
        self.world.connect(uid=self.uids[0])

    def session(self, data: st.DataObject) -> int:
        if not self.world.open:
            self.world.connect(uid=self.uids[0])
        return data.draw(st.sampled_from(sorted(self.world.open)))  # type: ignore[no-any-return]

    def salted(self, keys: list[bytes], salt: bytes) -> list[bytes]:
        return [key((name, salt)) if salt else name for name in keys]

    @rule(wait=st.integers(0, 150))
    def time_passes(self, wait: int) -> None:
        self.world.now += wait
        self.world.send(ev.Tick())

    @precondition(lambda self: len(self.world.open) < 4)
    @rule(data=st.data())
    def connect(self, data: st.DataObject) -> None:
        self.world.connect(uid=data.draw(st.sampled_from(self.uids)))

    @precondition(lambda self: len(self.world.open) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.close(self.session(data))

    @rule(
        data=st.data(),
        name=st.sampled_from(FULL),
        length=st.sampled_from([TILE_BYTES, TILE_BYTES, 2 * TILE_BYTES, 100]),
        salt=salts,
        fail=seldom,
    )
    def store(self, data: st.DataObject, name: bytes, length: int, salt: bytes, fail: bool) -> None:
        self._store(self.session(data), self.salted([name], salt), length, 64, (), salt, fail)

    @rule(data=st.data(), steps=st.integers(1, 3))
    def store_tail(self, data: st.DataObject, steps: int) -> None:
        sub_keys = tuple(TAIL[: steps - 1])
        self._store(
            self.session(data), [TAIL[steps - 1]], TILE_BYTES, 16 * steps, sub_keys, b"", False
        )

    def _store(
        self,
        session: int,
        keys: list[bytes],
        length: int,
        tokens: int,
        sub_keys: tuple[bytes, ...],
        salt: bytes,
        fail: bool,
    ) -> None:
        world = self.world
        answer = world.reserve(
            session, keys, length=length, tokens=tokens, sub_keys=sub_keys, salt=salt
        )
        numbers = [number for number in answer.reservation if number]
        if not numbers:
            return
        world.commit(session, numbers)
        for job, (copy, _) in list(world.copies.items()):
            if copy.session == session:
                if fail:
                    world.wanted.clear()
                world.copy_ends(job, not fail)

    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(FULL + TAIL), min_size=1, max_size=4),
        prefix=st.booleans(),
        salt=salts,
    )
    def acquire(self, data: st.DataObject, keys: list[bytes], prefix: bool, salt: bytes) -> None:
        if salt:
            keys = self.salted(keys, salt)
        self.world.acquire(self.session(data), keys, prefix=prefix, salt=salt)

    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(FULL + TAIL), min_size=1, max_size=4),
        prefix=st.booleans(),
        on_disk=st.booleans(),
        salt=salts,
    )
    def wait(
        self, data: st.DataObject, keys: list[bytes], prefix: bool, on_disk: bool, salt: bytes
    ) -> None:
        world = self.world
        session = self.session(data)
        keys = self.salted(keys, salt) if salt else keys
        mine = [
            span
            for _, (span, _) in sorted(world.files.items())
            if span.group == world.tenancy.group(world.uids[session])
        ]
        if on_disk and mine:
            span = data.draw(st.sampled_from(mine))
            keys, salt = [span.key, *keys], span.salt
        waits = sum(at[0] == session for at in world.arrivals)
        answer = world.acquire_waiting(session, keys, prefix, salt)
        assert answer is not None or waits < world.config.max_waits
        if answer is None:
            assert (session, world.request) in world.arrivals

    @rule(keep=st.integers(0, 1))
    def cool(self, keep: int) -> None:
        """All that is written, and most of what memory has is forgotten."""
        world = self.world
        for job in list(world.unlinks):
            world.unlink_ends(job)
        for _ in range(3):
            for job in list(world.spills):
                world.spill_ends(job)
        rows = [row.slot for row in world.core.views.spans(now_ms=world.now)]
        world.send(ev.Evict(rows[keep:]))

    @precondition(lambda self: self.world.disk_index)
    @rule(
        data=st.data(),
        then=st.sampled_from(["ends", "ends", "hurry", "dies", "hangs", "nothing"]),
        more=st.lists(st.sampled_from(FULL), max_size=2),
    )
    def several_want(self, data: st.DataObject, then: str, more: list[bytes]) -> None:
        """What is only on disk, by two sessions."""
        world = self.world
        spans = [
            span
            for _, (span, _) in sorted(world.files.items())
            if (span.group, tag(span.key, span.shard)) in world.disk_index
        ]
        if not spans:
            return
        span = data.draw(st.sampled_from(spans))
        for _ in range(2):
            mine = [s for s in sorted(world.open) if world.who(s)[0] == span.group]
            session = data.draw(st.sampled_from(mine)) if mine else world.connect(uid=span.group)
            if data.draw(seldom) and len(world.open) < 5:
                session = world.connect(uid=span.group)
            world.acquire_waiting(
                session, [span.key, *self.salted(more, span.salt)], True, span.salt
            )
        first = next((at for at, (keys, _, _) in world.arrivals.items() if span.key in keys), None)
        if then == "ends":
            for job, fetch in list(world.fetches.items()):
                if fetch.span == span:
                    world.fetch_ends(job)
        elif then == "hurry" and first is not None:
            world.hurry(*first)
        elif then == "dies" and first is not None:
            world.close(first[0])
        elif then == "hangs" and len(world.arrivals) > 1:
            self._hangs()
            world.acquire_waiting(session, [span.key], True, span.salt)

    @precondition(lambda self: self.world.arrivals)
    @rule(data=st.data())
    def waiter_dies(self, data: st.DataObject) -> None:
        session, _ = data.draw(st.sampled_from(sorted(self.world.arrivals)))
        if len(self.world.open) > 1:
            self.world.close(session)

    @precondition(lambda self: self.world.arrivals)
    @rule(data=st.data(), known=st.booleans())
    def hurry(self, data: st.DataObject, known: bool) -> None:
        if known:
            self.world.hurry(*data.draw(st.sampled_from(sorted(self.world.arrivals))))
        else:
            self.world.send(ev.Hurry(self.session(data), 10**9))

    @precondition(lambda self: len(self.world.arrivals) > 1)
    @rule()
    def disk_hangs(self) -> None:
        self._hangs()

    def _hangs(self) -> None:
        """Long enough for the tier to be treated as not there."""
        world = self.world
        world.now += 100
        before = len(world.outages)
        for at in sorted(world.arrivals)[:2]:
            if at in world.arrivals:
                world.hurry(*at)
        if len(world.outages) > before:
            assert world.outages[-1]
            assert not world.arrivals

    @precondition(lambda self: self.world.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.world.leases)))
        assert self.world.release(self.world.leases[lease][0], [lease]).released == 1

    @precondition(lambda self: self.world.leases)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.world.leases)))
        answer = self.world.ask(rq.ReportCorrupt, self.world.leases[lease][0], lease, [0, 1])
        assert isinstance(answer, rs.ReportCorruptResult)

    @rule(data=st.data())
    def flip(self, data: st.DataObject) -> None:
        slab = data.draw(st.sampled_from(sorted(self.world.sizes)))
        self.world.flip(slab, data.draw(st.integers(0, self.world.sizes[slab] - 1)))

    @precondition(lambda self: self.world.verifies)
    @rule(data=st.data())
    def verify_ends(self, data: st.DataObject) -> None:
        self.world.verify_ends(data.draw(st.sampled_from(sorted(self.world.verifies))))

    @precondition(lambda self: self.world.wipes)
    @rule(data=st.data())
    def wipe_ends(self, data: st.DataObject) -> None:
        self.world.wipe_ends(data.draw(st.sampled_from(sorted(self.world.wipes))))

    @precondition(lambda self: self.world.spills)
    @rule(data=st.data(), trouble=mostly_well)
    def spill_ends(self, data: st.DataObject, trouble: Trouble | None) -> None:
        self.world.spill_ends(data.draw(st.sampled_from(sorted(self.world.spills))), trouble)

    @precondition(lambda self: self.world.fetches)
    @rule(data=st.data(), trouble=st.sampled_from([None, None, None, Trouble.IO, Trouble.LOST]))
    def fetch_ends(self, data: st.DataObject, trouble: Trouble | None) -> None:
        self.world.fetch_ends(data.draw(st.sampled_from(sorted(self.world.fetches))), trouble)

    @precondition(lambda self: self.world.unlinks)
    @rule(data=st.data(), fail=seldom)
    def unlink_ends(self, data: st.DataObject, fail: bool) -> None:
        world = self.world
        job = data.draw(st.sampled_from(sorted(world.unlinks)))
        world.unlink_ends(job, not fail)

    @precondition(lambda self: self.world.files)
    @rule(data=st.data(), how=st.sampled_from(["flip", "gone", "other"]), now=seldom)
    def damage(self, data: st.DataObject, how: str, now: bool) -> None:
        world = self.world
        whole = [n for n, (span, content) in world.files.items() if content == span.root]
        going = {unlink.name for unlink in world.unlinks.values()}
        whole = sorted(set(whole) - going)
        if whole and now and how != "other":
            # "other" changes what a scan would say of it.
            world.damage(data.draw(st.sampled_from(whole)), how)

    @precondition(lambda self: self.world.files and self.world.disk_index)
    @rule(data=st.data(), now=seldom)
    def wants_what_is_damaged(self, data: st.DataObject, now: bool) -> None:
        """Of another namespace under that name, found out when it is read."""
        world = self.world
        if not now:
            return
        name = data.draw(st.sampled_from(sorted(world.files)))
        span, _ = world.files[name]
        mine = [s for s in sorted(world.open) if world.who(s)[0] == span.group]
        if mine and world.acquire_waiting(mine[0], [span.key], True, span.salt) is None:
            for job, fetch in list(world.fetches.items()):
                if fetch.name == name:
                    world.damage(name, "other")
                    world.fetch_ends(job)

    @rule(data=st.data(), files=st.booleans())
    def evict(self, data: st.DataObject, files: bool) -> None:
        world = self.world
        rows = [row.slot for row in world.core.views.spans(now_ms=world.now)]
        if rows:
            world.send(ev.Evict(data.draw(st.lists(st.sampled_from(rows), max_size=4))))
        if files:
            swept = world.core.sweep.files(0, 100)
            if swept.slots:
                world.send(ev.Forget([data.draw(st.sampled_from(swept.slots)), 0, 999]))

    @rule(now=seldom)
    def worker_dies(self, now: bool) -> None:
        if now:
            self.world.worker_dies()
            self.world.scan()

    @rule(now=seldom, reboot=st.booleans(), less=seldom, scan=mostly)
    def restart(self, now: bool, reboot: bool, less: bool, scan: bool) -> None:
        world = self.world
        if not now:
            return
        self.reached.update(world.core.counters)
        for number in list(world.open):
            world.open.discard(number)
        world.closed.clear()
        assert world.disk is not None
        if less:
            limits = {name: getattr(world.disk, name) for name in world.disk.__slots__}
            world.disk = DiskConfig(**{**limits, "capacity": max(ONE, world.disk.capacity // 2)})
        if reboot:
            world.reboot()
        else:
            world.restart()
            world.send(ev.GraceEnded())
        world.connect(uid=self.uids[0])
        if scan or not world.files:
            world.scan()
            for job in list(world.unlinks):
                world.unlink_ends(job)
        else:
            # Its files are as good as gone until they are found.
            world.files.clear()
            world.send(ev.DiskReady())

    @invariant()
    def all_holds(self) -> None:
        self.reached["steps"] += 1
        self.world.check()

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        self.reached.update(world.core.counters)
        world.settle()
        world.now += 10_000
        world.send(ev.Tick())
        world.settle()
        assert not world.arrivals, "somebody waits for ever"
        assert not world.waiting
        assert world.core.disk is not None
        assert not world.core.disk.fetches.flights
        for session in list(world.open):
            world.close(session)
        world.settle()
        world.check()
        status = world.core.views.status()
        assert (status.leases, status.leased_bytes, status.reservations) == (0, 0, 0)
        for row in world.core.views.spans(now_ms=world.now):
            assert row.leases == 0
            assert row.state in ("committed", "recovered")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_disk_walks(run_seed: int) -> None:
    """Nothing breaks on any walk, and together they went far enough to say so."""
    DiskMachine.reached = Counter()
    few = settings(max_examples=30, stateful_step_count=60, deadline=None)
    missed = set(DISK_MUST_REACH)
    for number in range(run_seed, run_seed + 18):
        walks(DiskMachine, number, few)
        missed = {name for name in DISK_MUST_REACH if not DiskMachine.reached[name]}
        # So many at least; `make model-check` goes on from here.
        if number >= run_seed + 2 and not missed:
            break
    assert not missed, missed


def test_an_acquire_without_a_wait_is_answered_at_once() -> None:
    world = DiskWorld({0: 1}, disk=DiskConfig(capacity=4 * ONE, max_files=8))
    world.scan()
    session = world.connect()
    world.store(session, [FULL[0]])
    world.settle()
    world.store(session, [FULL[1]])
    world.settle()
    assert list(world.acquire(session, [FULL[0]]).reason) == [Reason.PENDING]
    world.check()
