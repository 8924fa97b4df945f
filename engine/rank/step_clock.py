"""When the device began and ended a step, by CUDA events on its stream.

    step n  |start ######## end|         |start ######## end|  step n + 1
                                <- idle ->  zero where step n + 1 was in the stream before n ended

The end is recorded behind the copies out of a step, its start before the step's first work. Only a step with decode rows tells how
long the device stood idle before it: its sequences ran before. One of new prompts alone may follow on nothing to do.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepClock:
    """A step's events; all None on a CPU. `before`: the end of the step before it, None where it says nothing of idleness."""

    before: torch.cuda.Event | None = None
    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None

    @property
    def busy_us(self) -> int:
        """Microseconds from the step's start to its end, which has come; 0 on a CPU."""
        return _elapsed_us(self.start, self.end)

    @property
    def idle_us(self) -> int:
        """Microseconds that the device stood idle before the step; 0 where that is not known."""
        return _elapsed_us(self.before, self.start)


class Stopwatch:
    """Adds up how long pieces of work take the device, by events; a CPU, by its own clock."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._us = device, 0
        self._running: deque[StepClock] = deque()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the work inside the `with`."""
        start, began = record_event(self._device), time.monotonic_ns()
        yield
        if start is None:
            self._us += (time.monotonic_ns() - began) // 1000
        else:
            self._running.append(StepClock(None, start, record_event(self._device)))

    @property
    def us(self) -> int:
        """Microseconds of the pieces that the device has ended."""
        while self._running and (end := self._running[0].end) is not None and end.query():
            self._us += self._running.popleft().busy_us
        return self._us


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event on the device's current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_us(first: torch.cuda.Event | None, last: torch.cuda.Event | None) -> int:
    if first is None or last is None:
        return 0
    return max(0, round(1e3 * first.elapsed_time(last)))
