"""The engine's client against the core's end of its socket, played by hand."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from unittest.mock import patch

import msgspec
import pytest

from engine.errors import EngineDead, GenerationFailed, InvalidRequest, Overloaded, SlowReader
from engine.events import (
    EngineFailed,
    EngineLoad,
    FirstToken,
    RequestFinished,
    RequestStarted,
    Sink,
    Tokens,
    to_each,
)
from engine.front.client import MAX_PILED_TOKENS, EngineClient
from engine.front.stream import Stream
from engine.protocol import (
    OVERLOADED,
    AbortReason,
    Control,
    FinishReason,
    FrameReader,
    GenerateRequest,
    Logprobs,
    Output,
    SamplingParams,
    frame,
    pack_tokens,
)
from tests.support.engine.fakes import FakeCore, FakeEngineClient
from tests.support.engine.outcomes import Outcomes, no_sink
from tests.support.engine.outputs import outputs

pytestmark = pytest.mark.pure

PARAMS = SamplingParams(max_tokens=8)
Story = Callable[[EngineClient, FakeCore], Awaitable[None]]


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_story(story: Story, sink: Sink = no_sink, clock: Callable[[], float] = time.monotonic) -> Outcomes:
    """Run `story` with a started client and its core; whatever happens, each request that began is open or has ended once."""
    outcomes = Outcomes()

    async def main() -> None:
        core = FakeCore()
        client = EngineClient(core.front, core.memory.fd, sink=to_each(outcomes, sink))
        await client.start()
        try:
            async with asyncio.timeout(60):
                await story(client, core)
        finally:
            assert outcomes.open == client.open
            await client.close()
            core.close()
        assert outcomes.open == client.open == 0

    with patch("engine.front.client.monotonic", clock):
        asyncio.run(main())
    return outcomes


async def read(stream: Stream) -> list[int]:
    return [token async for output in outputs(stream) for token in output.tokens]


async def delivered() -> None:
    """Let what was sent reach the client: many turns of the loop, however long one takes."""
    for _ in range(10):
        await asyncio.sleep(0.002)


def test_a_request_streams_to_its_end() -> None:
    """The core gets what was asked, the reader gets the outputs in order and the finish, and the request counts as finished."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1, 2, 3], PARAMS, clip=True, salt="a", priority=-1)
        prompt = pack_tokens([1, 2, 3])
        wanted = GenerateRequest(id=stream.id, prompt=prompt, params=PARAMS, clip=True, salt="a", priority=-1)
        assert await core.receive() == wanted
        await core.send(Output(id=stream.id, tokens=[7]))
        reader = outputs(stream)
        assert await anext(reader) == Output(id=stream.id, tokens=[7])
        await core.send(Output(id=stream.id, tokens=[8], finish=FinishReason.length))
        assert await anext(reader) == Output(id=stream.id, tokens=[8], finish=FinishReason.length)
        with pytest.raises(StopAsyncIteration):
            await anext(reader)
        assert await core.silent()

    assert run_story(story).finished == 1


def test_frames_come_whole_from_any_pieces() -> None:
    """Byte by byte, each message comes with its last byte."""
    reader, sent = FrameReader(), [b"", b"a", b"bc" * 200]
    assert [message for byte in b"".join(map(frame, sent)) for message in reader.feed(bytes([byte]))] == sent


def test_what_piled_up_comes_as_one() -> None:
    """Outputs that arrive while the reader is away come merged: tokens and logprobs in order, the last one's finish."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1], PARAMS)
        probs = [Logprobs(-float(index), []) for index in range(3)]
        for index in range(3):
            finish = FinishReason.stop if index == 2 else None
            cached = 32 if index == 0 else 0
            await core.send(Output(id=stream.id, tokens=[index], logprobs=[probs[index]], finish=finish, cached=cached))
        await delivered()
        got = [output async for output in outputs(stream)]
        assert got == [Output(id=stream.id, tokens=[0, 1, 2], logprobs=probs, finish=FinishReason.stop, cached=32)]

    run_story(story)


def test_streams_do_not_mix() -> None:
    """One batch with outputs of three requests, in any order, reaches each reader with its own tokens."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        streams = [client.generate([index], PARAMS) for index in range(3)]
        for step in range(4):
            finish = FinishReason.length if step == 3 else None
            rows = [Output(id=stream.id, tokens=[10 * stream.id + step], finish=finish) for stream in streams]
            await core.send(*rows[:: -1 if step % 2 else 1])
        got = await asyncio.gather(*map(read, streams))
        assert got == [[10 * stream.id + step for step in range(4)] for stream in streams]

    assert run_story(story).finished == 3


