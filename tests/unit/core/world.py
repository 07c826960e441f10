"""A core with everything around it, simulated: clients, workers, memory.

``World`` sends what clients ask for and asserts what they rely on.
"""

from __future__ import annotations

from contents import NAMESPACE, SHARD, Held, Wanted
from workers import Workers

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import FlightCause, Standing
from kmesh_spand.core.holding import TICK_SHIFT
from kmesh_spand.core.record import Record
from kmesh_spand.core.states import State
from kmesh_spand.core.tags import tag

STAGING = 1 << 20
SCHEDULER, WORKER, TOOL = 1, 2, 3


class World(Workers):
    """Clients of one core after the other, with its surroundings and workers."""

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

    @property
    def idle(self) -> bool:
        """Whether a drain would be over."""
        return not self.copies

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
