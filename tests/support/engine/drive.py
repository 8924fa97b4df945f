"""Requests driven through a running group: what each one gave, and what the core's figures showed meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from cluster.children import Command, child_command
from cluster.group import Group
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.events import EngineLoad, Event, to_each
from engine.front.client import EngineClient
from engine.protocol import AbortReason, DecodedItem, FinishReason, Load, Logprobs, SamplingParams
from tests.support.engine.outcomes import Outcomes
from tests.support.engine.outputs import outputs


@dataclass(frozen=True)
class Request:
    """A prompt and how it samples. `leave_after` that many tokens the reader aborts; None: it stays to the end. `adapter`: its
    index, -1: none."""

    prompt: list[int]
    params: SamplingParams
    leave_after: int | None = None
    media: tuple[DecodedItem, ...] = ()
    adapter: int = -1


@dataclass
class Answer:
    """What a request gave until its end: `stop`, `length`, `left` (its reader aborted it) or `refused`. `prompt`: ranks and
    logprobs of the prompt's tokens, from the second on."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt: list[tuple[int, Logprobs]] = field(default_factory=list)
    end: str = ""


@dataclass
class Figures:
    """The core's figures over a run: the last ones, each pool's peak, and how many single steps held chunks and decodes at once."""

    last: Load | None = None
    mixed: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    outcomes: Outcomes = field(default_factory=Outcomes)

    def see(self, event: Event) -> None:
        if not isinstance(event, EngineLoad):
            return
        load = event.load
        last, self.last = self.last, load
        for pool in load.pools:
            self.peaks[pool.group] = max(pool.used, self.peaks.get(pool.group, 0))
        if last is not None and load.step == last.step + 1:
            both = load.prefill_tokens > last.prefill_tokens and load.decode_tokens > last.decode_tokens
            self.mixed += both


@contextmanager
def booted(config: EngineConfig, command: Command = child_command) -> Iterator[Group]:
    """A group that is ready; killed at the end."""
    group = Group.boot(config, command)
    try:
        yield group
    finally:
        group.kill()


@asynccontextmanager
async def attached(group: Group) -> AsyncIterator[tuple[EngineClient, Figures]]:
    """The group's one client, and the figures that it sees; closed at the end."""
    figures = Figures()
    client = EngineClient(group.front_socket, group.media, sink=to_each(figures.see, figures.outcomes))
    await client.start()
    try:
        yield client, figures
    finally:
        await client.close()


async def ask(client: EngineClient, request: Request) -> Answer:
    """One request to its end; GenerationFailed and EngineDead are raised."""
    answer = Answer()
    stream = client.generate(request.prompt, request.params, media=request.media, adapter=request.adapter)
    leave = request.leave_after
    if leave == 0:
        await asyncio.sleep(0.002 * (stream.id % 20))  # in the queue, in its prefill, now and then later
        stream.abort(AbortReason.client_gone)
    try:
        async for output in outputs(stream):
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
            for piece in output.prompt_logprobs:
                assert piece.first == len(answer.prompt) + 1, (piece.first, len(answer.prompt))
                answer.prompt += piece.entries()
            answer.end = _end(output.finish)
            if leave is not None and len(answer.tokens) >= leave:
                stream.abort(AbortReason.client_gone)
    except InvalidRequest:
        answer.end = "refused"
        return answer
    answer.end = answer.end or "left"
    return answer


def _end(finish: FinishReason | None) -> str:
    return "" if finish is None else finish.value


async def ask_all(client: EngineClient, requests: Iterable[Request], at_once: int) -> list[Answer]:
    """Every request, `at_once` of them open at any time; answers in the requests' order."""
    room = asyncio.Semaphore(at_once)

    async def one(request: Request) -> Answer:
        async with room:
            return await ask(client, request)

    return await asyncio.gather(*(one(request) for request in requests))


def hashes(group: Group) -> set[int]:
    """The ranks' state hashes, once all have finished the same step."""
    while len({status.finished for status in group.status()[:-1]}) > 1:
        time.sleep(0.01)
    return {status.hashes[status.finished] for status in group.status()[:-1]}


async def still(client: EngineClient) -> Load:
    """The core's figures, asked for once every request has ended."""
    while client.open:  # noqa: ASYNC110 - a test may poll
        await asyncio.sleep(0.01)
    before = client.load
    client.report()
    while client.load is before:  # noqa: ASYNC110 - a test may poll
        await asyncio.sleep(0.01)
    assert client.load is not None
    return client.load
