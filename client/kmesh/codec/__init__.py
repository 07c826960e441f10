"""Families: members as exact recipes over a base that is stored once.

The format is ``docs/recipe-format.md``. Needs numpy and zstandard, the extra ``codec``.
"""

from kmesh.codec.decoder import MAX_PAYLOAD_BYTES, DecodePlan, decode
from kmesh.codec.description import SpanDescription
from kmesh.codec.encoder import Encoded, Encoder
from kmesh.codec.many import ManyTables
from kmesh.codec.provenance import Provenance
from kmesh.codec.recipe import Recipe, RecipeTables
from kmesh.codec.records import BLOCK_TOKENS, TURN_KERNEL, Form, Op, XorCode
from kmesh.codec.segments import Base, Segment

__all__ = [
    "BLOCK_TOKENS",
    "MAX_PAYLOAD_BYTES",
    "TURN_KERNEL",
    "Base",
    "DecodePlan",
    "Encoded",
    "Encoder",
    "Form",
    "ManyTables",
    "Op",
    "Provenance",
    "Recipe",
    "RecipeTables",
    "Segment",
    "SpanDescription",
    "XorCode",
    "decode",
]
