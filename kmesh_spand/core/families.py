"""Declare, Join, Fork, Dissolve: which spans are to be kept as recipes over which."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

from kmesh_spand.core.batch import KEY_BYTES, Rows
from kmesh_spand.core.checks import invalid, too_many
from kmesh_spand.core.codes import Cause, Code, MirrorFate
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.family import Family, Member, Owner, Run, payload_bytes
from kmesh_spand.core.familychecks import check_declare, check_member
from kmesh_spand.core.familykeys import FamilyKeys
from kmesh_spand.core.familyspans import FamilySpans
from kmesh_spand.core.lanes import Candidate
from kmesh_spand.core.recoder import Recoder
from kmesh_spand.core.requests import Declare, Dissolve, Fork, Join
from kmesh_spand.core.results import DeclareResult, DissolveResult, JoinResult, Refused, Result
from kmesh_spand.core.sessions import Session
from kmesh_spand.core.states import STORED, State
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tags import scope
from kmesh_spand.core.tenants import Tenant

#: What a second declaration must repeat; how keys are turned only if both say it.
_FIXED = ("namespace", "dtype", "head_dim", "shards")
_ROTARY = ("frequencies", "interleaved")
_FIELDS = {"frequencies": "rotary.frequencies", "interleaved": "rotary.interleaved"}


class FamilyBook:
    """All families. They are names in memory: what was made for them stays without them.

    The store tells it what becomes of spans (``Watch``); the recoder asks it what to do next.
    The group's oldest families are forgotten when it has too many: those that were not declared,
    joined or forked into for longest.

    Attributes:
        by_id: every family.
        spans: where theirs are.
        group_spans, group_names: spans that the families of a group of uids name, and keys and
            runs that their members name, those of several members counted for each.
    """

    def __init__(self, config: CoreConfig, store: SpanStore, recoder: Recoder) -> None:
        self._config = config
        self._store = store
        self._recoder = recoder
        self._ids = itertools.count(1)
        self.by_id: dict[int, Family] = {}
        self._by_name: OrderedDict[tuple[Owner, str], Family] = OrderedDict()
        self._keys = FamilyKeys()
        self.group_spans: Counter[int] = Counter()
        self.group_names: Counter[int] = Counter()
        # By tier: members, each by its family's number and its name.
        self._scans: defaultdict[int, OrderedDict[tuple[int, str], None]] = defaultdict(OrderedDict)
        # Family and tier.
        self._starved: set[tuple[int, int]] = set()
        self.spans = FamilySpans(store)
        recoder.source = self

    def __len__(self) -> int:
        return len(self.by_id)

    def find(self, owner: Owner, name: str) -> Family | None:
        """The family of that name."""
        return self._by_name.get((owner, name))

    # Requests

    def declare(self, session: Session, event: Declare) -> Result:
        """Make a family known, or add to its base."""
        if refused := check_declare(event, self._config):
            return refused
        owner = session.group, event.salt
        keys = _split(event.base)
        for number, key in enumerate(keys):
            if why := self._unfit(owner, event, key):
                return invalid(f"base[{number}]", why)
        family = self.find(owner, event.family)
        if family is not None:
            told = event.frequencies and family.frequencies
            for name in (*_FIXED, *_ROTARY) if told else _FIXED:
                given = getattr(event, name)
                if getattr(family, name) != (tuple(given) if name == "shards" else given):
                    return invalid(_FIELDS.get(name, name), "the family was declared with another")
            if refused := too_many("base", len(family.base.keys() | keys), self._config.max_base):
                return refused
        created = family is None
        if family is None:
            family = Family(
                next(self._ids),
                owner,
                event.family,
                event.namespace,
                event.dtype,
                event.head_dim,
                tuple(event.shards),
                event.frequencies,
                event.interleaved,
                self._store.now_ms,
            )
            self.by_id[family.id] = self._by_name[owner, event.family] = family
        self._touch(family)
        added = family.add_base(keys)
        learned = bool(event.frequencies) and not family.frequencies
        if learned:
            family.frequencies, family.interleaved = event.frequencies, event.interleaved
        self._count(family, sum(self._keys.add(key, family, None) for key in keys))
        if added or learned:
            self._scan_later(family, family.members)
        self._make_room(family)
        return DeclareResult(family.id, created, added)

    def join(self, session: Session, event: Join) -> Result:
        """Add a member, or extend one."""
        family = self.find((session.group, event.salt), event.family)
        if family is None:
            return Refused(Code.NOT_FOUND, "no such family", "family")
        if event.namespace != family.namespace:
            return invalid("namespace", "is not the family's")
        if event.shards and tuple(event.shards) != family.shards:
            return invalid("shards", "are not the family's")
        if not event.keys:
            return invalid("keys", "a member without spans")
        known = family.members.get(event.member)
        before = known.keys if known else ()
        named = len(event.keys) // KEY_BYTES + len(event.runs) - (known.named if known else 0)
        if refused := self._too_long(family, named):
            return refused
        if refused := self._check_member(family, event.member, event.keys, event.runs, known):
            return refused
        keys = _split(event.keys)
        if keys[: len(before)] != before:
            return invalid("member", "there is one of that name with other keys")
        runs = tuple(event.runs) or (known.runs if known else ())
        parent = known.parent if known else ""
        return self._add(family, Member(event.member, keys, runs, parent))

    def fork(self, session: Session, event: Fork) -> Result:
        """Add a member that has all spans of another one."""
        family = self.find((session.group, event.salt), event.family)
        if family is None:
            return Refused(Code.NOT_FOUND, "no such family", "family")
        parent = family.members.get(event.parent)
        if parent is None:
            return Refused(Code.NOT_FOUND, "no such member", "parent")
        if event.member in family.members:
            return invalid("member", "there is one of that name")
        if refused := self._check_member(family, event.member, event.keys, event.runs, None):
            return refused
        added = len(event.keys) // KEY_BYTES + len(event.runs)
        if refused := self._too_long(family, parent.named + added):
            return refused
        keys, runs = parent.keys + _split(event.keys), parent.runs + tuple(event.runs)
        if len(keys) > self._config.max_family_spans:
            return invalid("keys", "more than a family may have, with the parent's")
        if any(a.position + a.tokens > b.position for a, b in itertools.pairwise(runs)):
            return invalid("provenance[0].position", "is among the parent's")
        return self._add(family, Member(event.member, keys, runs, event.parent))

    def dissolve(self, session: Session, event: Dissolve) -> Result:
        """Forget a family; its mirrors are made dense, or stay."""
        family = self.find((session.group, event.salt), event.family)
        if family is None:
            return Refused(Code.NOT_FOUND, "no such family", "family")
        if event.fate not in (0, *MirrorFate):
            return invalid("mirrors", f"{event.fate} is no fate")
        members = len(family.members)
        mirrors = [row for row in self.spans.rows(family) if row in self._store.mirrors.by_row]
        self._forget(family)
        if event.fate != MirrorFate.KEEP:
            table, known = self._store.table, self._keys.of(family.owner)
            for row in mirrors:
                if table.key_of(row) not in known:
                    self._recoder.densifier.want(row, drop=event.fate == MirrorFate.DENSE_OR_DROP)
        return DissolveResult(members, len(mirrors))

    def _unfit(self, owner: Owner, event: Declare, key: bytes) -> str:
        """Why a key that is stored can't be in a base, or nothing."""
        store, table = self._store, self._store.table
        for tenant, shard in itertools.product(self.spans.tenants(owner), event.shards):
            row = table.find(key, scope(tenant.number, shard))
            if table.state[row] == State.ALIAS:
                return "is the beginning of a longer span"
            if table.state[row] not in STORED:
                continue
            if row in store.mirrors.by_row:
                return "is a recipe itself"
            if table.spaces.value(table.space[row]) != event.namespace:
                return "is of another namespace"
            sized = payload_bytes(event.dtype, event.head_dim, table.tokens[row], shard)
            if table.length[row] != sized:
                return f"has {table.length[row]} bytes, not {sized} for its tokens"
        return ""

    def _check_member(
        self, family: Family, name: str, packed: bytes, runs: Sequence[Run], known: Member | None
    ) -> Refused | None:
        config = self._config
        if refused := check_member(name, packed, runs, family.base, config):
            return refused
        keys = _split(packed)
        if known is None and len(family.members) >= config.max_members:
            return Refused(Code.EXHAUSTED, f"{config.max_members} members are in it", "member")
        fresh = sum(not self._keys.names(family, key) for key in dict.fromkeys(keys))
        if family.spans + fresh * len(family.shards) > config.max_family_spans:
            most = config.max_family_spans
            return Refused(Code.EXHAUSTED, f"a family has at most {most} spans", "keys")
        for number, key in enumerate(keys):
            for shard, row in self.spans.found(family, key):
                if why := self._strange(family, row, shard):
                    return invalid(f"keys[{number}]", why)
        return None

    def _too_long(self, family: Family, named: int) -> Refused | None:
        """Whether members would name too much, what several of them name counted for each."""
        most = self._config.max_family_names
        if family.named + named <= most:
            return None
        return Refused(Code.EXHAUSTED, f"a family's members name at most {most} keys", "keys")

    def _strange(self, family: Family, row: int, shard: int) -> str:
        """Why a stored span can't be of a family, or nothing."""
        store, table = self._store, self._store.table
        if table.state[row] not in STORED:
            return ""
        if table.spaces.value(table.space[row]) != family.namespace:
            return "is of another namespace"
        length = store.mirrors.dense(row) or table.length[row]
        wanted = family.payload_bytes(table.tokens[row], shard)
        return f"has {length} bytes, not {wanted} for its tokens" if length != wanted else ""

    def _add(self, family: Family, member: Member) -> JoinResult:
        before = family.members.get(member.name)
        family.members[member.name] = member
        named = member.named - (before.named if before else 0)
        family.named += named
        self.group_names[family.owner[0]] += named
        if before and before.runs != member.runs:
            for row in self.spans.rows(family, before.keys):
                self._recoder.verdicts.reconsider(row)
        self._touch(family)
        fresh = member.keys[len(before.keys) :] if before else member.keys
        if member.parent:
            fresh = member.keys
        added = 0
        for key in fresh:
            added += self._keys.add(key, family, member.name)
        self._count(family, added)
        self._scan_later(family, [member.name])
        self._make_room(family)
        spans = len(member.keys) * len(family.shards)
        stored = {(key, shard) for key, shard, _ in self.spans.stored(family, member.keys)}
        return JoinResult(spans, len(stored))

    # What is counted, and forgotten

    def _count(self, family: Family, keys: int) -> None:
        family.spans += keys * len(family.shards)
        self.group_spans[family.owner[0]] += keys * len(family.shards)

    def _touch(self, family: Family) -> None:
        self._by_name.move_to_end((family.owner, family.name))

    def _make_room(self, newest: Family) -> None:
        """Forget a group's oldest families while it has too many."""
        group = newest.owner[0]
        while True:
            mine = [family for family in self._by_name.values() if family.owner[0] == group]
            if (
                len(mine) <= self._config.max_families
                and self.group_spans[group] <= self._config.max_group_spans
                and self.group_names[group] <= self._config.max_group_names
            ) or mine[0] is newest:
                return
            self._forget(mine[0])
            self._store.counters["families_forgotten"] += 1

    def _forget(self, family: Family) -> None:
        del self.by_id[family.id], self._by_name[family.owner, family.name]
        self.group_spans[family.owner[0]] -= family.spans
        if not self.group_spans[family.owner[0]]:
            del self.group_spans[family.owner[0]]
        self.group_names[family.owner[0]] -= family.named
        if not self.group_names[family.owner[0]]:
            del self.group_names[family.owner[0]]
        self._keys.forget(family)
        self._starved = {one for one in self._starved if one[0] != family.id}
        for scans in self._scans.values():
            for name in family.members:
                scans.pop((family.id, name), None)

    def knows(self, family: Family) -> bool:
        """Whether it was not forgotten."""
        return family.id in self.by_id

    def is_base(self, row: int) -> bool:
        """Whether a span is of some family's base: it is never made a recipe."""
        tenant = self._store.tenant_of(row)
        return self._keys.is_base((tenant.group, tenant.salt), self._store.table.key_of(row))

    # What is to be done

    def base(self, family: Family, shard: int, tier: int) -> Rows | None:
        """See ``FamilySpans``."""
        return self.spans.base(family, shard, tier)

    def stored(self, row: int) -> None:
        """A span is committed."""
        tenant, table = self._store.tenant_of(row), self._store.table
        places = self._keys.of((tenant.group, tenant.salt))
        if not places:
            return
        for name in (row, *self._store.aliases(row)):
            for place in places.get(table.key_of(name), ()):
                family, member = place.family, place.member
                if member is not None:
                    self._offer(row, family, member)
                elif (family.id, tenant.tier) in self._starved and self.spans.whole(family, row):
                    self._starved.remove((family.id, tenant.tier))
                    self._scan_later(family, family.members, tenant)

    def decodes(self, tenant: Tenant) -> None:
        """Recipes are asked for where none were made before: all members are looked through."""
        for (owner, _), family in self._by_name.items():
            if owner == (tenant.group, tenant.salt):
                self._scan_later(family, family.members, tenant)

    def _scan_later(
        self, family: Family, members: Iterable[str], tenant: Tenant | None = None
    ) -> None:
        """Members are to be looked through: what is stored of them by now, there or everywhere."""
        for each in [tenant] if tenant else self.spans.tenants(family.owner):
            if each.takes_recipes:
                self._scans[each.tier] |= {(family.id, member): None for member in members}

    def _offer(self, row: int, family: Family, member: str) -> None:
        if not self._store.tenant_of(row).takes_recipes:
            return
        generation = self._store.table.generation[row]
        self._recoder.lanes.offer(Candidate(row, generation, family, member))

    def gone(self, row: int, cause: Cause) -> None:
        """A name is about to go: what was found out about its span goes with it."""
        self._recoder.verdicts.gone(row)

    def starved(self, family: Family, tier: int) -> None:
        """A family's spans in a tier can't be looked at before more of its base is stored there."""
        self._starved.add((family.id, tier))

    def doubted(self, candidate: Candidate) -> None:
        """A base of a span is not served now: the span is looked at again when that is over."""
        row, family = candidate.row, candidate.family
        if not self.knows(family):
            return
        if self.spans.whole(family, row):
            self._offer(row, family, candidate.member)
        else:
            self.starved(family, self._store.tier_of(row))

    @property
    def waiting(self) -> list[int]:
        """Tiers in which there may be spans to look at that nobody has offered yet."""
        return [tier for tier, scans in self._scans.items() if scans]

    def look(self, tier: int) -> None:
        """Looks through one member."""
        (number, name), _ = self._scans[tier].popitem(last=False)
        family = self.by_id[number]
        self._scan(family, family.members[name], tier)

    def _scan(self, family: Family, member: Member, tier: int) -> None:
        table, mirrors = self._store.table, self._store.mirrors
        own = [key for key in member.keys if key not in family.base]
        shards = family.shards
        ready = {shard for shard in shards if self.spans.base(family, shard, tier) is not None}
        if len(ready) < len(shards):
            self.starved(family, tier)
        for _, shard, row in self.spans.stored(family, own, tier):
            if (
                shard in ready
                and table.state[row] == State.COMMITTED
                and row not in mirrors.by_row
                and not self._recoder.verdicts.of(row, family)
            ):
                self._offer(row, family, member.name)


def _split(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))
