"""``Families``: a session's calls about families."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from kmesh import families
from kmesh.calls import Procedure
from kmesh.families import (
    Declared,
    Description,
    Dissolved,
    Family,
    Joined,
    MirrorFate,
    Recovered,
)
from kmesh.layout import Shard
from kmesh.v1 import families_pb2

T = TypeVar("T")


class Run(Protocol):
    def __call__(self, procedure: Procedure[T], timeout: float | None, /) -> T: ...


class Start(Protocol):
    def __call__(self, procedure: Procedure[T], timeout: float | None, /) -> Future[T]: ...


class Families:
    """A session's calls about families. Errors are those of ``Session``'s calls, and:

    ConfigError for malformed arguments, InvalidArgument with the field at fault, NotFound for a
    family or a member that is not there. What is declared lives as long as the daemon's epoch:
    after a reconnect to a new one it is declared again.

    Args:
        run: runs a procedure to its end.
        start: starts one.
    """

    def __init__(self, run: Run, start: Start) -> None:
        self._run = run
        self._start = start

    def declare(self, family: Family, timeout: float | None = None) -> Declared:
        """Makes a family known, or adds base keys to one that is the same otherwise.

        Neither its base nor its members need to be stored by then.

        Raises:
            InvalidArgument: it is declared otherwise, or a base key is a recipe itself.
            TooLarge: its base has over 512 keys.
        """
        return self._run(families.declare(family), timeout)

    def declare_async(self, family: Family, timeout: float | None = None) -> Future[Declared]:
        """As ``declare``, without waiting."""
        return self._start(families.declare(family), timeout)

    def join(
        self,
        family: str,
        member: str,
        keys: bytes,
        namespace: bytes,
        *,
        shards: Sequence[Shard] = (),
        recovered: Sequence[Recovered] = (),
        salt: bytes = b"",
        timeout: float | None = None,
    ) -> Joined:
        """Adds a member: its spans are kept as recipes where that is smaller.

        A span may be stored before or after. It is served dense until its recipe is there.

        Args:
            keys: 32 bytes each, in order, at least one. A member of that name is extended if its
                keys are the first of these.
            namespace: must be the family's.
            shards: must be the family's, if given.
            recovered: in order of position. None at all: runs of equal tokens are looked for.
        """
        made = families.join(family, member, keys, namespace, shards, recovered, salt)
        return self._run(made, timeout)

    def join_async(
        self,
        family: str,
        member: str,
        keys: bytes,
        namespace: bytes,
        *,
        shards: Sequence[Shard] = (),
        recovered: Sequence[Recovered] = (),
        salt: bytes = b"",
        timeout: float | None = None,
    ) -> Future[Joined]:
        """As ``join``, without waiting."""
        made = families.join(family, member, keys, namespace, shards, recovered, salt)
        return self._start(made, timeout)

    def fork(
        self,
        family: str,
        parent: str,
        member: str,
        keys: bytes = b"",
        *,
        recovered: Sequence[Recovered] = (),
        salt: bytes = b"",
        timeout: float | None = None,
    ) -> Joined:
        """Adds a member that has all spans of ``parent``, and ``keys`` behind them."""
        made = families.fork(family, parent, member, keys, recovered, salt)
        return self._run(made, timeout)

    def dissolve(
        self,
        family: str,
        mirrors: MirrorFate = MirrorFate.DENSE,
        *,
        salt: bytes = b"",
        timeout: float | None = None,
    ) -> Dissolved:
        """Forgets a family at once; its recipes are made dense in the background, or stay."""
        return self._run(families.dissolve(family, mirrors, salt), timeout)

    def describe(
        self, family: str, *, salt: bytes = b"", device: str = "", timeout: float | None = None
    ) -> Description:
        """A family and all of its members.

        Args:
            device: UUID of the GPU in whose memory spans are counted; empty: host memory.
        """
        return self._run(families.describe(family, salt, device), timeout)

    def list(
        self, timeout: float | None = None, *, device: str = ""
    ) -> tuple[families_pb2.FamilyInfo, ...]:
        """All families that the session may see; ``device`` as for ``describe``."""
        return self._run(families.list_all(device), timeout)
