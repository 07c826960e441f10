"""The cold form's literal area: chunks, their bytes by significance, compressed with zstd."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import zstandard

from kmesh.codec.records import CHUNK, CHUNK_BYTES
from kmesh.errors import RecipeFormatError

LEVEL = 3


def freeze(
    parts: Iterable[npt.NDArray[np.uint8]], element_bytes: int, level: int = LEVEL
) -> tuple[npt.NDArray[np.void], bytes]:
    """Chunk records and stored bytes of neighbouring parts of a literal area.

    A chunk never spans two parts, since each run has a distribution of its own.
    """
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=False)
    chunks, stored = [], []
    for part in parts:
        for begin in range(0, len(part), CHUNK_BYTES):
            raw = part[begin : begin + CHUNK_BYTES]
            turned = _left(raw, element_bytes)
            sizes = [0, 0, 0, 0]
            for plane in range(element_bytes):
                data = _pack(turned[plane::element_bytes].tobytes(), compressor)
                sizes[plane] = len(data)
                stored.append(data)
            chunks.append((len(raw), sizes, 0))
    return np.array(chunks, dtype=CHUNK), b"".join(stored)


def _pack(plane: bytes, compressor: zstandard.ZstdCompressor) -> bytes:
    """As it is where compressing gains nothing: the mantissas of most state."""
    packed: bytes = compressor.compress(plane)
    return packed if len(packed) < len(plane) else plane


def thaw(
    chunks: npt.NDArray[np.void], stored: npt.NDArray[np.uint8], element_bytes: int
) -> npt.NDArray[np.uint8]:
    """The literal area. The chunk records have been checked against each other already.

    Raises:
        RecipeFormatError: a frame doesn't hold what its chunk says.
    """
    literals = np.empty(int(chunks["raw"].sum(dtype=np.uint64)), dtype=np.uint8)
    decompressor = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES)
    at = begin = 0
    for number, (raw, sizes) in enumerate(zip(chunks["raw"], chunks["stored"], strict=True)):
        want = int(raw) // element_bytes
        for plane in range(element_bytes):
            end = at + int(sizes[plane])
            data = stored[at:end].tobytes()
            if len(data) < want:
                data = _unpack(data, want, decompressor, number)
            literals[begin + plane : begin + int(raw) : element_bytes] = np.frombuffer(data, "u1")
            at = end
        begin += int(raw)
    return _right(literals, element_bytes)


def _left(raw: npt.NDArray[np.uint8], element_bytes: int) -> npt.NDArray[np.uint8]:
    """Elements turned left by a bit: the sign goes last, and the exponent has its own byte."""
    words = np.ascontiguousarray(raw).view(f"<u{element_bytes}")
    return (words << 1 | words >> (8 * element_bytes - 1)).view(np.uint8)


def _right(raw: npt.NDArray[np.uint8], element_bytes: int) -> npt.NDArray[np.uint8]:
    """Inverse of ``_left``."""
    words = raw.view(f"<u{element_bytes}")
    return (words >> 1 | words << (8 * element_bytes - 1)).view(np.uint8)


def _unpack(data: bytes, want: int, decompressor: zstandard.ZstdDecompressor, number: int) -> bytes:
    """What a frame claims is compared before memory is taken for it."""
    try:
        claims = zstandard.get_frame_parameters(data)
        if claims.content_size != want:
            raise RecipeFormatError(
                f"a frame of {claims.content_size} bytes where {want} belong",
                field="chunks.stored",
                record=number,
            )
        plane: bytes = decompressor.decompress(data, max_output_size=want, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RecipeFormatError(str(error), field="chunks.stored", record=number) from None
    if len(plane) != want:
        raise RecipeFormatError("a frame is short", field="chunks.stored", record=number)
    return plane
