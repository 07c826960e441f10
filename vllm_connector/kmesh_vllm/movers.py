"""What moves spans between memory that processes share and an engine's pages, as an interface.

``hostmover`` is the one for pages in host memory, ``gpumover`` the one for pages on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kmesh.kernels.plan import RECORD
from kmesh.session import Session, Staging

if TYPE_CHECKING:
    from kmesh_vllm.bringing import Brought
    from kmesh_vllm.decoding import Payload
    from kmesh_vllm.lending import Lent

Ids = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]


class Slab(Protocol):
    """One of the daemon's slabs, as whoever moves its spans sees it."""

    @property
    def slab(self) -> int: ...
    @property
    def address(self) -> int: ...
    def sums_address(self, offset: int) -> int: ...
    def contains(self, offset: int, length: int) -> bool: ...


class Readable(Protocol):
    """A slab whose bytes this process can have; addresses are its own."""

    @property
    def slab(self) -> int: ...
    def sums_address(self, offset: int) -> int: ...
    def contains(self, offset: int, length: int) -> bool: ...
    def view(self, offset: int, length: int) -> memoryview: ...


class AtHand(Readable, Slab, Protocol):
    """A slab that this process reads where it lies; addresses are its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Recipes:
    """How those records of a piece are moved that are recipes.

    Attributes:
        tables: u64, for each record the address of its recipe's tables; 0: it is dense.
        bases: of ``kmesh.kernels.rounds.BASE``, what they refer to.
        kept: what ``tables`` are addresses of.
    """

    tables: npt.NDArray[np.uint64]
    bases: Records
    kept: object


@dataclass(eq=False, slots=True)
class Piece:
    """Parts of spans for the pages of one request.

    Attributes:
        records: of ``kmesh.kernels.plan.RECORD``; of a recipe, address, sums, root and length are
            those of its file.
        on_gpu: for each of them, whether its payload is in a GPU's memory.
        pages: int64 ids of the tensors' blocks; -1 where a block must not be written.
        recipes: if some of them are.
    """

    records: Records
    on_gpu: npt.NDArray[np.bool_]
    pages: Ids
    recipes: Recipes | None = None
    #: Values that ``on_gpu`` has, once they were looked for.
    _places: bytes | None = None

    def like(self, pages: Ids) -> Piece:
        """The same parts for the pages of another request, without recipes."""
        return Piece(self.records, self.on_gpu, pages, None, self._places)

    def without(self, dropped: npt.NDArray[np.bool_]) -> Piece:
        """The same piece without some of its records."""
        kept, recipes = ~dropped, self.recipes
        if recipes is not None:
            recipes = Recipes(recipes.tables[kept], recipes.bases, recipes.kept)
        return Piece(self.records[kept], self.on_gpu[kept], self.pages, recipes)

    def part(self, on_gpu: bool) -> Records:
        """The records whose payloads are in a GPU's memory, or those whose are not."""
        if self._places is None:
            places = self.on_gpu.tobytes()
            self._places = bytes([value for value in (0, 1) if value in places])
        if len(self._places) <= 1:
            return self.records if self._places == bytes([on_gpu]) else self.records[:0]
        mixed: Records = self.records[self.on_gpu == on_gpu]
        return mixed


class Moving(Protocol):
    """Pieces that are being restored. Until ``done`` their pages may be written at any time.

    Attributes:
        read_bytes: of payloads that were read for them, tiles whole; once there are ``statuses``.
    """

    @property
    def read_bytes(self) -> int: ...

    def done(self) -> bool:
        """Whether nothing is written any more. Never waits."""

    def statuses(self) -> list[bytes]:
        """For each piece, a ``kmesh.kernels.host.Status`` for each record; once ``done``.

        Raises:
            UnsupportedError: as ``Mover.restore``; no page was written.
            Exception: the move failed as a whole; all of its pages may hold anything.
        """


