"""The slabs, and whose each of them is."""

from __future__ import annotations

from collections.abc import Iterator

from kmesh.layout import TILE_BYTES
from kmesh_spand.core.allocator import Slab
from kmesh_spand.core.effects import Effect, GiveUp, PutOwner, Wipe
from kmesh_spand.core.tenants import OwnerState, SlabOwner, Tenant, TenantBook


class Grounds:
    """Slabs and their tenants; see "Slab and tenant" in ``docs/states.md``.

    Attributes:
        slabs: by number. sealed: those that can't be written.
        given_up: group and tiles of sealed slabs that were given up and not replaced yet.
        tenants: whose slabs are. wipes: slab by wipe job in flight.
        tiers: of the slabs. grew_ms: when each slab was last seen growing.
        out: where effects go. now_ms: what time it is.
    """

    def __init__(
        self, tenants: TenantBook, counters: dict[str, int], job_ids: Iterator[int]
    ) -> None:
        self.slabs: dict[int, Slab] = {}
        self.tiers: set[int] = set()
        self.sealed: set[int] = set()
        self.given_up: dict[int, tuple[int | None, int]] = {}
        self.tenants = tenants
        self.wipes: dict[int, int] = {}
        self.grew_ms: dict[int, int] = {}
        self.counters = counters
        self.out: list[Effect] = []
        self.now_ms = 0
        self._job_ids = job_ids

    def add_slab(
        self,
        number: int,
        capacity: int,
        owner: SlabOwner | None = None,
        tier: int = 0,
        *,
        sealed: bool = False,
        replaces: int | None = None,
    ) -> None:
        """A slab of ``capacity`` bytes, none of them populated; ValueError if it can't be."""
        if number in self.slabs or not 0 <= number <= 0xFFFF or capacity < TILE_BYTES:
            raise ValueError(f"slab {number} of {capacity} bytes is known already, or none")
        group = self.given_up.pop(replaces)[0] if replaces is not None else None
        slab = self.slabs[number] = Slab(capacity // TILE_BYTES, tier, sealed=sealed)
        self.tiers.add(tier)
        self.grew_ms[number] = self.now_ms
        if sealed:
            self.sealed.add(number)
        groups = self.tenants.tenancy.groups
        if group is not None:
            slab.group = group
            self._put_owner(number, OwnerState.CLEAN)
            return
        if owner is None:
            slab.group = groups[0] if len(groups) == 1 else None
            return
        slab.group, slab.lost = owner.group, owner.state is OwnerState.LOST
        if owner.state is OwnerState.OWNED:
            slab.tenant = self.tenants.open(owner.group, owner.salt, tier)
            self.tenants.own(slab.tenant, number)
        elif owner.state is OwnerState.DIRTY and not sealed:
            self._wipe(number)

    def assign(self, number: int, tenant: Tenant) -> None:
        """Give a clean slab of nobody to a tenant."""
        slab = self.slabs[number]
        assert (slab.tenant, slab.clean, slab.lost, slab.used) == (None, True, False, 0)
        assert slab.group in (None, tenant.group)
        assert slab.tier == tenant.tier
        slab.tenant, slab.group = tenant, tenant.group
        self.tenants.own(tenant, number)
        owner = SlabOwner(OwnerState.OWNED, tenant.group, tenant.salt)
        self.out.append(PutOwner(number, owner.encode()))

    def reclaim(self, number: int) -> None:
        """Take an empty slab from its tenant, and have it wiped."""
        slab = self.slabs[number]
        assert slab.tenant is not None
        assert not slab.used
        self.tenants.lose(slab.tenant, number)
        slab.tenant = None
        self._put_owner(number, OwnerState.DIRTY)
        self._wipe(number)

    def give_up_empty(self) -> None:
        """Give up all sealed slabs that hold nothing."""
        for number in [number for number in self.sealed if not self.slabs[number].used]:
            self.give_up(number)

    def give_up(self, number: int) -> None:
        """Give up an empty sealed slab; there is no such slab then."""
        slab = self.slabs.pop(number)
        assert slab.sealed
        assert not slab.used
        self.sealed.remove(number)
        del self.grew_ms[number]
        if slab.tenant is not None:
            self.tenants.lose(slab.tenant, number)
        # What is known of a slab that was lost is nothing to go by.
        group = None if slab.lost else slab.group
        self.given_up[number] = group, slab.tiles
        self.counters["slabs_given_up"] += 1
        if group is not None:
            # A daemon that has this memory still, and can write it, is not to show it to others.
            owner = SlabOwner(OwnerState.DIRTY, group)
            self.out.append(PutOwner(number, owner.encode()))
        self.out.append(GiveUp(number))

    def _wipe(self, number: int) -> None:
        self.slabs[number].clean = False
        job = next(self._job_ids)
        self.wipes[job] = number
        self.out.append(Wipe(job, number))

    def wiped(self, job: int, ok: bool) -> None:
        """A wipe has ended."""
        number = self.wipes.pop(job, None)
        if number is None:
            return
        if ok:
            self.counters["wiped"] += 1
            self.slabs[number].clean = True
            self._put_owner(number, OwnerState.CLEAN)
        else:
            self.counters["wipe_failed"] += 1
            self.slabs[number].lost = True

    def _put_owner(self, number: int, state: OwnerState) -> None:
        group = self.slabs[number].group
        assert group is not None
        self.out.append(PutOwner(number, SlabOwner(state, group).encode()))

    def populate(self, number: int, capacity: int) -> None:
        """The first ``capacity`` bytes of a slab have pages."""
        if number not in self.slabs:
            # It was given up meanwhile.
            return
        self.slabs[number].populate(capacity // TILE_BYTES)
        self.grew_ms[number] = self.now_ms
