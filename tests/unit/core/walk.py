"""What walks through the core have in common: their world, who is there, what a lookup may say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar

import hypothesis.strategies as st
from contents import OTHER_SHARD, SHARD, Held, Who, key
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from world import World

from kmesh.layout import TILE_BYTES
from kmesh_spand.control.native import NativeBatch
from kmesh_spand.core.codes import Cause, Reason
from kmesh_spand.core.record import Record
from kmesh_spand.core.tags import tag
from kmesh_spand.core.tenants import SHARED, Tenancy, tenant_name

# Tiles of each slab, and catalog slots: memory is short, then the catalog.
SIZES = [({0: 4, 3: 2}, 11), ({0: 7, 3: 5}, 4), ({0: 3, 1: 4, 2: 3, 5: 2}, 9)]
FULL = [key(("full", n)) for n in range(5)]
# A family of tails: the first 16, 32 and 48 tokens of one span.
TAILS = [[key(("tail", n, tokens)) for tokens in (16, 32, 48)] for n in range(1)]
KEYS = FULL + [name for tail in TAILS for name in tail]
SHARDS = [SHARD, SHARD, OTHER_SHARD]
UIDS = [1000, 1001]
SALT = key("salt")
# Quotas that bind: of one uid, and of one salt of the other.
TENANCIES = [
    Tenancy(),
    Tenancy(groups=(1000,)),
    Tenancy(
        groups=(1000, 1001),
        quotas={"1001": 3 * TILE_BYTES, tenant_name(1000, SALT): 2 * TILE_BYTES},
    ),
    Tenancy(groups=(SHARED,), shared=True, default_quota=5 * TILE_BYTES),
]

# Mostly the case in which something happens.
seldom = st.sampled_from([False, False, False, True])
lengths = st.integers(1, 3 * TILE_BYTES)
salts = st.sampled_from([b"", b"", SALT])


def having(what: str) -> Callable[[Walk], bool]:
    """A precondition: the world has some of these."""
    return lambda machine: bool(getattr(machine.world, what))


class Walk(RuleBasedStateMachine):
    """A world, and what is known of it from outside."""

    reached: ClassVar[Counter[str]]
    in_grace = False
    # Tiles of slabs beside those of host memory, and the tier of each.
    gpu: ClassVar[dict[int, int]] = {}
    gpu_tiers: ClassVar[dict[int, int]] = {}

    @initialize(
        sizes=st.sampled_from(SIZES),
        stored=st.lists(st.sampled_from(KEYS), unique=True, max_size=3),
        tenancy=st.sampled_from(TENANCIES),
        hardened=seldom,
    )
    def start(
        self,
        sizes: tuple[dict[int, int], int],
        stored: list[bytes],
        tenancy: Tenancy,
        hardened: bool,
    ) -> None:
        slabs, max_spans = sizes
        self.uids = [1000] if len(tenancy.groups) == 1 and not tenancy.shared else UIDS
        self.world = World(
            {**slabs, **self.gpu},
            tiers=self.gpu_tiers,
            batch=NativeBatch(),
            tenancy=tenancy,
            max_spans=max_spans,
            max_batch=8,
            max_reservations=5,
            max_verify=2,
            patience_ms=100,
            remembered_keys=1024,
            max_flights=3,
            max_waits=3,
            hold_ms=50,
            dense_rest_ms=150,
            hardened=hardened,
        )
        self.grace: list[Held] = []
        # Why keys may end in the present rule; names that were found at some time, and last.
        self.causes: set[Cause | None] = set()
        self.known: set[tuple[bytes, int]] = set()
        # Bases that an operator wants gone, when no mirror needs them and nothing holds them.
        self.condemned: set[tuple[bytes, int]] = set()
        self.found: set[tuple[bytes, int]] = set()
        self.world.store(self.world.connect("a"), stored)

    def pick(self, data: st.DataObject, items: object) -> int:
        return data.draw(st.sampled_from(sorted(items)))  # type: ignore[call-overload,no-any-return]

    def tier(self, data: st.DataObject) -> int:
        """Where the present rule does what it does."""
        return data.draw(st.sampled_from([0, 1, 1])) if self.gpu else 0

    def salted(self, keys: list[bytes], salt: bytes) -> list[bytes]:
        """Keys as a chain makes them, into which the salt goes."""
        return [key((name, salt)) if salt else name for name in keys]

    def expect(
        self,
        name: bytes,
        shard: int,
        who: Who,
        stored: Mapping[tuple[bytes, int, Who], Record] | None = None,
        recipes: bool | None = None,
        tier: int = 0,
    ) -> set[Reason]:
        """What a tenant's lookup may say of a name: nobody else's spans are in it.

        ``stored`` is what ``World.records`` says, where it is asked about many names. ``recipes``:
        whether who asks takes them; None: it is not asked for bytes.
        """
        world = self.world
        stored = world.records(tier) if stored is None else stored
        if (name, shard, who) in stored:
            found = (who[0], tier, tag(name, shard)) in world.index
            record = stored[name, shard, who]
            if found and recipes is not None and record.root in world.recipes:
                # What it refers to may be suspect just now.
                return {Reason.OK, Reason.PENDING} if recipes else {Reason.PENDING, Reason.MISS}
            return {Reason.OK} if found else {Reason.PENDING}
        writing = [
            want
            for want in world.wanted.values()
            if (want.shard, want.who, want.tier) == (shard, who, tier)
        ]
        if any(want.key == name for want in writing):
            return {Reason.PENDING}
        if any(name in want.sub_keys for want in writing):
            return {Reason.PENDING, Reason.MISS}
        return {Reason.MISS}

    def others(self, who: Who, tier: int) -> dict[int, bytes]:
        """Everything that is not a tenant's in a tier: keys by slot."""
        world = self.world
        return {
            row.slot: row.key
            for row in world.core.views.spans(limit=1000, now_ms=world.now)
            if (world.who_of(row.slab), world.tiers.get(row.slab, 0)) != (who, tier)
        }

    @rule(wait=st.integers(0, 200))
    def time_passes(self, wait: int) -> None:
        self.world.now += wait

    @precondition(lambda self: len(self.world.open) < 4)
    @rule(data=st.data(), engine=st.sampled_from(["", "a"]))
    def connect(self, data: st.DataObject, engine: str) -> None:
        self.world.connect(engine, uid=data.draw(st.sampled_from(self.uids)))

    @precondition(having("open"))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.causes.add(Cause.ABORTED)
        self.world.close(self.pick(data, self.world.open))
