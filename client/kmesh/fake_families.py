"""Families of the fake daemon: names and members.

It makes no recipe by itself. One that ``encode`` made lies beside its payload, which is served to
whoever asks for no recipes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message

from kmesh import _host, errors, layout
from kmesh.fake_state import FakeRecipe, Slab, Span
from kmesh.families import MAX_BASE, MAX_PAIRS, MAX_RECOVERED, NAME_BYTES
from kmesh.keys import KEY_BYTES
from kmesh.v1 import common_pb2, families_pb2, spans_pb2

#: What a declaration may not change.
_FIXED = ("namespace", "dtype", "head_dim", "shards")
_PAGE = 200


@dataclass(slots=True)
class _Family:
    id: int
    declared: families_pb2.DeclareFamilyRequest
    base: list[bytes]
    members: dict[str, tuple[str, list[bytes]]] = field(default_factory=dict)


class FakeFamilies:
    """Answers as the daemon does where nothing is ever worth a recipe.

    Args:
        find: a committed span of a key and a shard under a salt, or None.
    """

    def __init__(self, find: Callable[[bytes, int, bytes], Span | None]) -> None:
        self._find = find
        self._ids = itertools.count(1)
        self.families: dict[tuple[bytes, str], _Family] = {}

    def handle(self, body: Message) -> Message | None:
        """The answer to a request about families; None if it is about something else."""
        if isinstance(body, families_pb2.DeclareFamilyRequest):
            return self._declare(body)
        if isinstance(body, families_pb2.JoinFamilyRequest):
            return self._join(body)
        if isinstance(body, families_pb2.ForkMemberRequest):
            return self._fork(body)
        if isinstance(body, families_pb2.DissolveFamilyRequest):
            family = self._get(body.salt, body.family, "dissolve_family")
            del self.families[body.salt, body.family]
            return families_pb2.DissolveFamilyResponse(members=len(family.members))
        if isinstance(body, families_pb2.DescribeFamilyRequest):
            return self._describe(body)
        if isinstance(body, families_pb2.ListFamiliesRequest):
            return families_pb2.ListFamiliesResponse(
                families=[self._info(family) for family in self.families.values()]
            )
        return None

    def _get(self, salt: bytes, name: str, call: str) -> _Family:
        family = self.families.get((salt, name))
        if family is None:
            raise errors.NotFound("no such family", field=f"{call}.family")
        return family

    def _declare(self, body: families_pb2.DeclareFamilyRequest) -> Message:
        call = "declare_family"
        _name(body.family, f"{call}.family")
        base = list(dict.fromkeys(_split(body.base, f"{call}.base")))
        if body.dtype not in layout.DTYPE_BYTES:
            raise errors.InvalidArgument("no such dtype", field=f"{call}.dtype")
        if len(body.namespace) != 32:
            raise errors.InvalidArgument("not 32 bytes", field=f"{call}.namespace")
        if not body.head_dim:
            raise errors.InvalidArgument("none", field=f"{call}.head_dim")
        if not body.shards:
            raise errors.InvalidArgument("no shard", field=f"{call}.shards")
        if len(body.rotary.frequencies) > min(MAX_PAIRS, body.head_dim // 2):
            raise errors.InvalidArgument("too many", field=f"{call}.rotary.frequencies")
        known = self.families.get((body.salt, body.family))
        if known is None:
            if not 0 < len(base) <= MAX_BASE:
                raise errors.InvalidArgument("none, or too many", field=f"{call}.base")
            known = _Family(next(self._ids), body, base)
            self.families[body.salt, body.family] = known
            return families_pb2.DeclareFamilyResponse(id=known.id, created=True, added=len(base))
        told = known.declared.rotary.frequencies and body.rotary.frequencies
        for name in (*_FIXED, "rotary") if told else _FIXED:
            if getattr(known.declared, name) != getattr(body, name):
                raise errors.InvalidArgument("is declared otherwise", field=f"{call}.{name}")
        added = [key for key in base if key not in known.base]
        if len(known.base) + len(added) > MAX_BASE:
            raise errors.TooLarge(f"over {MAX_BASE} keys", field=f"{call}.base")
        known.base += added
        if body.rotary.frequencies:
            known.declared.rotary.CopyFrom(body.rotary)
        return families_pb2.DeclareFamilyResponse(id=known.id, added=len(added))

    def _join(self, body: families_pb2.JoinFamilyRequest) -> Message:
        call = "join_family"
        family = self._get(body.salt, body.family, call)
        _name(body.member, f"{call}.member")
        keys = _split(body.keys, f"{call}.keys")
        if not keys:
            raise errors.InvalidArgument("a member without spans", field=f"{call}.keys")
        if body.namespace != family.declared.namespace:
            raise errors.InvalidArgument("is not the family's", field=f"{call}.namespace")
        if body.shards and list(body.shards) != list(family.declared.shards):
            raise errors.InvalidArgument("are not the family's", field=f"{call}.shards")
        _check_provenance(body.provenance, family, call)
        _, before = family.members.get(body.member, ("", []))
        if keys[: len(before)] != before:
            raise errors.InvalidArgument("has other keys", field=f"{call}.member")
        family.members[body.member] = ("", keys)
        spans, stored = self._counts(family, keys)
        return families_pb2.JoinFamilyResponse(spans=spans, stored=stored)

    def _fork(self, body: families_pb2.ForkMemberRequest) -> Message:
        call = "fork_member"
        family = self._get(body.salt, body.family, call)
        if body.parent not in family.members:
            raise errors.NotFound("no such member", field=f"{call}.parent")
        _name(body.member, f"{call}.member")
        if body.member in family.members:
            raise errors.InvalidArgument("is a member already", field=f"{call}.member")
        _check_provenance(body.provenance, family, call)
        keys = family.members[body.parent][1] + _split(body.keys, f"{call}.keys")
        family.members[body.member] = (body.parent, keys)
        spans, stored = self._counts(family, keys)
        return families_pb2.ForkMemberResponse(spans=spans, stored=stored)

    def _describe(self, body: families_pb2.DescribeFamilyRequest) -> Message:
        if body.id:
            found = [family for family in self.families.values() if family.id == body.id]
            if not found:
                raise errors.NotFound("no such family", field="describe_family.id")
            family = found[0]
        else:
            family = self._get(body.salt, body.family, "describe_family")
        answer = families_pb2.DescribeFamilyResponse(family=self._info(family))
        first = int(body.page_token or 0)
        limit = min(body.limit or _PAGE, _PAGE)
        members = list(family.members.items())
        for name, (parent, keys) in members[first : first + limit]:
            spans, stored = self._counts(family, keys)
            base = self._counts(family, [key for key in keys if key in family.base])[1]
            size = sum(span.length for span in self._spans(family, keys))
            answer.members.add(
                name=name,
                parent=parent,
                master=set(family.base) <= set(keys),
                spans=spans,
                base=base,
                dense=stored - base,
                waiting=spans - stored,
                dense_bytes=size,
                stored_bytes=size,
                used_bytes=self._used(family, keys),
            )
        if len(members) > first + limit:
            answer.next_page_token = str(first + limit)
        return answer

    def _info(self, family: _Family) -> families_pb2.FamilyInfo:
        own = {key for _, keys in family.members.values() for key in keys} - set(family.base)
        base, stored = self._counts(family, family.base)
        size = sum(span.length for span in self._spans(family, [*family.base, *own]))
        declared = family.declared
        return families_pb2.FamilyInfo(
            id=family.id,
            name=declared.family,
            tenant="fake",
            namespace=declared.namespace,
            dtype=declared.dtype,
            head_dim=declared.head_dim,
            shards=declared.shards,
            base_spans=base,
            base_stored=stored,
            base_bytes=sum(span.length for span in self._spans(family, family.base)),
            members=len(family.members),
            spans=self._counts(family, own)[0],
            dense_bytes=size,
            stored_bytes=size,
            used_bytes=self._used(family, [*family.base, *own]),
        )

    def _counts(self, family: _Family, keys: Iterable[bytes]) -> tuple[int, int]:
        keys = list(keys)
        return len(keys) * len(family.declared.shards), len(self._spans(family, keys))

    def _used(self, family: _Family, keys: Iterable[bytes]) -> int:
        return layout.TILE_BYTES * sum(
            layout.tiles(span.length) for span in self._spans(family, keys)
        )

    def _spans(self, family: _Family, keys: Iterable[bytes]) -> list[Span]:
        codes = [_code(shard) for shard in family.declared.shards]
        found = [self._find(key, code, family.declared.salt) for key in keys for code in codes]
        return [span for span in found if span is not None]

    def encode(self, salt: bytes, name: str, slabs: Sequence[Slab]) -> int:
        """Makes recipes of a family's members, wherever equal tokens are found; how many."""
        from kmesh.codec import Base, Encoder, Segment, SpanDescription

        family, made = self._get(salt, name, "encode"), 0
        declared = family.declared

        def describe(span: Span) -> SpanDescription:
            return SpanDescription(
                span.keys[0],
                declared.namespace,
                declared.dtype,
                layout.Shard.from_code(span.shard),
                declared.head_dim,
                span.tokens,
                span.start,
                span.generation,
            )

        def view(span: Span) -> memoryview:
            return slabs[span.slab].memory.view(span.offset, span.length)

        for shard in map(_code, declared.shards):
            found = [self._find(key, shard, salt) for key in family.base]
            bases = {span.keys[0]: span for span in found if span is not None}
            segments = Base(Segment(describe(span), view(span)) for span in bases.values())
            encoder = Encoder(segments)
            for key in {key: None for _, keys in family.members.values() for key in keys}:
                span = self._find(key, shard, salt)
                if span is None or key in bases or span.recipe:
                    continue
                recipe = encoder.encode(describe(span), view(span))
                used = [key.tobytes() for key in recipe.recipe.segments["key"]]
                if used:
                    span.recipe = _keep(recipe.data, slabs, [bases[key] for key in used])
                    made += 1
        return made


