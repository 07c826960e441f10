"""Control's side of a worker: what it is told when, and what its end means for each job."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kmesh import errors
from kmesh_spand import ipc, jobmessages, messages
from kmesh_spand.control.observer import Observer
from kmesh_spand.control.storeworker import StoreWorker
from kmesh_spand.core import effects, events

TIMEOUT = 2.0


class Place:
    """A StoreWorker on a loop whose clock is set by hand, and the worker's end of the way to it."""

    def __init__(self, start_seconds: float | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.events: list[events.Event] = []
        self.restarts: list[str] = []
        self.fallbacks: list[messages.Fallback] = []
        self.end: socket.socket | None = None
        self.worker = StoreWorker(
            self.loop,
            "store worker",
            timeout=TIMEOUT,
            start_seconds=start_seconds,
            verify_rate=0,
            growth=None,
            event=self.events.append,
            restart=self.restarts.append,
            observer=Observer(0),
            fell_back=self.fallbacks.append,
        )

    def start(self, killed_by: int = 0) -> None:
        """A process was started; the one before is gone."""
        self.kill()
        self.end, theirs = ipc.pair()
        self.end.setblocking(False)
        self.worker.attach(theirs.detach(), 1, 1, killed_by)

    def kill(self) -> None:
        if self.end is not None:
            self.end.close()
            self.end = None
            self.turn()

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.worker.check()
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    def heard(self) -> list[ipc.AnyMessage]:
        """What the worker was sent."""
        assert self.end is not None
        found = []
        while True:
            try:
                message, fd = ipc.receive(self.end)
            except BlockingIOError:
                return found
            if fd is not None:
                os.close(fd)
            found.append(message)

    def answer(self, message: ipc.AnyMessage) -> None:
        assert self.end is not None
        ipc.send(self.end, message)
        self.turn()

    def begin(self) -> list[ipc.AnyMessage]:
        """Lets the worker answer its heartbeat; what it is sent then."""
        self.turn()
        (beat,) = self.heard()
        assert isinstance(beat, messages.Beat)
        self.answer(beat)
        return self.heard()

    def verify(self, *jobs: int) -> None:
        for job in jobs:
            self.worker.verify(effects.Verify(job, 0, 0, 100, 7))

    def copy(self, job: int) -> None:
        self.worker.copy(effects.Copy(job, 1, 0, 0, 0, 100))

    def close(self) -> None:
        self.kill()
        self.worker.close()
        self.loop.close()


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


def staging(place: Place) -> None:
    fd = os.memfd_create("staging")
    os.ftruncate(fd, 4096)
    place.worker.add_staging(1, fd, 4096)


def test_a_worker_is_told_nothing_before_it_has_answered(place: Place) -> None:
    staging(place)
    place.verify(1)
    place.start()
    place.copy(2)
    place.worker.wipe(effects.Wipe(3, 5))
    place.worker.export(0, 0, 4096, lambda *_: None)
    told = place.begin()
    assert [type(message).__name__ for message in told] == [
        "Staging", "Verify", "Wipe", "Copy", "Export",
    ]  # fmt: skip
    # And from then on at once.
    place.verify(4)
    assert place.heard() == [jobmessages.Verify(4, 0, 0, 100, 7)]


def test_a_worker_may_take_longer_to_start_than_a_copy(place: Place) -> None:
    """What waits for it does not end it; a copy that has waited for too long fails alone."""
    place.worker.wipe(effects.Wipe(1, 5))
    place.verify(2)
    place.start()
    place.copy(3)
    made: list[Any] = []
    place.worker.export(0, 0, 4096, lambda *told: made.append(told))
    for _ in range(50):
        place.turn(TIMEOUT)
    assert place.events == [events.CopyFailed(3)]
    assert isinstance(made[0][1], errors.Exhausted)
    assert not place.restarts
    place.copy(4)
    assert place.begin()[-1] == jobmessages.Copy(4, 1, 0, 0, 0, 100)
    # Once it has started it has to answer.
    place.turn(TIMEOUT + 1)
    assert place.restarts == ["no answer for 2.0 s"]


def test_a_worker_that_never_starts_is_given_up_if_nobody_else_does() -> None:
    place = Place(start_seconds=60.0)
    place.start()
    place.turn(59)
    assert not place.restarts
    place.turn(2)
    place.turn(2)
    assert place.restarts == ["it has not started in 60.0 s"]
    place.close()


@pytest.mark.parametrize("started", [False, True])
def test_verifications_and_wipes_outlive_any_number_of_workers(place: Place, started: bool) -> None:
    place.verify(1, 2)
    place.worker.wipe(effects.Wipe(3, 5))
    for _ in range(10):
        place.start(killed_by=signal.SIGKILL)
        if started:
            place.begin()
        place.turn(1)
    assert not place.events
    place.start()
    told = place.begin()
    assert {message.job for message in told} == {1, 2, 3}  # type: ignore[union-attr]
    for job in (1, 2):
        place.answer(jobmessages.Verified(job, job == 1))
    place.answer(jobmessages.Wiped(3))
    assert place.events == [
        events.VerifyDone(1, True), events.VerifyDone(2, False), events.WipeDone(3, True),
    ]  # fmt: skip


def test_what_killed_its_reader_comes_last_with_the_next_one(place: Place) -> None:
    place.verify(1, 2, 3)
    order = []
    for _ in range(3):
        place.start(killed_by=signal.SIGKILL)
        order.append([message.job for message in place.begin()])  # type: ignore[union-attr]
    assert order == [[1, 2, 3], [2, 3, 1], [3, 1, 2]]


@pytest.mark.parametrize("death", [signal.SIGBUS, signal.SIGSEGV])
def test_a_payload_whose_reading_is_a_fault_is_said_to_be_unreadable(
    place: Place, death: int
) -> None:
    """The others that wait are not: nobody has looked at them."""
    place.start()
    place.begin()
    place.verify(1, 2, 3)
    place.answer(jobmessages.Verified(1, True))
    place.start(killed_by=death)
    assert place.events == [events.VerifyDone(1, True), events.VerifyDone(2, None)]
    assert place.begin() == [jobmessages.Verify(3, 0, 0, 100, 7)]
    # The death of one that had not begun is about none of them.
    place.start()
    place.start(killed_by=death)
    assert len(place.events) == 2


@pytest.mark.parametrize("death", [signal.SIGBUS, signal.SIGSEGV])
def test_a_fault_that_may_be_a_copys_or_a_wipes_is_held_against_no_payload(
    place: Place, death: int
) -> None:
    """Copies are made beside verifications, and one that was killed says not by which of them."""
    place.start()
    place.begin()
    place.verify(1, 2)
    place.copy(3)
    place.start(killed_by=death)
    assert place.events == [events.CopyFailed(3)]
    # The one that was being read is read last.
    told = place.begin()
    assert [message.job for message in told] == [2, 1]  # type: ignore[union-attr]
    place.worker.wipe(effects.Wipe(4, 5))
    place.start(killed_by=death)
    told = place.begin()
    assert [message.job for message in told] == [1, 2, 4]  # type: ignore[union-attr]
    # A copy that was answered is no excuse.
    place.copy(5)
    place.answer(jobmessages.CopyDone(5, 99, 0.1))
    place.answer(jobmessages.Wiped(4))
    place.start(killed_by=death)
    assert place.events[-1] == events.VerifyDone(1, None)
    assert place.begin() == [jobmessages.Verify(2, 0, 0, 100, 7)]


def test_a_worker_that_is_well_may_say_that_it_cannot_read(place: Place) -> None:
    place.start()
    place.begin()
    place.verify(1)
    place.answer(jobmessages.Failed(1, "a range that is none"))
    assert place.events == [events.VerifyDone(1, None)]


def test_a_file_descriptor_that_was_left_nowhere_fails_its_export_alone(place: Place) -> None:
    """The kernel leaves a descriptor out of a message where the receiver has no room for it."""
    place.start()
    place.begin()
    made: list[Any] = []
    place.worker.export(0, 0, 4096, lambda *told: made.append(told))
    place.copy(7)
    place.answer(jobmessages.Exported(1))
    place.answer(jobmessages.CopyDone(7, 99, 0.1))
    ((fd, failed),) = made
    assert fd == -1
    assert isinstance(failed, errors.Exhausted)
    assert "no file descriptor left" in str(failed)
    assert place.events == [events.CopyDone(7, 99)]
    assert place.worker.up


def test_a_worker_that_could_not_be_reached_is_asked_for_again(place: Place) -> None:
    place.verify(1)
    place.worker.attach_failed(3, 4)
    assert not place.worker.up
    assert place.restarts == ["control had no file descriptor left for it"]
    place.start()
    assert place.begin() == [jobmessages.Verify(1, 0, 0, 100, 7)]


def beats(place: Place, seconds: int) -> None:
    """That many go by, in which the worker says nothing but that it is there."""
    for _ in range(seconds):
        for message in place.heard():
            if isinstance(message, messages.Beat):
                place.answer(message)
        place.turn(1.0)


def encode(job: int, pieces: list[effects.Piece]) -> effects.Encode:
    span, base = (effects.Payload(bytes(32), 0, at, 100, 1, 7, 64, 0) for at in (0, 65536))
    return effects.Encode(job, span, bytes(32), "bfloat16", 64, 0, [base], (), False, pieces)


def test_kernels_may_be_compiled_after_other_jobs(place: Place) -> None:
    """The first encoding by provenance takes longer, whatever was answered before."""
    place.start()
    place.begin()
    place.worker.recode(effects.Densify(1, encode(1, []).span, [], 0, 0, 100, 7))
    place.answer(jobmessages.Densified(1, True))
    place.worker.recode(encode(2, []))
    place.answer(jobmessages.NotEncoded(2, "it shares nothing"))
    piece = effects.Piece(0, 64, 0, 0)
    place.worker.recode(encode(3, [piece]))
    beats(place, 25)
    assert not place.restarts
    place.answer(jobmessages.Encoded(3, 50, [0]))
    place.worker.recode(encode(4, [piece]))
    beats(place, 4)
    assert len(place.restarts) == 1


def test_the_first_recipe_of_a_worker_takes_longer(place: Place) -> None:
    """It loads the codec for that, or compiles a GPU's kernels. Each worker does."""
    for life in range(2):
        place.start()
        place.worker.recode(effects.KeepRecipe(10 * life, 0, 0, 100))
        assert place.begin() == [jobmessages.KeepRecipe(10 * life, 0, 0, 100)]
        beats(place, 25)
        assert not place.restarts
        place.answer(jobmessages.RecipeKept(10 * life, 7))
        assert place.events.pop() == events.RecipeKept(10 * life, 7)
        place.worker.recode(effects.KeepRecipe(10 * life + 1, 0, 0, 100))
        beats(place, 4)
        assert len(place.restarts) == 1
        place.restarts.clear()
        place.kill()
        assert place.events.pop() == events.RecodeFailed(10 * life + 1)


def test_what_a_worker_does_in_a_lesser_way_is_told(place: Place) -> None:
    place.start()
    place.worker.recode(effects.KeepRecipe(1, 3, 0, 100))
    place.begin()
    place.answer(messages.Fallback("encode", 3))
    assert place.fallbacks == [messages.Fallback("encode", 3)]
    assert not place.events


def test_workers_that_can_not_load_the_codec_are_ended_a_few_times_only(place: Place) -> None:
    verify = jobmessages.Verify(1, 0, 0, 100, 7, True)
    keep = effects.KeepRecipe(2, 0, 0, 100)
    unloadable = jobmessages.Failed(1, "the codec can't be loaded: no memory", unloadable=True)

    def fails() -> bool:
        """One more worker can't; whether it is ended for that."""
        place.start()
        place.worker.verify(effects.Verify(1, 0, 0, 100, 7, True))
        place.worker.recode(keep)
        place.begin()
        place.events.clear()
        place.answer(unloadable)
        assert events.VerifyDone(1, None) in place.events
        ended = not place.worker.up
        # A job is not tried again by the same worker.
        assert (events.RecodeFailed(2) in place.events) == ended
        assert place.worker.checks == 0
        return ended

    for _ in range(2):
        assert fails()
    # One that can starts the count anew.
    place.start()
    place.worker.verify(effects.Verify(1, 0, 0, 100, 7, True))
    assert place.begin() == [verify]
    place.answer(jobmessages.Verified(1, True, 10, 3, [jobmessages.Fact(b"k", 1, 2, 3, 4)]))
    assert [fails() for _ in range(5)] == [True, True, True, False, False]
    assert not place.restarts
