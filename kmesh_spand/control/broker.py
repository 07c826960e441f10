"""The broker: what each session is given as a file descriptor, and why not otherwise."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kmesh import dmabuf, errors, layout
from kmesh.handles import COMMON, Agreement, HandleKind, HandleRefusal, Location, Offer, Tier, agree
from kmesh.negotiation import kind_name, known_kind
from kmesh.v1 import common_pb2, sessions_pb2
from kmesh_spand.control import limits
from kmesh_spand.control.gpus import Gpus
from kmesh_spand.settings import Settings
from kmesh_spand.storage import DmaBufs

logger = logging.getLogger(__name__)

#: Told a new fd, which it owns, or what went wrong.
Made = Callable[[int, errors.RequestError | None], None]
#: Makes a DMA-BUF of whole pages of a slab: slab, offset, bytes.
Make = Callable[[int, int, int, Made], None]

COUNTERS = ("handle_fallbacks", "dma_buf_slabs", "dma_buf_spans", "dma_buf_failed")
_OFF = 'the daemon\'s setting dma_buf is "off": whoever holds one can write through it'
_SPANS = 'dma_buf = "spans": single spans are given so, slabs are not'
_TIER_NAMES: dict[int, str] = {Tier.HOST: "host memory", Tier.GPU: "GPU memory"}
_ERRORS: dict[HandleRefusal, type[errors.RequestError]] = {
    HandleRefusal.NOT_ALLOWED: errors.PermissionDenied,
    HandleRefusal.SEALED: errors.PermissionDenied,
    HandleRefusal.SIZE_LIMIT: errors.TooLarge,
    HandleRefusal.NO_MEMORY: errors.Exhausted,
}


@dataclass(frozen=True, slots=True)
class Exported:
    """What sessions may attach: read-only fds and sizes, owned by the process.

    ``indexes`` are by group of uids, ``slabs`` are of host memory, by number. ``dma_bufs`` were
    made before those were sealed.
    """

    indexes: dict[int, tuple[int, int]]
    slabs: dict[int, tuple[int, int]]
    gpus: Gpus
    dma_bufs: DmaBufs = field(default_factory=DmaBufs)


def refused(offer: Offer, name: str) -> errors.RequestError:
    """The error for a kind that is not given; ``name`` is the field that asked for it."""
    kind = _ERRORS.get(offer.refusal or HandleRefusal.UNKNOWN, errors.InvalidArgument)
    return kind(f"{kind_name(offer.kind)} is not given: {offer.text}", field=name)


class Broker:
    """Agrees on kinds of handles, and gives them.

    Args:
        make: makes DMA-BUFs, where slabs are not sealed.
        counters: those of ``COUNTERS`` are kept in it.
        probe: says by NotExported that this machine has no DMA-BUFs of host memory.

    Attributes:
        gpus: slabs of GPU memory.
    """

    def __init__(
        self,
        settings: Settings,
        exported: Exported,
        make: Make,
        counters: Counter[str],
        probe: Callable[[], None] = dmabuf.probe,
    ) -> None:
        self.counters = counters
        self.gpus = exported.gpus
        self._slabs = exported.slabs
        self._sealed = exported.dma_bufs
        self._make = make
        # One for each slab is enough: every importer gets the same.
        self._made: dict[int, int] = dict(enumerate(self._sealed.fds))
        self._agreed: dict[int, tuple[Agreement, ...]] = {}
        self._exports: Counter[int] = Counter()
        # Sessions that were given each slab of host memory.
        self._given: dict[int, set[int]] = {}
        self._told: set[tuple[int, int]] = set()
        memfd = Offer(HandleKind.MEMFD, slabs=True)
        self._permitted = settings.dma_buf
        self._host = (memfd, self._host_dma_buf(settings, probe))

    @property
    def offered(self) -> dict[int, tuple[Offer, ...]]:
        """For each tier, what is given and why not. Of GPUs it changes when they are found."""
        gpu: tuple[Offer, ...] = ()
        if self.gpus.gpus:
            gpu = Offer(HandleKind.CUDA_VMM_FD, slabs=True), self._gpu_dma_buf()
        return {Tier.HOST: self._host, Tier.GPU: gpu}

    def _gpu_dma_buf(self) -> Offer:
        """What is given of GPU memory as DMA-BUF, and why not more."""
        kind = HandleKind.DMA_BUF
        if self._permitted == "off":
            return Offer(kind, refusal=HandleRefusal.NOT_ALLOWED, text=_OFF)
        if not self.gpus.dma_buf:
            text = "neither a GPU nor its driver has DMA-BUFs, or no device worker runs"
            if self.gpus.in_host:
                text = 'gpu_place = "host": memory of the host that CUDA made has no DMA-BUF'
            return Offer(kind, refusal=HandleRefusal.NO_DEVICE, text=text)
        if self._permitted == "spans":
            return Offer(kind, spans=True, refusal=HandleRefusal.NOT_ALLOWED, text=_SPANS)
        return Offer(kind, slabs=True, spans=True)

    def _host_dma_buf(self, settings: Settings, probe: Callable[[], None]) -> Offer:
        """What is given of host memory as DMA-BUF, and why not more."""
        kind = HandleKind.DMA_BUF
        if settings.dma_buf == "off":
            return Offer(kind, refusal=HandleRefusal.NOT_ALLOWED, text=_OFF)
        if settings.hardened:
            if self._sealed.refusal is not None:
                logger.warning("no DMA-BUF is given: %s", self._sealed.text)
                return Offer(kind, refusal=self._sealed.refusal, text=self._sealed.text)
            return Offer(kind, slabs=True)
        try:
            probe()
            if settings.dma_buf == "spans":
                return Offer(kind, spans=True, refusal=HandleRefusal.NOT_ALLOWED, text=_SPANS)
        except dmabuf.NotExported as failed:
            logger.warning("no DMA-BUF is given: %s", failed)
            return Offer(kind, refusal=failed.refusal, text=str(failed))
        try:
            dmabuf.Limits.read().check(max(size for _, size in self._slabs.values()))
        except dmabuf.NotExported as large:
            logger.warning("slabs are not given as DMA-BUF: %s", large)
            return Offer(kind, spans=True, refusal=large.refusal, text=f"slab_size: {large}")
        return Offer(kind, slabs=True, spans=True)

    # Agreeing.

    def agree(self, wanted: Iterable[sessions_pb2.HandlePreference]) -> tuple[Agreement, ...]:
        """What a client gets that can use these.

        Raises:
            InvalidArgument: a tier is named twice, or too much is.
        """
        asked: dict[int, Sequence[int]] = {int(tier): kinds for tier, kinds in COMMON.items()}
        named: set[int] = set()
        for number, preference in enumerate(wanted):
            name = f"hello.handles[{number}]"
            if preference.tier in named or len(named) == limits.MAX_HANDLES:
                raise errors.InvalidArgument("this tier was named before", field=f"{name}.tier")
            if len(preference.kinds) > limits.MAX_HANDLES:
                raise errors.InvalidArgument(
                    f"over {limits.MAX_HANDLES} kinds", field=f"{name}.kinds"
                )
            named.add(preference.tier)
            asked[preference.tier] = tuple(preference.kinds)
        return tuple(
            agree(tier, kinds, self.offered.get(tier, ())) for tier, kinds in asked.items()
        )

    def opened(self, session: int, agreed: tuple[Agreement, ...]) -> None:
        """A session began with this agreement; a lesser kind is counted, and logged once."""
        self._agreed[session] = agreed
        for agreement in agreed:
            missed = agreement.fallback
            if missed is None:
                continue
            self.counters["handle_fallbacks"] += 1
            which = (agreement.tier, missed.kind)
            # What a client makes up is no news.
            known = agreement.tier in self.offered and known_kind(missed.kind)
            if known and which not in self._told:
                self._told.add(which)
                logger.warning(
                    "%s is given as %s, a client would rather have %s: %s",
                    _TIER_NAMES.get(agreement.tier, f"tier {agreement.tier}"),
                    kind_name(agreement.chosen) if agreement.chosen else "nothing",
                    kind_name(missed.kind),
                    missed.text,
                    extra={"session": session},
                )

    def closed(self, session: int) -> None:
        """Forgets a session."""
        self._agreed.pop(session, None)
        self._exports.pop(session, None)
        for sessions in self._given.values():
            sessions.discard(session)

    def agreed(self, session: int) -> tuple[Agreement, ...]:
        """What was agreed with an open session."""
        return self._agreed.get(session, ())

    def listed(self, session: int) -> tuple[Agreement, ...]:
        """The same, without what the client has made up: a list of sessions holds that of all."""
        return tuple(
            Agreement(agreement.tier, tuple(o for o in agreement.offers if known_kind(o.kind)))
            for agreement in self.agreed(session)
            if agreement.tier in self.offered
        )

    def everything(self) -> tuple[Agreement, ...]:
        """All that can be said of each tier, in the daemon's own order."""
        return tuple(Agreement(tier, offers) for tier, offers in self.offered.items())

    def kinds(self) -> list[int]:
        """In which whole slabs of the host are given."""
        return [offer.kind for offer in self.offered[Tier.HOST] if offer.slabs]

    # Giving.

    def slab_count(self) -> int:
        """Numbers that slabs of any memory have: those of the host come first."""
        return max(self._slabs) + 1 + self.gpus.slab_count()

    def forget(self, slab: int) -> set[int]:
        """Gives a slab of host memory back; returns sessions that may have it mapped."""
        os.close(self._slabs.pop(slab)[0])
        return self._given.pop(slab, set())

    def gpu_slab(self, session: int, slab: int, kind: int, done: Callable[..., None]) -> None:
        """Gives a whole slab of GPU memory; arguments as ``slab``.

        Raises:
            RequestError: it is not given so, or not made yet.
        """
        name = "attach_slab.kind"
        chosen = [a.chosen for a in self.agreed(session) if a.tier == Tier.GPU]
        kind = kind or next(filter(None, chosen), int(HandleKind.CUDA_VMM_FD))
        offer = self._offer(Tier.GPU, kind)
        if not offer.slabs:
            raise refused(offer, name)
        fd, size = self.gpus.slabs.get(slab, (-1, 0))
        if fd < 0:
            raise errors.NotFound(f"slab {slab} is not made yet", field="attach_slab.slab")
        handle = sessions_pb2.SlabHandle(
            slab=slab,
            kind=common_pb2.HandleKind.ValueType(kind),
            size=size,
            sums_offset=layout.sums_offset(size),
            device=self.gpus.device(slab),
            in_host=self.gpus.in_host,
        )
        if kind == HandleKind.DMA_BUF:
            self._whole(slab, size, handle, done)
        else:
            done(handle, fd, None)

    def slab(
        self, session: int, slab: int, kind: int, populated: bool, done: Callable[..., None]
    ) -> None:
        """Gives a whole slab of host memory, which the session may map.

        Args:
            kind: 0 for the one that was agreed on.
            populated: all of it has pages.
            done: told the answer, the fd, which stays ours, and what went wrong.

        Raises:
            RequestError: it is not given so.
        """
        name = "attach_slab.kind"
        fd, size = self._slabs[slab]
        host = next(a for a in self.agreed(session) if a.tier == Tier.HOST)
        if not kind and not host.chosen:
            missed = host.offers[0] if host.offers else Offer(0, text="no kind was asked for")
            raise refused(missed, name)
        kind = kind or host.chosen
        self._given.setdefault(slab, set()).add(session)
        handle = sessions_pb2.SlabHandle(
            slab=slab,
            kind=common_pb2.HandleKind.ValueType(kind),
            size=size,
            sums_offset=layout.sums_offset(size),
        )
        if kind == HandleKind.MEMFD:
            done(handle, fd, None)
            return
        offer = self._offer(Tier.HOST, kind)
        if not offer.slabs:
            raise refused(offer, name)
        if slab not in self._made and not populated:
            raise errors.Exhausted("the slab's memory is not populated yet", field=name)
        self._whole(slab, size, handle, done)

    def _whole(
        self, slab: int, size: int, handle: sessions_pb2.SlabHandle, done: Callable[..., None]
    ) -> None:
        """Gives a whole slab as DMA-BUF."""

        def made(new: int, failed: errors.RequestError | None) -> None:
            if failed is not None:
                self.counters["dma_buf_failed"] += 1
                done(None, -1, failed)
                return
            if self._made.setdefault(slab, new) != new:
                os.close(new)
            self.counters["dma_buf_slabs"] += 1
            done(handle, self._made[slab], None)

        if slab in self._made:
            made(self._made[slab], None)
        else:
            self._make(slab, 0, size, made)

    def _offer(self, tier: Tier, kind: int) -> Offer:
        """What is offered of a tier in this kind."""
        return agree(tier, [kind], self.offered[tier]).offers[0]

    def span(
        self,
        session: int,
        kind: int,
        find: Callable[[], Location | None],
        done: Callable[..., None],
    ) -> None:
        """Gives one leased span's pages.

        Args:
            find: where the span lies; None once it is not leased any more.
            done: told the answer, the fd, which is closed after that, and what went wrong.

        Raises:
            RequestError: it is not given so.
        """
        place = find()
        on_gpu = place is not None and self.gpus.planned(place.slab)
        offer = self._offer(Tier.GPU if on_gpu else Tier.HOST, kind)
        if not offer.spans:
            if offer.slabs:
                text = "slabs are given so, single spans are not"
                raise errors.PermissionDenied(
                    f"{kind_name(kind)}: {text}", field="export_span.kind"
                )
            raise refused(offer, "export_span.kind")
        if place is None:
            raise errors.NotFound("no such entry of a lease of this engine", field="export_span")
        if self._exports[session] >= limits.MAX_EXPORTS:
            raise errors.Exhausted(f"{limits.MAX_EXPORTS} spans were exported to this session")
        size = dmabuf.whole_pages(place.length)
        try:
            if not on_gpu:
                dmabuf.Limits.read().check(size)
        except dmabuf.NotExported as large:
            raise errors.TooLarge(str(large), field="export_span.entry") from None
        self._exports[session] += 1

        def made(fd: int, failed: errors.RequestError | None) -> None:
            try:
                if failed is None and find() != place:
                    failed = errors.NotFound("the lease ended meanwhile", field="export_span")
                if failed is not None:
                    if session in self._agreed:
                        self._exports[session] -= 1
                    self.counters["dma_buf_failed"] += 1
                    done(None, -1, failed)
                    return
                self.counters["dma_buf_spans"] += 1
                handle = sessions_pb2.SpanHandle(
                    kind=common_pb2.HandleKind.ValueType(kind),
                    size=size,
                    length=place.length,
                    device=self.gpus.device(place.slab),
                )
                done(handle, fd, None)
            finally:
                if fd >= 0:
                    os.close(fd)

        self._make(place.slab, place.offset, size, made)
