"""Rules about families: they are declared, recipes are made, and made dense again."""

from __future__ import annotations

import hypothesis.strategies as st
from contents import NAMESPACE, SHARD
from hypothesis.stateful import precondition, rule
from walk import FULL, having, salts, seldom
from walk_spans import SpanRules

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Cause, MirrorFate, Reason
from kmesh_spand.core.states import State

# Of all spans that are a family's: two tiles each.
DTYPE, HEAD_DIM, DENSE = "bfloat16", 64, 2 * TILE_BYTES
FAMILIES = ["one", "two"]
fates = st.sampled_from(list(MirrorFate))


class FamilyRules(SpanRules):
    """What becomes of spans that are alike."""

    def _declare(self, session: int, family: str, base: list[bytes], salt: bytes) -> rs.Result:
        answer = self.world.ask(
            rq.Declare,
            session,
            family,
            NAMESPACE,
            DTYPE,
            HEAD_DIM,
            [SHARD],
            b"".join(base),
            (),
            False,
            salt,
        )
        assert answer is not None
        return answer

    @precondition(having("open"))
    @rule(
        data=st.data(),
        family=st.sampled_from(FAMILIES),
        base=st.lists(st.sampled_from(FULL), min_size=1, max_size=2, unique=True),
        salt=salts,
    )
    def declare(self, data: st.DataObject, family: str, base: list[bytes], salt: bytes) -> None:
        session = self.pick(data, self.world.open)
        answer = self._declare(session, family, self.salted(base, salt), salt)
        assert isinstance(answer, rs.DeclareResult | rs.Refused)
        if isinstance(answer, rs.Refused):
            assert answer.field.startswith("base")

    @precondition(having("open"))
    @rule(
        data=st.data(),
        family=st.sampled_from(FAMILIES),
        member=st.sampled_from(["a", "b"]),
        keys=st.lists(st.sampled_from(FULL), min_size=1, max_size=3, unique=True),
        salt=salts,
        fork=seldom,
    )
    def join_family(
        self,
        data: st.DataObject,
        family: str,
        member: str,
        keys: list[bytes],
        salt: bytes,
        fork: bool,
    ) -> None:
        world = self.world
        session = self.pick(data, world.open)
        packed = b"".join(self.salted(keys, salt))
        if fork:
            answer = world.ask(rq.Fork, session, family, member, member + "'", packed, (), salt)
        else:
            answer = world.ask(
                rq.Join, session, family, member, NAMESPACE, packed, [SHARD], (), salt
            )
        assert isinstance(answer, rs.JoinResult | rs.Refused)

    @precondition(having("open"))
    @rule(data=st.data(), names=st.permutations(FULL), keep=st.booleans(), salt=salts)
    def mirror(self, data: st.DataObject, names: list[bytes], keep: bool, salt: bytes) -> None:
        """What takes chance too long: a base, a member, a recipe."""
        world, tier = self.world, self.tier(data)
        session = self.pick(data, world.open)
        for name in names[:2]:
            self._store(data, session, name, SHARD, DENSE, False, salt, tier)
        base, member = self.salted(names[:2], salt)
        self._declare(session, "one", [base], salt)
        world.ask(rq.Join, session, "one", member.hex(), NAMESPACE, member, (), (), salt)
        for job in list(world.encodes):
            world.encode_ends(job)
        for job in list(world.keeps) if keep else ():
            world.keep_ends(job)

    @precondition(having("open"))
    @rule(data=st.data(), family=st.sampled_from(FAMILIES), fate=fates, salt=salts)
    def dissolve(self, data: st.DataObject, family: str, fate: MirrorFate, salt: bytes) -> None:
        self.causes |= {Cause.PRESSURE, Cause.OPERATOR}
        session = self.pick(data, self.world.open)
        answer = self.world.ask(rq.Dissolve, session, family, fate, salt)
        assert isinstance(answer, rs.DissolveResult | rs.Refused)

    @precondition(having("encodes"))
    @rule(
        data=st.data(),
        length=st.integers(1, DENSE),
        used=st.sampled_from([0, 1, 1, 2]),
        fail=seldom,
    )
    def encode_ends(self, data: st.DataObject, length: int, used: int, fail: bool) -> None:
        self.causes.add(Cause.PRESSURE)
        self.world.encode_ends(self.pick(data, self.world.encodes), length, used, ok=not fail)

    @precondition(having("keeps"))
    @rule(data=st.data(), fail=seldom)
    def keep_ends(self, data: st.DataObject, fail: bool) -> None:
        self.world.keep_ends(self.pick(data, self.world.keeps), ok=not fail)

    @precondition(having("densifies"))
    @rule(data=st.data(), fail=seldom)
    def densify_ends(self, data: st.DataObject, fail: bool) -> None:
        self.causes |= {Cause.CORRUPT, Cause.PRESSURE, Cause.OPERATOR}
        self.world.densify_ends(self.pick(data, self.world.densifies), ok=not fail)

    @precondition(having("mirrors"))
    @precondition(having("open"))
    @rule(data=st.data(), fail=seldom)
    def want_dense(self, data: st.DataObject, fail: bool) -> None:
        """A mirror is asked for by somebody who takes no recipes."""
        self.causes |= {Cause.CORRUPT, Cause.PRESSURE, Cause.OPERATOR}
        world = self.world
        record = data.draw(st.sampled_from(world.mirrors))
        who = world.who_of(record.slab)
        assert who is not None
        mine = [session for session in sorted(world.open) if world.who(session, who[1]) == who]
        if mine and record.state is State.COMMITTED:
            tier = world.tiers.get(record.slab, 0)
            answer = world.acquire(mine[0], [record.key], [record.shard], salt=who[1], tier=tier)
            assert set(answer.reason) <= {Reason.PENDING, Reason.MISS}
            for job in list(world.densifies):
                world.densify_ends(job, ok=not fail)

    @rule(data=st.data(), drop=st.booleans())
    def evict_bases(self, data: st.DataObject, drop: bool) -> None:
        self.causes |= {Cause.PRESSURE, Cause.OPERATOR}
        world = self.world
        rows = [row for row in world.core.views.spans(now_ms=world.now) if row.mirrors]
        if rows:
            row = data.draw(st.sampled_from(rows))
            spans = [(row.slot, row.generation), (row.slot, row.generation + 1)]
            self.condemned.add((row.key, row.shard))
            world.send(ev.EvictBases(spans, drop))
