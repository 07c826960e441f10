"""Which flight has promised a key, and which of those keys are stored or on their way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kmesh_spand.core.flight import Flight, Who
from kmesh_spand.core.states import KEYED, State
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tags import scope
from kmesh_spand.core.tenants import Tenant


class Promises:
    """Of all flights. A key is promised by one at a time.

    Attributes:
        by_key: for each tenant, which flight has promised a key.
    """

    def __init__(self, store: SpanStore) -> None:
        self._store = store
        self.by_key: dict[Who, dict[bytes, Flight]] = {}

    def held(self, who: Who) -> Mapping[bytes, Flight]:
        """A tenant's."""
        return self.by_key.get(who, {})

    def find(self, tenant: Tenant, key: bytes) -> Flight | None:
        """The flight that has promised a tenant's key."""
        return self.held(_who(tenant)).get(key)

    def add(self, flight: Flight, begin: int, end: int) -> int:
        """A flight promises its keys [begin, end), up to the first one that another has promised.

        Returns:
            Where they end.
        """
        held = self.by_key.setdefault(flight.who, {})
        for at in range(begin, end):
            if held.setdefault(flight.keys[at], flight) is not flight:
                end = at
                break
        if not held:
            del self.by_key[flight.who]
        return end

    def take_back(self, flight: Flight, begin: int, end: int) -> None:
        """Of a flight's keys [begin, end), those that it has promised are promised no more."""
        held = self.by_key.get(flight.who, {})
        for at in range(begin, end):
            if held.get(flight.keys[at]) is flight:
                del held[flight.keys[at]]
        if not held:
            self.by_key.pop(flight.who, None)

    def touched(self, row: int) -> Iterator[tuple[Flight, bytes, int, int]]:
        """Flights that promised names of a span: with the key, the shard and the name's row."""
        store, table = self._store, self._store.table
        held = self.by_key.get(_who(store.tenant_of(row)))
        if held is None:
            return
        shard = store.shard(row)
        for name in (row, *store.aliases(row)):
            key = table.key_of(name)
            flight = held.get(key)
            if flight is not None:
                yield flight, key, shard, name

    def missing(self, who: Who, keys: Sequence[bytes], shards: tuple[int, ...]) -> list[int]:
        """For each key the shards, as bits, in which it is not stored."""
        masks = [(1 << len(shards)) - 1] * len(keys)
        store, table = self._store, self._store.table
        tenant = store.tenants.find(*who)
        for bit, shard in enumerate(shards if tenant is not None else ()):
            assert tenant is not None
            rows, found = table.find_all(b"".join(keys), scope(tenant.number, shard))
            for i, row in enumerate(rows if found else ()):
                if row and table.state[store.resolve(row)] == State.COMMITTED:
                    masks[i] &= ~(1 << bit)
        return masks

    def pending(self, flight: Flight, at: int) -> bool:
        """Whether a key is being written in every shard in which it has not landed."""
        store, table = self._store, self._store.table
        tenant = store.tenants.find(*flight.who)
        if tenant is None:
            return False
        for bit, shard in enumerate(flight.shards):
            if flight.left[at] >> bit & 1:
                row = table.find(flight.keys[at], scope(tenant.number, shard))
                if table.state[store.resolve(row)] not in KEYED:
                    return False
        return True


def _who(tenant: Tenant) -> Who:
    return tenant.group, tenant.salt, tenant.tier
