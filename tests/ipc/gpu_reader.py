"""Who reads families on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from daemon_process import Daemon, wait_for
from household import Household, Spans

from kmesh.cuda.device import Device
from kmesh.cuda.reading import read_span
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.layout import Shard
from kmesh.session import Role, Session


class Reader:
    """A session, and the daemon's slabs on the GPU."""

    def __init__(self, daemon: Daemon, session: Session, slabs: DeviceSlabs, gpu: Device) -> None:
        self.session, self.slabs, self.gpu = session, slabs, gpu
        self._daemon = daemon

    def take_recipes(self) -> None:
        """Asks for some, before which none are made."""
        self.session.acquire(
            bytes(32), [Shard(0, 1, 0, 1)], recipes=True, device=self.gpu.uuid
        ).release()

    def settled(self, mirrors: int) -> None:
        """Nothing more is going to be encoded, and so many spans were."""
        self.take_recipes()

        def done() -> bool:
            found = self.session.families.describe("round", device=self.gpu.uuid)
            return all(m.base + m.mirrors + m.refused == m.spans for m in found.members)

        try:
            wait_for(done, 60, "encoding never ended")
        except AssertionError as late:
            raise AssertionError(f"{late}: {self._encoding()}") from None
        found = self.session.families.describe("round", device=self.gpu.uuid)
        assert found.family.mirrors == mirrors, self._encoding()

    def _encoding(self) -> str:
        """What became of each member's spans, why the last one stayed dense, and what was
        counted."""
        members = [
            f"{m.name}: of {m.spans} spans {m.mirrors} are recipes, {m.base} of the base, {m.dense}"
            f" dense, of which {m.refused} stay so ({m.refusal}); {m.used_bytes} bytes of"
            f" {m.dense_bytes}"
            for m in self.session.families.describe("round", device=self.gpu.uuid).members
        ]
        counts = {
            name: count
            for name, count in sorted(self._daemon.status().counters.items())
            if "encode" in name and count
        }
        return "\n".join(["", *members, str(counts)])

    def read(self, household: Household, spans: Spans, *, recipes: bool) -> int:
        """Reads a member, once it is served so; how many of its spans are recipes."""
        count = len(spans.payloads)

        def once() -> list[bool] | None:
            with self.session.acquire(
                spans.keys, [household.shard], recipes=recipes, device=self.gpu.uuid, timeout=30
            ) as lease:
                if lease.hits < count:
                    return None
                for number, payload in enumerate(spans.payloads):
                    assert read_span(self.slabs, self.gpu, lease, number) == payload
                return [lease.is_recipe(number) for number in range(count)]

        found = wait_for(once, 30, what="it was never served")
        assert isinstance(found, list)
        return sum(found)


@contextmanager
def reader(daemon: Daemon, gpu: Device) -> Iterator[Reader]:
    """One that is connected."""
    with (
        Session.connect(daemon.socket_dir, role=Role.TOOL, timeout=30) as session,
        DeviceSlabs(session, gpu) as slabs,
    ):
        yield Reader(daemon, session, slabs, gpu)
