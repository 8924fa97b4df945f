"""What the front makes of the core's figures: who was scheduled when, and how long steps take."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from unittest.mock import patch

import pytest

from engine.events import EngineLoad, Event, FirstToken, RequestFinished, Scheduled
from engine.front.client import EngineClient
from engine.protocol import AbortReason, FinishReason, Output, SamplingParams, TokenBatch, encode_message
from tests.support.engine.fakes import FakeCore
from tests.support.engine.load_figures import load

pytestmark = pytest.mark.pure

PARAMS = SamplingParams(max_tokens=8)
Story = Callable[["StoryRun"], Awaitable[None]]


class StoryRun:
    """A client, its core, and a clock that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[Event] = []
        self.core = FakeCore()
        self.told = asyncio.Event()
        self.client = EngineClient(self.core.front, self.core.memory.fd, sink=self.receive)

    def receive(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, EngineLoad):
            self.told.set()

    async def report(self, at: float, step: int, *outputs: Output, started: Sequence[int] = (), **figures: int) -> None:
        """The core speaks, `at` seconds after the curtain."""
        self.now = 100.0 + at
        self.told.clear()
        batch = TokenBatch(outputs=list(outputs), started=list(started), load=load(step, **figures))
        await self.core.send_raw(encode_message(batch))
        await asyncio.wait_for(self.told.wait(), 20)

    def scheduled(self) -> dict[int, float]:
        """Who was, after how many seconds (to a microsecond)."""
        return {event.request: round(event.queue_s, 6) for event in self.events if isinstance(event, Scheduled)}


def run_story(story: Story) -> StoryRun:
    async def main() -> StoryRun:
        ran = StoryRun()
        with patch("engine.front.client.monotonic", lambda: ran.now):
            await ran.client.start()
            try:
                await story(ran)
            finally:
                await ran.client.close()
                ran.core.close()
        return ran

    return asyncio.run(main())


def test_a_request_is_scheduled_when_the_core_says_so() -> None:
    """Whatever the order, and whatever the figures look like; its first token and its end say for how long it queued."""

    async def story(ran: StoryRun) -> None:
        first, second = (ran.client.generate([1], PARAMS).id for _ in range(2))
        await ran.report(0.1, 1, received=2, waiting=1, running=1, started=(second,))
        assert ran.scheduled() == {second: 0.1}
        await ran.report(0.2, 2, received=2, waiting=1, running=1)
        assert ran.scheduled() == {second: 0.1}
        done = Output(id=first, tokens=[7], finish=FinishReason.length)
        await ran.report(0.5, 3, done, received=2, running=1, started=(first,))
        assert ran.scheduled() == {second: 0.1, first: 0.5}

    events = run_story(story).events
    assert next(event.queue_s for event in events if isinstance(event, FirstToken)) == pytest.approx(0.5)
    assert next(event.queue_s for event in events if isinstance(event, RequestFinished)) == pytest.approx(0.5)


def test_who_ends_in_the_queue_was_never_scheduled() -> None:
    """An abort and a refusal end unscheduled; so does one that is scheduled after its client has gone."""

    async def story(ran: StoryRun) -> None:
        gone, refused, late = (ran.client.generate([1], PARAMS).id for _ in range(3))
        ran.client.abort(gone, AbortReason.client_gone)
        ends = (
            Output(id=gone, finish=FinishReason.abort),
            Output(id=refused, finish=FinishReason.error, error="no", invalid=True),
        )
        await ran.report(0.1, 1, *ends, received=3, waiting=1)
        ran.client.abort(late, AbortReason.client_gone)
        await ran.report(0.2, 2, Output(id=late, finish=FinishReason.abort), received=3, started=(late, gone))
        assert ran.scheduled() == {}

    ran = run_story(story)
    assert [event.queue_s for event in ran.events if isinstance(event, RequestFinished)][:2] == [None, None]


def test_a_step_takes_the_time_between_two_reports_of_work() -> None:
    """Idle time is none of it, nor is a report without a new step an end of the interval."""

    async def story(ran: StoryRun) -> None:
        await ran.report(0.0, 4)
        await ran.report(9.0, 4, running=1)
        await ran.report(9.1, 5, running=1)
        await ran.report(9.2, 5, running=1)
        await ran.report(9.4, 7)
        await ran.report(20.0, 8, running=1)

    found = [event.interval_s for event in run_story(story).events if isinstance(event, EngineLoad)]
    assert found == [None, None, pytest.approx(0.1), None, pytest.approx(0.3), None]
