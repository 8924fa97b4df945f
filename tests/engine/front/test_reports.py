"""What the front makes of the core's figures: who was scheduled when, and how long steps take."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from engine.events import EngineLoad, Event, FirstToken, RequestFinished, Scheduled
from engine.front.client import EngineClient
from engine.protocol import AbortReason, FinishReason, Output, SamplingParams, TokenBatch, encode_message
from tests.support.engine.fakes import FakeCore
from tests.support.engine.load_figures import load

pytestmark = pytest.mark.pure

PARAMS = SamplingParams(max_tokens=8)
Story = Callable[["Play"], Awaitable[None]]


class Play:
    """A client, its core, and a clock that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[Event] = []
        self.core = FakeCore()
        self.told = asyncio.Event()
        self.client = EngineClient(self.core.front, sink=self.hear, clock=lambda: self.now)

    def hear(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, EngineLoad):
            self.told.set()

    async def report(self, at: float, step: int, *outputs: Output, **figures: int) -> None:
        """The core speaks, `at` seconds after the curtain."""
        self.now = 100.0 + at
        self.told.clear()
        await self.core.send_raw(encode_message(TokenBatch(outputs=list(outputs), load=load(step, **figures))))
        await asyncio.wait_for(self.told.wait(), 2)

    def scheduled(self) -> dict[int, float]:
        """Who was, after how many seconds (to a microsecond)."""
        return {event.request: round(event.queue_s, 6) for event in self.events if isinstance(event, Scheduled)}


def play(story: Story) -> Play:
    async def main() -> Play:
        played = Play()
        await played.client.start()
        try:
            await story(played)
        finally:
            await played.client.close()
            played.core.close()
        return played

    return asyncio.run(main())


def test_a_request_is_scheduled_when_the_core_first_shows_it() -> None:
    """Not while it waits there, not before the core has read it; its first token and its end say for how long it queued."""

    async def story(played: Play) -> None:
        first, second = (played.client.generate([1], PARAMS).id for _ in range(2))
        await played.report(0.1, 1, received=1, waiting=0, running=1)
        assert played.scheduled() == {first: 0.1}
        await played.report(0.2, 2, received=2, waiting=1, running=1)
        assert played.scheduled() == {first: 0.1}
        await played.report(0.5, 3, received=2, waiting=0, running=2)
        assert played.scheduled() == {first: 0.1, second: 0.5}
        done = Output(id=second, tokens=[7], finish=FinishReason.length)
        await played.report(0.6, 4, done, received=2, running=1)

    events = play(story).events
    assert next(event.queue_s for event in events if isinstance(event, FirstToken)) == pytest.approx(0.5)
    assert next(event.queue_s for event in events if isinstance(event, RequestFinished)) == pytest.approx(0.5)


def test_who_ends_in_the_queue_was_never_scheduled() -> None:
    """An abort and a refusal leave the queue with their end, and the one behind them is not mistaken for them."""

    async def story(played: Play) -> None:
        gone, refused, behind = (played.client.generate([1], PARAMS).id for _ in range(3))
        played.client.abort(gone, AbortReason.client_gone)
        ends = (
            Output(id=gone, finish=FinishReason.abort),
            Output(id=refused, finish=FinishReason.error, error="no", invalid=True),
        )
        await played.report(0.1, 1, *ends, received=3, waiting=1, running=1)
        assert played.scheduled() == {}
        await played.report(0.2, 2, received=3, waiting=0, running=2)
        assert played.scheduled() == {behind: 0.2}

    play(story)


def test_a_step_takes_the_time_between_two_reports_of_work() -> None:
    """Idle time is none of it, nor is a report without a new step an end of the interval."""

    async def story(played: Play) -> None:
        await played.report(0.0, 4)
        await played.report(9.0, 4, running=1)
        await played.report(9.1, 5, running=1)
        await played.report(9.2, 5, running=1)
        await played.report(9.4, 7)
        await played.report(20.0, 8, running=1)

    found = [event.interval_s for event in play(story).events if isinstance(event, EngineLoad)]
    assert found == [None, None, pytest.approx(0.1), None, pytest.approx(0.3), None]
