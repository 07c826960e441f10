"""A thread of ours that does one thing after another, where it may be refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SerialExecutor:
    """Calls what it is given in one thread, which is started at the first call, in order.

    Where ``ThreadPoolExecutor`` lacks a thread it has taken a call all the same, and makes it when
    it finds one. This one never makes a call that it has refused.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> Future[T]:
        """Has a call made when those before it have ended.

        Raises:
            OSError: there is no thread for it, now or any more.
        """
        future: Future[T] = Future()
        # What was raised has this frame in its traceback, which must not have the future in turn:
        # what the call was given would stay until somebody looks for garbage.
        waiting = [future]

        def run() -> None:
            mine = waiting.pop()
            try:
                if not mine.set_running_or_notify_cancel():
                    return
                try:
                    found = call(*args, **named)
                except BaseException as wrong:
                    mine.set_exception(wrong)
                else:
                    mine.set_result(found)
            finally:
                del mine

        try:
            self._pool.submit(run)
        except RuntimeError as lacking:
            future.cancel()
            raise OSError(str(lacking)) from lacking
        return future

    def shutdown(self, *, cancel: bool = False) -> None:
        """Waits for the calls to end, and takes no more.

        Args:
            cancel: those that have not begun are not made.
        """
        self._pool.shutdown(wait=True, cancel_futures=cancel)
