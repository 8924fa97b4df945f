"""How long a device took for a step, and stood idle before it, from the events around it."""

import time
from dataclasses import replace

import pytest
import torch

from deploy.models.resolve import resolve
from engine.plan import encode_plan
from engine.rank import step_clock
from engine.rank.builder import build
from engine.rank.sampler import ResultRows
from engine.rank.stages.report_stage import Launched
from engine.rank.step_clock import Stopwatch, record_event
from tests.golden.record import load
from tests.support.engine.ranks import single
from tests.support.engine.recording import PAGES, config_of

pytestmark = pytest.mark.cpu


class Event:
    """Recorded at a time in milliseconds."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.over = True

    def query(self) -> bool:
        return self.over

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def clock(before: float | None, start: float, end: float) -> Launched:
    events = [None if at is None else Event(at) for at in (before, start, end)]
    return Launched(1, (b"", b""), ResultRows(), (), {}, *events, stage=None)  # type: ignore[arg-type]


def test_busy_and_idle() -> None:
    """A step of 4.5 ms that began 20 us after the end of the one before it; nothing is known of one that follows nothing."""
    assert (clock(10.0, 10.02, 14.52).busy_us, clock(10.0, 10.02, 14.52).idle_us) == (4500, 20)
    assert clock(None, 10.02, 14.52).idle_us == 0
    assert clock(10.0, 9.999, 14.0).idle_us == 0


def test_a_cpu_step_took_as_long_as_its_launch() -> None:
    """A step that takes 20 ms, whose result is read 20 ms later: the later ones do not count. Where its end is when the result is
    read, they do."""
    rank = single(config_of(resolve("nano:31b"), 1))
    made = build(rank, PAGES)
    forward = made.forward_stage.run

    def slow(*args: object) -> object:
        time.sleep(0.02)
        return forward(*args)  # type: ignore[arg-type]

    made.forward_stage.run = slow  # type: ignore[method-assign,assignment]
    launched = made.launch(encode_plan(load()[0][0]))
    time.sleep(0.02)
    launched.result()
    first, late = (step.busy_us for step in (launched, replace(launched, end=record_event(rank.device))))
    assert 20_000 <= first <= late - 20_000


def test_a_stopwatch_adds_up_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 2 ms and 3 ms, the second of which the device has not ended at first; what lies between them does not count."""
    events = [Event(at) for at in (1.0, 3.0, 7.0, 10.0)]
    watch, recorded = Stopwatch(torch.device("cuda")), iter(events)
    monkeypatch.setattr(step_clock, "record_event", lambda device: next(recorded))
    events[3].over = False
    for _ in range(2):
        with watch.timed():
            pass
    assert (watch.us, watch.us) == (2000, 2000)
    events[3].over = True
    assert watch.us == 5000


def test_a_cpu_is_timed_by_its_own_clock() -> None:
    """20 ms of work are there at once, and 20 ms beside it are not."""
    watch = Stopwatch(torch.device("cpu"))
    with watch.timed():
        time.sleep(0.02)
    first = watch.us
    time.sleep(0.02)
    assert watch.us == first >= 20_000
