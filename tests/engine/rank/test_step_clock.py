"""How long a device took for a step, and stood idle before it, from the events around it."""

import pytest
import torch

from engine.rank.step_clock import StepClock, mark

pytestmark = pytest.mark.cpu


class Event:
    """Recorded at a time in milliseconds."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def clock(before: float | None, start: float, end: float) -> StepClock:
    events = [None if at is None else Event(at) for at in (before, start, end)]
    return StepClock(*events)  # type: ignore[arg-type]


def test_busy_and_idle() -> None:
    """A step of 4.5 ms that began 20 us after the end of the one before it; nothing is known of one that follows nothing."""
    assert (clock(10.0, 10.02, 14.52).busy_us, clock(10.0, 10.02, 14.52).idle_us) == (4500, 20)
    assert clock(None, 10.02, 14.52).idle_us == 0
    assert clock(10.0, 9.999, 14.0).idle_us == 0


def test_a_cpu_has_no_clock() -> None:
    """Nothing is recorded, and both are zero."""
    assert mark(torch.device("cpu")) is None
    assert (StepClock().busy_us, StepClock().idle_us) == (0, 0)
