"""Everything around a core, simulated: slabs, staging, catalog, index, replies.

``World.send`` carries effects out as the shell would and asserts what the shell relies on.
Bytes are one word a tile: the number of the content that was copied there.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from dataclasses import dataclass

from kmesh.layout import TILE_BYTES, Shard, tiles
from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.batch import Batch
from kmesh_spand.core.codes import Arrival, FlightCause, Standing
from kmesh_spand.core.config import CoreConfig, DiskConfig
from kmesh_spand.core.core import Core
from kmesh_spand.core.holding import TICK_SHIFT
from kmesh_spand.core.mirrors import BaseFact, RecipeFacts
from kmesh_spand.core.policy import Policy
from kmesh_spand.core.record import RECORD_BYTES, Record
from kmesh_spand.core.record import decode as _decode
from kmesh_spand.core.records import Records, read
from kmesh_spand.core.states import State
from kmesh_spand.core.tags import tag
from kmesh_spand.core.tenants import OWNER_BYTES, OwnerState, Tenancy
from kmesh_spand.core.tenants import decode_owner as _decode_owner

SHARD = Shard(0, 4, 0, 2).code()
OTHER_SHARD = Shard(4, 8, 0, 2).code()
NAMESPACE = hashlib.blake2b(b"namespace", digest_size=32).digest()
STAGING = 1 << 20
SCHEDULER, WORKER, TOOL = 1, 2, 3
#: A tenant: its group of uids, and its salt.
Who = tuple[int, bytes]
# The same few records are looked at after each step.
decode = functools.lru_cache(4096)(_decode)
decode_owner = functools.lru_cache(256)(_decode_owner)
# What a tile holds when it was damaged, or is being written.
FLIPPED, PARTIAL = -1, -2


def key(name: object) -> bytes:
    """A key of 32 bytes that only ``name`` has."""
    return hashlib.blake2b(repr(name).encode(), digest_size=32).digest()


def heir_of(slab: int) -> int:
    """The other number of a slab's place."""
    return slab ^ 8


@dataclass(frozen=True)
class Wanted:
    """What a reservation is for."""

    session: int
    key: bytes
    sub_keys: tuple[bytes, ...]
    shard: int
    length: int
    tokens: int
    who: Who
    tier: int = 0


@dataclass(frozen=True)
class Recipe:
    """A recipe's content: which it gives, and which spans it names."""

    dense: int
    facts: RecipeFacts


@dataclass(frozen=True)
class Held:
    """One leased entry, as its client knows it."""

    slab: int
    tile: int
    count: int
    root: int


