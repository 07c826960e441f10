"""Ranges into which a span is written anew, as a recipe or dense, beside the one that it has."""

from __future__ import annotations

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core.codes import Reason
from kmesh_spand.core.effects import Payload
from kmesh_spand.core.eviction import Evictor
from kmesh_spand.core.states import Trigger
from kmesh_spand.core.store import SpanStore

_U32 = 0xFFFF_FFFF


class Drafts:
    """Takes rows for what jobs write, and says where what they read lies."""

    def __init__(self, store: SpanStore, patience_ms: int) -> None:
        self._store = store
        self._evictor = Evictor(store, patience_ms)

    def take(self, row: int, length: int) -> int:
        """A row with a range of so many bytes, to take another's names over; 0: no room."""
        store, table = self._store, self._store.table
        place = self._evictor.place(tiles(length), store.tenant_of(row))
        if isinstance(place, Reason):
            return 0
        draft, slab, tile = place
        table.label(draft, table.key_of(row), table.scopes.value(table.scope[row]))
        table.space[draft] = table.spaces.take(table.spaces.value(table.space[row]))
        table.generation[draft] = table.generation[draft] + 1 & _U32
        table.tokens[draft], table.start[draft] = table.tokens[row], table.start[row]
        table.slab[draft], table.tile[draft] = slab, tile
        table.length[draft] = length
        store.move(draft, Trigger.DRAFT)
        return draft

    def payload(self, row: int) -> Payload:
        """Where a span lies, and what it is."""
        table = self._store.table
        return Payload(
            table.key_of(row),
            table.slab[row],
            table.tile[row] * TILE_BYTES,
            table.length[row],
            table.generation[row],
            table.root[row],
            table.tokens[row],
            table.start[row],
        )
