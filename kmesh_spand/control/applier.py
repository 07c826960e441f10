"""Carries out the core's effects: catalog, index, store worker, answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kmesh.index import IndexWriter, on_device
from kmesh_spand.control.diskjobs import DiskJobs
from kmesh_spand.control.staging import StagingPool
from kmesh_spand.control.workers import Workers
from kmesh_spand.core import effects
from kmesh_spand.core.record import RECORD_BYTES
from kmesh_spand.core.tenants import OWNER_BYTES

logger = logging.getLogger(__name__)


class Applier:
    """Applies batches of effects in order. One that fails is logged; the rest still happen.

    Attributes:
        index_full: keys that found no place in the index (they are stored, but never hit).

    Args:
        catalog: the catalog, writable, of whole records.
        owners: of the slabs, writable.
        indexes: one for each group of uids.
        reply: where answers go.
        note: told of spans that came and went.
        device: UUID of the GPU that a tier is.
        disk: what writes and reads files; None: there is no disk tier.
        give_up: told of sealed slabs that are empty.
    """

    def __init__(
        self,
        catalog: memoryview,
        owners: memoryview,
        indexes: Mapping[int, IndexWriter],
        worker: Workers,
        staging: StagingPool,
        reply: Callable[[effects.Reply], None],
        note: Callable[[effects.SpanCommitted | effects.SpanEnded], None],
        device: Callable[[int], str] = lambda tier: "",
        disk: DiskJobs | None = None,
        give_up: Callable[[int], None] = lambda slab: None,
    ) -> None:
        self.index_full = 0
        self._catalog = catalog
        self._owners = owners
        self._indexes = indexes
        self._worker = worker
        self._staging = staging
        self._reply = reply
        self._note = note
        self._device = device
        self._disk = disk
        self._give_up = give_up

    def apply(self, batch: Sequence[effects.Effect]) -> None:
        """Carries out one batch. Answers see its changes: they go out after the index's version."""
        changed: set[int] = set()
        replies = []
        for effect in batch:
            if isinstance(effect, effects.Reply):
                replies.append(effect)
                continue
            try:
                if (group := self._one(effect)) is not None:
                    changed.add(group)
            except Exception:
                logger.exception("an effect failed", extra={"effect": type(effect).__name__})
        for group in changed:
            self._indexes[group].bump()
        for reply in replies:
            self._reply(reply)

    def _one(self, effect: effects.Effect) -> int | None:
        """Returns the group whose index changed, if one did."""
        match effect:
            case effects.PutRecord():
                at = effect.slot * RECORD_BYTES
                self._catalog[at : at + RECORD_BYTES] = effect.data
            case effects.PutOwner():
                at = effect.slab * OWNER_BYTES
                self._owners[at : at + OWNER_BYTES] = effect.data
            case effects.Wipe():
                self._worker.wipe(effect)
            case effects.GiveUp():
                self._give_up(effect.slab)
            case effects.Publish():
                for tag in self._tags(effect):
                    if not self._indexes[effect.group].insert(tag, effect.slot):
                        self.index_full += 1
                return effect.group
            case effects.Unpublish():
                for tag in self._tags(effect):
                    self._indexes[effect.group].remove(tag, effect.slot)
                return effect.group
            case effects.Copy():
                self._worker.copy(effect)
            case effects.Verify():
                self._worker.verify(effect)
            case effects.Encode() | effects.KeepRecipe() | effects.Densify():
                self._worker.recode(effect)
            case effects.ForgetRecipe():
                self._worker.forget_recipe(effect)
            case effects.DropStaging():
                self._staging.drop(effect.session)
            case effects.Spill() | effects.Fetch() | effects.Unlink() | effects.DiskOutage():
                self._on_disk(effect)
            case effects.SpanCommitted() | effects.SpanEnded():
                self._note(effect)
            case effects.Reply():
                raise AssertionError("replies come last")
        return None

    def _on_disk(
        self, effect: effects.Spill | effects.Fetch | effects.Unlink | effects.DiskOutage
    ) -> None:
        assert self._disk is not None
        match effect:
            case effects.Spill():
                self._disk.write(effect)
            case effects.Fetch():
                self._disk.read(effect)
            case effects.Unlink():
                self._disk.remove(effect)
            case effects.DiskOutage(away):
                self._disk.outage(away=away)

    def _tags(self, effect: effects.Publish | effects.Unpublish) -> Sequence[int]:
        if not effect.tier:
            return effect.tags
        device = self._device(effect.tier)
        return [on_device(tag, device) for tag in effect.tags] if device else ()
