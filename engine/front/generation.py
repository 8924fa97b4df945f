"""From token ids to typed parts: detokenized, parsed, cut at stop strings, with the finish reason.

With stop strings tokens are read one by one, so batching does not change the end. Thoughts and
calls are never cut.
"""

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec

from engine.adapters import NO_ADAPTER
from engine.errors import GenerationFailed, SlowReader
from engine.front.client import EngineClient
from engine.front.parts import Arguments, Content, Part, Reasoning, ToolCallStart, joined
from engine.front.reply import Markers, ReplyParser
from engine.front.text import Detokenizer, StopStrings, TextProcessor
from engine.front.tools import NO_TOOLS, Tools
from engine.protocol import AbortReason, DecodedItem, FinishReason, Logprobs, Output, PromptLogprobs, SamplingParams

TOOL_CALLS = "tool_calls"  # OpenAI's finish reason when the model waits for the results of its calls
_MOST_LOGPROBS = 4096  # of tokens and alternatives in one delta: a few milliseconds of the event loop

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A validated request, and how its reply is read. Fields of GenerateRequest mean the same.

    prompts    int32 token ids; choices are equally many per prompt, in the order of prompts
    params     one per choice
    markers    of a chat, whose reply may have thoughts and calls of `tools`;   one_call  it ends with its first call
    media      of a chat's one prompt
    echoes     prompt texts that begin the answers, or empty;   echo_only  the answer is nothing else
    """

    prompts: "tuple[array[int], ...]"
    params: tuple[SamplingParams, ...]
    clip: bool
    salt: str = ""
    priority: int = 0
    adapter: int = NO_ADAPTER
    client: str = ""
    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    markers: Markers | None = None
    tools: Tools = NO_TOOLS
    one_call: bool = False
    echoes: tuple[str, ...] = ()
    echo_only: bool = False
    media: tuple[DecodedItem, ...] = ()

    def prompt(self, choice: int) -> "array[int]":
        return self.prompts[choice // self.choices_each]

    @property
    def choices_each(self) -> int:
        return len(self.params) // len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def media_tokens(self) -> dict[str, int]:
        counts = Counter[str]()
        for item in self.media:
            counts[f"{item.kind}_tokens"] += item.soft_tokens
            if item.kind == "audio":
                counts["audio_clips"] += 1
        return dict(counts)


class PromptPart(msgspec.Struct):
    """The first prompt token has no rank and logprobs."""

    tokens: Sequence[int]
    logprobs: Sequence[tuple[int, Logprobs] | None]


class Delta(msgspec.Struct):
    """One output's addition to one choice; the last has `finish`. `logprobs`: empty, or one entry
    per token. Deltas with `prompt` come first."""

    parts: Sequence[Part]
    tokens: list[int]
    logprobs: list[Logprobs]
    finish: str | None = None
    stop: str | int | None = None
    prompt: PromptPart | None = None


BlockKind = Literal["reasoning", "text", "call"]
_BLOCK_KINDS: dict[type[Part], BlockKind] = {Reasoning: "reasoning", Content: "text", Arguments: "call"}


class ReplyBlock(msgspec.Struct):
    """A run of parts of one kind. `pieces`: text, or a call's arguments."""

    index: int
    kind: BlockKind
    id: str = ""
    name: str = ""
    pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Choice(msgspec.Struct):
    """The sum of one choice's deltas, without logprobs, which may be large.

        parts     Reasoning Reasoning   Content Content Content   ToolCallStart Arguments Arguments
        blocks    |-- reasoning ----|   |------ text ---------|   |------------ call -------------|
    """

    blocks: list[ReplyBlock] = []
    tokens: list[int] = []
    finish: str | None = None
    stop: str | int | None = None

    def add(self, delta: Delta) -> None:
        for part in delta.parts:
            self.take(part)
        self.tokens += delta.tokens
        self.finish = delta.finish
        self.stop = delta.stop

    def take(self, part: Part) -> ReplyBlock:
        blocks = self.blocks
        if isinstance(part, ToolCallStart):
            blocks.append(ReplyBlock(len(blocks), "call", part.id, part.name))
            return blocks[-1]
        kind = _BLOCK_KINDS[type(part)]
        text = part.text
        if not blocks or blocks[-1].kind != kind:
            if kind == "reasoning" and self._texts_of(kind):
                text = text.removeprefix("\n")  # which joins thoughts where they are one text
            blocks.append(ReplyBlock(len(blocks), kind))
        blocks[-1].pieces.append(text)
        return blocks[-1]

    @property
    def content(self) -> str:
        return "".join(self._texts_of("text"))

    @property
    def reasoning(self) -> str:
        return "\n".join(self._texts_of("reasoning"))

    def _texts_of(self, kind: BlockKind) -> list[str]:
        return [block.text for block in self.blocks if block.kind == kind]

    @property
    def calls(self) -> list[ReplyBlock]:
        return [block for block in self.blocks if block.kind == "call"]


