"""When the device began and ended a step, by CUDA events on its stream; on a CPU by its clock.

    step n  |start ######## end|         |start ######## end|  step n + 1
                                <- idle ->  zero where step n + 1 was in the stream before n ended

The end is recorded behind the copies out of a step, its start before the step's first work. Only a step with decode rows tells how
long the device stood idle before it: its sequences ran before. One of new prompts alone may follow on nothing to do.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

DeviceEvent = torch.cuda.Event  # on a CPU a HostEvent


class Stopwatch:
    """Adds up how long pieces of work take the device, by events."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._us = device, 0
        self._running: deque[tuple[DeviceEvent, DeviceEvent]] = deque()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the work inside the `with`."""
        start = record_event(self._device)
        yield
        self._running.append((start, record_event(self._device)))

    @property
    def us(self) -> int:
        """Microseconds of the pieces that the device has ended."""
        while self._running and self._running[0][1].query():
            self._us += elapsed_us(*self._running.popleft())
        return self._us


class HostEvent:
    """What of `torch.cuda.Event` is used here, for a CPU, whose work has ended when a call returns."""

    def __init__(self) -> None:
        self._ns = time.monotonic_ns()

    def query(self) -> bool:
        """True: it has come."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds from this event to `end`."""
        return 1e-6 * (end._ns - self._ns)


def record_event(device: torch.device) -> DeviceEvent:
    """Record an event on the device's current stream; on a CPU a HostEvent."""
    if device.type != "cuda":
        return HostEvent()  # type: ignore[return-value]
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_us(first: DeviceEvent, last: DeviceEvent) -> int:
    """Returns the microseconds from one event to a later one; both have come."""
    return max(0, round(1e3 * first.elapsed_time(last)))