class Taken(Protocol):
    """Spans of a step that are to be stored: the first ``count`` of those that were asked for.

    Attributes:
        kept: they stay as they are when the engine goes on, so that ``put`` may be called later
            and in another thread. Otherwise only before the engine's next step.
    """

    @property
    def kept(self) -> bool: ...
    @property
    def count(self) -> int: ...

    def put(self, first: int, offsets: list[int], staging: Staging) -> bytes:
        """Writes spans from number ``first`` on to these offsets of the staging; waits for it.

        Spans are put once each, in their order.

        Returns:
            A ``Status`` for each; one that is not DONE was not written.

        Raises:
            Exception: none of them may be committed.
        """

    def drop(self) -> None:
        """The rest is not wanted. May be called again."""


class Mover(Protocol):
    """Restores into, and stores from, the pages of one engine.

    Attributes:
        starts_only: ``restore`` only starts something and is called in the engine's thread alone;
            otherwise it does it, and is called in threads that may be kept.
        moves_recipes: ``restore`` takes recipes, if it ``takes_recipes`` by then.
        devices: whose memory it can read: UUIDs of GPUs, and "" for the daemon's host memory.
        recipes: UUIDs of GPUs out of whose memory it restores recipes; may become fewer.
    """

    @property
    def starts_only(self) -> bool: ...
    @property
    def moves_recipes(self) -> bool: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def recipes(self) -> tuple[str, ...]: ...

    def attached(self, session: Session, number: int) -> Slab | None:
        """A slab whose memory can be read at once; None: ``attach`` it first. Never waits."""

    def attach(self, session: Session, number: int, timeout: float) -> Slab:
        """A slab; may take long. It stays as long as the caller holds it, or until ``end``.

        Raises:
            KMeshError, OSError: it can't be read here; says why.
        """

    def reads_gpu(self, slab: Slab) -> bool:
        """Whether a slab is GPU memory."""

    def at_hand(self, slab: Slab) -> AtHand | None:
        """A slab as this process itself reads it, until ``end``; None: it can't."""

    def readable(self, slab: Slab) -> Readable:
        """A slab's bytes, until ``end``. Of one that is not ``at_hand`` they are copies, for which
        the GPU is waited for: not for the engine's thread."""

    def bring(self, addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> Brought:
        """What ``kmesh.codec.ManyTables`` reads of recipes, at least one, in slabs that are not
        ``at_hand``. Waits for the GPU: not for the engine's thread.

        Args:
            addresses, lengths: u64, of each, as whoever moves it sees it.

        Raises:
            KMeshError: it can't be had in time.
        """

    def takes_recipes(self, timeout: float) -> bool:
        """Whether recipes may be restored as they are; waits a while until they may."""

    def lend(self, payloads: Sequence[Payload]) -> Lent:
        """Makes payloads of this process readable for ``restore``; may take long.

        Raises:
            CudaError, OSError: there is no memory for it.
        """

    def restore(self, pieces: list[Piece]) -> Moving:
        """Starts to move the pieces, behind all that the engine has started on its pages.

        Raises:
            UnsupportedError: the recipes among them have to be decoded; nothing was started. Where
                that is not known at once, ``Moving.statuses`` raises it.
        """

    def ready(self) -> bool:
        """Whether ``take`` takes anything yet. Never waits."""

    def take(self, records: Records, pages: Ids) -> Taken:
        """Spans that the step has filled; ``address`` of the records means nothing.

        When it returns, the engine may go on: what it starts from here on comes after the reading
        of what is ``kept``.
        """

    def room(self, length: int, timeout: float) -> bool:
        """Whether ``take`` has room for a span of so many bytes; waits a while until it has."""

    def prepare_staging(self, staging: Staging) -> None:
        """Staging that ``put`` will write to; may take long.

        Raises:
            KMeshError, OSError: it can't be written from here.
        """

    def touch_staging(self, staging: Staging) -> None:
        """Has such staging ready for writing, so that ``put`` does not wait for its pages; may take
        long."""

    def begin(self) -> int:
        """A load begins: memory that it gets stays until ``end``, also if its session ends.

        Returns:
            Its number.
        """

    def end(self, load: int) -> None:
        """A load has ended. Never waits."""

    def close(self) -> None:
        """Waits, for a bounded time, for what is under way and gives memory back."""


def empty_records(count: int) -> Records:
    """Records that are all zero."""
    return np.zeros(count, RECORD)
