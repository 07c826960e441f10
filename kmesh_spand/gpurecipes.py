"""Recipes in slabs of GPU memory. The GPU makes them where it can, and this process where it can't:
by content, or without a compiler for the kernels."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kmesh import _host
from kmesh.cuda.device import Device
from kmesh.cuda.memory import Registration
from kmesh.errors import CudaError, RecipeError, UnsupportedError
from kmesh_spand import jobmessages, messages
from kmesh_spand.gpustore import GpuStore
from kmesh_spand.recipes import Made, Recipes, describe, family_of, load_codec, rotary_of
from kmesh_spand.units import format_size

if TYPE_CHECKING:
    from kmesh.codec import Provenance, SpanDescription
    from kmesh.codec.gpu import GpuEncoder
    from kmesh.kernels.bare import BareDevice

logger = logging.getLogger(__name__)

_PROGRAM = "encode"
#: ``CUDA_ERROR_OUT_OF_MEMORY``: of what is not the daemon's, somebody else has taken all.
_OUT_OF_MEMORY = 2
#: Of span and base, that are brought here to be encoded by this process.
MOST_BYTES = 256 << 20


class GpuRecipes(Recipes):
    """See ``Recipes``. Recipes are written into memory of the host that the GPU reaches, so that no
    memory of the GPU is taken for them; they go to their slab as payloads do.

    Args:
        store: for these jobs alone.
        fell_back: told of each span that this process encodes.
    """

    def __init__(
        self, device: Device, store: GpuStore, fell_back: Callable[[messages.Fallback], None]
    ) -> None:
        super().__init__(store)
        self._device = device
        self._gpu_store = store
        self._fell_back = fell_back
        self._said: set[str] = set()
        self._launcher: BareDevice | None = None
        self._lacking: UnsupportedError | None = None
        # Of the family that was encoded last: its base is hashed once.
        self._gpu_encoder: tuple[object, GpuEncoder] | None = None
        self._room = mmap.mmap(-1, mmap.PAGESIZE)
        self._registered: Registration | None = None

    def _make(
        self, job: jobmessages.Encode, span: SpanDescription, provenance: Sequence[Provenance]
    ) -> Made:
        size = job.span.length + sum(base.length for base in job.bases)
        try:
            if not provenance:
                raise UnsupportedError("what is equal is looked for by the processor alone")
            return self._made_by_gpu(job, span, provenance)
        except UnsupportedError as lacking:
            self._say(str(lacking))
        except CudaError as failed:
            # What the processor can't do instead is no verdict on the span: memory comes back.
            if failed.code != _OUT_OF_MEMORY or size > MOST_BYTES:
                raise
            self._say(str(failed))
        if size > MOST_BYTES:
            raise RecipeError(
                f"span and base have {format_size(size)}: of more than {format_size(MOST_BYTES)}"
                " no recipe is made without the GPU",
                field="payload",
            )
        self._fell_back(messages.Fallback("encode", job.span.slab))
        made = super()._make(job, span, provenance)
        # It has a copy of the base.
        self._encoder = None
        return made

    def _made_by_gpu(
        self, job: jobmessages.Encode, span: SpanDescription, provenance: Sequence[Provenance]
    ) -> Made:
        load_codec("kmesh.codec.gpu", "kmesh.kernels.bare")
        from kmesh.codec.gpu import GpuBytes

        launcher = self._compiled()
        address = self._gpu_store.address(job.span.slab, job.span.offset, job.span.length)
        payload = GpuBytes(address, job.span.length)
        encoder = self._gpu_encoder_of(job, launcher)
        made = encoder.encode(span, payload, provenance, launcher.stream, place=self._place)
        # It has to be brought here now: the next one is written over it.
        _ = made.data
        return made

    def _compiled(self) -> BareDevice:
        """Compiles with the first job. UnsupportedError if that can't be, each time; after a
        CudaError the next job goes on where this one stopped."""
        from kmesh.kernels.bare import BareDevice

        if self._lacking is not None:
            raise self._lacking
        try:
            if self._launcher is None:
                self._launcher = BareDevice(self._device)
            self._launcher.prepare(_PROGRAM)
        except UnsupportedError as lacking:
            self._lacking = lacking
            self.close()
            raise
        return self._launcher

    def _gpu_encoder_of(self, job: jobmessages.Encode, launcher: BareDevice) -> GpuEncoder:
        from kmesh.codec import Base
        from kmesh.codec.description import beside
        from kmesh.codec.gpu import GpuBytes, GpuEncoder, GpuSegment

        same = family_of(job)
        if self._gpu_encoder is None or self._gpu_encoder[0] != same:
            like = describe(job.span, job)
            segments = []
            for place in job.bases:
                of = beside(like, place.key, place.tokens, place.position, place.generation)
                address = self._gpu_store.address(place.slab, place.offset, place.length)
                segments.append(GpuSegment.read(of, GpuBytes(address, place.length), launcher))
            made = GpuEncoder(Base(segments), rotary_of(job), device=launcher)
            self._gpu_encoder = same, made
        return self._gpu_encoder[1]

    def _place(self, size: int) -> int:
        """Room for a recipe, as the GPU sees it."""
        if self._registered is None or len(self._room) < size:
            self._give_back()
            room = 1 << max(size - 1, mmap.PAGESIZE - 1).bit_length()
            self._room = mmap.mmap(-1, room)
            address = _host.address(self._room)
            self._registered = Registration(self._device, address, room, writable=True)
        return self._registered.address

    def _give_back(self) -> None:
        if self._registered is not None:
            self._registered.close()
            self._registered = None

    def close(self) -> None:
        """Gives back what the GPU was asked for."""
        self._give_back()
        self._gpu_encoder = None
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            logger.warning("spans on the GPU are encoded by the processor: %s", why)
