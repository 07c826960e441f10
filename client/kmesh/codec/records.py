"""The tables of a recipe as numpy and ``struct`` see them: ``docs/recipe-format.md`` in numbers."""

from __future__ import annotations

import enum
import struct

import numpy as np

MAGIC = b"KMRECIPE"
VERSION = 1
#: Of the arithmetic by which REF_ROT turns keys.
TURN_KERNEL = 1
BLOCK_TOKENS = (16, 32, 64)
#: Data of ops are counted in units of so many bytes.
UNIT = 16
#: Each run's literals begin at a multiple of this.
RUN_ALIGN = 64
CHUNK_BYTES = 1 << 20


class Form(enum.IntEnum):
    """How the literal area lies in a recipe."""

    ADDRESSABLE = 1
    COLD = 2


class Op(enum.IntEnum):
    """Where the bytes of some tokens of a run come from. 5 is kept free for LOWRANK."""

    LITERAL = 1
    REF = 2
    REF_ROT = 3
    XOR = 4


class XorCode(enum.IntEnum):
    """How a difference is written: all of it, or a bitmap and what is not zero."""

    DENSE = 0
    SPARSE = 1


HEAD = struct.Struct("<8sH2B2H2I4H8I4Q32s32s3Q64xQ")
HEAD_FIELDS = (
    *("magic", "version", "form", "dtype", "block_tokens", "reserved", "tokens", "position"),
    *("layer_begin", "layer_end", "head_begin", "head_end", "head_dim", "segments", "turns"),
    *("pairs", "ops", "lists", "chunks", "reserved2", "literal_bytes", "stored_bytes"),
    *("file_bytes", "generation", "namespace", "key", "payload_root", "tables_root"),
    *("stored_root", "head_root"),
)
HEAD_SUMMED = 248
#: The head as an array has it.
HEAD_RECORD = np.dtype(
    [
        *(("magic", "V8"), ("version", "<u2"), ("form", "u1"), ("dtype", "u1")),
        *((name, "<u2") for name in ("block_tokens", "reserved")),
        *((name, "<u4") for name in ("tokens", "position")),
        *((name, "<u2") for name in ("layer_begin", "layer_end", "head_begin", "head_end")),
        *((name, "<u4") for name in ("head_dim", "segments", "turns", "pairs")),
        *((name, "<u4") for name in ("ops", "lists", "chunks", "reserved2")),
        *((name, "<u8") for name in ("literal_bytes", "stored_bytes", "file_bytes", "generation")),
        *(("namespace", "V32"), ("key", "V32")),
        *((name, "<u8") for name in ("payload_root", "tables_root", "stored_root")),
        *(("reserved3", "V64"), ("head_root", "<u8")),
    ]
)
#: Of a turn, before its cosines and sines.
TURN_HEAD = 8

SEGMENT = np.dtype(
    [
        ("key", "V32"),
        ("digest", "V32"),
        ("root", "<u8"),
        ("generation", "<u8"),
        ("tokens", "<u4"),
        ("position", "<u4"),
        ("reserved", "<u8"),
    ]
)
LIST = np.dtype([("first", "<u4"), ("count", "<u4")])
OP = np.dtype(
    [
        ("kind", "u1"),
        ("code", "u1"),
        ("turn", "<u2"),
        ("segment", "<u4"),
        ("token", "<u4"),
        ("tokens", "<u4"),
        ("source", "<u4"),
        ("data", "<u4"),
        ("size", "<u4"),
        ("reserved", "<u4"),
    ]
)
RUN = np.dtype([("list", "<u4"), ("reserved", "<u4"), ("offset", "<u8"), ("length", "<u8")])
CHUNK = np.dtype([("raw", "<u4"), ("stored", "<u4", 4), ("reserved", "<u4")])


def turn_record(pairs: int) -> np.dtype[np.void]:
    """A turn, with a cosine and a sine for each pair of elements."""
    return np.dtype(
        [
            ("delta", "<i4"),
            ("kernel", "<u2"),
            ("interleaved", "u1"),
            ("reserved", "u1"),
            ("table", "<f4", (pairs, 2)),
        ]
    )


def aligned(size: int, step: int) -> int:
    """``size`` rounded up to a multiple of ``step``."""
    return -(-size // step) * step
