"""``AsyncFamilies`` has the methods of ``kmesh.familycalls.Families`` as coroutines."""

# Deadlines are arguments: they travel to the daemon, and what comes later is given back.
# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Awaitable, Sequence
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
    def __call__(self, procedure: Procedure[T], timeout: float | None, /) -> Awaitable[T]: ...


class AsyncFamilies:
    """See ``Families`` for what calls mean and raise.

    Args:
        run: runs a procedure to its end.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    async def declare(self, family: Family, timeout: float | None = None) -> Declared:
        return await self._run(families.declare(family), timeout)

    async def join(
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
        made = families.join(family, member, keys, namespace, shards, recovered, salt)
        return await self._run(made, timeout)

    async def fork(
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
        made = families.fork(family, parent, member, keys, recovered, salt)
        return await self._run(made, timeout)

    async def dissolve(
        self,
        family: str,
        mirrors: MirrorFate = MirrorFate.DENSE,
        *,
        salt: bytes = b"",
        timeout: float | None = None,
    ) -> Dissolved:
        return await self._run(families.dissolve(family, mirrors, salt), timeout)

    async def describe(
        self, family: str, *, salt: bytes = b"", device: str = "", timeout: float | None = None
    ) -> Description:
        return await self._run(families.describe(family, salt, device), timeout)

    async def list(
        self, timeout: float | None = None, *, device: str = ""
    ) -> tuple[families_pb2.FamilyInfo, ...]:
        return await self._run(families.list_all(device), timeout)