class World:
    """A core and its surroundings, over several epochs."""

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

    # Events

    def send(self, event: ev.Event) -> list[fx.Effect]:
        """Handle an event and carry its effects out."""
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self._do(effect)
        return effects

    def ask(self, kind: type, session: int, *args: object) -> rs.Result | None:
        """Send a request; its answer, or None when that comes later."""
        self.request += 1
        self.waiting[session, self.request] = None
        self.send(kind(session, self.request, *args))
        if (session, self.request) in self.waiting:
            return None
        return self.answer

    def connect(self, engine: str = "", role: int = TOOL, uid: int = 1000) -> int:
        """A new session's number."""
        self.session += 1
        self.open.add(self.session)
        self.uids[self.session] = uid
        self.send(ev.SessionOpened(self.session, uid, engine, role))
        return self.session

    def close(self, session: int) -> None:
        """End a session: its requests get no answer, its holds are gone."""
        self.open.discard(session)
        self.closed.add(session)
        self.waiting = {k: v for k, v in self.waiting.items() if k[0] != session}
        self.leases = {n: held for n, held in self.leases.items() if held[0] != session}
        self.wanted = {n: want for n, want in self.wanted.items() if want.session != session}
        self.led = {n: leader for n, leader in self.led.items() if leader != session}
        self.claims = {at: claim for at, claim in self.claims.items() if at[0] != session}
        self.waits = {at: flight for at, flight in self.waits.items() if at[0] != session}
        self.send(ev.SessionClosed(session))

    def who(self, session: int, salt: bytes = b"") -> Who:
        """The tenant of a session's requests with that salt."""
        return self.tenancy.group(self.uids[session]), salt

    def who_of(self, slab: int) -> Who | None:
        """The tenant that a slab was given to."""
        owner = decode_owner(self.owners.get(slab, bytes(OWNER_BYTES)))
        if owner is None or owner.state is not OwnerState.OWNED:
            return None
        return owner.group, owner.salt

    def acquire(
        self,
        session: int,
        keys: list[bytes],
        shards: list[int] | None = None,
        prefix: bool = False,
        salt: bytes = b"",
        tier: int = 0,
        recipes: bool = False,
    ) -> rs.AcquireResult:
        """Acquire, and check that what was leased are the bytes stored under those keys."""
        shards = shards or [SHARD]
        answer = self.ask(rq.Acquire, session, b"".join(keys), shards, prefix, salt, tier, recipes)
        assert isinstance(answer, rs.AcquireResult), answer
        held: list[Held | None] = []
        based: dict[tuple[int, bytes], Held] = {}
        for base in answer.bases:
            assert self.contents[base.root].key == base.key
            shard = shards[base.shard]
            assert (shard, base.key) not in based
            place = Held(base.slab, base.offset // TILE_BYTES, tiles(base.length), base.root)
            based[shard, base.key] = place
        dense = list(zip(answer.dense_length, answer.dense_root, strict=True))
        assert len(dense) in ((0, len(answer.reason)) if recipes else (0,))
        dense = dense or [(0, 0)] * len(answer.reason)
        for entry, reason in enumerate(answer.reason):
            row = [
                column[entry]
                for column in (
                    answer.slab,
                    answer.offset,
                    answer.length,
                    answer.tokens,
                    answer.generation,
                    answer.root,
                )
            ]
            if reason:
                assert not any((*row, *dense[entry]))
                held.append(None)
                continue
            slab, offset, length, tokens, generation, root = row
            assert generation
            recipe, count = self.recipes.get(root), tiles(length)
            assert (recipe is not None) == (dense[entry][0] > 0), "a recipe that nobody asked for"
            held.append(Held(slab, offset // TILE_BYTES, count, root))
            if recipe is not None:
                for fact in recipe.facts.bases:
                    base_held = based[shards[entry % len(shards)], fact.key]
                    assert base_held.root == fact.root
                length, root = dense[entry]
                assert root == recipe.dense, "another span's recipe"
            found = self.contents[root]
            name, shard = keys[entry // len(shards)], shards[entry % len(shards)]
            assert name in (found.key, *found.sub_keys)
            assert (found.shard, found.length, found.tokens) == (shard, length, tokens)
            assert found.who == self.who_of(slab) == self.who(session, salt)
            assert self.core.may_map(slab, self.uids[session])
            assert self.tiers.get(slab, 0) == tier
        assert bool(answer.lease) == any(held)
        if answer.lease:
            assert answer.lease not in self.leases
            self.leases[answer.lease] = session, held
            self.based[answer.lease] = list(based.values())
        self.check_bytes()
        return answer

    def release(self, session: int, leases: list[int]) -> rs.ReleaseResult:
        """Release."""
        answer = self.ask(rq.Release, session, leases)
        assert isinstance(answer, rs.ReleaseResult), answer
        for lease in leases:
            if lease in self.leases and self.leases[lease][0] == session:
                del self.leases[lease]
        return answer

    def reserve(
        self,
        session: int,
        keys: list[bytes],
        *,
        length: int = TILE_BYTES,
        tokens: int = 64,
        sub_keys: tuple[bytes, ...] = (),
        shard: int = SHARD,
        salt: bytes = b"",
        tier: int = 0,
    ) -> rs.ReserveResult:
        """Reserve spans of one size; ``sub_keys`` of each."""
        count = len(keys)
        answer = self.ask(
            rq.Reserve,
            session,
            NAMESPACE,
            shard,
            b"".join(keys),
            [tokens] * count,
            list(range(count)),
            [length] * count,
            b"".join(sub_keys) * count,
            salt,
            tier,
        )
        who = self.who(session, salt)
        assert isinstance(answer, rs.ReserveResult), answer
        for name, reason, number in zip(keys, answer.reason, answer.reservation, strict=True):
            assert bool(number) == (not reason)
            if number:
                self.wanted[number] = Wanted(
                    session, name, sub_keys, shard, length, tokens, who, tier
                )
        return answer

    def commit(self, session: int, numbers: list[int]) -> rs.Result | None:
        """Commit from offset 0, 64, …"""
        offsets = [64 * entry for entry in range(len(numbers))]
        return self.ask(rq.Commit, session, numbers, offsets, STAGING)

    def abort(self, session: int, numbers: list[int]) -> rs.AbortResult:
        """Abort."""
        answer = self.ask(rq.Abort, session, numbers)
        assert isinstance(answer, rs.AbortResult)
        for number in numbers:
            if number in self.wanted and self.wanted[number].session == session:
                del self.wanted[number]
        return answer

    def claim(
        self,
        session: int,
        keys: list[bytes],
        shards: list[int] | None = None,
        salt: bytes = b"",
        place: str = "",
    ) -> rs.ClaimResult:
        """Claim; two sessions never lead one key."""
        shards = shards or [SHARD]
        answer = self.ask(rq.Claim, session, b"".join(keys), shards, salt, 0, place)
        assert isinstance(answer, rs.ClaimResult), answer
        if answer.standing == Standing.LEAD:
            assert answer.flight not in self.led
            assert 0 < answer.covered <= len(keys)
            self.led[answer.flight] = session
        if answer.standing == Standing.COMPUTING:
            assert self.led.get(answer.flight) != session
            assert 0 < answer.covered <= min(len(keys), answer.ahead)
            self.claims[session, answer.flight] = answer, keys
        return answer

    def wait(
        self,
        session: int,
        claim: rs.ClaimResult,
        shards: list[int] | None = None,
        place: str = "",
    ) -> rs.Result | None:
        """Await what a Claim found; None while it is not answered."""
        self.waits[session, self.request + 1] = claim.flight
        shards = shards or [SHARD]
        return self.ask(
            rq.Await, session, claim.flight, claim.first, claim.covered, shards, 0, place
        )

    def progress(
        self, session: int, flight: int, computed: int = 0, place: str = ""
    ) -> rs.Progress | None:
        """Progress, asked or told; it never takes anything back while one session leads."""
        before = self.core.flights.by_id.get(flight)
        told = before.pace.computed if before is not None else 0
        answer = self.ask(rq.AskProgress, session, flight, computed, place)
        assert isinstance(answer, rs.ProgressResult), answer
        far = answer.progress
        if far is None:
            assert before is None or before.who[0] != self.tenancy.group(self.uids[session])
        else:
            assert far.begin + far.computed == max(
                told,
                min(far.begin + computed, before.end) if self.led.get(flight) == session else 0,
            )
            assert far.quiet_ms <= far.age_ms
            assert far.pause_ms <= far.age_ms
        return far

    def leave(self, session: int, flight: int, only: int = 0) -> int:
        """Leave; all of the session's waits for that flight are answered."""
        answer = self.ask(rq.Leave, session, flight, only)
        assert isinstance(answer, rs.LeaveResult), answer
        mine = [at for at, n in self.waits.items() if (at[0], n) == (session, flight)]
        assert only or not mine
        return answer.left

    def land(self, session: int, flight: int, cause: FlightCause = FlightCause.DONE) -> bool:
        """Land; the session leads it no more."""
        mine = self.led.get(flight) == session
        if mine:
            del self.led[flight]
        answer = self.ask(rq.Land, session, flight, cause)
        assert isinstance(answer, rs.LandResult), answer
        assert answer.ended <= mine
        return answer.ended

    def store(self, session: int, keys: list[bytes], **how: object) -> None:
        """Reserve, commit and copy."""
        answer = self.reserve(session, keys, **how)  # type: ignore[arg-type]
        assert not any(answer.reason), answer
        self.commit(session, list(answer.reservation))
        for job in list(self.copies):
            self.copy_ends(job)

    def copy_ends(self, job: int, ok: bool = True) -> None:
        """A copy is done, or failed."""
        copy, content = self.copies.pop(job)
        if ok:
            self._write(copy, content)
            self.send(ev.CopyDone(job, content))
        else:
            self.send(ev.CopyFailed(job))

    def verify_ends(self, job: int, answered: bool = True) -> None:
        """A verification has read what is there, or its worker died."""
        verify = self.verifies.pop(job)
        first = verify.offset // TILE_BYTES
        read = range(first, first + tiles(verify.length))
        good = all(self.memory.get((verify.slab, tile)) == verify.root for tile in read)
        if good and answered:
            self.flipped -= {(verify.slab, tile) for tile in read}
        facts = None
        if good and answered and verify.recipe:
            recipe = self.recipes.get(verify.root)
            good, facts = recipe is not None, recipe.facts if recipe else None
        self.send(ev.VerifyDone(job, good if answered else None, facts))

    @property
    def mirrors(self) -> list[Record]:
        """What the catalog has of recipes."""
        return [record for record in map(self.record, self.catalog) if record.dense]

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

    def encode_ends(self, job: int, length: int = 1000, used: int = 1, *, ok: bool = True) -> None:
        """An encoding is done: a recipe over the first ``used`` bases, or nothing (0)."""
        encode = self.encodes.pop(job)
        bases = list(encode.bases)[:used]
        spoiled = not self._intact(encode.span)
        changed = [number for number, base in enumerate(bases) if not self._intact(base)]
        if not ok:
            self.send(ev.RecodeFailed(job))
        elif spoiled or changed:
            self.send(ev.EncodeSpoiled(job, spoiled, changed))
        elif not used:
            self.send(ev.NotEncoded(job, "a test says so"))
        else:
            self.made[job] = encode, length, list(range(len(bases)))
            self.send(ev.Encoded(job, length, range(len(bases))))

    def keep_ends(self, job: int, *, ok: bool = True) -> None:
        """A recipe was written, or could not be."""
        keep = self.keeps.pop(job)
        encode, _, used = self.made.pop(job)
        if not ok:
            self.send(ev.RecodeFailed(job))
            return
        self.content += 1
        bases = [encode.bases[number] for number in used]
        facts = [BaseFact(b.key, b.generation, b.root, b.tokens, b.position) for b in bases]
        span = encode.span
        self.recipes[self.content] = Recipe(span.root, RecipeFacts(span.length, span.root, facts))
        self._fill(keep.slab, keep.offset, keep.length, self.content)
        self.send(ev.RecipeKept(job, self.content))

    def densify_ends(self, job: int, *, ok: bool = True) -> None:
        """A recipe was decoded, or its worker died."""
        densify = self.densifies.pop(job)
        if not ok:
            self.send(ev.RecodeFailed(job))
            return
        good = self._intact(densify.mirror, *densify.bases)
        if good:
            assert self.recipes[densify.mirror.root].dense == densify.root
            self._fill(densify.slab, densify.offset, densify.length, densify.root)
        self.send(ev.Densified(job, good))

    def _fill(self, slab: int, offset: int, length: int, word: int) -> None:
        first = offset // TILE_BYTES
        assert slab not in self.sealed, "what is sealed is written"
        for tile in range(first, first + tiles(length)):
            assert tile < self.sizes[slab]
            self.memory[slab, tile] = word
            self.flipped.discard((slab, tile))

    def wipe_ends(self, job: int, ok: bool = True) -> None:
        """A slab was wiped, or could not be."""
        slab = self.wipes.pop(job)
        if ok:
            self.memory = {at: word for at, word in self.memory.items() if at[0] != slab}
            self.flipped = {at for at in self.flipped if at[0] != slab}
        self.send(ev.WipeDone(job, ok))

    def settle(self) -> None:
        """Let every job end well."""
        for job in list(self.wipes):
            self.wipe_ends(job)
        while self.copies or self.verifies or self.encodes or self.keeps or self.densifies:
            for job in list(self.encodes):
                self.encode_ends(job)
            for job in list(self.keeps):
                self.keep_ends(job)
            for job in list(self.densifies):
                self.densify_ends(job)
            for job in list(self.copies):
                self.copy_ends(job)
            for job in list(self.verifies):
                self.verify_ends(job)

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

    # Effects

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

    def _write(self, copy: fx.Copy, content: int) -> None:
        self._fill(copy.slab, copy.offset, copy.length, content)

    # What must hold

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
    def indexed(self) -> int:
        """Names in the index."""
        return len(self.index)

    @property
    def idle(self) -> bool:
        """Whether a drain would be over."""
        return not self.copies

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

    def check(self) -> None:
        """All of the above, and the core's own ledgers, against each other."""
        self.core.check()
        self.check_bytes()
        status = self.core.views.status()
        assert status.index_entries == self.indexed
        assert status.sessions == len(self.open)
        assert status.leases == len(self.leases)
        assert self.core.idle == self.idle
        assert set(self.index) <= {
            self._name_of(r) for r in map(self.record, self.catalog) if r.state
        }
        rows = {row.slot: row for row in self.core.views.spans(limit=10_000, now_ms=self.now)}
        stored = {"recovered", "verifying", "committed", "suspect"}
        listed = {slot for slot, row in rows.items() if row.state in stored}
        committed = {s for s in self.catalog if self.record(s).state is State.COMMITTED}
        assert listed == committed
        for slot in committed:
            row, record = rows[slot], self.record(slot)
            who = self.who_of(record.slab)
            assert who is not None
            for name in (
                "key",
                "namespace",
                "slab",
                "offset",
                "length",
                "start",
                "tokens",
                "shard",
                "generation",
            ):
                assert getattr(row, name) == getattr(record, name), name
            # The next life says the same.
            assert row.age_ms == (self.now >> TICK_SHIFT) - record.born << TICK_SHIFT
            assert (row.state == "committed") == (self._name_of(record) in self.index)

    def _name_of(self, record: Record) -> tuple[int, int, int]:
        """Group, tier and tag by which the index would have a record."""
        who = self.who_of(record.slab)
        assert who is not None
        return who[0], self.tiers.get(record.slab, 0), tag(record.key, record.shard)
