"""A core that answers by a script, and tells its load as the real one does: how many requests it has read, and how many wait."""

import asyncio
import struct
from collections.abc import Callable, Iterator

import msgspec

from engine.protocol import (
    Abort,
    AbortReason,
    AdapterChange,
    Control,
    FinishReason,
    FrontMessage,
    GenerateRequest,
    Load,
    Logprobs,
    Output,
    PromptLogprobs,
)
from tests.support.engine.fakes import FakeCore
from tests.support.engine.load_figures import load, pool

LOAD = load(pools=[pool("sliding", 3, 7), pool("full", 0, 9)])


class ScriptedCore(FakeCore):
    """Answers every request with `steps` (token ids of each step), then `finish`; cut at max_tokens as the real one does.

    queue_s, prefill_s   how long a request waits, and then takes to its first token; delay_s: between steps
    forever              the steps again and again
    at_once              all steps of an answer come in one message
    refuse, fail_after   refuse every request with that sentence; fail at that step each one that `fails`
    cached               tokens of each prompt that are said to be cached, with its first output; a list: of each request in turn
    drafts               of each step, of which those among its tokens are accepted
    requests, aborts     what the client asked for since the last reset; changes: of adapters; sent: tokens
    deaf                 adapters that change nothing
    """

    def __init__(self) -> None:
        super().__init__()
        self._received = 0
        self._waiting = set[int]()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.reset()

    def reset(self) -> None:
        """The script and the records of a new core; what it has read still counts in its load."""
        self.steps: list[list[int]] = [[300], [301], [302]]
        self.finish = FinishReason.stop
        self.queue_s = self.prefill_s = self.delay_s = 0.0
        self.forever = self.at_once = False
        self.cached: int | list[int] = 0
        self.drafts = 0
        self.deaf = set[int]()
        self.refuse: str | None = None
        self.fail_after: int | None = None
        self.fails: Callable[[GenerateRequest], bool] = lambda request: True
        self.requests = list[GenerateRequest]()
        self.aborts = list[tuple[int, AbortReason]]()
        self.changes = list[tuple[str, int]]()
        self.sent = 0

    def answer_endlessly(self, delay_s: float) -> None:
        """The steps again and again, so far apart."""
        self.forever, self.delay_s = True, delay_s

    @property
    def abort_reasons(self) -> list[AbortReason]:
        return [reason for _, reason in self.aborts]

    async def serve(self) -> None:
        """Until the client closes its end."""
        while (message := await self.receive_or_end()) is not None:
            await self._handle(message)

    async def _handle(self, message: FrontMessage) -> None:
        match message:
            case GenerateRequest():
                self._received += 1
                self._waiting.add(message.id)
                self._tasks[message.id] = asyncio.create_task(self._answer(message, self.queue_s))
                self.requests.append(message)  # who waits for it may then change the script
            case Abort():
                self.aborts.append((message.id, message.reason))
                self._tasks.pop(message.id).cancel()
                self._waiting.discard(message.id)
                success = message.reason is AbortReason.stop_string
                await self.send(Output(id=message.id, finish=FinishReason.stop if success else FinishReason.abort))
            case AdapterChange():
                self.changes.append((message.action, message.id))
            case Control():
                await self.send()

    async def _answer(self, request: GenerateRequest, queue_s: float) -> None:
        await asyncio.sleep(queue_s)
        self._waiting.remove(request.id)
        await self.send(started=[request.id])
        await asyncio.sleep(self.prefill_s)
        if self.refuse is not None:
            await self.send(Output(id=request.id, finish=FinishReason.error, error=self.refuse, invalid=True))
            return
        changed = request.adapter >= 0 and request.adapter not in self.deaf
        for piece in prompt_logprobs(request, shift=float(changed)):
            await self.send(Output(id=request.id, prompt_logprobs=[piece]))
            await asyncio.sleep(0)
        found = self.cached if isinstance(self.cached, int) else self.cached[self.requests.index(request)]
        left = request.params.max_tokens
        place, ready = 0, list[Output]()
        while left > 0 and (self.forever or place < len(self.steps)):
            if self.fail_after == place and self.fails(request):
                await self.send(Output(id=request.id, finish=FinishReason.error, error="the logits are not finite"))
                return
            tokens = self.steps[place % len(self.steps)][:left]
            left -= len(tokens)
            place += 1
            last = not self.forever and place == len(self.steps)
            finish = FinishReason.length if left == 0 else self.finish if last else None
            self.sent += len(tokens)
            cached, logprobs = found if place == 1 else 0, _logprobs(request, tokens)
            accepted = min(self.drafts, len(tokens) - 1)
            drafts = {"accepted": accepted, "rejected": self.drafts - accepted}
            ready.append(Output(id=request.id, tokens=tokens, logprobs=logprobs, finish=finish, cached=cached, **drafts))
            if not self.at_once or finish is not None:
                await self.send(*ready)
                ready.clear()
                await asyncio.sleep(self.delay_s)

    def load(self) -> Load:
        """What the real core would tell now."""
        return msgspec.structs.replace(LOAD, received=self._received, waiting=len(self._waiting))


def prompt_logprobs(request: GenerateRequest, shift: float = 0.0) -> Iterator[PromptLogprobs]:
    """Of each token but the first -1 / 8 for each place in the prompt, rank 3, and the ids that follow it as the likeliest; in two
    pieces, or more."""
    count, prompt = request.params.prompt_logprobs, request.tokens
    if count is None or len(prompt) < 2:
        return
    size, values = min(256, len(prompt) // 2), [-0.0625 * place for place in range(count)]
    for first in range(1, len(prompt), size):
        rows = [
            struct.pack(f"<fi{count}i{count}f", -at / 8 - shift, 3, *range(token + 1, token + 1 + count), *values)
            for at, token in enumerate(prompt[first : first + size], first)
        ]
        yield PromptLogprobs(first, count, b"".join(rows))


def _logprobs(request: GenerateRequest, tokens: list[int]) -> list[Logprobs]:
    count = request.params.logprobs
    if count is None:
        return []
    return [Logprobs(-0.5 - index, [(token + place, -0.5 - place) for place in range(count)]) for index, token in enumerate(tokens)]
