"""Members of families: who computed a prompt of a family tells the daemon, and waits for nothing.

A family's base is the shared segments of its requests, as spans of their own, each in the frame in
which it was computed. A member's spans are those of its prompt; the daemon keeps them as recipes
over the base where that is smaller. Nothing here changes what a request is given.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kmesh.errors import InvalidArgument, KMeshError, NotFound, TooLarge
from kmesh.families import MAX_BASE, NAME_BYTES, Declared, Family, Joined
from kmesh.keys import KEY_BYTES
from kmesh.session import Session
from kmesh_vllm.counts import Counts
from kmesh_vllm.identity import Identity

logger = logging.getLogger("kmesh_vllm")

#: Seconds for an answer: nobody waits for it.
_TIMEOUT = 30.0
#: Members on their way to the daemon at a time.
_MOST = 256
#: Families of which is remembered what was declared.
_FAMILIES = 256


@dataclass(frozen=True, slots=True)
class Member:
    """A request that computed its prompt.

    Attributes:
        family: its name.
        request: vLLM's id of the request.
        namespace, salt: of the request.
        base: keys of shared segments' spans, in order; none: the first member's own spans are it.
        keys: of the member's spans, 32 bytes each; at least one.
    """

    family: str
    request: str
    namespace: bytes
    salt: bytes = field(repr=False)
    base: tuple[bytes, ...]
    keys: bytes

    @property
    def name(self) -> str:
        """The request's id; of one that is too long the end, which vLLM makes unique."""
        return self.request.encode(errors="replace")[-NAME_BYTES:].decode(errors="ignore")

    @property
    def place(self) -> tuple[str, bytes, bytes]:
        """What tells families apart."""
        return self.family, self.namespace, self.salt


class Joining:
    """Acts for the scheduler half of one engine. ``join`` is for one thread."""

    def __init__(self, identity: Identity, counts: Counts) -> None:
        self._identity = identity
        self._counts = counts
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._too_old = False
        self._under_way = 0
        self._declared: OrderedDict[tuple[str, bytes, bytes], set[bytes]] = OrderedDict()
        self._told: set[str] = set()

    def __len__(self) -> int:
        """Members on their way to the daemon."""
        return self._under_way

    def join(self, session: Session, member: Member) -> None:
        """Tells the daemon of a member, in the background."""
        with self._lock:
            if session is not self._session:
                # What is declared ends with the daemon's epoch.
                self._session, self._too_old = session, False
                self._declared.clear()
                self._told.clear()
            if self._too_old or self._under_way >= _MOST:
                self._counts.add("family_failed")
                return
            self._under_way += 1
            known = self._declared.get(member.place, set())
            missing = [key for key in member.base if key not in known][: MAX_BASE - len(known)]
        if missing:
            self._declare(session, member, missing)
        else:
            self._join(session, member, again=True)

    def _declare(self, session: Session, member: Member, base: Sequence[bytes]) -> None:
        def done(future: Future[Declared]) -> None:
            error = future.exception()
            if isinstance(error, TooLarge):
                # Engines together have filled the base: what is in it has to do.
                self._join(session, member, again=False)
                return
            if error is not None:
                self._failed(session, error)
                return
            with self._lock:
                if session is self._session:
                    self._declared.setdefault(member.place, set()).update(base)
                    self._declared.move_to_end(member.place)
                    while len(self._declared) > _FAMILIES:
                        self._declared.popitem(last=False)
            self._join(session, member, again=False)

        names = self._identity.namespace

        def start() -> Future[Declared]:
            family = Family(
                name=member.family,
                namespace=member.namespace,
                dtype=names.dtype,
                head_dim=names.head_dim,
                shards=self._identity.sharding.shards,
                base=b"".join(base),
                salt=member.salt,
            )
            return session.families.declare_async(family, _TIMEOUT)

        self._begin(session, start, done)

    def _join(self, session: Session, member: Member, *, again: bool) -> None:
        """Joins; ``again``: a family that is not there is declared first."""

        def done(future: Future[Joined]) -> None:
            error = future.exception()
            if isinstance(error, NotFound) and again:
                with self._lock:
                    self._declared.pop(member.place, None)
                own = tuple(
                    member.keys[i : i + KEY_BYTES] for i in range(0, len(member.keys), KEY_BYTES)
                )
                self._declare(session, member, (member.base or own)[:MAX_BASE])
            elif error is not None:
                self._failed(session, error)
            else:
                self._counts.add("family_joins")
                self._ended()

        self._begin(
            session,
            lambda: session.families.join_async(
                member.family,
                member.name,
                member.keys,
                member.namespace,
                salt=member.salt,
                timeout=_TIMEOUT,
            ),
            done,
        )

    def _begin(
        self,
        session: Session,
        start: Callable[[], Future[Declared]] | Callable[[], Future[Joined]],
        done: Callable[[Future[Declared]], None] | Callable[[Future[Joined]], None],
    ) -> None:
        try:
            future = start()
        except KMeshError as wrong:
            self._failed(session, wrong)
            return
        future.add_done_callback(done)  # type: ignore[arg-type]

    def _failed(self, session: Session, wrong: BaseException) -> None:
        self._counts.add("family_failed")
        self._ended()
        where = getattr(wrong, "field", "") or type(wrong).__name__
        with self._lock:
            if session is not self._session:
                return
            if isinstance(wrong, InvalidArgument) and where == "body":
                self._too_old = True
            if where in self._told:
                return
            self._told.add(where)
        if self._too_old:
            logger.warning("the daemon knows no families: none is joined")
        elif isinstance(wrong, KMeshError):
            logger.warning("a request did not join its family: %s", str(wrong))
        else:
            logger.error("a request did not join its family", exc_info=wrong)

    def _ended(self) -> None:
        with self._lock:
            self._under_way -= 1
