"""What surrounds a core: slabs, staging, catalog, index, replies.

``Surroundings.send`` carries effects out as the shell would and asserts what the shell relies on.
Bytes are one word a tile: the number of the content that was copied there.
"""

from __future__ import annotations

import functools
from array import array

from contents import FLIPPED, PARTIAL, Held, Recipe, Wanted, Who, heir_of

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core import results as rs
from kmesh_spand.core.batch import Batch
from kmesh_spand.core.codes import Arrival
from kmesh_spand.core.config import CoreConfig, DiskConfig
from kmesh_spand.core.core import Core
from kmesh_spand.core.policy import Policy
from kmesh_spand.core.record import RECORD_BYTES, Record
from kmesh_spand.core.record import decode as _decode
from kmesh_spand.core.records import Records, read
from kmesh_spand.core.states import State
from kmesh_spand.core.tags import tag
from kmesh_spand.core.tenants import OWNER_BYTES, OwnerState, Tenancy
from kmesh_spand.core.tenants import decode_owner as _decode_owner

# The same few records are looked at after each step.
decode = functools.lru_cache(4096)(_decode)
decode_owner = functools.lru_cache(256)(_decode_owner)


class Surroundings:
    """Carries out what one core after the other says, over several epochs."""

    def __init__(
        self,
        slabs: dict[int, int],
        *,
        policy: Policy | None = None,
        populated: bool = True,
        tenancy: Tenancy | None = None,
        tiers: dict[int, int] | None = None,
        batch: Batch | None = None,
        disk: DiskConfig | None = None,
        hardened: bool = False,
        **limits: int,
    ) -> None:
        self.disk = disk
        self.tiers = tiers or {}
        self.config = CoreConfig(**{"max_spans": 64, **limits})
        self.tenancy = tenancy or Tenancy()
        self.batch = batch or Batch()
        self.owners: dict[int, bytes] = {}
        self.sizes = dict(slabs)
        self.hardened = hardened
        # Slabs that can't be written, and sizes of those that were given up.
        self.sealed: set[int] = set()
        self.given_up: dict[int, int] = {}
        self.now = 1_000_000
        self.memory: dict[tuple[int, int], int] = {}
        self.catalog: dict[int, bytes] = {}
        self.contents: dict[int, Wanted] = {}
        self.recipes: dict[int, Recipe] = {}
        self.session = self.request = self.content = 0
        self._reset(policy)
        for slab, size in slabs.items():
            self.send(ev.SlabAdded(slab, size * TILE_BYTES, None, self.tiers.get(slab, 0)))
            if populated:
                self.send(ev.Populated(slab, size * TILE_BYTES))

    def _reset(self, policy: Policy | None) -> None:
        self.core = Core(self.config, policy, self.tenancy, self.batch, self.disk)
        self.index: dict[tuple[int, int, int], int] = {}
        self.uids: dict[int, int] = {}
        self.wipes: dict[int, int] = {}
        self.open: set[int] = set()
        self.closed: set[int] = set()
        self.waiting: dict[tuple[int, int], rs.Result | None] = {}
        self.answered: dict[tuple[int, int], rs.Result] = {}
        self.wanted: dict[int, Wanted] = {}
        self.copies: dict[int, tuple[fx.Copy, int]] = {}
        self.verifies: dict[int, fx.Verify] = {}
        self.encodes: dict[int, fx.Encode] = {}
        self.made: dict[int, tuple[fx.Encode, int, list[int]]] = {}
        self.keeps: dict[int, fx.KeepRecipe] = {}
        self.densifies: dict[int, fx.Densify] = {}
        # What leases hold beside their own spans.
        self.based: dict[int, list[Held]] = {}
        self.leases: dict[int, tuple[int, list[Held | None]]] = {}
        # Who leads which flight, and for what each session waits, as clients know it.
        self.led: dict[int, int] = {}
        self.claims: dict[tuple[int, int], tuple[rs.ClaimResult, list[bytes]]] = {}
        self.waits: dict[tuple[int, int], int] = {}
        self.flipped: set[tuple[int, int]] = set()

    def send(self, event: ev.Event) -> list[fx.Effect]:
        """Handle an event and carry its effects out."""
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self._do(effect)
        return effects

    def who(self, session: int, salt: bytes = b"") -> Who:
        """The tenant of a session's requests with that salt."""
        return self.tenancy.group(self.uids[session]), salt

    def who_of(self, slab: int) -> Who | None:
        """The tenant that a slab was given to."""
        owner = decode_owner(self.owners.get(slab, bytes(OWNER_BYTES)))
        if owner is None or owner.state is not OwnerState.OWNED:
            return None
        return owner.group, owner.salt

    def flip(self, slab: int, tile: int) -> None:
        """Damage a tile."""
        self.memory[slab, tile] = FLIPPED
        self.flipped.add((slab, tile))

    def read_catalog(self) -> tuple[Records, array[int]]:
        """The catalog, as it is read after a restart, and damaged slots."""
        written = bytearray((max(self.catalog, default=0) + 1) * RECORD_BYTES)
        for slot, data in self.catalog.items():
            written[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = data
        return read(memoryview(written), len(written) // RECORD_BYTES)

    def restart(self, catalog: dict[int, bytes] | None = None) -> None:
        """A new epoch over the same memory, with the catalog as given."""
        self.catalog = dict(self.catalog if catalog is None else catalog)
        self._reset(None)
        found, _ = self.read_catalog()
        self.catalog = {slot: self.catalog[slot] for slot in found.slots}
        self.send(ev.Recovered(found))
        host = {slab for slab in self.sizes if not self.tiers.get(slab)}
        self.sealed = host if self.hardened else set()
        fresh, self.given_up = self.given_up, {}
        for slab, size in list(self.sizes.items()):
            owner = decode_owner(self.owners.get(slab, bytes(OWNER_BYTES)))
            tier, sealed = self.tiers.get(slab, 0), slab in self.sealed
            self.send(ev.SlabAdded(slab, size * TILE_BYTES, owner, tier, sealed))
            if slab in self.sizes:
                self.send(ev.Populated(slab, size * TILE_BYTES))
        for slab, size in fresh.items():
            self._new_slab(slab, size, None)

    def replace(self, slab: int, *, populated: bool = True) -> None:
        """Memory that can be written is there instead of a slab that was given up."""
        self._new_slab(slab, self.given_up.pop(slab), slab, populated)

    def _new_slab(self, slab: int, size: int, replaces: int | None, populated: bool = True) -> None:
        heir = heir_of(slab)
        assert heir not in self.sizes
        assert heir not in self.tiers
        # What was known of that number is of other memory.
        self.owners.pop(heir, None)
        self.sizes[heir] = size
        self.memory = {at: word for at, word in self.memory.items() if at[0] != heir}
        self.flipped = {at for at in self.flipped if at[0] != heir}
        self.send(ev.SlabAdded(heir, size * TILE_BYTES, replaces=replaces))
        if populated:
            self.send(ev.Populated(heir, size * TILE_BYTES))

    def _do(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Reply(session, request, result):
                if session in self.open:
                    del self.waiting[session, request]
                    self.answered[session, request] = result
                self.answer = result
                flight = self.waits.pop((session, request), 0)
                if flight and isinstance(result, rs.AwaitResult):
                    self._arrived(session, flight, result)
            case fx.Copy():
                assert effect.session in self.open
                self.content += 1
                want = next(
                    want
                    for want in self.wanted.values()
                    if self._place_of(want) == (effect.slab, effect.offset)
                )
                assert want.session == effect.session
                self.contents[self.content] = want
                self.copies[effect.job] = effect, self.content
                self._write(effect, PARTIAL)
            case fx.Verify():
                self.verifies[effect.job] = effect
            case fx.Encode():
                assert self._intact(effect.span, *effect.bases) in (True, False)
                assert self.contents[effect.span.root].key == effect.span.key
                self.encodes[effect.job] = effect
            case fx.KeepRecipe(job, slab, offset, length):
                assert self.made[job][1] == length
                self._fill(slab, offset, length, PARTIAL)
                self.keeps[job] = effect
            case fx.ForgetRecipe(job, slab):
                encode, _, _ = self.made.pop(job)
                assert self.tiers.get(slab, 0) == self.tiers.get(encode.span.slab, 0)
            case fx.Densify():
                self._fill(effect.slab, effect.offset, effect.length, PARTIAL)
                self.densifies[effect.job] = effect
            case fx.PutRecord(slot, data):
                record = decode(data)
                assert record is not None
                self.catalog[slot] = data
                if record.state is State.FREE:
                    assert slot not in self.index.values()
            case fx.GiveUp(slab):
                self.sealed.remove(slab)
                self.given_up[slab] = self.sizes.pop(slab)
            case fx.Wipe(job, slab):
                assert slab not in self.sealed
                assert self.who_of(slab) is None
                assert slab not in self.wipes.values()
                self.wipes[job] = slab
            case fx.PutOwner(slab, data):
                before = decode_owner(self.owners.get(slab, bytes(OWNER_BYTES)))
                owner = decode_owner(data)
                assert owner is not None
                assert before is None or before.group == owner.group, "a group's slab moved"
                self.owners[slab] = data
                if owner.state is OwnerState.OWNED:
                    assert not any(
                        word
                        for at, word in self.memory.items()
                        if at[0] == slab and word != FLIPPED
                    ), "a tenant was given another's bytes"
            case fx.Publish(slot, tags, group, tier):
                assert self.record(slot).state is State.COMMITTED
                assert tags[0] == tag(self.record(slot).key, self.record(slot).shard)
                who = self.who_of(self.record(slot).slab)
                assert who is not None
                assert who[0] == group
                for name in tags:
                    old = self.index.get((group, tier, name))
                    # Only from one row to the other of the same span.
                    assert old is None or self.record(old).key == self.record(slot).key
                    self.index[group, tier, name] = slot
                self.wanted = {
                    n: want
                    for n, want in self.wanted.items()
                    if (want.who, want.tier) != (who, tier) or tag(want.key, want.shard) not in tags
                }
            case fx.Unpublish(slot, tags, group, tier):
                for name in tags:
                    assert self.index.pop((group, tier, name)) == slot
            case fx.DropStaging(session):
                self.closed.remove(session)
                assert all(copy.session != session for copy, _ in self.copies.values())

    def _arrived(self, session: int, flight: int, result: rs.AwaitResult) -> None:
        assert (result.arrival == Arrival.ENDED) == (result.cause != 0)
        if result.arrival == Arrival.LEAD:
            leader = self.led.get(flight)
            assert leader not in self.open, "two lead one flight"
            self.led[flight] = session

    def _place_of(self, want: Wanted) -> tuple[int, int] | None:
        for row in self.core.views.spans(now_ms=self.now):
            if (row.key, row.shard, row.state) == (want.key, want.shard, "copying") and (
                self.who_of(row.slab),
                self.tiers.get(row.slab, 0),
            ) == (want.who, want.tier):
                return row.slab, row.offset
        return None

    def _intact(self, *places: fx.Payload) -> bool:
        """Whether what a job reads is what it was told; it is unless a test damaged it."""
        intact = True
        for place in places:
            first = place.offset // TILE_BYTES
            held = Held(place.slab, first, tiles(place.length), place.root)
            self.check_held(held)
            intact &= all(
                self.memory[held.slab, tile] == held.root
                for tile in range(first, first + held.count)
            )
        return intact

    def _fill(self, slab: int, offset: int, length: int, word: int) -> None:
        first = offset // TILE_BYTES
        assert slab not in self.sealed, "what is sealed is written"
        for tile in range(first, first + tiles(length)):
            assert tile < self.sizes[slab]
            self.memory[slab, tile] = word
            self.flipped.discard((slab, tile))

    def _write(self, copy: fx.Copy, content: int) -> None:
        self._fill(copy.slab, copy.offset, copy.length, content)

    def record(self, slot: int) -> Record:
        """What the catalog has at a slot."""
        record = decode(self.catalog[slot])
        assert record is not None
        return record

    def records(self, tier: int = 0) -> dict[tuple[bytes, int, Who], Record]:
        """Spans and their further names in a tier, by key, shard and tenant."""
        found = {}
        for slot in self.catalog:
            record = self.record(slot)
            if record.state is not State.FREE:
                who, where = self.who_of(record.slab), self.tiers.get(record.slab, 0)
                assert who is not None
                assert (record.key, record.shard, who, where) not in found
                found[record.key, record.shard, who, where] = record
        return {name[:3]: record for name, record in found.items() if name[3] == tier}

    @property
    def mirrors(self) -> list[Record]:
        """What the catalog has of recipes."""
        return [record for record in map(self.record, self.catalog) if record.dense]

    @property
    def indexed(self) -> int:
        """Names in the index."""
        return len(self.index)

    def check_bytes(self) -> None:
        """Every leased tile still holds what was stored, unless a test damaged it."""
        self.based = {n: held for n, held in self.based.items() if n in self.leases}
        for number, (_, held) in self.leases.items():
            for item in (*held, *self.based[number]):
                if item:
                    self.check_held(item)

    def check_held(self, held: Held) -> None:
        """One leased span's bytes."""
        for tile in range(held.tile, held.tile + held.count):
            at = held.slab, tile
            assert self.memory[at] == held.root or at in self.flipped, at
