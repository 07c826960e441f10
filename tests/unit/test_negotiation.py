"""What is agreed on handles, without a daemon or a device."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmesh import dmabuf, errors, negotiation
from kmesh.dmabuf import Limits, NotExported
from kmesh.handles import (
    COMMON,
    Agreement,
    HandleKind,
    HandleRefusal,
    Location,
    Offer,
    Tier,
    agree,
)
from kmesh.v1 import common_pb2, sessions_pb2
from kmesh_spand.config import load
from kmesh_spand.control import broker as brokers
from kmesh_spand.control.broker import Broker, Exported
from kmesh_spand.control.gpus import Gpus
from kmesh_spand.storage import DmaBufs

MEMFD, VMM, DMA_BUF = HandleKind.MEMFD, HandleKind.CUDA_VMM_FD, HandleKind.DMA_BUF
NO = HandleRefusal.NOT_ALLOWED
SLAB = 8 << 20

offers = st.lists(
    st.builds(
        Offer,
        st.integers(1, 5),
        slabs=st.booleans(),
        spans=st.booleans(),
        refusal=st.none() | st.sampled_from(HandleRefusal),
        text=st.text(max_size=5),
    ),
    unique_by=lambda offer: offer.kind,
)


@given(st.lists(st.integers(1, 7)), offers)
def test_the_first_kind_that_is_given_is_chosen(kinds: list[int], offered: list[Offer]) -> None:
    agreed = agree(Tier.HOST, kinds, offered)
    given = {offer.kind for offer in offered if offer.slabs}
    assert agreed.chosen == next((kind for kind in kinds if kind in given), 0)
    assert [offer.kind for offer in agreed.offers] == list(dict.fromkeys(kinds))
    fallback = agreed.fallback
    assert (fallback is not None) == bool(kinds and agreed.chosen != kinds[0])
    if fallback is not None:
        assert fallback.kind == kinds[0]


@given(st.sampled_from(Tier), offers)
def test_an_agreement_goes_over_the_wire_whole(tier: Tier, offered: list[Offer]) -> None:
    sent = Agreement(tier, tuple(offered))
    message = common_pb2.TierHandles.FromString(negotiation.to_message(sent).SerializeToString())
    assert message.chosen == sent.chosen
    assert negotiation.from_messages([message]) == {tier: sent}


def test_what_is_newer_than_this_version_is_no_error() -> None:
    strange = common_pb2.TierHandles(tier=9, chosen=8)  # type: ignore[arg-type]
    known = common_pb2.TierHandles(tier=common_pb2.TIER_HOST)
    known.offers.add(kind=77, refusal=88, text="a new reason")  # type: ignore[arg-type]
    heard = negotiation.from_messages([strange, known])
    assert set(heard) == {Tier.HOST}
    assert heard[Tier.HOST].offers == (
        Offer(77, refusal=HandleRefusal.UNKNOWN, text="a new reason"),
    )
    assert negotiation.describe(heard[Tier.HOST]) == "none (77: a new reason)"


class Maker:
    """Stands for the store worker: makes memfds, when told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.waiting: list[Callable[..., None]] = []

    def __call__(self, slab: int, offset: int, size: int, made: Callable[..., None]) -> None:
        self.asked.append((slab, offset, size))
        self.waiting.append(made)

    def finish(self, failed: errors.RequestError | None = None) -> int:
        """The inode of what was made."""
        fd = -1 if failed else os.memfd_create("made")
        inode = os.fstat(fd).st_ino if fd >= 0 else 0
        self.waiting.pop(0)(fd, failed)
        return inode


