"""``World`` with a disk: files that are written, read and removed late, badly or never."""

from __future__ import annotations

from dataclasses import replace

from contents import FLIPPED, SHARD, Held
from world import World

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Trouble
from kmesh_spand.core.diskfile import SpanFile, file_bytes
from kmesh_spand.core.tenants import tenant_name


class DiskWorld(World):
    """Files have contents as tiles have: one word.

    Attributes:
        files: what is in the directory, by name: the span, and the content.
        disk_index: names of which the index says that they are in a file.
        reads: how often each file was read, from the first byte to the last.
    """

    def __init__(self, slabs: dict[int, int], **how: object) -> None:
        self.files: dict[int, tuple[SpanFile, int]] = {}
        self.last_name = 0
        self.reads: dict[int, int] = {}
        super().__init__(slabs, **how)  # type: ignore[arg-type]

    def _reset(self, policy: object) -> None:
        self.disk_index: dict[tuple[int, int], int] = {}
        self.spills: dict[int, fx.Spill] = {}
        self.fetches: dict[int, fx.Fetch] = {}
        self.unlinks: dict[int, fx.Unlink] = {}
        self.outages: list[bool] = []
        self.arrivals: dict[tuple[int, int], tuple[list[bytes], list[int], bytes]] = {}
        super()._reset(policy)  # type: ignore[arg-type]

    # Events

    def scan(self, batch: int = 2) -> None:
        """The directory is looked through, a few files at a time."""
        found = sorted((name, span) for name, (span, _) in self.files.items())
        for at in range(0, len(found), batch):
            self.send(ev.DiskFound(found[at : at + batch]))
        self.send(ev.DiskReady())

    def spill_ends(self, job: int, trouble: Trouble | None = None) -> None:
        """A file is written from what the range holds now, or is not."""
        spill = self.spills.pop(job)
        first = spill.offset // TILE_BYTES
        read = [
            self.memory.get((spill.slab, tile), 0)
            for tile in range(first, first + tiles(spill.span.length))
        ]
        if trouble is None and any(word != spill.span.root for word in read):
            trouble = Trouble.LOST
        if trouble is not None:
            self.send(ev.SpillFailed(job, trouble))
            return
        self.last_name += 1
        self.files[self.last_name] = spill.span, spill.span.root
        self.check_room()
        self.send(ev.Spilled(job, self.last_name))

    def fetch_ends(self, job: int, trouble: Trouble | None = None) -> None:
        """A file was read into its range if it is what it must be."""
        fetch = self.fetches.pop(job)
        span, content = self.files.get(fetch.name, (None, 0))
        held = span is not None and span.serves(fetch.span)
        if trouble is None and not (held and content == fetch.span.root):
            trouble = Trouble.BAD
        if trouble is not None:
            self.send(ev.FetchFailed(job, trouble))
            return
        self.reads[fetch.name] = self.reads.get(fetch.name, 0) + 1
        first = fetch.offset // TILE_BYTES
        for tile in range(first, first + tiles(fetch.span.length)):
            self.memory[fetch.slab, tile] = content
            self.flipped.discard((fetch.slab, tile))
        self.send(ev.Fetched(job))

    def unlink_ends(self, job: int, ok: bool = True) -> None:
        """A file is gone, or could not be removed."""
        unlink = self.unlinks.pop(job)
        # One that can't be removed takes room that nobody counts until a scan finds it: here it is
        # as good as gone.
        self.files.pop(unlink.name, None)
        self.send(ev.Unlinked(job, ok))

    def worker_dies(self) -> None:
        """Nothing that was under way is done; what was to be removed is removed by the next one."""
        self.send(ev.DiskGone())
        for job in list(self.spills):
            self.spills.pop(job)
            self.send(ev.SpillFailed(job, Trouble.LOST))
        for job in list(self.fetches):
            self.fetches.pop(job)
            self.send(ev.FetchFailed(job, Trouble.LOST))

    def acquire_waiting(
        self, session: int, keys: list[bytes], prefix: bool = True, salt: bytes = b""
    ) -> rs.AcquireResult | None:
        """An Acquire that waits for the disk; None while it does."""
        self.arrivals[session, self.request + 1] = keys, [SHARD], salt
        answer = self.ask(
            rq.Acquire, session, b"".join(keys), [SHARD], prefix, salt, 0, False, False, True
        )
        assert answer is None or isinstance(answer, rs.AcquireResult)
        return answer

    def hurry(self, session: int, request: int) -> None:
        """Its time is over."""
        self.send(ev.Hurry(session, request))
        assert (session, request) not in self.arrivals

    def close(self, session: int) -> None:
        self.arrivals = {at: what for at, what in self.arrivals.items() if at[0] != session}
        super().close(session)

    def settle(self) -> None:
        while self.spills or self.fetches or self.unlinks or self.copies or self.verifies:
            for job in list(self.spills):
                self.spill_ends(job)
            for job in list(self.fetches):
                self.fetch_ends(job)
            for job in list(self.unlinks):
                self.unlink_ends(job)
            super().settle()
        super().settle()

    def reboot(self) -> None:
        """Nothing is left but the files."""
        self.memory.clear()
        self.owners.clear()
        self.flipped.clear()
        for session in list(self.open):
            self.open.discard(session)
        self.restart({})

    # Effects

    def _do(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Spill():
                assert self.core.disk is not None
                assert self.core.disk.ready
                self.spills[effect.job] = effect
                self.check_room()
                return
            case fx.Fetch():
                assert effect.name in self.files or self.core.disk is not None
                self.fetches[effect.job] = effect
                first = effect.offset // TILE_BYTES
                for tile in range(first, first + tiles(effect.span.length)):
                    self.memory[effect.slab, tile] = FLIPPED
                return
            case fx.Unlink():
                self.unlinks[effect.job] = effect
                return
            case fx.DiskOutage(away):
                self.outages.append(away)
                return
            case fx.Publish(slot, tags, group, tier) if slot >= self.config.max_spans:
                assert tier == 0
                for name in tags:
                    assert (group, 0, name) not in self.index, "memory has it"
                    self.disk_index[group, name] = slot
                return
            case fx.Unpublish(slot, tags, group, _) if slot >= self.config.max_spans:
                for name in tags:
                    assert self.disk_index.pop((group, name)) == slot
                return
            case fx.Publish(slot, tags, group, 0):
                for name in tags:
                    self.disk_index.pop((group, name), None)
            case fx.Reply(session, request, result) if (session, request) in self.arrivals:
                keys, shards, salt = self.arrivals.pop((session, request))
                if session in self.open and isinstance(result, rs.AcquireResult):
                    self._leased(session, keys, shards, salt, result)
        super()._do(effect)

    def _leased(
        self,
        session: int,
        keys: list[bytes],
        shards: list[int],
        salt: bytes,
        answer: rs.AcquireResult,
    ) -> None:
        held: list[Held | None] = []
        for entry, reason in enumerate(answer.reason):
            if reason:
                held.append(None)
                continue
            found = self.contents[answer.root[entry]]
            assert keys[entry] in (found.key, *found.sub_keys)
            slab = answer.slab[entry]
            assert found.who == self.who_of(slab) == self.who(session, salt)
            assert (found.length, found.tokens) == (answer.length[entry], answer.tokens[entry])
            tile = answer.offset[entry] // TILE_BYTES
            held.append(Held(slab, tile, tiles(answer.length[entry]), answer.root[entry]))
        assert bool(answer.lease) == any(held)
        if answer.lease:
            self.leases[answer.lease] = session, held
            self.based[answer.lease] = []

    # What must hold

    @property
    def indexed(self) -> int:
        return len(self.index) + len(self.disk_index)

    @property
    def idle(self) -> bool:
        assert self.core.disk is not None
        return not self.copies and not self.spills and self.core.disk.settled

    def check_room(self) -> None:
        """Files that are there, and those that are being written, fit the disk and the quotas."""
        assert self.disk is not None
        there = [span for span, _ in self.files.values()]
        there += [spill.span for spill in self.spills.values()]
        assert sum(file_bytes(s.length, len(s.names)) for s in there) <= self.disk.capacity
        going = {unlink.name for unlink in self.unlinks.values()}
        for name, quota in self.disk.quotas.items():
            mine = [
                span
                for number, (span, _) in self.files.items()
                if tenant_name(span.group, span.salt) == name and number not in going
            ]
            assert sum(file_bytes(s.length, len(s.names)) for s in mine) <= quota

    def check(self) -> None:
        super().check()
        assert not set(self.disk_index) & {(group, name) for group, _, name in self.index}
        assert all(slot >= self.config.max_spans for slot in self.disk_index.values())

    def damage(self, name: int, how: str) -> None:
        """A file that is not what it was."""
        span, content = self.files[name]
        if how == "flip":
            self.files[name] = span, FLIPPED
        elif how == "gone":
            del self.files[name]
        else:
            self.files[name] = replace(span, namespace=bytes(32)), content
