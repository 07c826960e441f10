"""Rules about what clients do not bring about: damage, wipes, operators and restarts."""

from __future__ import annotations

import hypothesis.strategies as st
from contents import NAMESPACE
from hypothesis.stateful import precondition, rule
from walk import Walk, having, seldom

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core.codes import Cause
from kmesh_spand.core.record import decode
from kmesh_spand.core.states import State
from kmesh_spand.core.tenants import OWNER_BYTES


class FaultRules(Walk):
    """What happens to the memory and to the daemon."""

    @precondition(having("verifies"))
    @rule(data=st.data(), lost=seldom)
    def verify_ends(self, data: st.DataObject, lost: bool) -> None:
        self.verify_one(self.pick(data, self.world.verifies), lost)

    def verify_one(self, job: int, lost: bool = False) -> None:
        self.causes |= {Cause.CORRUPT, Cause.RECOVERY}
        self.world.verify_ends(job, not lost)

    @precondition(having("wipes"))
    @rule(data=st.data(), fail=seldom)
    def wipe_ends(self, data: st.DataObject, fail: bool) -> None:
        self.world.wipe_ends(self.pick(data, self.world.wipes), not fail)

    @precondition(having("sizes"))
    @rule(data=st.data())
    def flip(self, data: st.DataObject) -> None:
        slab = self.pick(data, self.world.sizes)
        self.world.flip(slab, data.draw(st.integers(0, self.world.sizes[slab] - 1)))

    @rule(data=st.data(), aged=st.booleans(), many=seldom)
    def evict(self, data: st.DataObject, aged: bool, many: bool) -> None:
        world, sweep = self.world, self.world.core.sweep
        self.causes.add(Cause.OPERATOR)
        rows = [row for row in world.core.views.spans(now_ms=world.now) if row.state != "orphaned"]
        if rows and not many:
            rows = [data.draw(st.sampled_from(rows))]
            keys = b"".join(row.key for row in rows)
            swept = sweep.keys(keys, min_age_ms=0, min_idle_ms=0, now_ms=world.now)
            # A further name of a span means that span.
            stored = [*world.records().items(), *world.records(1).items()]
            named = {r.primary - 1 for (name, _, _), r in stored if name in keys}
            rows = [
                row
                for row in world.core.views.spans(now_ms=world.now)
                if row.key in keys or row.slot in named
            ]
            gone = ("orphaned", "doomed", "draft", "retired")
            rows = [row for row in rows if row.state not in gone]
        else:
            idle = 64 if aged else 0
            swept = sweep.part(0, 100, NAMESPACE, min_idle_ms=idle, now_ms=world.now)
            if aged:
                rows = [row for row in rows if not row.leases and row.idle_ms >= idle]
        assert swept.next_slot is None
        assert len(swept.slots) + swept.leased + swept.busy + len(swept.bases) >= len(rows)
        may = {row.slot for row in rows if row.state in ("committed", "recovered")}
        may -= {row - 1 for row in world.core._store.holds}
        assert set(swept.slots) == {row.slot for row in rows if not row.leases} & may
        assert swept.size == sum(row.length for row in rows if row.slot in swept.slots)
        lies = [row.slot for row in rows if row.leases] + [-1, 10**6]
        world.send(ev.Evict([*swept.slots, *lies]))
        left = {row.slot for row in world.core.views.spans(now_ms=world.now)}
        assert not left & set(swept.slots)
        assert left >= {row.slot for row in rows if row.leases}

    @rule(drain=seldom)
    def drains(self, drain: bool) -> None:
        """A drain that is cancelled at once: nobody computes for others in between."""
        if not drain:
            return
        self.causes |= {Cause.PRESSURE, Cause.OPERATOR}
        self.world.send(ev.Drain())
        assert not any(flight.leader for flight in self.world.core.flights.by_id.values())
        self.world.led.clear()
        self.world.send(ev.Resume())

    @rule(data=st.data(), now=seldom, reads=st.booleans())
    def restart(self, data: st.DataObject, now: bool, reads: bool) -> None:
        world = self.world
        if not now:
            return
        leased = [item for _, held in world.leases.values() for item in held if item]
        catalog = dict(world.catalog)
        stored = [s for s in catalog if world.record(s).state is not State.FREE]
        for slot in (
            data.draw(st.lists(st.sampled_from(stored), max_size=2, unique=True)) if stored else ()
        ):
            self.damage(data, catalog, slot)
        kept = {
            (item.slab, item.offset // TILE_BYTES, item.root)
            for slot in stored
            if catalog.get(slot) == world.catalog[slot]
            and (item := world.record(slot)).state is State.COMMITTED
        }
        self.reached.update(world.core.counters)
        self.grace = [item for item in leased if (item.slab, item.tile, item.root) in kept]
        if world.owners and data.draw(seldom):
            # A slab of which nobody can say whose it is: what is in it is gone, and stays unused.
            slab = self.pick(data, world.owners)
            raw = bytearray(world.owners[slab])
            raw[data.draw(st.integers(0, OWNER_BYTES - 1))] ^= data.draw(st.integers(1, 255))
            world.owners[slab] = bytes(raw)
        world.restart(catalog)
        self.in_grace = world.core._store.grace
        self.known.clear()
        self.found.clear()
        assert not world.index
        if reads:
            while world.verifies:
                self.verify_one(min(world.verifies))

    def damage(self, data: st.DataObject, catalog: dict[int, bytes], slot: int) -> None:
        raw = self.world.catalog[slot]
        how = data.draw(st.sampled_from(["flip", "cut", "copy", "shift", "zero"]))
        if how == "flip":
            at = data.draw(st.integers(0, len(raw) - 1))
            catalog[slot] = (
                raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :]
            )
        elif how == "cut":
            catalog[slot] = raw[:100] + bytes(28)
        elif how == "copy":
            catalog[data.draw(st.integers(0, self.world.config.max_spans - 1))] = raw
        elif how == "zero":
            catalog.pop(slot, None)
        else:
            record = decode(raw)
            if record is not None:
                moved = data.draw(st.sampled_from([1, TILE_BYTES, 99 * TILE_BYTES]))
                values = {n: getattr(record, n) for n in record.__slots__}
                catalog[slot] = type(record)(**{**values, "offset": record.offset + moved}).encode()

    @precondition(having("given_up"))
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        self.world.replace(self.pick(data, self.world.given_up))

    @precondition(lambda self: self.in_grace)
    @rule()
    def grace_ends(self) -> None:
        self.grace, self.in_grace = [], False
        self.causes.add(Cause.RECOVERY)
        self.world.send(ev.GraceEnded())
