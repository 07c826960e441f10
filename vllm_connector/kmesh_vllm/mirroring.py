"""Spans of a load that are recipes: for kernels that restore them as they are, or decoded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kmesh.errors import ProtocolError
from kmesh.kernels.rotary import ELEMENTS
from kmesh.kernels.rounds import BASE
from kmesh_vllm.decoding import decode_mirrors
from kmesh_vllm.identity import Identity
from kmesh_vllm.lending import Lent
from kmesh_vllm.locating import Locator
from kmesh_vllm.metadata import BASE_RECORD, MIRROR_RECORD, LoadPlan
from kmesh_vllm.movers import Mover, Piece, Readable, Recipes, Records, Slab
from kmesh_vllm.sharding import Sharding

logger = logging.getLogger("kmesh_vllm")

_SHARD = ("layer_begin", "layer_end", "head_begin", "head_end")
_PLACE = ("root", "generation", "tokens", "position")


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Which of a piece's records are recipes.

    Attributes:
        mirrored: bool, of each record.
        wrong: bool, of each record: it must not be moved.
        lent: payloads of those that were decoded. decoded: how many these are.
    """

    mirrored: npt.NDArray[np.bool_]
    wrong: npt.NDArray[np.bool_]
    lent: Lent | None = None
    decoded: int = 0


class MirrorClerk:
    """Writes down how a piece's recipes are moved.

    Where the mover takes none, or not one like that, it is decoded.
    """

    def __init__(self, mover: Mover, identity: Identity) -> None:
        self._mover = mover
        self._identity = identity
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def far(self, plan: LoadPlan, numbered: npt.NDArray[np.intp], locator: Locator) -> bool:
        """Whether some of a plan's recipes lie where this process can't read them.

        Args:
            numbered: of the plan's records, those that are wanted.
        """
        mirrors = np.frombuffer(plan.mirrors, MIRROR_RECORD)["record"]
        slabs = plan.records()["slab"][mirrors[np.isin(mirrors, numbered)]]
        return any(
            self._mover.at_hand(locator.slab(number)) is None for number in set(slabs.tolist())
        )

    def place(
        self,
        plan: LoadPlan,
        piece: Piece,
        numbered: npt.NDArray[np.intp],
        stored: Sharding,
        locator: Locator,
        refused: str,
        decodes: bool,
    ) -> Placed | None:
        """Fills in a piece whose records say where recipes lie; None: not at once.

        Args:
            numbered: of the piece's records, their numbers in the plan.
            stored: in which the spans were stored.
            refused: why the mover takes none of them; or empty.
            decodes, raises: as ``Clerk.write``.
        """
        mirrors = np.frombuffer(plan.mirrors, MIRROR_RECORD)
        mirrors = mirrors[np.isin(mirrors["record"], numbered)]
        count, at = len(numbered), np.searchsorted(numbered, mirrors["record"])
        mirrored, wrong = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        mirrored[at] = True
        if not len(mirrors):
            return Placed(mirrored, wrong)
        mover, lent = self._mover, None

        def readable(number: int) -> Readable:
            return mover.readable(locator.slab(number))

        if not refused and not mover.takes_recipes(0):
            refused = "there is no kernel for them"
        why = dict.fromkeys(range(len(mirrors)), refused)
        if not refused:
            spans = plan.records()[mirrors["record"]]
            parts = np.zeros(stored.parts, np.bool_)
            parts[spans["part"]] = True
            bases = bases_of(self._identity, plan, stored, parts, locator)
            if bases is None:
                return None
            read = read_recipes(self._identity, plan, stored, spans, mirrors, mover, locator.slab)
            wrong[at], why = read.wrong, read.unsupported
            tables = np.zeros(count, np.uint64)
            tables[at] = read.tables
            if tables.any():
                piece.recipes = Recipes(tables, bases, read.kept)
        if why:
            if not decodes:
                return None
            lent = self._decode(plan, piece, numbered, mirrors["record"][list(why)], readable)
            self._tell(set(why.values()))
        return Placed(mirrored, wrong, lent, len(why))

    def _decode(
        self,
        plan: LoadPlan,
        piece: Piece,
        numbered: npt.NDArray[np.intp],
        records: npt.NDArray[np.uint32],
        readable: Callable[[int], Readable],
    ) -> Lent:
        """Puts payloads in the place of some of a plan's records."""
        wanted = np.zeros(len(plan.records()), np.bool_)
        wanted[records] = True
        decoded = decode_mirrors(plan, wanted, readable)
        payloads = list(decoded.values())
        lent = self._mover.lend(payloads)
        at = np.searchsorted(numbered, list(decoded))
        piece.records["address"][at] = lent.addresses
        piece.records["sums_address"][at] = lent.sums_addresses
        piece.records["length"][at] = [one.data.size for one in payloads]
        piece.records["root"][at] = [one.root for one in payloads]
        piece.on_gpu[at] = False
        return lent

    def _tell(self, reasons: set[str]) -> None:
        """Says each reason once, where this is not what the mover is for."""
        if not self._mover.moves_recipes:
            return
        with self._lock:
            new = reasons - self._told
            self._told |= new
        for reason in sorted(new):
            logger.warning("spans are decoded on the host, which is slow: %s", reason)


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """What was found when recipes were read.

    Attributes:
        tables: u64, the address of each one's tables; 0 where there are none to be used.
        wrong: bool, of each: it is not the recipe that the lease names.
        unsupported: by number of a recipe that has to be decoded, why.
        kept: what ``tables`` are addresses of.
    """

    tables: npt.NDArray[np.uint64]
    wrong: npt.NDArray[np.bool_]
    unsupported: dict[int, str]
    kept: object


