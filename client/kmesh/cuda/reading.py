"""Whole payloads out of slabs as a GPU sees them, for tools, tests and whoever is not an engine."""

from __future__ import annotations

from collections.abc import Callable

from kmesh import _host, errors
from kmesh.cuda.device import Device
from kmesh.cuda.proof import fetch
from kmesh.cuda.slabs import DeviceSlab, DeviceSlabs
from kmesh.keys import KEY_BYTES
from kmesh.layout import tiles
from kmesh.lease import Lease


class FetchedSlab:
    """A slab whose bytes are brought to the host when they are asked for: see ``mirrors.Slab``.

    Args:
        fetch: a copy of so many bytes at an address of the GPU's.
    """

    def __init__(self, slab: DeviceSlab, fetch: Callable[[int, int], bytes | bytearray]) -> None:
        self.slab = slab.slab
        self._slab, self._fetch = slab, fetch
        self._sums: dict[int, bytes | bytearray] = {}

    def contains(self, offset: int, length: int) -> bool:
        return self._slab.contains(offset, length)

    def view(self, offset: int, length: int) -> memoryview:
        data = self._fetch(self._slab.address + offset, length)
        # After the payload: a range that was given to another meanwhile has other sums by then.
        self._sums[offset] = self._fetch(self._slab.sums_address(offset), 8 * tiles(length))
        return memoryview(data)

    def sums_address(self, offset: int) -> int:
        """Of what was last viewed there."""
        return _host.address(self._sums[offset])


def read_span(slabs: DeviceSlabs, device: Device, lease: Lease, key: int, shard: int = 0) -> bytes:
    """A leased payload, moved by the GPU, copied and then verified; out of its recipe, if it is
    kept as one (needs the extra ``codec``).

    Raises:
        IndexError, LookupError: as ``Lease.entry``.
        CorruptionError: the bytes are not those that were stored; tell the daemon with
            ``session.report_corrupt(lease, [lease.index(key, shard)])``.
    """
    span = lease.entry(key, shard)
    if lease.is_recipe(key, shard):
        from kmesh.mirrors import MirrorReader, bases_of, place_of

        reader = MirrorReader(
            lambda number: FetchedSlab(slabs.slab(number), lambda *what: fetch(device, *what))
        )
        return reader.read(place_of(lease, key, shard), bases_of(lease, shard)).tobytes()
    slab = slabs.slab(span.slab)
    if not slab.contains(span.offset, span.length):
        raise errors.ProtocolError(f"no span can lie at {span} in slab {slab.slab}")
    payload = fetch(device, slab.address + span.offset, span.length)
    # After the payload: a range that was given to another meanwhile has other sums by then.
    sums = fetch(device, slab.sums_address(span.offset), 8 * tiles(span.length))
    root = lease.root[lease.index(key, shard)]
    if not _host.verify(_host.address(payload), span.length, _host.address(sums), root):
        name = lease.keys[key * KEY_BYTES : (key + 1) * KEY_BYTES].hex()
        raise errors.CorruptionError(f"span {name}: its bytes do not match their sums")
    return payload
