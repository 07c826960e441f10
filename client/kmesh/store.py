"""Whole payloads in and out, for tools, tests and whoever is not an engine.

Engines write their staging and read slabs in place, without these copies.
"""

from __future__ import annotations

from collections.abc import Sequence

from kmesh import _host, errors
from kmesh.calls import ReserveBatch
from kmesh.keys import KEY_BYTES
from kmesh.layout import STAGING_ALIGN
from kmesh.lease import REASON_OK, Lease
from kmesh.memory import SlabMapping, Staging
from kmesh.session import Session


def put_spans(
    session: Session,
    staging: Staging,
    batch: ReserveBatch,
    payloads: Sequence[bytes | bytearray | memoryview],
) -> list[int]:
    """Stores spans through the session's staging, as many at a time as it holds.

    Args:
        payloads: one for each span of ``batch``, of its ``length``.

    Returns:
        A ``kmesh.v1.Reason`` for each span: 0 stored, REASON_EXISTS (4) was there already.

    Raises:
        ConfigError: a payload has another length than ``batch`` says, or is larger than the
            staging. Nothing was stored then.
        KMeshError: as ``Session.reserve`` and ``commit``. Either the staging may be written again,
            or the session was closed, since nobody could say so.
    """
    if len(payloads) != len(batch):
        raise errors.ConfigError(f"payloads: {len(payloads)} for {len(batch)} spans")
    for i, (payload, length) in enumerate(zip(payloads, batch.length, strict=True)):
        with memoryview(payload) as view:
            if view.nbytes != length:
                raise errors.ConfigError(f"payloads: number {i} has {view.nbytes} bytes")
        if length > staging.size:
            raise errors.ConfigError(f"payloads: number {i} is larger than the staging")
    reserved = session.reserve(batch)
    reasons = list(reserved.reason)
    wanted = [i for i, reason in enumerate(reasons) if reason == REASON_OK]
    try:
        while wanted:
            offsets: list[int] = []
            used = 0
            for i in wanted:
                if used + batch.length[i] > staging.size:
                    break
                with memoryview(payloads[i]) as view:
                    staging.view()[used : used + view.nbytes] = view.cast("B")
                offsets.append(used)
                used += -(-batch.length[i] // STAGING_ALIGN) * STAGING_ALIGN
            ids = [reserved.reservation[i] for i in wanted[: len(offsets)]]
            for i, reason in zip(wanted, session.commit(ids, offsets), strict=False):
                reasons[i] = reason
            wanted = wanted[len(offsets) :]
    except BaseException:
        if not session.closed and wanted:
            try:
                session.abort([reserved.reservation[i] for i in wanted])
            except errors.KMeshError:
                # The daemon may still read the staging, and serve what it finds there.
                session.close()
        raise
    return reasons


def read_span(session: Session, lease: Lease, key: int, shard: int = 0) -> bytes:
    """A leased payload, copied and then verified; out of its recipe, if it is kept as one.

    Raises:
        IndexError, LookupError: as ``Lease.entry``.
        CorruptionError: the bytes are not those that were stored; tell the daemon with
            ``session.report_corrupt(lease, [lease.index(key, shard)])``.
    """
    if lease.is_recipe(key, shard):
        from kmesh.mirrors import MirrorReader, bases_of, place_of

        reader = MirrorReader(session.slab)
        return reader.read(place_of(lease, key, shard), bases_of(lease, shard)).tobytes()
    return read_mapped(session.slab(lease.entry(key, shard).slab), lease, key, shard)


def read_mapped(slab: SlabMapping, lease: Lease, key: int, shard: int = 0) -> bytes:
    """As ``read_span``, out of the mapping of the slab in which a dense span lies."""
    span = lease.entry(key, shard)
    if span.slab != slab.slab or not slab.contains(span.offset, span.length):
        raise errors.ProtocolError(f"no span can lie at {span} in slab {slab.slab}")
    root = lease.root[lease.index(key, shard)]
    sums = slab.sums_address(span.offset)
    with slab.reading():
        payload = bytes(slab.view(span.offset, span.length))
        good = _host.verify(_host.address(payload), span.length, sums, root)
    if not good:
        name = lease.keys[key * KEY_BYTES : (key + 1) * KEY_BYTES].hex()
        raise errors.CorruptionError(f"span {name}: its bytes do not match their sums")
    return payload
