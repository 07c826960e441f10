"""Tenants: who shares spans with whom, who owns which slab, and how much each may keep.

A tenant is a group of uids and a salt (its 32-byte digest, or none). A group is one uid, or all
uids together. Spans, slabs, quotas, the order of eviction and statistics are a tenant's own.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from kmesh_spand.core.policy import LRU, Policy

SALT_BYTES = 32
#: The group of all uids, where they share. No uid: the kernel uses it for "no change".
SHARED = 0xFFFF_FFFF
#: Tenants without a slab whose statistics are kept.
MAX_IDLE = 256
#: What a tenant's counters are called.
TENANT_COUNTERS = (
    "acquires",
    "hits",
    "misses",
    "committed",
    "evicted",
    "evicted_bytes",
    "reserve_quota",
    "reserve_pool_full",
)

OWNER_BYTES = 64
OWNER_VERSION = 1
_MAGIC = b"KMSO"
_OWNER = struct.Struct("<4sHBBI32s16x")
_CRC = struct.Struct("<I")


def tenant_name(group: int, salt: bytes, tier: int = 0) -> str:
    """How people call a tenant: ``1000``, or ``1000:`` and 16 digits that tell salts apart.

    The digits are a digest of the salt's digest: keys can't be made from them. What it has on the
    settings' first GPU (tier 1) is ``1000@gpu0``.
    """
    name = "all" if group == SHARED else str(group)
    if salt:
        digest = hashlib.blake2b(salt, digest_size=8, person=b"kmesh-tenant")
        name += f":{digest.hexdigest()}"
    return f"{name}@gpu{tier - 1}" if tier else name


@dataclass(frozen=True, slots=True)
class Tenancy:
    """How tenants are told apart, and their quotas.

    Attributes:
        groups: all that can come. Each has a slab kept for it; with one group, all are its.
        shared: all uids are one group.
        quotas: bytes by name of a tenant, or of its group without salt; 0 is no limit.
        default_quota: bytes of the others.
    """

    groups: tuple[int, ...] = ()
    shared: bool = False
    quotas: Mapping[str, int] = field(default_factory=dict)
    default_quota: int = 0

    def group(self, uid: int) -> int:
        """The group of a uid."""
        return SHARED if self.shared else uid

    def quota(self, group: int, salt: bytes) -> int:
        """Bytes that a tenant may keep, 0 for no limit."""
        for name in (tenant_name(group, salt), tenant_name(group, b"")):
            if name in self.quotas:
                return self.quotas[name]
        return self.default_quota


class OwnerState(IntEnum):
    """What is known of a slab's memory."""

    OWNED = 1
    DIRTY = 2
    CLEAN = 3
    LOST = 4


@dataclass(frozen=True, slots=True)
class SlabOwner:
    """Whose a slab is. A slab that was a group's stays the group's: mappings can't be revoked.

    Attributes:
        state: OWNED by the tenant of ``salt``; DIRTY or CLEAN, of no tenant, before or after it
            was wiped; LOST: what was written is damaged, and the slab is not used.
    """

    state: OwnerState
    group: int = 0
    salt: bytes = b""

    def encode(self) -> bytes:
        """``OWNER_BYTES`` bytes; LOST can't be written."""
        salt = self.salt or bytes(SALT_BYTES)
        body = _OWNER.pack(_MAGIC, OWNER_VERSION, self.state, bool(self.salt), self.group, salt)
        return body + _CRC.pack(zlib.crc32(body))