@pytest.mark.parametrize(
    ("invalid", "code", "kind", "counter"),
    [
        (True, "too_long", InvalidRequest, "refused"),
        (False, "too_long", GenerationFailed, "failed"),
        (False, OVERLOADED, Overloaded, "failed"),
    ],
)
def test_an_error_reaches_its_own_reader(invalid: bool, code: str, kind: type[Exception], counter: str) -> None:
    """A refusal raises InvalidRequest, an error GenerationFailed, one that is only of now Overloaded, after what had come; the
    neighbour goes on."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream, neighbour = client.generate([1], PARAMS), client.generate([2], PARAMS)
        await core.send(Output(id=stream.id, tokens=[5]))
        await core.send(
            Output(id=stream.id, finish=FinishReason.error, error="no room", invalid=invalid, code=code),
            Output(id=neighbour.id, tokens=[6], finish=FinishReason.stop),
        )
        await delivered()
        reader = outputs(stream)
        assert (await anext(reader)).tokens == [5]
        with pytest.raises(kind, match="no room") as caught:
            await anext(reader)
        assert getattr(caught.value, "code", None) == ("too_long" if invalid else None)
        assert await read(neighbour) == [6]

    outcomes = run_story(story)
    assert (getattr(outcomes, counter), outcomes.finished) == (1, 1)


async def leave_by_break(stream: Stream) -> None:
    async for _ in outputs(stream):
        break


async def leave_unread(stream: Stream) -> None:
    stream.abort(AbortReason.client_gone)


async def leave_by_cancel(stream: Stream) -> None:
    task = asyncio.create_task(read(stream))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [leave_by_break, leave_unread, leave_by_cancel])
def test_leaving_early_aborts(leave: Callable[[Stream], Awaitable[None]]) -> None:
    """However a reader leaves, the core hears one abort for client_gone; the request stays open until the core confirms."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1], PARAMS)
        await core.receive_request()
        await core.send(Output(id=stream.id, tokens=[5]))
        await leave(stream)
        gc.collect()
        abort = await core.receive_abort()
        assert (abort.id, abort.reason) == (stream.id, AbortReason.client_gone)
        assert client.open == 1
        await core.send(Output(id=stream.id, tokens=[6]))
        await core.send(Output(id=stream.id, finish=FinishReason.abort))
        await delivered()
        assert await core.silent()

    assert run_story(story).aborted == 1


@pytest.mark.parametrize("reason", list(AbortReason))
def test_an_abort_carries_its_reason_and_ends_the_iteration(reason: AbortReason) -> None:
    """abort(reason) reaches the core once, wakes the waiting reader without an error, and a stop string counts as finished."""
    events = []

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1], PARAMS)
        await core.receive_request()
        reading = asyncio.create_task(read(stream))
        await delivered()
        stream.abort(reason)
        stream.abort(AbortReason.client_gone)
        assert await asyncio.wait_for(reading, 5) == []
        assert (await core.receive_abort()).reason is reason
        stopped = reason is AbortReason.stop_string
        await core.send(Output(id=stream.id, finish=FinishReason.stop if stopped else FinishReason.abort))
        await delivered()
        assert await core.silent()

    run_story(story, events.append)
    outcome = next(event.outcome for event in events if isinstance(event, RequestFinished))
    assert outcome == ("stop" if reason is AbortReason.stop_string else reason.value)


