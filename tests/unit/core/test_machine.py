"""A random walk through the core: clients that come, die and lie; copies that end late or
never; damaged memory and catalogs; restarts. ``World`` holds what must be true."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, assume, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core.codes import Reason
from kmesh_spand.core.record import decode
from kmesh_spand.core.states import State
from kmesh_spand.core.tags import tag

from world import OTHER_SHARD, SHARD, Held, World, key

SLABS = {0: 7, 3: 5}
FULL = [key(("full", n)) for n in range(8)]
# A family of tails: the first 16, 32 and 48 tokens of one span.
TAILS = [[key(("tail", n, tokens)) for tokens in (16, 32, 48)] for n in range(2)]
KEYS = FULL + [name for tail in TAILS for name in tail]
SHARDS = [SHARD, OTHER_SHARD]

lengths = st.integers(1, 3 * TILE_BYTES)


class CoreMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.world = World(
            SLABS, max_spans=9, max_batch=8, max_reservations=5, max_verify=2, patience_ms=100
        )
        self.grace: list[Held] = []

    def pick(self, data: st.DataObject, items: object) -> int:
        found = sorted(items)  # type: ignore[call-overload]
        assume(found)
        return data.draw(st.sampled_from(found))  # type: ignore[no-any-return]

    def expect(self, name: bytes, shard: int) -> set[Reason]:
        """What a lookup may say of a name."""
        world = self.world
        if tag(name, shard) in world.index:
            return {Reason.OK}
        if (name, shard) in world.records():
            return {Reason.PENDING}
        writing = [want for want in world.wanted.values() if want.shard == shard]
        if any(want.key == name for want in writing):
            return {Reason.PENDING}
        if any(name in want.sub_keys for want in writing):
            return {Reason.PENDING, Reason.MISS}
        return {Reason.MISS}

    @rule(wait=st.integers(0, 200))
    def time_passes(self, wait: int) -> None:
        self.world.now += wait

    @precondition(lambda self: len(self.world.open) < 4)
    @rule(engine=st.sampled_from(["", "a"]))
    def connect(self, engine: str) -> None:
        self.world.connect(engine)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.close(self.pick(data, self.world.open))

    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(KEYS), max_size=4),
        shards=st.lists(st.sampled_from(SHARDS), min_size=1, max_size=2),
        prefix=st.booleans(),
    )
    def acquire(
        self, data: st.DataObject, keys: list[bytes], shards: list[int], prefix: bool
    ) -> None:
        session = self.pick(data, self.world.open)
        expected = [self.expect(name, shard) for name in keys for shard in shards]
        answer = self.world.acquire(session, keys, shards, prefix)
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

    @rule(data=st.data(), lie=st.booleans())
    def release(self, data: st.DataObject, lie: bool) -> None:
        world = self.world
        lease = self.pick(data, world.leases)
        owner = world.leases[lease][0]
        session = self.pick(data, world.open) if lie else owner
        answer = world.release(session, [lease, lease, 10**9])
        assert answer.released == (session == owner)
        refused = [lease, 10**9] if session == owner else [lease, lease, 10**9]
        assert answer.refused == refused

    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(FULL), min_size=1, max_size=3),
        shard=st.sampled_from(SHARDS),
        length=lengths,
    )
    def reserve(self, data: st.DataObject, keys: list[bytes], shard: int, length: int) -> None:
        self._reserve(data, keys, shard, length, 64, ())

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
    ) -> None:
        world = self.world
        session = self.pick(data, world.open)
        mine = sum(want.session == session for want in world.wanted.values())
        assume(mine + len(keys) <= world.config.max_reservations)
        expected = [self.expect(name, shard) for name in keys]
        status, evicted = world.core.status(), world.core.counters["evicted"]
        free = not (self.grace or world.wanted or world.copies or world.verifies or world.leases)
        answer = world.reserve(
            session, keys, length=length, tokens=tokens, sub_keys=sub_keys, shard=shard
        )
        for entry, (reason, may) in enumerate(zip(answer.reason, expected, strict=True)):
            if may == {Reason.OK} and entry == 0:
                assert reason == Reason.EXISTS
            if may == {Reason.PENDING}:
                assert reason == Reason.PENDING
            assert (reason == Reason.PENDING) <= (
                Reason.PENDING in may or keys[entry] in keys[:entry]
            )
        if free and not status.recovering and not self.in_grace and answer.reason[0]:
            assert answer.reason[0] == Reason.EXISTS
        if Reason.OK not in answer.reason:
            assert world.core.counters["evicted"] == evicted

    @rule(data=st.data(), twice=st.booleans())
    def commit(self, data: st.DataObject, twice: bool) -> None:
        world = self.world
        number = self.pick(data, world.wanted)
        session = self.pick(data, world.open)
        mine = world.wanted[number].session == session
        flying = len(world.copies)
        answer = world.commit(session, [number, 10**9] + [number] * twice)
        if not mine:
            assert answer == fx.CommitResult([Reason.STALE] * (2 + twice))
        assert len(world.copies) - flying <= mine

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        world = self.world
        number = self.pick(data, world.wanted)
        session = self.pick(data, world.open)
        mine = world.wanted[number].session == session
        assert world.abort(session, [number, number, 10**9]).aborted == mine

    @rule(data=st.data(), ok=st.booleans())
    def copy_ends(self, data: st.DataObject, ok: bool) -> None:
        job = self.pick(data, self.world.copies)
        copy, _ = self.world.copies[job]
        if not ok:
            place = copy.slab, copy.offset
            self.world.wanted = {
                number: want
                for number, want in self.world.wanted.items()
                if self.world._place_of(want) != place
            }
        self.world.copy_ends(job, ok)

    @rule(data=st.data(), answered=st.booleans())
    def verify_ends(self, data: st.DataObject, answered: bool) -> None:
        self.world.verify_ends(self.pick(data, self.world.verifies), answered)

    @rule(data=st.data(), slab=st.sampled_from(sorted(SLABS)))
    def flip(self, data: st.DataObject, slab: int) -> None:
        self.world.flip(slab, data.draw(st.integers(0, SLABS[slab] - 1)))

    @rule(data=st.data(), entries=st.lists(st.integers(0, 5), max_size=3))
    def report(self, data: st.DataObject, entries: list[int]) -> None:
        world = self.world
        lease = self.pick(data, world.leases)
        owner, held = world.leases[lease]
        answer = world.ask(ev.ReportCorrupt, owner, lease, entries)
        real = [entry for entry in entries if entry < len(held) and held[entry]]
        assert answer == fx.ReportCorruptResult(len(real))

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        world = self.world
        leased = [item for _, held in world.leases.values() for item in held if item]
        catalog = dict(world.catalog)
        stored = [s for s in catalog if world.record(s).state is not State.FREE]
        for slot in data.draw(st.lists(st.sampled_from(stored), max_size=2)) if stored else ():
            self.damage(data, catalog, slot)
        kept = {
            (item.slab, item.offset // TILE_BYTES, item.root)
            for slot, item in ((s, decode(raw)) for s, raw in catalog.items())
            if item is not None and item == world.record(slot) and item.state is State.COMMITTED
        }
        self.grace = [item for item in leased if (item.slab, item.tile, item.root) in kept]
        self.grace = [item for item in self.grace if not self.is_flipped(item)]
        world.restart(catalog)
        self.in_grace = world.core._store.grace
        assert not world.index

    def is_flipped(self, held: Held) -> bool:
        tiles = range(held.tile, held.tile + held.count)
        return any((held.slab, tile) in self.world.flipped for tile in tiles)

    def damage(self, data: st.DataObject, catalog: dict[int, bytes], slot: int) -> None:
        raw = catalog[slot]
        how = data.draw(st.sampled_from(["flip", "cut", "copy", "shift", "zero"]))
        if how == "flip":
            at = data.draw(st.integers(0, len(raw) - 1))
            catalog[slot] = (
                raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :]
            )
        elif how == "cut":
            catalog[slot] = raw[:100] + bytes(28)
        elif how == "copy":
            catalog[data.draw(st.integers(0, 9))] = raw
        elif how == "zero":
            del catalog[slot]
        else:
            record = decode(raw)
            if record is not None:
                moved = data.draw(st.sampled_from([1, TILE_BYTES, 99 * TILE_BYTES]))
                values = {n: getattr(record, n) for n in record.__slots__}
                catalog[slot] = type(record)(**{**values, "offset": record.offset + moved}).encode()

    in_grace = False

    @rule()
    def grace_ends(self) -> None:
        self.grace, self.in_grace = [], False
        self.world.send(ev.GraceEnded())

    @invariant()
    def all_holds(self) -> None:
        self.world.check()
        for held in self.grace:
            if not self.is_flipped(held):
                self.world.check_held(held)

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        world.settle()
        assert not world.waiting
        for session in list(world.open):
            world.close(session)
        world.settle()
        world.send(ev.GraceEnded())
        world.check()
        assert not world.closed, "staging of a dead session is still there"
        status = world.core.status()
        assert (status.leases, status.reservations, status.leased_bytes) == (0, 0, 0)
        used = sum(slab.used for slab in status.slabs)
        assert used == sum(
            -(-row.length // TILE_BYTES) * TILE_BYTES
            for row in world.core.spans(limit=1000, now_ms=world.now)
        )


CoreMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
TestCore = CoreMachine.TestCase
