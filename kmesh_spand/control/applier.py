"""Carries out the core's effects: catalog, index, store worker, answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kmesh.index import IndexWriter
from kmesh_spand.control.staging import StagingPool
from kmesh_spand.control.storeworker import StoreWorker
from kmesh_spand.core import effects
from kmesh_spand.core.record import RECORD_BYTES

logger = logging.getLogger(__name__)


class Applier:
    """Applies batches of effects in order. One that fails is logged; the rest still happen.

    Attributes:
        index_full: keys that found no place in the index (they are stored, but never hit).

    Args:
        catalog: the catalog, writable, of whole records.
        reply: where answers go.
        note: told of spans that came and went.
    """

    def __init__(
        self,
        catalog: memoryview,
        index: IndexWriter,
        worker: StoreWorker,
        staging: StagingPool,
        reply: Callable[[effects.Reply], None],
        note: Callable[[effects.SpanCommitted | effects.SpanEnded], None],
    ) -> None:
        self.index_full = 0
        self._catalog = catalog
        self._index = index
        self._worker = worker
        self._staging = staging
        self._reply = reply
        self._note = note

    def apply(self, batch: Sequence[effects.Effect]) -> None:
        """Carries out one batch. Answers see its changes: they go out after the index's version."""
        changed = False
        replies = []
        for effect in batch:
            if isinstance(effect, effects.Reply):
                replies.append(effect)
                continue
            try:
                changed |= self._one(effect)
            except Exception:
                logger.exception("an effect failed", extra={"effect": type(effect).__name__})
        if changed:
            self._index.bump()
        for reply in replies:
            self._reply(reply)

    def _one(self, effect: effects.Effect) -> bool:
        """Returns whether the index changed."""
        match effect:
            case effects.PutRecord():
                at = effect.slot * RECORD_BYTES
                self._catalog[at : at + RECORD_BYTES] = effect.data
            case effects.Publish():
                for tag in effect.tags:
                    if not self._index.insert(tag, effect.slot):
                        self.index_full += 1
                return True
            case effects.Unpublish():
                for tag in effect.tags:
                    self._index.remove(tag, effect.slot)
                return True
            case effects.Copy():
                self._worker.copy(effect)
            case effects.Verify():
                self._worker.verify(effect)
            case effects.DropStaging():
                self._staging.drop(effect.session)
            case effects.SpanCommitted() | effects.SpanEnded():
                self._note(effect)
            case effects.Reply():
                raise AssertionError("replies come last")
        return False
