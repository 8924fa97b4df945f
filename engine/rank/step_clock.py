"""Start and end of a step on the device, by CUDA events; on a CPU by its clock."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

DeviceEvent = torch.cuda.Event  # on a CPU a HostEvent


class Stopwatch:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._us = 0
        self._running: deque[tuple[DeviceEvent, DeviceEvent]] = deque()

    @contextmanager
    def timed(self) -> Iterator[None]:
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
    """`torch.cuda.Event` for a CPU, whose work ends before a call returns."""

    def __init__(self) -> None:
        self._ns = time.monotonic_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        ...

    def elapsed_time(self, end: "HostEvent") -> float:
        return 1e-6 * (end._ns - self._ns)


def record_event(device: torch.device) -> DeviceEvent:
    if device.type != "cuda":
        return HostEvent()  # type: ignore[return-value]
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_us(first: DeviceEvent, last: DeviceEvent) -> int:
    """The device must have reached both events."""
    return max(0, round(1e3 * first.elapsed_time(last)))
