"""What a daemon's memory is, written down beside it for the daemon that takes it over.

    8s magic · u32 version · u32 length of what follows · u32 crc32 of all else · msgpack

It is a memfd that nobody can write any more. What changes while a daemon runs, such as its epoch,
is not in it, so that it never has to be replaced.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib

import msgspec

from kmesh.layout import LAYOUT_VERSION
from kmesh_spand.core import record, tenants
from kmesh_spand.memory import SIZE_SEALS
from kmesh_spand.settings import Settings

MAGIC = b"KMESHMAN"
VERSION = 1
#: Of one that is believed; many uids with quotas fit.
MAX_BYTES = 1 << 20
SEALS = SIZE_SEALS | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

_HEAD = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
#: Settings that say what the memory is, or whose it is. The others may change.
_SETTINGS = (
    "host_memory",
    "slab_size",
    "max_spans",
    "span_tokens",
    "share",
    "tenants",
    "hardened",
    "hugepages",
    "numa_node",
    "gpu",
    "gpu_memory",
    "gpu_slab_size",
)


#: What is meant where nothing is said.
_UNSAID = {"gpu_place": "gpu"}


class Unfit(Exception):
    """Memory of an earlier daemon can't be taken over; the text names what differs."""


class Manifest(msgspec.Struct, frozen=True):
    """One description.

    Attributes:
        version: of the program that made the memory; may differ.
        formats: versions of what is written in memory, by name.
        settings: as in ``Settings``; ``groups`` instead of the uids that may connect.
        slabs: bytes of each slab, host memory first.
        catalog: bytes of the catalog.
    """

    version: str
    formats: dict[str, int]
    settings: dict[str, object]
    slabs: tuple[int, ...]
    catalog: int

    @classmethod
    def of(cls, settings: Settings, version: str, catalog: int) -> Manifest:
        """What a daemon with these settings has, or would make."""
        gpu = [plan.size for plan in settings.gpu_slabs()]
        agreed = {name: getattr(settings, name) for name in _SETTINGS}
        if settings.gpu and settings.gpu_place != "gpu":
            agreed["gpu_place"] = settings.gpu_place
        return msgspec.msgpack.decode(
            msgspec.msgpack.encode(
                cls(
                    version,
                    {
                        "layout": LAYOUT_VERSION,
                        "records": record.VERSION,
                        "owners": tenants.OWNER_VERSION,
                    },
                    {**agreed, "groups": settings.tenancy().groups},
                    (*settings.slab_sizes(), *gpu),
                    catalog,
                )
            ),
            type=cls,
        )

    def check(self, mine: Manifest) -> None:
        """Whether a daemon that would make ``mine`` can use what this one describes.

        Raises:
            Unfit: names the first thing that differs.
        """
        for name, there in (*self.formats.items(), *mine.formats.items()):
            here = mine.formats.get(name)
            if self.formats.get(name) != here:
                raise Unfit(
                    f"it was made by kmesh-spand {self.version}: {name} of version {there}, "
                    f"this is {mine.version} with {name} of version {here}"
                )
        for name in {**self.settings, **mine.settings}:
            before, now = (known.settings.get(name, _UNSAID.get(name)) for known in (self, mine))
            if before != now:
                raise Unfit(f"{name} was {before!r}, and is {now!r}")
        if self.slabs != mine.slabs or self.catalog != mine.catalog:
            raise Unfit("slabs or catalog have other sizes")


def encode(manifest: Manifest) -> bytes:
    """Inverse of ``decode``."""
    body = msgspec.msgpack.encode(manifest)
    head = _HEAD.pack(MAGIC, VERSION, len(body))
    return head + _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + body


def decode(data: bytes) -> Manifest:
    """The manifest.

    Raises:
        Unfit: it is none, of another version, cut short or damaged.
    """
    before = _HEAD.size + _CRC.size
    if len(data) < before or not data.startswith(MAGIC):
        raise Unfit("the manifest is none")
    _, version, length = _HEAD.unpack_from(data)
    if version != VERSION:
        raise Unfit(f"the manifest is of version {version}, and not of {VERSION}")
    body = data[before:]
    if len(body) != length:
        raise Unfit("the manifest is cut short, or too long")
    if _CRC.unpack_from(data, _HEAD.size)[0] != zlib.crc32(body, zlib.crc32(data[: _HEAD.size])):
        raise Unfit("the manifest is damaged")
    try:
        return msgspec.msgpack.decode(body, type=Manifest)
    except msgspec.MsgspecError as failed:
        raise Unfit(f"the manifest can't be read: {failed}") from None


def make(manifest: Manifest) -> int:
    """A memfd with it, which the caller owns.

    Raises:
        OSError: no file descriptor or no memory for it.
    """
    fd = os.memfd_create("kmesh-manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        data = encode(manifest)
        if os.write(fd, data) != len(data):
            raise OSError("no memory is left for the manifest")
        os.fchmod(fd, 0o400)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
