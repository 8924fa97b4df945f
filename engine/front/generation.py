"""From an engine's stream of token ids to text: detokenized, cut at stop strings, with how it ended.

    Output(tokens) --Detokenizer--> text --StopStrings--> Delta((Content(text), ...), tokens, logprobs, finish)

With stop strings tokens are taken one by one, so that where a text ends does not depend on how tokens were batched; a match ends
the request in the engine too, which counts it as a success.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import GenerationFailed, SlowReader
from engine.front.client import Clock
from engine.front.text import StopStrings, TextProcessor
from engine.protocol import AbortReason, FinishReason, Logprobs, Output, SamplingParams

_QUEUE = 16


class EngineStream(Protocol):
    """One request's outputs, as `engine.front.client.Stream` gives them."""

    id: int

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def abort(self, reason: AbortReason) -> None: ...


class Engine(Protocol):
    """What the edge needs of an `EngineClient`."""

    dead: str | None

    @property
    def open(self) -> int: ...

    def generate(self, prompt: list[int], params: SamplingParams, *, clip: bool = False) -> EngineStream: ...

    def clock(self, request: int) -> Clock | None: ...


@dataclass(frozen=True)
class Job:
    """One request, validated: what goes to the engine and what happens to the text that comes back. `params`: one per choice."""

    prompt: list[int]
    params: tuple[SamplingParams, ...]
    clip: bool
    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(slots=True)
class Delta:
    """What one step added to one choice; `finish` set: it is the last. `logprobs` is empty, or one a token.

    `parts` say what the new text is, in order; none where the step gave no text yet.
    """

    parts: tuple[Content, ...]
    tokens: list[int]
    logprobs: list[Logprobs]
    finish: str | None = None


@dataclass(slots=True)
class Choice:
    """The deltas of one choice, added up, their logprobs apart: those are as large as anybody asks for."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        """One more."""
        self.texts += [part.text for part in delta.parts]
        self.tokens += delta.tokens
        self.finish = delta.finish

    @property
    def content(self) -> str:
        """The whole answer."""
        return "".join(self.texts)


class Generation:
    """One choice in the making; iterate it once. `clock`: its clock points, unless the engine was gone already.

    `cached`: tokens of its prompt that were found in the prefix cache, known with its first tokens.
    """

    def __init__(self, engine: Engine, text: TextProcessor, job: Job, params: SamplingParams) -> None:
        """Submits it."""
        self._stream = engine.generate(job.prompt, params, clip=job.clip)
        self.clock = engine.clock(self._stream.id)
        self.cached = 0
        self._detokenizer = text.detokenizer(skip_special_tokens=job.skip_special_tokens)
        self._stops = StopStrings(job.stops) if job.stops else None
        self._stop_ids = frozenset(params.stop_ids)

    def abort(self, reason: AbortReason) -> None:
        """End it in the engine; nothing when it has ended."""
        self._stream.abort(reason)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Every step's delta, the last with `finish`. Raises what the engine's stream raises."""
        async for output in self._stream:
            self.cached += output.cached
            delta = self._cut(output) if self._stops else self._plain(output)
            yield delta
            if delta.finish is not None:
                return

    def _plain(self, output: Output) -> Delta:
        text = self._detokenizer.push(self._shown(output))
        if output.finish is not None:
            text += self._detokenizer.flush()
        return Delta(_content(text), output.tokens, output.logprobs, _finish(output))

    def _shown(self, output: Output) -> list[int]:
        """The tokens that are text: not the stop id that ended it."""
        ended = output.finish is FinishReason.stop and output.tokens and output.tokens[-1] in self._stop_ids
        return output.tokens[:-1] if ended else output.tokens

    def _cut(self, output: Output) -> Delta:
        assert self._stops is not None
        shown, parts = self._shown(output), []
        for place, text in enumerate(self._texts(shown, final=output.finish is not None)):
            kept, match = self._stops.push(text)
            parts.append(kept)
            if match is not None:
                self._stream.abort(AbortReason.stop_string)
                used = min(place + 1, len(output.tokens))
                return Delta(_content("".join(parts)), output.tokens[:used], output.logprobs[:used], FinishReason.stop.value)
        if output.finish is not None:
            parts.append(self._stops.flush())
        return Delta(_content("".join(parts)), output.tokens, output.logprobs, _finish(output))

    def _texts(self, tokens: Sequence[int], *, final: bool) -> Iterator[str]:
        """Each token's text, then what was held back."""
        for token in tokens:
            yield self._detokenizer.push([token])
        if final:
            yield self._detokenizer.flush()


def _content(text: str) -> tuple[Content, ...]:
    return (Content(text),) if text else ()


def _finish(output: Output) -> str | None:
    """OpenAI's word for the end. An abort that this side did not ask for is a failure: the text is not complete."""
    if output.finish is None:
        return None
    if output.finish not in (FinishReason.stop, FinishReason.length):
        raise GenerationFailed("the engine ended the request early")
    return output.finish.value


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Delta]]:
    """(choice, delta) of several generations as they come; the first error ends them all."""
    if len(generations) == 1:
        async with aclosing(generations[0].deltas()) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue(_QUEUE)
    tasks = [asyncio.create_task(_pump(index, generation, queue)) for index, generation in enumerate(generations)]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                _abort_siblings(generations, item)
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _abort_siblings(generations: Sequence[Generation], error: BaseException) -> None:
    """Before their streams are closed, which would say that the client has gone."""
    reason = AbortReason.slow_reader if isinstance(error, SlowReader) else AbortReason.sibling_failed
    for generation in generations:
        generation.abort(reason)


async def _pump(index: int, generation: Generation, queue: asyncio.Queue[tuple[int, Delta] | BaseException | None]) -> None:
    try:
        async with aclosing(generation.deltas()) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                await queue.put((index, delta))
    except Exception as error:  # noqa: BLE001 - carried to the reader, who raises it
        await queue.put(error)
        return
    await queue.put(None)