def decode_owner(data: bytes | bytearray | memoryview) -> SlabOwner | None:
    """The owner as it was written; None for zeros: the slab never had one."""
    data = bytes(data)
    if not any(data):
        return None
    lost = SlabOwner(OwnerState.LOST)
    if len(data) != OWNER_BYTES or _CRC.unpack_from(data, _OWNER.size)[0] != zlib.crc32(
        data[: _OWNER.size]
    ):
        return lost
    magic, version, state, salted, group, salt = _OWNER.unpack_from(data)
    if magic != _MAGIC or version != OWNER_VERSION or state not in (1, 2, 3):
        return lost
    return SlabOwner(OwnerState(state), group, salt if salted else b"")


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant in one tier that has something there, or had.

    What a tenant has in host memory and on a GPU are apart: names, order, quota, statistics.

    Attributes:
        number: unique among those that are known.
        tier: 0 is host memory, the others are GPUs.
        quota: tiles, 0 for no limit. order: of eviction.
        tiles: of all its ranges. evictable: rows in ``order``.
        passed: by tiles, how many rows the next look for that much room passes over, as they made
            none the last time; not 0.
        decodes: somebody has asked for recipes there; in host memory that makes no difference.
        spans, stored_bytes: of spans with a catalog record; spaces: the same by namespace number.
    """

    number: int
    group: int
    salt: bytes = field(repr=False)
    quota: int
    order: Policy
    tier: int = 0
    slabs: set[int] = field(default_factory=set)
    tiles: int = 0
    evictable: int = 0
    passed: dict[int, int] = field(default_factory=dict)
    decodes: bool = False
    spans: int = 0
    stored_bytes: int = 0
    spaces: dict[int, list[int]] = field(default_factory=dict)
    counters: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(TENANT_COUNTERS, 0))
    )

    @property
    def takes_recipes(self) -> bool:
        """Whether any are made of its spans there."""
        return self.decodes or not self.tier

    def evicting(self) -> None:
        """A row leaves the order, perhaps before those that are passed over."""
        if self.passed:
            self.passed = {count: rows - 1 for count, rows in self.passed.items() if rows > 1}


class TenantBook:
    """All tenants with slabs, and the last few without.

    Args:
        policy: the first tenant's; others get ``policy.another()``, or LRU where that fails.
        tile_bytes: unit of ``Tenant.quota``.

    Attributes:
        owned: slabs that have a tenant.
    """

    def __init__(self, tenancy: Tenancy, policy: Policy, max_rows: int, tile_bytes: int) -> None:
        self.tenancy = tenancy
        self.owned = 0
        self._policy = policy
        self._max_rows = max_rows
        self._tile_bytes = tile_bytes
        self._known: dict[tuple[int, bytes, int], Tenant] = {}
        self._idle: OrderedDict[tuple[int, bytes, int], Tenant] = OrderedDict()
        self._unused: list[tuple[int, Policy]] = [(1, policy)]
        self._last = 1

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._known.values())

    @property
    def owners(self) -> int:
        """Tenants with slabs."""
        return len(self._known) - len(self._idle)

    def find(self, group: int, salt: bytes, tier: int = 0) -> Tenant | None:
        """A tenant that is known."""
        return self._known.get((group, salt, tier))

    def open(self, group: int, salt: bytes, tier: int = 0) -> Tenant:
        """A tenant, made known if it is not."""
        key = group, salt, tier
        found = self._known.get(key)
        if found is None:
            number, order = self._unused.pop() if self._unused else self._another()
            quota = self.tenancy.quota(group, salt)
            found = Tenant(number, group, salt, -(-quota // self._tile_bytes), order, tier)
            self._known[key] = self._idle[key] = found
            self._trim()
        elif key in self._idle:
            self._idle.move_to_end(key)
        return found

    def own(self, tenant: Tenant, slab: int) -> None:
        """A slab is the tenant's from now on."""
        tenant.slabs.add(slab)
        self.owned += 1
        self._idle.pop((tenant.group, tenant.salt, tenant.tier), None)

    def lose(self, tenant: Tenant, slab: int) -> None:
        """An empty slab is no longer the tenant's."""
        tenant.slabs.remove(slab)
        self.owned -= 1
        if not tenant.slabs:
            self._idle[tenant.group, tenant.salt, tenant.tier] = tenant
            self._trim()

    def _trim(self) -> None:
        # The newest stays: its caller is about to use it.
        while len(self._idle) > MAX_IDLE:
            key, gone = self._idle.popitem(last=False)
            del self._known[key]
            self._unused.append((gone.number, gone.order))

    def _another(self) -> tuple[int, Policy]:
        self._last += 1
        try:
            order = self._policy.another()
        except Exception:
            order = LRU(self._max_rows)
        return self._last, order