def test_an_abort_after_the_end_is_silent() -> None:
    """Leaving a stream that has ended tells the core nothing."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1], PARAMS)
        await core.receive_request()
        await core.send(Output(id=stream.id, tokens=[3], finish=FinishReason.length))
        assert await read(stream) == [3]
        stream.abort(AbortReason.deadline)
        client.abort(stream.id, AbortReason.deadline)
        client.abort(4711, AbortReason.deadline)
        assert await core.silent()

    run_story(story)


def test_a_slow_reader_is_cut_off() -> None:
    """A reader one token over the cap is aborted as slow_reader and its stream raises; at the cap it lives."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1], PARAMS)
        await core.receive_request()
        await core.send(Output(id=stream.id, tokens=list(range(MAX_PILED_TOKENS))))
        assert await core.silent()
        await core.send(Output(id=stream.id, tokens=[1]))
        assert (await core.receive_abort()).reason is AbortReason.slow_reader
        await core.send(Output(id=stream.id, tokens=[1]))
        await core.send(Output(id=stream.id, finish=FinishReason.abort))
        await delivered()
        assert client.open == 0
        with pytest.raises(SlowReader, match="unread"):
            await read(stream)

    assert run_story(story).aborted == 1


def test_a_slow_reader_gets_what_was_finished() -> None:
    """An answer that ends with more than the cap unread is not cut: its reader gets all of it, with its finish."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1], PARAMS)
        await core.receive_request()
        await core.send(Output(id=stream.id, tokens=list(range(MAX_PILED_TOKENS))))
        await core.send(Output(id=stream.id, tokens=[7], finish=FinishReason.stop))
        await delivered()
        (output,) = [output async for output in outputs(stream)]
        assert output.tokens == [*range(MAX_PILED_TOKENS), 7]
        assert output.finish is FinishReason.stop

    assert run_story(story).finished == 1


def test_death_wakes_every_reader() -> None:
    """fail(reason) raises EngineDead in every waiting reader, and in later streams; the first reason stays."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        streams = [client.generate([1], PARAMS) for _ in range(8)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await delivered()
        client.health()
        client.fail("rank 2 was killed by SIGKILL")
        client.fail("something else")
        done, pending = await asyncio.wait(readers, timeout=5)
        assert not pending
        assert {str(task.exception()) for task in done} == {"rank 2 was killed by SIGKILL"}
        with pytest.raises(EngineDead, match="rank 2"):
            await read(client.generate([1], PARAMS))
        with pytest.raises(EngineDead, match="rank 2"):
            client.health()

    assert run_story(story).failed == 9


def test_the_end_of_the_socket_is_death() -> None:
    """When the core's end closes streams raise EngineDead; a better reason that comes soon is the one they raise."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1], PARAMS)
        core.close()
        with pytest.raises(EngineDead, match="the core ended"):
            await read(stream)

    async def explained(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1], PARAMS)
        core.close()
        await delivered()
        client.generate([2], PARAMS)
        client.fail("the core was killed by SIGKILL")
        with pytest.raises(EngineDead, match="SIGKILL"):
            await read(stream)

    run_story(story)
    run_story(explained)


UNREADABLE = [b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"outputs": []})]


@pytest.mark.parametrize("raw", UNREADABLE)
def test_a_message_that_cannot_be_read_is_death(raw: bytes) -> None:
    """It ends the engine for the client, with the decoder's words."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1], PARAMS)
        await core.send_raw(raw)
        with pytest.raises(EngineDead, match="cannot be decoded"):
            await read(stream)

    run_story(story)


def test_load_stop_and_report() -> None:
    """report and stop reach the core as such; the core's figures reach the sink and `load`."""
    events = []

    async def story(client: EngineClient, core: FakeCore) -> None:
        client.report()
        client.stop()
        assert [await core.receive(), await core.receive()] == [Control(action="report"), Control(action="stop")]
        await core.send()
        await delivered()
        (event,) = (event for event in events if isinstance(event, EngineLoad))
        assert client.load is event.load
        assert event.load.step == 1

    run_story(story, sink=events.append)


