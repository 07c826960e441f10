"""Whole payloads out of slabs as a GPU sees them, for tools, tests and whoever is not an engine."""

from __future__ import annotations

from kmesh import _host, errors
from kmesh.cuda.device import Device
from kmesh.cuda.proof import fetch
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.keys import KEY_BYTES
from kmesh.layout import tiles
from kmesh.lease import Lease


def read_span(slabs: DeviceSlabs, device: Device, lease: Lease, key: int, shard: int = 0) -> bytes:
    """A leased payload, moved by the GPU, copied and then verified.

    Raises:
        IndexError, LookupError: as ``Lease.entry``.
        CorruptionError: the bytes are not those that were stored; tell the daemon with
            ``session.report_corrupt(lease, [lease.index(key, shard)])``.
    """
    span = lease.entry(key, shard)
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