class PlainText:
    reasoning_tokens = calls = ended_calls = 0

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    def push(self, tokens: Sequence[int]) -> list[Part]:
        return _content(self._detokenizer.push(tokens))

    def end(self, *, cut: bool) -> list[Part]:  # noqa: ARG002 - as ReplyParser has it
        return _content(self._detokenizer.flush())


def _reader(text: TextProcessor, job: Job, prompt: Sequence[int]) -> ReplyParser | PlainText:
    skip = job.skip_special_tokens
    if job.markers is None:
        return PlainText(Detokenizer(text.pieces, skip_special_tokens=skip))
    return ReplyParser(text.pieces, job.markers, job.tools, prompt=prompt, show_special=not skip)


class Generation:
    def __init__(self, engine: EngineClient, text: TextProcessor, job: Job, choice: int) -> None:
        prompt = job.prompt(choice)
        params = job.params[choice]
        self.choice = choice
        self._prompt = prompt
        if job.echoes:
            self._echo = job.echoes[choice // job.choices_each]
        else:
            self._echo = ""
        self._echo_only = job.echo_only
        self._tells_logprobs = params.prompt_logprobs is not None
        self.stream = engine.generate(
            prompt,
            params,
            clip=job.clip,
            salt=job.salt,
            priority=job.priority,
            adapter=job.adapter,
            client=job.client,
            media=job.media,
        )
        self.clock = self.stream.clock
        self.cached = self.accepted = self.rejected = 0
        self.has_ended = False
        self._reader = _reader(text, job, prompt)
        self._one_call = job.one_call
        self._may_stop_early = bool(job.stops) or job.one_call
        self._stops = StopStrings(job.stops)
        self._stop_ids = frozenset(params.stop_ids)
        self._own_stop_ids = self._stop_ids.difference(text.eos_ids)

    @property
    def reasoning_tokens(self) -> int:
        """Markers included."""
        return self._reader.reasoning_tokens

    @property
    def ready(self) -> bool:
        return not self.has_ended and self.stream.ready

    def take(self) -> Iterator[Delta]:
        """New deltas; the last has `finish`. Raises as the engine's stream."""
        if not self.ready:
            return
        output = self.stream.take()
        if output is None:
            self.has_ended = True
            return
        self.cached += output.cached
        self.accepted += output.accepted
        self.rejected += output.rejected
        yield from self._prompt_deltas(output.prompt_logprobs)
        for piece in _split_logprobs(output) if output.logprobs else (output,):
            delta = self._delta(piece)
            self.has_ended = delta.finish is not None
            yield delta
            if self.has_ended:
                return

    def _prompt_deltas(self, reported: Sequence[PromptLogprobs]) -> Iterator[Delta]:
        if self._echo or self._tells_logprobs:
            first = PromptPart(self._prompt[:1], [None]) if self._tells_logprobs else None
            yield Delta(_content(self._echo), [], [], prompt=first)
            self._echo = ""
            self._tells_logprobs = False
        for whole in reported:
            for piece in whole.cut(_MOST_LOGPROBS // (1 + whole.alternatives)):
                tokens = self._prompt[piece.first : piece.first + piece.count]
                yield Delta((), [], [], prompt=PromptPart(tokens, piece.entries()))

    def _delta(self, output: Output) -> Delta:
        if self._echo_only:
            return Delta((), [], [], FinishReason.length.value if output.finish else None)
        if output.finish is None and not self._may_stop_early:  # nearly every output
            return Delta(self._reader.push(output.tokens), output.tokens, output.logprobs)
        kept: list[Part] = []
        for index, parts in enumerate(self._by_token(output)):
            matched = self._keep(parts, kept)
            if matched is not None or (self._one_call and self._reader.ended_calls):
                self.stream.abort(AbortReason.stop_string)
                used = min(index + 1, len(output.tokens))
                finish = self._finish(FinishReason.stop)
                return Delta(joined(kept), output.tokens[:used], output.logprobs[:used], finish, matched)
        if output.finish is not None:
            kept += _content(self._stops.flush())
        stop = last if (last := _last(output)) in self._own_stop_ids else None
        return Delta(joined(kept), output.tokens, output.logprobs, self._finish(output.finish), stop)

    def _by_token(self, output: Output) -> Iterator[list[Part]]:
        """Without the stop id at the end, then what was held back."""
        for token in output.tokens[:-1] if _last(output) in self._stop_ids else output.tokens:
            yield self._reader.push([token])
        if output.finish is not None:
            yield self._reader.end(cut=output.finish is FinishReason.length)

    def _keep(self, parts: Iterable[Part], kept: list[Part]) -> str | None:
        """Returns the matched stop string, or None. Matches do not cross a thought or call."""
        for part in parts:
            if not isinstance(part, Content):
                kept += (*_content(self._stops.flush()), part)
                continue
            text, match = self._stops.push(part.text)
            kept += _content(text)
            if match is not None:
                return match
        return None

    def _finish(self, finish: FinishReason | None) -> str | None:
        """OpenAI's finish reason. GenerationFailed for an abort that this side did not ask for."""
        if finish is None:
            return None
        if finish not in (FinishReason.stop, FinishReason.length):
            raise GenerationFailed("the engine ended the request early")
        if finish is FinishReason.stop and self._reader.calls:
            return TOOL_CALLS
        return finish.value


def _split_logprobs(output: Output) -> Iterator[Output]:
    """Pieces of an output with many logprobs for a slow reader. The last has its end."""
    count = len(output.tokens)
    step = max(1, _MOST_LOGPROBS // (1 + len(output.logprobs[0].top)))
    for first in range(0, count, step):
        end = first + step
        finish = output.finish if end >= count else None
        yield Output(output.id, output.tokens[first:end], output.logprobs[first:end], finish)


def _last(output: Output) -> int | None:
    if output.finish is FinishReason.stop and output.tokens:
        return output.tokens[-1]
    return None


def _content(text: str) -> list[Part]:
    if text:
        return [Content(text)]
    return []


@dataclass
class DeltaReader(Generic[T]):
    """Reads several generations; `convert` turns new (choice, delta) pairs into the result of
    `next`.

    While a reader waits, the client's callback converts pairs, for all readers before the first
    writes. `put` gets the result without a task switch, and returns what the reader must still do.
    """

    generations: Sequence[Generation]
    convert: Callable[[Iterator[tuple[int, Delta]]], T]
    put: Callable[[T], T | None] | None = None
    _waiter: "asyncio.Future[T | None] | None" = None
    _error: Exception | None = None

    def __post_init__(self) -> None:
        for generation in self.generations:
            generation.stream.on_ready = self._arrived

    @property
    def has_ended(self) -> bool:
        return self._error is None and all(generation.has_ended for generation in self.generations)

    @property
    def ready(self) -> bool:
        return self._error is not None or any(generation.ready for generation in self.generations)

    async def next(self) -> T:
        """The first error of a stream ends all."""
        if not self.ready:
            self._waiter = asyncio.get_running_loop().create_future()
            converted = await self._waiter
            if converted is not None:
                return converted
        return self.convert(self._taken())

    def _arrived(self) -> None:
        waiter = self._waiter
        self._waiter = None
        if waiter is None or waiter.done():
            return
        try:
            converted = self.convert(self._taken())
        except Exception as error:  # noqa: BLE001 - the reader raises it
            self._error = error
            waiter.set_result(None)
            return
        if self.put is None:
            waiter.set_result(converted)
        else:
            waiter.get_loop().call_soon(self._put_now, waiter, converted, self.put)

    def _put_now(self, waiter: "asyncio.Future[T | None]", converted: T, put: Callable[[T], T | None]) -> None:
        if waiter.done():  # the reader has gone
            return
        left = None
        try:
            left = put(converted)
        except Exception as error:  # noqa: BLE001 - the reader raises it
            self._error = error
        if left is not None or self.has_ended:
            waiter.set_result(left)
            return
        self._waiter = waiter
        if self.ready:
            self._arrived()

    def _taken(self) -> Iterator[tuple[int, Delta]]:
        """New pairs; an error is raised after earlier pairs."""
        if self._error is not None:
            raise self._error
        has_yielded = False
        for generation in self.generations:
            try:
                for delta in generation.take():
                    has_yielded = True
                    yield generation.choice, delta
            except Exception as error:
                if isinstance(error, SlowReader):
                    reason = AbortReason.slow_reader
                else:
                    reason = AbortReason.sibling_failed
                for other in self.generations:  # closing their streams would report that the client has gone
                    if other is not generation:
                        other.stream.abort(reason)
                if not has_yielded:
                    raise
                self._error = error
                return