def test_waiting_since_spans_open_requests() -> None:
    """waiting_since is None without open requests, and does not move while one after the other is open."""

    async def story(client: EngineClient, core: FakeCore) -> None:
        assert client.waiting_since is None
        first = client.generate([1], PARAMS)
        since = client.waiting_since
        second = client.generate([1], PARAMS)
        await core.send(Output(id=first.id, finish=FinishReason.stop))
        await read(first)
        assert since is not None
        assert client.waiting_since == since
        await core.send(Output(id=second.id, finish=FinishReason.stop))
        await read(second)
        assert client.waiting_since is None

    run_story(story)


def test_events_state_their_times() -> None:
    """With a clock moved by hand: ttft is submit to first output, gaps lie between outputs, tpot is (last - first) / (n - 1)."""
    clock = Clock()
    events = []

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1, 2], PARAMS)
        for seconds, tokens in ((0.5, [1]), (0.25, [2, 3]), (0.125, [4])):
            clock.now += seconds
            await core.send(Output(id=stream.id, tokens=tokens, finish=FinishReason.length if tokens == [4] else None))
            await delivered()
        clock.now += 100
        assert await read(stream) == [1, 2, 3, 4]

    run_story(story, clock=clock, sink=events.append)
    assert [event for event in events if not isinstance(event, EngineLoad)] == [
        RequestStarted(1, 2),
        FirstToken(1, 0.5),
        Tokens(1, []),
        Tokens(2, [0.125]),
        Tokens(1, [0.125]),
        RequestFinished(1, "length", 4, 0.5, 0.125, 0.875),
        EngineFailed(),
    ]


def test_one_message_is_one_event_of_tokens() -> None:
    """However many requests it has tokens for; those of a request that nobody waits for do not count. Planted: two messages."""

    def counted(*, apart: bool) -> list[Tokens]:
        events = []

        async def story(client: EngineClient, core: FakeCore) -> None:
            first, second, left = (client.generate([1], PARAMS) for _ in range(3))
            left.abort(AbortReason.client_gone)
            outputs = [Output(id=first.id, tokens=[1]), Output(id=second.id, tokens=[2, 3]), Output(id=left.id, tokens=[4])]
            for group in [[each] for each in outputs] if apart else [outputs]:
                await core.send(*group)
            await delivered()

        run_story(story, clock=Clock(), sink=events.append)
        return [event for event in events if isinstance(event, Tokens)]

    assert counted(apart=False) == [Tokens(3, [])]
    assert counted(apart=True) == [Tokens(1, []), Tokens(2, [])]


def test_an_abort_stops_the_clock() -> None:
    """A request's time ends where the front left it, however late the core confirms; later tokens are not counted."""
    clock = Clock()
    events = []

    async def story(client: EngineClient, core: FakeCore) -> None:
        stream = client.generate([1], PARAMS)
        clock.now += 1
        stream.abort(AbortReason.deadline)
        clock.now += 50
        await core.send(Output(id=stream.id, tokens=[1]))
        await core.send(Output(id=stream.id, finish=FinishReason.abort))
        await delivered()

    run_story(story, clock=clock, sink=events.append)
    assert RequestFinished(1, "deadline", 0, None, None, 1.0) in events


def test_the_fake_behaves_as_the_client() -> None:
    """FakeEngineClient streams its answer up to max_tokens or a stop id, refuses, aborts and dies as the real one does."""

    async def main() -> None:
        fake = FakeEngineClient()
        assert await read(fake.generate([4], SamplingParams(max_tokens=3))) == [5, 6, 7]
        assert await read(fake.generate([4], SamplingParams(max_tokens=9, stop_ids=(6,)))) == [5, 6]
        async with aclosing(outputs(fake.generate([4], SamplingParams(max_tokens=9)))) as reader:
            assert (await anext(reader)).tokens == [5]
        assert fake.aborted == [(3, AbortReason.client_gone)]
        fake.refuse = "no"
        with pytest.raises(InvalidRequest, match="no"):
            await read(fake.generate([4], PARAMS))
        fake.refuse = None
        stream = fake.generate([4], SamplingParams(max_tokens=9))
        fake.fail("gone")
        with pytest.raises(EngineDead, match="gone"):
            await read(stream)
        with pytest.raises(EngineDead, match="gone"):
            fake.health()
        assert fake.open == 0

    asyncio.run(main())
