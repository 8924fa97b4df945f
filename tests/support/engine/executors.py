"""In place of pools of threads: one that does at once what it is given, one whose threads are busy."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class AtOnce(Executor):
    """In place of a pool of threads: what is submitted is done."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(work(*args, **options))
        return future


class Later(Executor):
    """In place of a pool whose threads are busy."""

    def __init__(self) -> None:
        self._futures: list[Future[Any]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> "Future[Any]":
        self._futures.append(Future())
        return self._futures[-1]

    def begin(self) -> int:
        """How much of what was submitted a thread would do now."""
        return sum(future.set_running_or_notify_cancel() for future in self._futures)
