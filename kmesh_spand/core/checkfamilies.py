"""What must always hold of recipes, their bases and their jobs; for tests."""

from __future__ import annotations

from collections import Counter

from kmesh.layout import tiles
from kmesh_spand.core.families import FamilyBook
from kmesh_spand.core.recoder import Recoder
from kmesh_spand.core.states import STORED, State
from kmesh_spand.core.store import SpanStore


def check_families(store: SpanStore, recoder: Recoder, book: FamilyBook) -> None:
    """Raise AssertionError unless recipes, bases, holds, drafts and names fit together."""
    _check_mirrors(store)
    _check_jobs(store, recoder)
    _check_names(book)


def _check_mirrors(store: SpanStore) -> None:
    table, mirrors = store.table, store.mirrors
    of_base: dict[int, set[int]] = {}
    for row, mirror in mirrors.by_row.items():
        assert table.state[row] in {*STORED, State.DOOMED, State.RETIRED}
        assert mirror.length > 0
        assert len(set(mirror.bases)) == len(mirror.bases)
        for base in mirror.bases:
            assert base not in mirrors.by_row, "a recipe refers to a recipe"
            assert table.scope[base] == table.scope[row]
            assert store.tier_of(base) == store.tier_of(row)
            assert table.state[base] in {*STORED, State.DOOMED}, "a base went before its mirror"
            assert table.state[base] in STORED or mirror.lost
            of_base.setdefault(base, set()).add(row)
        if table.state[row] == State.COMMITTED:
            assert mirror.bases, "a mirror is served that nobody has read"
            assert not mirror.lost, "a mirror is served whose base is bad"
    assert mirrors.of_base == of_base
    stored = [row for row in mirrors.by_row if table.state[row] in STORED]
    assert mirrors.spans == len(stored)
    assert mirrors.stored_bytes == sum(table.length[row] for row in stored)
    assert mirrors.tiles == sum(tiles(table.length[row]) for row in stored)
    assert mirrors.dense_bytes == sum(mirrors.by_row[row].length for row in stored)


def _check_jobs(store: SpanStore, recoder: Recoder) -> None:
    table = store.table
    holds = Counter(base for mirror in store.mirrors.by_row.values() for base in mirror.bases)
    drafts = Counter[int]()
    for encoding in recoder.encodes.values():
        holds.update((encoding.candidate.row, *encoding.bases))
        if encoding.draft:
            drafts[encoding.draft] += 1
    for densifying in recoder.densifier.jobs.values():
        assert densifying.row in store.mirrors.by_row
        holds[densifying.row] += 1
        drafts[densifying.draft] += 1
    encoded = [job.candidate.row for job in recoder.encodes.values()]
    recoder.lanes.check(encoded, [job.row for job in recoder.densifier.jobs.values()])
    assert store.holds == holds
    states = {row for row in range(1, table.rows + 1) if table.state[row] == State.DRAFT}
    assert drafts == dict.fromkeys(states, 1)
    assert all(table.state[row] != State.FREE for row in holds)
    for row in recoder.rests:
        dense = table.state[row] == State.COMMITTED and row not in store.mirrors.by_row
        assert not dense or recoder.verdicts.of(row), "a span rests that may be encoded"
    assert store.condemned.keys() <= holds.keys()


def _check_names(book: FamilyBook) -> None:
    counted, named = Counter[int](), Counter[int]()
    for number, family in book.by_id.items():
        assert family.id == number
        assert book.find(family.owner, family.name) is family
        keys = {key for member in family.members.values() for key in member.keys}
        assert family.spans == len(keys | family.base.keys()) * len(family.shards)
        counted[family.owner[0]] += family.spans
        assert family.named == sum(member.named for member in family.members.values())
        named[family.owner[0]] += family.named
    assert +book.group_spans == +counted
    assert +book.group_names == +named
