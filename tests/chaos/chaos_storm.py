"""A chaos run: a daemon, its clients, and the faults of a schedule, one after the other."""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import resource
import select
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from chaos_cast import SLACK, Client, Rude, is_root
from chaos_end import finish
from chaos_events import Events
from chaos_house import MAX_SPANS, RECOVERY, House
from chaos_keep import Keepsake
from chaos_plan import Fault, is_stored, schedule
from chaos_watch import Broken, memory, require, touches
from foreign import NOBODY
from leaks import open_fds

from kmesh.layout import sums_offset
from kmesh_spand.core.record import RECORD_BYTES, decode

CLIENTS = 4
_LOOK, _STATUS = 0.5, 2.0
#: Faults that an operator could make, and which keep nobody from being served.
_HARMLESS = ("rude", "flip", "damage")


class Storm:
    """One run. ``run`` raises Broken as soon as something does not hold.

    Attributes:
        arguments: further ones of all clients.
    """

    arguments: ClassVar[dict[str, int]] = {}

    def __init__(
        self, directory: Path, events: Events, *, seed: int, seconds: float, shape: str
    ) -> None:
        self.directory, self.events = directory, events
        self.seed, self.seconds, self.shape = seed, seconds, shape
        self.house = House(directory, shape, is_stored(seed))
        self.faults = list(schedule(seed, seconds, shape, CLIENTS))
        self.done: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.explained = 0
        self.ledger: dict[str, int] = {}
        self._flips: list[tuple[int, int]] = []
        self._undo: list[tuple[float, int, bool, Callable[[], None]]] = []
        self._looked = self._asked = 0.0
        # What must outlive the daemon, and how often something did.
        self._keepsake: Keepsake | None = None
        self.keepsakes = 0
        # Bits that were flipped in this life of the daemon.
        self._flipped = 0
        self.clients: list[Client] = []
        self.rude: Rude | None = None

    def uids(self) -> list[int]:
        return [0, NOBODY] if self.shape == "uids" and is_root() else [os.getuid()]

    def client(self, number: int, uid: int) -> Client:
        gpus = 2 if self.shape == "gpus" else 0
        arguments = {"seed": self.seed, "uid": uid, "gpus": gpus, **self.arguments}
        made = Client(number, self.directory, arguments)
        self.clients.append(made)
        return made

    def run(self) -> None:
        """All of it."""
        self.directory.chmod(0o755)
        self.house.start()
        self._wait_ready()
        self._move_in()
        self.house.remember_descriptors()
        self.rude = Rude(self.directory)
        uids = self.uids()
        for number in range(CLIENTS):
            self.client(number, uids[number % len(uids)]).start()
        self.events.add("begin", seed=self.seed, shape=self.shape, daemon=self.house.pid)
        began, last = time.monotonic(), 0.0
        for fault in self.faults:
            # What took longer than planned does not bring the rest closer together.
            self.pause(fault.at - last)
            if time.monotonic() - began > self.seconds:
                break
            self.begin(fault)
            last = fault.at
        self.pause(began + self.seconds - time.monotonic())
        finish(self)

    # Time passes.

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            self.turn()
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.05))

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """Turns until the condition holds, and returns what it says."""
        until = time.monotonic() + seconds
        while not (value := condition()):
            require(time.monotonic() < until, f"not within {seconds:.0f} s: {what}")
            self.turn(looking=False)
            time.sleep(0.05)
        return value

    def turn(self, looking: bool = True) -> None:
        """Ends what is due, looks after the clients, and looks at the daemon now and then."""
        now = time.monotonic()
        while self._undo and self._undo[0][0] <= now:
            heapq.heappop(self._undo)[3]()
        for client in self.clients:
            for row in client.reports():
                self.heard(row)
            client.check()
            if not client.pid and client.killed:
                client.start()
        if self.rude is not None:
            self.rude.check()
        if looking and now - self._looked > _LOOK:
            self._looked = now
            self.house.look(self.troubled)
        if looking and now - self._asked > _STATUS and not self.troubled:
            self.house.status()
            self._asked = time.monotonic()

    @property
    def troubled(self) -> bool:
        """Something that lasts still keeps the daemon from serving, or may."""
        return any(undo[2] for undo in self._undo)

    def later(self, seconds: float, troubling: bool, act: Callable[[], None]) -> None:
        """``act`` ends a fault."""
        heapq.heappush(self._undo, (time.monotonic() + seconds, self.done.total(), troubling, act))

    def calm(self) -> None:
        """Ends all faults that last."""
        while self._undo:
            heapq.heappop(self._undo)[3]()

    def heard(self, row: dict[str, Any]) -> None:
        """A client's report. A corruption must be that of a bit that was flipped."""
        self.events.add("heard", **{"report" if k == "what" else k: v for k, v in row.items()})
        if row["what"] == "broken":
            raise Broken(f"client {row.get('client')}: {row['text']}: {row}")
        if row["what"] == "corrupt":
            span = row["inode"], row["size"], row["offset"], row["length"]
            require(
                any(touches(flip, *span) for flip in self._flips),
                f"corrupt bytes where nobody flipped a bit: {row}",
            )
            self.explained += 1

    # Faults.

    def begin(self, fault: Fault) -> None:
        """Carries a fault out. What it is for may be gone at the moment: then it is missed."""
        pid = self._pid(fault.target)
        act = getattr(self, f"_{fault.kind}")
        if fault.kind not in _HARMLESS and not fault.target.startswith("client"):
            self.house.troubled = time.monotonic()
        self.events.add(
            fault.kind, number=fault.number, target=fault.target, seconds=fault.seconds, pid=pid
        )
        try:
            done = act(fault, pid) is not False
        except OSError as failed:
            self.events.add("missed", number=fault.number, why=repr(failed)[:200])
            done = False
        (self.done if done else self.missed)[fault.name] += 1

    def _pid(self, target: str) -> int:
        if target.startswith("client"):
            return self.clients[int(target.removeprefix("client"))].pid
        return self.house.process(target)

    def _client(self, fault: Fault) -> Client:
        return self.clients[int(fault.target.removeprefix("client"))]

    def _kill(self, fault: Fault, pid: int) -> bool:
        if fault.target == "daemon":
            self._kill_daemon()
            return True
        if not pid:
            return False
        if fault.target.startswith("client"):
            self._client(fault).killed = True
        os.kill(pid, signal.SIGKILL)
        return True

    def _stop(self, fault: Fault, pid: int) -> bool:
        if not pid:
            return False
        client = None
        if fault.target.startswith("client"):
            client = self._client(fault)
        handle = os.pidfd_open(pid)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            os.close(handle)
            if client is not None:
                client.excused = time.monotonic()

        signal.pidfd_send_signal(handle, signal.SIGSTOP)
        if client is not None:
            client.excused = time.monotonic() + fault.seconds
        self.later(fault.seconds, client is None, go_on)
        return True

    def _kill_daemon(self) -> None:
        """All of it dies with its supervisor; what it held is gone, unless it is stored."""
        self._keep()
        family = self.house.family()
        self.house.signal(signal.SIGKILL)
        self._next_life(family)

    def _restart(self, fault: Fault, pid: int) -> None:
        """As an operator would, whatever is wrong with it at the moment, but not stopped."""
        self._keep()
        family = self.house.family()
        self.house.signal(signal.SIGCONT)
        self.house.signal(signal.SIGTERM)
        self._next_life(family, 0)

    def _upgrade(self, fault: Fault, pid: int) -> None:
        """A new daemon takes over while everybody goes on."""
        self.calm()
        house, old = self.house, self.house.daemon
        assert old is not None
        house.troubled = time.monotonic()
        self.wait(lambda: house.look(False) is not None, RECOVERY, "an answer")
        self._keep(True)
        family = house.family()
        house.begin_upgrade()
        self.wait(house.is_upgraded, 60, "a daemon that takes over")
        self._has_ended(family, 0)
        house.end_upgrade()
        house.troubled = time.monotonic()
        self.events.add("upgraded", daemon=house.pid, life=house.lives)
        self._check_kept()
        self._move_in()

    def _keep(self, upgrade: bool = False) -> None:
        """Stores what must outlive the daemon, where it can be and where memory is kept."""
        self._keepsake = None
        if upgrade or (self.house.stored and not self.troubled):
            keepsake = Keepsake(self.house.sockets, self.house.lives)
            if why := keepsake.store():
                keepsake.close()
                self.events.add("nothing to keep", why=why)
            else:
                self._keepsake = keepsake

    def _check_kept(self) -> None:
        if self._keepsake is not None:
            lost = self._keepsake.check(self._flipped)
            if lost:
                self.events.add("kept, but for flipped bits", spans=lost)
            self._keepsake = None
            self.keepsakes += 1
        self._flipped = 0

    def _next_life(self, family: list[int], expected: int = -signal.SIGKILL) -> None:
        self._has_ended(family, expected)
        self.calm()
        stored = self.house.stored
        self.house.start()
        self.events.add("started", daemon=self.house.pid, life=self.house.lives)
        self._wait_ready()
        if stored:
            self.house.check_kept()
        # Before the same tenant's next ones, which may need their room.
        self._check_kept()
        self._move_in()

    def _has_ended(self, family: list[int], expected: int) -> None:
        daemon = self.house.daemon
        assert daemon is not None
        self.wait(lambda: daemon.process.poll() is not None, SLACK + 3, "the daemon's end")
        # One that was started while its supervisor was told to stop may find it gone.
        require(
            daemon.process.returncode == expected,
            f"the daemon ended with {daemon.process.returncode} instead of {expected}:\n"
            + "\n".join(daemon.log().splitlines()[-20:]),
        )
        self.wait(lambda: all(map(_gone, family)), SLACK, "the end of the daemon's processes")
        for handle in family:
            os.close(handle)
        self.house.ended()

    def _wait_ready(self) -> None:
        self.wait(self.house.is_ready, 60, "a daemon that starts")
        self.house.let_in()

    def _move_in(self) -> None:
        """A slab for what is to be kept, before others have them all."""
        keepsake = Keepsake(self.house.sockets, self.house.lives)
        if why := keepsake.store():
            self.events.add("no room to keep", why=why)
        keepsake.close()

    def _flip(self, fault: Fault, pid: int) -> bool:
        """Some bits of what is stored, each in another byte, as a broken machine would."""
        found = memory(self.house.pid)
        catalog = found.pop("catalog", None)
        rng = random.Random(fault.draw)
        path = catalog if fault.target == "record" else rng.choice([*found.values(), None])
        if path is None:
            return False
        file = path.stat()
        end = sums_offset(file.st_size)
        if fault.target == "record":
            places = [rng.choice(_records(path) or [0]) + rng.randrange(RECORD_BYTES)]
        elif fault.target == "sums":
            places = [rng.randrange(end, file.st_size) for _ in range(4)]
        else:
            places = [rng.randrange(end) for _ in range(8)]
        if path != catalog:
            self._flips += [(file.st_ino, at) for at in places]
        path.chmod(0o600)
        try:
            with open(path, "r+b", buffering=0) as memory_file:
                for at in places:
                    memory_file.seek(at)
                    byte = memory_file.read(1)[0]
                    memory_file.seek(at)
                    memory_file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        finally:
            path.chmod(file.st_mode & 0o777)
        self._flipped += len(places)
        self.events.add("flipped", inode=file.st_ino, at=places)
        return True

    def _damage(self, fault: Fault, pid: int) -> bool:
        """A file of the disk tier gets other bits, is cut short, or is another's."""
        rng = random.Random(fault.draw)
        files = sorted(self.house.disk.glob("??/*"))
        if len(files) < 2:
            return False
        path, other = rng.sample(files, 2)
        how = rng.choice(("flip", "cut", "copy", "gone"))
        data = bytearray(path.read_bytes())
        if how == "flip" and data:
            for _ in range(8):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        elif how == "cut":
            os.truncate(path, rng.randrange(len(data) + 1))
        elif how == "copy":
            path.write_bytes(other.read_bytes())
        else:
            path.unlink()
        self.events.add("damaged", file=path.name, how=how)
        return True

    def _limit(self, pid: int, what: int, soft: int, seconds: float, ours: bool) -> bool:
        """A limit of the kernel's on a process for a while."""
        old = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (soft, old[1]))

        def lift() -> None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, what, old)

        self.later(seconds, ours, lift)
        return True

    def _files(self, fault: Fault, pid: int) -> bool:
        ours = not fault.target.startswith("client")
        # A Python that is still loading is not what is tested.
        if not pid or not (ours or self._client(fault).began()):
            return False
        few = open_fds(pid).total() + fault.draw % 4
        return self._limit(pid, resource.RLIMIT_NOFILE, few, fault.seconds, ours)

    def _memory(self, fault: Fault, pid: int) -> bool:
        if not pid:
            return False
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        few = pages * resource.getpagesize() + (fault.draw % 8 << 20)
        return self._limit(pid, resource.RLIMIT_AS, few, fault.seconds, True)

    def _file_size(self, fault: Fault, pid: int) -> bool:
        return bool(pid) and self._limit(pid, resource.RLIMIT_FSIZE, 4096, fault.seconds, True)

    def _fault(self, fault: Fault, pid: int) -> bool:
        """One of the daemon's parts fails while a file is there: see ``faulty``."""
        file = self.house.faults / fault.target
        if file.exists():
            return False
        file.touch()
        self.later(fault.seconds, True, file.unlink)
        return True

    def _rude(self, fault: Fault, pid: int) -> None:
        assert self.rude is not None
        self.rude.do(fault.target, fault.draw, fault.seconds)

    _operator = _rude

    def close(self) -> None:
        """Ends everything, however far it got."""
        self.calm()
        for client in self.clients:
            client.close()
        if self.rude is not None:
            self.rude.close()
        if self._keepsake is not None:
            self._keepsake.close()
        self.house.close()


def _records(catalog: Path) -> list[int]:
    """Where a catalog has records of what is stored."""
    with catalog.open("rb") as file:
        data = file.read(MAX_SPANS * RECORD_BYTES)
    places = range(0, len(data), RECORD_BYTES)
    found = {at: decode(data[at : at + RECORD_BYTES]) for at in places}
    return [at for at, record in found.items() if record is not None and record.tokens]


def _gone(handle: int) -> bool:
    """Whether the process of a pidfd has ended."""
    return bool(select.select([handle], [], [], 0)[0])
