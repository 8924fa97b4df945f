"""Something done again and again, from a thread, while a `with` lasts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(work: Callable[[], object], period_s: float) -> Iterator[None]:
    """`work` at once, and every `period_s` after its end."""
    over = threading.Event()

    def run() -> None:
        while True:
            work()
            if over.wait(period_s):
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