def held() -> set[int]:
    """Inodes of all open files."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.fstat(int(name)).st_ino)
    return found


class World:
    """A broker with one slab."""

    def __init__(self, probe: Callable[[], None] = lambda: None, **settings: Any) -> None:
        dma_bufs = settings.pop("dma_bufs", None) or DmaBufs()
        self.maker = Maker()
        self.counters = Counter(dict.fromkeys(brokers.COUNTERS, 0))
        self.slab = os.memfd_create("slab")
        chosen = load(settings, {}).settings
        self.broker = Broker(
            chosen,
            Exported({}, {0: (self.slab, SLAB)}, Gpus(chosen), dma_bufs),
            self.maker,
            self.counters,
            probe,
        )
        self.said: list[tuple[Any, int, errors.RequestError | None]] = []

    def open(self, *kinds: int, session: int = 1) -> Agreement:
        wanted = [sessions_pb2.HandlePreference(tier=common_pb2.TIER_HOST, kinds=kinds)]  # type: ignore[arg-type]
        agreed = self.broker.agree(wanted)
        self.broker.opened(session, agreed)
        return agreed[0]

    def attach(self, kind: int = 0, *, populated: bool = True, session: int = 1) -> None:
        self.broker.slab(session, 0, kind, populated, self._hear)

    def export(self, find: Callable[[], Location | None], kind: int = DMA_BUF) -> None:
        self.broker.span(1, kind, find, self._hear)

    def _hear(self, body: Any, fd: int, failed: errors.RequestError | None) -> None:
        self.said.append((body, os.dup(fd) if fd >= 0 else -1, failed))

    def close(self) -> None:
        for fd in [self.slab, *(fd for _, fd, _ in self.said if fd >= 0)]:
            os.close(fd)
        for fd in self.broker._made.values():
            os.close(fd)


@pytest.fixture
def world() -> Any:
    made: list[World] = []

    def make(*args: Any, **settings: Any) -> World:
        made.append(World(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _absent() -> None:
    raise NotExported(HandleRefusal.NO_DEVICE, "/dev/udmabuf: not there")


def test_dma_bufs_are_off_unless_they_are_permitted(world: Any) -> None:
    made = world()
    agreed = made.open(DMA_BUF, MEMFD)
    assert (agreed.chosen, agreed.fallback.refusal) == (MEMFD, NO)
    assert 'dma_buf is "off"' in agreed.fallback.text
    for attempt in (lambda: made.attach(DMA_BUF), lambda: made.export(lambda: None)):
        with pytest.raises(errors.PermissionDenied, match='dma_buf is "off"'):
            attempt()
    made.attach()
    assert made.said[0][0].kind == MEMFD
    assert made.maker.asked == []


def test_a_lesser_kind_is_counted_each_time_and_logged_once(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = world()
    for session in range(3):
        made.open(DMA_BUF, MEMFD, session=session)
    made.open(MEMFD, DMA_BUF, session=3)
    assert made.counters["handle_fallbacks"] == 3
    told = [r.message for r in caplog.records if "would rather have" in r.message]
    assert len(told) == 1
    assert "host memory is given as MEMFD" in told[0]
    assert len(made.broker.agreed(2)) == 2
    made.broker.closed(2)
    assert made.broker.agreed(2) == ()


def test_a_client_that_can_use_nothing_that_is_given(world: Any) -> None:
    made = world(_absent, dma_buf="slabs")
    agreed = made.open(DMA_BUF)
    assert (agreed.chosen, agreed.fallback.refusal) == (0, HandleRefusal.NO_DEVICE)
    with pytest.raises(errors.InvalidArgument, match="DMA_BUF is not given: /dev/udmabuf"):
        made.attach()
    assert made.counters["handle_fallbacks"] == 1


def test_a_hello_is_checked(world: Any) -> None:
    made = world()
    host = sessions_pb2.HandlePreference(tier=common_pb2.TIER_HOST)
    with pytest.raises(errors.InvalidArgument, match="named before") as twice:
        made.broker.agree([host, host])
    assert twice.value.field == "hello.handles[1].tier"
    host.kinds.extend([common_pb2.HANDLE_KIND_MEMFD] * 17)
    with pytest.raises(errors.InvalidArgument, match="over 16"):
        made.broker.agree([host])
    # A tier that is newer than the daemon is refused kind by kind.
    newer = sessions_pb2.HandlePreference(tier=7, kinds=[9])  # type: ignore[arg-type, list-item]
    answer = {agreed.tier: agreed for agreed in made.broker.agree([newer])}
    assert answer[7].offers[0].refusal == HandleRefusal.NO_TIER
    assert answer[Tier.HOST].chosen == MEMFD
    # A client from before this was there.
    assert [agreed.chosen for agreed in made.broker.agree([])] == [MEMFD, 0]


def test_a_slab_is_made_once_for_all(world: Any) -> None:
    made = world(dma_buf="slabs")
    assert made.open(DMA_BUF).chosen == DMA_BUF
    with pytest.raises(errors.Exhausted, match="not populated"):
        made.attach(populated=False)
    made.attach()
    made.attach()
    assert made.maker.asked == [(0, 0, SLAB)] * 2
    first, second = made.maker.finish(), made.maker.finish()
    made.attach(populated=False)
    assert len(made.maker.asked) == 2
    identities = {os.fstat(fd).st_ino for _, fd, _ in made.said}
    assert len(made.said) == 3
    assert identities == {first}
    assert second not in held()
    assert made.counters["dma_buf_slabs"] == 3


def test_a_span_is_given_only_while_it_is_leased(world: Any) -> None:
    made = world(dma_buf="spans")
    made.open(MEMFD)
    place: list[Location | None] = [Location(0, 65536, 5000, 1)]
    made.export(lambda: place[0])
    assert made.maker.asked == [(0, 65536, 8192)]
    made.maker.finish()
    body, got, failed = made.said[0]
    assert (body.kind, body.size, body.length, failed) == (DMA_BUF, 8192, 5000, None)
    assert got >= 0
    made.export(lambda: place[0])
    place[0] = None
    late = made.maker.finish()
    assert late not in held()
    _, got, failed = made.said[1]
    assert got == -1
    assert isinstance(failed, errors.NotFound)
    with pytest.raises(errors.NotFound):
        made.export(lambda: None)
    assert (made.counters["dma_buf_spans"], made.counters["dma_buf_failed"]) == (1, 1)
    with pytest.raises(errors.PermissionDenied, match='dma_buf = "spans"'):
        made.attach(DMA_BUF)


def test_exports_of_one_session_are_bounded(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers.limits, "MAX_EXPORTS", 2)
    made = world(dma_buf="spans")
    made.open(MEMFD)
    # What failed was given to nobody.
    for failed in (errors.Exhausted("no"), errors.Exhausted("no"), None, None):
        made.export(lambda: Location(0, 0, 1, 1))
        made.maker.finish(failed)
    with pytest.raises(errors.Exhausted, match="2 spans were exported"):
        made.export(lambda: Location(0, 0, 1, 1))
    made.broker.closed(1)
    made.open(MEMFD)
    made.export(lambda: Location(0, 0, 1, 1))
    made.maker.finish()


def test_sealed_slabs_are_given_as_they_were_made(world: Any) -> None:
    fd = os.memfd_create("before the seal")
    made = world(dma_buf="slabs", hardened=True, dma_bufs=DmaBufs([fd]))
    made.open(DMA_BUF)
    made.attach(populated=False)
    assert made.maker.asked == []
    assert os.fstat(made.said[0][1]).st_ino == os.fstat(fd).st_ino
    with pytest.raises(errors.PermissionDenied, match="single spans are not"):
        made.export(lambda: Location(0, 0, 1, 1))
    without = world(
        dma_buf="slabs",
        hardened=True,
        dma_bufs=DmaBufs([], HandleRefusal.NO_DEVICE, "no device"),
    )
    assert without.open(DMA_BUF, MEMFD).fallback.text == "no device"


def test_a_list_of_sessions_holds_nothing_that_clients_make_up(world: Any) -> None:
    """A session names up to 16 tiers and kinds of each; that of thousands is one message."""
    made = world()
    tiers = [1, 2, *range(50, 64)]
    wanted = [
        sessions_pb2.HandlePreference(tier=tier, kinds=[*range(1, 4), *range(70, 83)])
        for tier in tiers
    ]
    made.broker.opened(1, made.broker.agree(wanted))
    assert sum(len(a.offers) for a in made.broker.agreed(1)) == 256
    listed = made.broker.listed(1)
    assert [a.tier for a in listed] == [Tier.HOST, Tier.GPU]
    assert [o.kind for a in listed for o in a.offers] == [1, 2, 3, 1, 2, 3]
    assert sum(negotiation.to_message(a).ByteSize() for a in listed) < 700


def test_sizes_over_the_modules_limit(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "read", classmethod(lambda cls: cls(4 << 20, 1024)))
    made = world(dma_buf="slabs")
    missed = made.open(DMA_BUF, MEMFD).fallback
    assert missed.refusal == HandleRefusal.SIZE_LIMIT
    assert "slab_size: 8 MiB are more than size_limit_mb = 4" in missed.text
    with pytest.raises(errors.TooLarge, match="size_limit_mb = 4"):
        made.export(lambda: Location(0, 0, 5 << 20, 1))
    made.export(lambda: Location(0, 0, 4 << 20, 1))
    made.maker.finish()


def test_limits_are_read(tmp_path: Path) -> None:
    assert Limits.read(tmp_path) == Limits(0, 0)
    (tmp_path / "size_limit_mb").write_text("64\n")
    (tmp_path / "list_limit").write_text("2\n")
    limits = Limits.read(tmp_path)
    assert limits == Limits(64 << 20, 2)
    limits.check(64 << 20, 2)
    with pytest.raises(NotExported, match="65 MiB are more than size_limit_mb = 64"):
        limits.check((64 << 20) + 1)
    with pytest.raises(NotExported, match="3 ranges are more than list_limit = 2"):
        limits.check(1, 3)
    # A module that says nothing is asked by doing.
    Limits(0, 0).check(1 << 40, 1 << 20)


def test_what_is_no_dma_buf_is_not_taken_for_one() -> None:
    fd = os.memfd_create("t")
    os.ftruncate(fd, 4096)
    with pytest.raises(errors.ProtocolError, match="was called a DMA-BUF is none"):
        dmabuf.DmaBufMapping(fd, 4096)
    os.close(fd)


def test_every_client_can_use_what_is_common() -> None:
    assert set(COMMON) == set(Tier)
    assert COMMON[Tier.HOST] == (MEMFD,)
    assert VMM not in COMMON[Tier.GPU]
