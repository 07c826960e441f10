"""Calls of a session on their way: procedures between their requests and the answers."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Generic, TypeVar

from kmesh.calls import Procedure
from kmesh.channel import Channel
from kmesh.wire import Answer

T = TypeVar("T")


class Running(Generic[T]):
    """A procedure on its way. The channel holds it while it is owed an answer, nobody else does."""

    def __init__(
        self, channel: Channel, procedure: Procedure[T], deadline: float, future: Future[T]
    ) -> None:
        self._channel = channel
        self._procedure = procedure
        self._deadline = deadline
        self._futures = [future]

    def step(self, answer: Answer | None, error: BaseException | None) -> None:
        """Goes on with what came."""
        procedure = self._procedure
        try:
            if error is not None:
                body = procedure.throw(error)
            elif answer is not None:
                body = procedure.send(answer)
            else:
                body = next(procedure)
            self._channel.call(body, self._deadline, self.step)
        except StopIteration as done:
            self._futures.pop().set_result(done.value)
        except BaseException as failed:
            procedure.close()
            # The error knows this frame: what the frame knows must not know the error.
            self._futures.pop().set_exception(failed)
        finally:
            del error
