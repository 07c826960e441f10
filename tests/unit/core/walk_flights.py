"""Rules about flights: sessions claim, wait, store for others, leave and fail."""

from __future__ import annotations

import hypothesis.strategies as st
from contents import OTHER_SHARD, SHARD
from hypothesis.stateful import precondition, rule
from walk import FULL, SHARDS, having, lengths, salts, seldom
from walk_spans import SpanRules

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Arrival, FlightCause, Reason, Standing

ENDS = [FlightCause.DONE, FlightCause.ABORTED, FlightCause.PREEMPTED, FlightCause.NOT_STORED]


class FlightRules(SpanRules):
    """What sessions do for each other."""

    @precondition(having("open"))
    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(FULL), min_size=1, max_size=4, unique=True),
        shards=st.lists(st.sampled_from([SHARD, OTHER_SHARD]), min_size=1, max_size=2, unique=True),
        salt=salts,
    )
    def claim(self, data: st.DataObject, keys: list[bytes], shards: list[int], salt: bytes) -> None:
        world = self.world
        session = self.pick(data, world.open)
        keys = self.salted(keys, salt)
        who = world.who(session, salt)
        stored = all(self.expect(keys[0], shard, who) == {Reason.OK} for shard in shards)
        if sum(leader == session for leader in world.led.values()) >= world.config.max_flights:
            return
        answer = world.claim(session, keys, shards, salt)
        assert not stored or answer.standing in (Standing.STORED, Standing.NONE)
        if answer.standing == Standing.COMPUTING:
            flight = world.core.flights.by_id[answer.flight]
            assert flight.who == (*who, 0)
            assert flight.leader is None or flight.leader.id != session
            end = answer.first + answer.covered
            assert list(flight.keys[answer.first : end]) == keys[: answer.covered]

    @precondition(having("led"))
    @rule(data=st.data(), shard=st.sampled_from(SHARDS), old=seldom)
    def join(self, data: st.DataObject, shard: int, old: bool) -> None:
        """Somebody else wants what a flight brings, or believes an old claim."""
        world, flights = self.world, self.world.core.flights.by_id
        led = [number for number in flights if number in world.led]
        if old and world.claims:
            session, number = data.draw(st.sampled_from(sorted(world.claims)))
            found = world.claims[session, number][0]
        elif led:
            number = data.draw(st.sampled_from(led))
            flight = flights[number]
            group, salt, _ = flight.who
            others = [
                session
                for session in sorted(world.open)
                if session != world.led[number] and world.who(session)[0] == group
            ]
            session = (
                data.draw(st.sampled_from(others))
                if others
                else world.connect(uid=world.uids[world.led[number]])
            )
            first = data.draw(st.integers(flight.frontier, flight.end - 1))
            found = world.claim(session, list(flight.keys[first:]), salt=salt)
        else:
            return
        if found.standing != Standing.COMPUTING or world.led.get(number) == session:
            return
        waits = sum(at[0] == session for at in world.waits)
        answer = world.wait(session, found, [shard])
        if number not in flights:
            assert answer == rs.AwaitResult(Arrival.LANDED)
        elif waits >= world.config.max_waits:
            assert isinstance(answer, rs.Refused | rs.AwaitResult)
        else:
            assert answer in (None, rs.AwaitResult(Arrival.LANDED))
        at = session, world.request
        if at not in world.waits or number not in world.led:
            return
        # What seldom comes next by itself comes at once; drawn, one of these would fill a round.
        fate = world.request % 5
        if fate == 1:
            self._leave(at, one=data.draw(st.booleans()))
        elif fate == 2:
            self._land(number, world.led[number], FlightCause.ABORTED)
        elif fate == 3:
            flight = flights[number]
            for _ in range(flight.end - flight.frontier):
                if number in flights:
                    self._leader_stores(data, number, TILE_BYTES, False)

    @precondition(having("led"))
    @rule(data=st.data(), length=lengths, fail=seldom, steps=st.integers(1, 4))
    def leader_stores(self, data: st.DataObject, length: int, fail: bool, steps: int) -> None:
        """What comes next of a flight, in the leader's shards."""
        flights = self.world.core.flights.by_id
        led = [number for number, flight in flights.items() if flight.leader]
        if not led:
            return
        awaited = set(self.world.waits.values())
        number = data.draw(st.sampled_from([n for n in led if n in awaited] or led))
        for _ in range(steps):
            if number in flights:
                self._leader_stores(data, number, length, fail)

    def _leader_stores(self, data: st.DataObject, number: int, length: int, fail: bool) -> None:
        flight = self.world.core.flights.by_id[number]
        salt, wanted = flight.who[1], flight.keys[flight.frontier]
        names = {self.salted([name], salt)[0]: name for name in FULL}
        for shard in flight.shards:
            if flight.leader is not None:
                session = flight.leader.id
                self._store(data, session, names[wanted], shard, length, fail, salt)

    @precondition(having("led"))
    @rule(data=st.data(), computed=st.integers(0, 5), late=st.integers(0, 50))
    def progress(self, data: st.DataObject, computed: int, late: int) -> None:
        """Of a flight, by its leader or by another."""
        world = self.world
        world.now += late
        flight = self.pick(data, world.led)
        session = data.draw(st.sampled_from([world.led[flight], self.pick(data, world.open)]))
        world.progress(session, flight, computed, data.draw(st.sampled_from(["", "gpu"])))

    @precondition(having("waits"))
    @rule(data=st.data(), one=seldom)
    def leave(self, data: st.DataObject, one: bool) -> None:
        at, _ = data.draw(st.sampled_from(sorted(self.world.waits.items())))
        self._leave(at, one)

    def _leave(self, at: tuple[int, int], one: bool) -> None:
        world, (session, request) = self.world, at
        flight = world.waits[at]
        waits = sum((at[0], n) == (session, flight) for at, n in world.waits.items())
        assert world.leave(session, flight, request if one else 0) == (1 if one else waits)

    @precondition(having("led"))
    @rule(data=st.data(), cause=st.sampled_from(ENDS), lie=seldom)
    def land(self, data: st.DataObject, cause: FlightCause, lie: bool) -> None:
        world = self.world
        # Mostly one for which somebody waits.
        flight = self.pick(data, set(world.led) & set(world.waits.values()) or world.led)
        session = self.pick(data, world.open) if lie else world.led[flight]
        self._land(flight, session, cause)

    def _land(self, flight: int, session: int, cause: FlightCause) -> None:
        world = self.world
        waiting = [at for at, n in world.waits.items() if n == flight and at[0] != session]
        led = world.core.flights.by_id.get(flight)
        failed = cause in (FlightCause.ABORTED, FlightCause.PREEMPTED)
        if world.land(session, flight, cause) and led is not None and failed and waiting:
            # Somebody leads, or everybody was told.
            assert flight in world.led or not set(waiting) & set(world.waits)