def _keep(data: bytes, slabs: Sequence[Slab], bases: list[Span]) -> FakeRecipe:
    for number, slab in enumerate(slabs):
        offset = slab.take(len(data))
        if offset is not None:
            memory = slab.memory
            first = layout.sums_offset(memory.size) + offset // layout.TILE_BYTES * 8
            root = _host.copy_with_sums(
                memory.address + offset, _host.address(data), len(data), memory.address + first
            )
            return FakeRecipe(number, offset, len(data), root, bases)
    raise errors.Exhausted("no slab has room for a recipe")


def add_recipe(answer: spans_pb2.AcquireResponse, span: Span | None, shard: int) -> None:
    """What an answer with recipes says of one entry."""
    recipe = span.recipe if span else None
    answer.dense_length.append(span.length if span and recipe else 0)
    answer.dense_root.append(span.root if span and recipe else 0)
    known = {(base.shard, base.key) for base in answer.bases}
    for base in recipe.bases if recipe else ():
        if (shard, base.keys[0]) not in known:
            answer.bases.add(
                shard=shard,
                key=base.keys[0],
                slab=base.slab,
                offset=base.offset,
                length=base.length,
                generation=base.generation,
                root=base.root,
                tokens=base.tokens,
                position=base.start,
            )


def _name(value: str, field: str) -> None:
    if not 0 < len(value.encode()) <= NAME_BYTES or not value.isprintable():
        raise errors.InvalidArgument(f"not 1 to {NAME_BYTES} bytes", field=field)


def _check_provenance(runs: Iterable[families_pb2.Provenance], family: _Family, call: str) -> None:
    end = 0
    for i, run in enumerate(runs):
        name = f"{call}.provenance[{i}]"
        if i == MAX_RECOVERED:
            raise errors.TooLarge(f"over {MAX_RECOVERED} runs", field=f"{call}.provenance")
        if run.base not in family.base:
            raise errors.InvalidArgument("is not in the base", field=f"{name}.base")
        if not run.tokens:
            raise errors.InvalidArgument("none", field=f"{name}.tokens")
        if run.position < end:
            raise errors.InvalidArgument("overlaps the one before", field=f"{name}.position")
        end = run.position + run.tokens


def _code(shard: common_pb2.Shard) -> int:
    return layout.Shard(shard.layer_begin, shard.layer_end, shard.head_begin, shard.head_end).code()


def _split(packed: bytes, name: str) -> list[bytes]:
    if len(packed) % KEY_BYTES:
        raise errors.InvalidArgument("not a multiple of 32 bytes", field=name)
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