def read_recipes(
    identity: Identity,
    plan: LoadPlan,
    stored: Sharding,
    spans: Records,
    mirrors: Records,
    mover: Mover,
    slab_of: Callable[[int], Slab],
) -> Read:
    """Tables of a plan's recipes, copied: they lie where others can write.

    Of those that this process can't read where they lie, heads and tables are brought here, which
    waits for the GPU.

    Args:
        stored: in which the spans were stored.
        spans: ``SPAN_RECORD`` of each recipe, of which slab and range are what a slab can have.
        mirrors: its ``MIRROR_RECORD``.
        slab_of: a slab, by its number.
    """
    from kmesh.codec import ManyTables

    addresses = spans["offset"].copy()
    far, views = np.zeros(len(spans), np.bool_), []
    for number in set(spans["slab"].tolist()):
        here, slab = spans["slab"] == number, slab_of(number)
        near = mover.at_hand(slab)
        if near is not None:
            # A view keeps its slab mapped while the tables are copied.
            views.append(near.view(0, 0))
        far[here] = near is None
        addresses[here] += np.uint64((near or slab).address)
    brought = None
    if far.any():
        brought = mover.bring(addresses[far], spans["length"][far])
        addresses[far] = brought.addresses
    found = ManyTables(addresses, spans["length"])
    del views, brought
    # Where a recipe is wrong its head means nothing, and is not asked.
    heads, names = found.heads, identity.namespace
    same = heads["payload_root"] == mirrors["dense_root"]
    same &= heads["namespace"] == np.frombuffer(plan.namespace, "V32")
    same &= heads["tokens"] == spans["tokens"]
    same &= heads["dtype"] == ELEMENTS.get(names.dtype, 0)
    same &= heads["head_dim"] == names.head_dim
    shards = np.array([[getattr(s, name) for name in _SHARD] for s in stored.shards])
    for name, column in zip(_SHARD, shards[spans["part"]].T, strict=True):
        same &= heads[name] == column
    same &= _lengths(identity, stored, spans) == mirrors["dense_length"]
    for number in np.flatnonzero(~same).tolist():
        if number not in found.wrong:
            logger.warning("a span can't be restored: what lies there is another one's recipe")
    for number, field in found.wrong.items():
        same[number] = False
        logger.warning("a span can't be restored: %s of its recipe is wrong", field)
    tables = np.where(same, found.addresses, np.uint64(0))
    unsupported = {n: why for n, why in found.unsupported.items() if same[n]}
    tables[list(unsupported)] = 0
    return Read(tables, ~same, unsupported, found)


def bases_of(
    identity: Identity,
    plan: LoadPlan,
    stored: Sharding,
    wanted: npt.NDArray[np.bool_],
    locator: Locator,
) -> npt.NDArray[np.void] | None:
    """What a plan's recipes refer to, an array of ``kmesh.kernels.rounds.BASE``; None if memory is
    not attached.

    Args:
        wanted: of which shards.

    Raises:
        ProtocolError: the plan names bytes that no span can have.
    """
    given = np.frombuffer(plan.bases, BASE_RECORD)
    given = given[wanted[given["part"]]]
    if (_lengths(identity, stored, given) != given["length"]).any():
        raise ProtocolError("a lease names a base of another length than its tokens have")
    found = locator.locate(given["slab"], given["offset"], given["length"])
    if found is None:
        return None
    bases = np.zeros(len(given), BASE)
    bases["address"], bases["sums_address"], bases["order"] = found
    bases["key"] = np.ascontiguousarray(given["key"]).view("V32").reshape(-1)
    for name in _PLACE:
        bases[name] = given[name]
    shards = np.array([[getattr(s, name) for name in _SHARD] for s in stored.shards])
    bases["layers"], bases["heads"] = np.split(shards[given["part"]], 2, axis=1)
    bases["namespace"] = np.frombuffer(plan.namespace, "V32")
    bases["head_dim"] = identity.namespace.head_dim
    bases["dtype"] = ELEMENTS.get(identity.namespace.dtype, 0)
    return bases


def _lengths(identity: Identity, stored: Sharding, spans: Records) -> npt.NDArray[np.uint64]:
    """Payload bytes of spans of so many ``tokens``."""
    sizes: npt.NDArray[np.uint64] = spans["tokens"].astype(np.uint64) * np.uint64(
        identity.geometry(stored.part_heads).token_bytes
    )
    return sizes
