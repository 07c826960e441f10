"""Rules about spans: they are asked for, reserved, written, committed and given up."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from contents import NAMESPACE, SHARD
from hypothesis.stateful import precondition, rule
from walk import FULL, KEYS, SALT, SHARDS, TAILS, Walk, having, lengths, salts, seldom

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Cause, Code, Reason


class SpanRules(Walk):
    """What sessions do with spans."""

    @precondition(having("open"))
    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(KEYS), max_size=4),
        shards=st.lists(st.sampled_from(SHARDS), min_size=1, max_size=2),
        prefix=st.booleans(),
        salt=salts,
        recipes=st.booleans(),
    )
    def acquire(
        self,
        data: st.DataObject,
        keys: list[bytes],
        shards: list[int],
        prefix: bool,
        salt: bytes,
        recipes: bool,
    ) -> None:
        self.causes.add(Cause.PRESSURE)
        session, tier = self.pick(data, self.world.open), self.tier(data)
        keys = self.salted(keys, salt)
        who = self.world.who(session, salt)
        stored = self.world.records(tier)
        expected = [
            self.expect(name, shard, who, stored, recipes, tier)
            for name in keys
            for shard in shards
        ]
        answer = self.world.acquire(session, keys, shards, prefix, salt, tier, recipes)
        assert len(answer.reason) == len(expected)
        whole = len(expected)
        if prefix:
            bad = next((i for i, reason in enumerate(answer.reason) if reason), whole)
            whole = bad - bad % len(shards)
            assert set(answer.reason[whole + len(shards) :]) <= {Reason.MISS}
            stop = list(zip(answer.reason, expected, strict=True))[whole : whole + len(shards)]
            assert all(reason in {*may, Reason.MISS} - {Reason.OK} for reason, may in stop)
            assert not stop or any(may - {Reason.OK} for _, may in stop)
        for reason, may in zip(answer.reason[:whole], expected[:whole], strict=True):
            assert reason in may

    @precondition(having("index"))
    @precondition(having("open"))
    @rule(data=st.data(), recipes=st.booleans())
    def acquire_stored(self, data: st.DataObject, recipes: bool) -> None:
        self.causes.add(Cause.PRESSURE)
        world, tier = self.world, self.tier(data)
        stored = sorted(world.records(tier))
        if not stored:
            return
        name, shard, (_, salt) = data.draw(st.sampled_from(stored))
        session = self.pick(data, world.open)
        expected = self.expect(name, shard, world.who(session, salt), recipes=recipes, tier=tier)
        answer = world.acquire(session, [name], [shard], salt=salt, tier=tier, recipes=recipes)
        assert set(answer.reason) <= expected

    @precondition(having("leases"))
    @rule(data=st.data(), lie=seldom)
    def release(self, data: st.DataObject, lie: bool) -> None:
        world = self.world
        lease = self.pick(data, world.leases)
        owner = world.leases[lease][0]
        session = self.pick(data, world.open) if lie else owner
        answer = world.release(session, [lease, lease, 10**9])
        assert answer.released == (session == owner)
        refused = [lease, 10**9] if session == owner else [lease, lease, 10**9]
        assert answer.refused == refused

    @precondition(having("leases"))
    @rule(data=st.data(), entries=st.lists(st.integers(0, 5), max_size=3))
    def report(self, data: st.DataObject, entries: list[int]) -> None:
        world = self.world
        lease = self.pick(data, world.leases)
        owner, held = world.leases[lease]
        answer = world.ask(rq.ReportCorrupt, owner, lease, entries)
        real = [entry for entry in entries if entry < len(held) and held[entry]]
        assert answer == rs.ReportCorruptResult(len(real))

    @precondition(having("open"))
    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(FULL), min_size=1, max_size=3),
        shard=st.sampled_from(SHARDS),
        length=lengths,
        salt=salts,
    )
    def reserve(
        self, data: st.DataObject, keys: list[bytes], shard: int, length: int, salt: bytes
    ) -> None:
        self._reserve(data, keys, shard, length, 64, (), salt=salt)

    @precondition(lambda self: self.world.open and self.limited())
    @rule(data=st.data(), name=st.sampled_from(FULL), shard=st.sampled_from(SHARDS))
    def reserve_beyond_quota(self, data: st.DataObject, name: bytes, shard: int) -> None:
        session, salt = data.draw(st.sampled_from(self.limited()))
        quota = self.world.tenancy.quota(*self.world.who(session, salt))
        self._reserve(data, [name], shard, quota + 1, 64, (), session, salt)

    def limited(self) -> list[tuple[int, bytes]]:
        """Sessions and salts of tenants that have a quota."""
        world, salts = self.world, (b"", SALT)
        each = itertools.product(sorted(world.open), salts)
        return [one for one in each if world.tenancy.quota(*world.who(*one))]

    @precondition(having("open"))
    @rule(
        data=st.data(),
        tail=st.sampled_from(TAILS),
        steps=st.integers(1, 3),
        shard=st.sampled_from(SHARDS),
        length=lengths,
    )
    def reserve_tail(
        self, data: st.DataObject, tail: list[bytes], steps: int, shard: int, length: int
    ) -> None:
        self._reserve(data, [tail[steps - 1]], shard, length, 16 * steps, tuple(tail[: steps - 1]))

    def _reserve(
        self,
        data: st.DataObject,
        keys: list[bytes],
        shard: int,
        length: int,
        tokens: int,
        sub_keys: tuple[bytes, ...],
        session: int = 0,
        salt: bytes = b"",
        tier: int = 0,
    ) -> None:
        world = self.world
        self.causes.add(Cause.PRESSURE)
        session = session or self.pick(data, world.open)
        keys = self.salted(keys, salt)
        who = world.who(session, salt)
        mine = sum(want.session == session for want in world.wanted.values())
        if mine + len(keys) > world.config.max_reservations:
            keys_bytes, count = b"".join(keys), len(keys)
            refused = world.ask(
                rq.Reserve,
                session,
                NAMESPACE,
                shard,
                keys_bytes,
                [tokens] * count,
                [0] * count,
                [length] * count,
                b"".join(sub_keys) * count,
                salt,
                tier,
            )
            assert isinstance(refused, rs.Refused)
            assert refused.code == Code.EXHAUSTED
            return
        expected = [self.expect(name, shard, who, tier=tier) for name in keys]
        status, evicted = world.core.views.status(), world.core.counters["evicted"]
        before = world.core.counters["slabs_given_up"]
        others = self.others(who, tier)
        free = not (self.grace or world.wanted or world.copies or world.verifies or world.leases)
        free = free and not (world.encodes or world.keeps or world.densifies)
        answer = world.reserve(
            session, keys, length=length, tokens=tokens, sub_keys=sub_keys, shard=shard, salt=salt,
            tier=tier,
        )  # fmt: skip
        for entry, (reason, may) in enumerate(zip(answer.reason, expected, strict=True)):
            if may == {Reason.OK} and entry == 0:
                assert reason == Reason.EXISTS
            if may == {Reason.PENDING}:
                assert reason == Reason.PENDING
            assert (reason == Reason.PENDING) <= (
                Reason.PENDING in may or keys[entry] in keys[:entry]
            )
        if free and not status.recovering and not self.in_grace and answer.reason[0]:
            # With nothing held, only what belongs to others can be in the way.
            may = {Reason.EXISTS}
            slabs = world.sizes.keys() - world.sealed
            slabs = {slab for slab in slabs if world.tiers.get(slab, 0) == tier}
            mine = [world.sizes[slab] for slab in slabs if world.who_of(slab) == who]
            if world.sealed or world.given_up:
                may.add(Reason.NOT_READY)
            if max(mine, default=0) < tiles(length):
                may |= {Reason.POOL_FULL, Reason.NOT_READY, Reason.TOO_LARGE}
            if world.wipes:
                may.add(Reason.NOT_READY)
            if others:
                may.add(Reason.CATALOG_FULL)
            quota = world.tenancy.quota(*who)
            if quota and tiles(length) * TILE_BYTES > quota:
                may.add(Reason.QUOTA)
            assert answer.reason[0] in may
        given_up = world.core.counters["slabs_given_up"] - before
        if Reason.OK not in answer.reason and not given_up:
            assert world.core.counters["evicted"] == evicted
        # With more of it there would be no end.
        assert given_up <= len(keys)
        assert others == self.others(who, tier), "a tenant touched another's spans"

    @precondition(having("open"))
    @rule(data=st.data(), name=st.sampled_from(FULL), length=lengths, fail=seldom, salt=salts)
    def store(self, data: st.DataObject, name: bytes, length: int, fail: bool, salt: bytes) -> None:
        session, tier = self.pick(data, self.world.open), self.tier(data)
        self._store(data, session, name, SHARD, length, fail, salt, tier)

    def _store(
        self,
        data: st.DataObject,
        session: int,
        name: bytes,
        shard: int,
        length: int,
        fail: bool,
        salt: bytes,
        tier: int = 0,
    ) -> None:
        world = self.world
        self._reserve(data, [name], shard, length, 64, (), session, salt, tier)
        (name,) = self.salted([name], salt)
        for number, want in list(world.wanted.items()):
            if (want.session, want.key, want.shard) == (session, name, shard):
                world.commit(session, [number])
        for job, (copy, _) in list(world.copies.items()):
            if copy.session == session:
                self._copy_ends(job, fail)

    @precondition(having("wanted"))
    @rule(data=st.data(), twice=seldom, lie=seldom)
    def commit(self, data: st.DataObject, twice: bool, lie: bool) -> None:
        world = self.world
        number = self.pick(data, world.wanted)
        session = self.pick(data, world.open) if lie else world.wanted[number].session
        mine = world.wanted[number].session == session
        flying = len(world.copies)
        answer = world.commit(session, [number, 10**9] + [number] * twice)
        if not mine:
            assert answer == rs.CommitResult([Reason.STALE] * (2 + twice))
        assert len(world.copies) - flying <= mine

    @precondition(having("wanted"))
    @rule(data=st.data(), lie=seldom)
    def abort(self, data: st.DataObject, lie: bool) -> None:
        self.causes.add(Cause.ABORTED)
        world = self.world
        number = self.pick(data, world.wanted)
        session = self.pick(data, world.open) if lie else world.wanted[number].session
        mine = world.wanted[number].session == session
        assert world.abort(session, [number, number, 10**9]).aborted == mine

    @precondition(having("copies"))
    @rule(data=st.data(), fail=st.booleans())
    def copy_ends(self, data: st.DataObject, fail: bool) -> None:
        job = self.pick(data, self.world.copies)
        self._copy_ends(job, fail)

    def _copy_ends(self, job: int, fail: bool) -> None:
        copy, _ = self.world.copies[job]
        if fail:
            self.causes.add(Cause.COPY_FAILED)
            place = copy.slab, copy.offset
            self.world.wanted = {
                number: want
                for number, want in self.world.wanted.items()
                if self.world._place_of(want) != place
            }
        self.world.copy_ends(job, not fail)
