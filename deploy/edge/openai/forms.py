"""Answers of chats and text completions, whole and in chunks.

A stream's chunks differ in one string, so prefix and suffix are encoded once. Thoughts are in
`reasoning_content` and `reasoning`: clients read either.
"""

import abc
import math
import secrets
import time
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from deploy.edge.answers.response_format import JSON, ServedModel, Usage
from deploy.edge.openai.data_events import DONE, DataEvents
from deploy.edge.openai.schemas import CompletionKeys
from engine.front.generation import Choice, Delta
from engine.front.parts import Arguments, Content, Part, Reasoning, ToolCallStart
from engine.front.text import Detokenizer
from engine.protocol import JsonObject, Logprobs

_FLOOR = -9999.0  # what OpenAI sends for a probability of zero: JSON has no infinity

encode = msgspec.json.encode


def usage_json(usage: Usage) -> JsonObject:
    return _counts(usage.prompt, usage.completion) | {
        "prompt_tokens_details": {"cached_tokens": usage.cached, **usage.media},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
    }


def _counts(prompt: int, completion: int) -> JsonObject:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class _ChoiceSoFar(msgspec.Struct):
    """Logprobs are encoded as they come, so that an answer ends quickly."""

    reply: Choice = msgspec.field(default_factory=Choice)
    lists: dict[str, list[bytes]] = {}
    prompt: list[bytes] = []
    shown: Detokenizer | None = None
    offset: int = 0


class _Base(DataEvents, abc.ABC):
    """`FIRST`: the chunk before the first token; `EMPTY`: a chunk without text."""

    media_type = JSON
    PREFIX: ClassVar[str]
    CHUNK: ClassVar[str]
    WHOLE: ClassVar[str]
    FIRST: ClassVar[bytes]
    EMPTY: ClassVar[bytes]

    def __init__(self, model: ServedModel, request: CompletionKeys) -> None:
        self.id = f"{self.PREFIX}-{secrets.token_hex(12)}"
        self.model = model
        self._usage_chunks = request.usage_chunks
        self._prompt_logprobs = request.prompt_logprobs
        self._echoed = request.echoed_logprobs
        self._skips = request.skip_special_tokens is not False
        self._created = int(time.time())
        self._head = b"data: " + encode(self._identity(self.CHUNK))[:-1] + b',"choices":['
        if self._usage_chunks == "none":
            self._tail = b"]}\n\n"
        else:
            self._tail = b'],"usage":null}\n\n'
        self._tokens = 0  # for the usage in each chunk
        self._choices: dict[int, _ChoiceSoFar] = {}

    @abc.abstractmethod
    def _chunk(self, index: int, delta: Delta) -> bytes:
        ...

    @abc.abstractmethod
    def _logprobs(self, choice: _ChoiceSoFar, delta: Delta) -> JsonObject | None:
        """Lists by name, one entry per token."""

    @abc.abstractmethod
    def _whole(self, index: int, choice: _ChoiceSoFar) -> JsonObject:
        ...

    def events(self, index: int, delta: Delta) -> bytes:
        if self._usage_chunks == "each":
            self._tokens += len(delta.tokens)
            self._tail = b'],"usage":%b}\n\n' % encode(_counts(self.usage.prompt, self._tokens))
        events = b""
        if index not in self._choices:
            self._choices[index] = _ChoiceSoFar()
            if self.FIRST:
                events = self._event(index, self.FIRST)
            else:
                events = b""
        if delta.parts or delta.logprobs or delta.prompt:
            events += self._chunk(index, delta)
        if delta.finish is None:
            return events
        return events + self._event(index, self.EMPTY, ended=encode(_ended(delta))[1:-1])

    def end(self, usage: Usage) -> bytes:
        if self._usage_chunks == "none":
            return DONE
        return self._head + b'],"usage":' + encode(usage_json(usage)) + b"}\n\n" + DONE

    def add(self, index: int, delta: Delta) -> None:
        choice = self._choices.setdefault(index, _ChoiceSoFar())
        choice.reply.add(delta)
        for name, values in (self._logprobs(choice, delta) or {}).items():
            choice.lists.setdefault(name, []).append(encode(values)[1:-1])
        if delta.prompt is not None and self._prompt_logprobs is not None:
            pairs = zip(delta.prompt.tokens, delta.prompt.logprobs, strict=True)
            entries = [None if entry is None else self._prompt_entry(token, *entry) for token, entry in pairs]
            choice.prompt.append(encode(entries)[1:-1])

    def full(self, usage: Usage) -> bytes:
        answers = [self._whole(index, choice) | _ended(choice.reply) for index, choice in sorted(self._choices.items())]
        return encode(self._identity(self.WHOLE) | {"choices": answers, "usage": usage_json(usage)} | self._about_prompt())

    def _about_prompt(self) -> JsonObject:
        return {}

    def _scored(self, choice: _ChoiceSoFar) -> JsonObject:
        if self._prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": _array(choice.prompt)}

    def _prompt_entry(self, token: int, rank: int, logprobs: Logprobs) -> JsonObject:
        """The token itself comes first."""
        entries = {token: (rank, logprobs.chosen)}
        for position, (other, value) in enumerate(logprobs.top[: self._prompt_logprobs], 1):
            entries.setdefault(other, (position, value))
        return {
            str(other): {"logprob": _finite(value), "rank": position, "decoded_token": self.model.text_of(other)}
            for other, (position, value) in entries.items()
        }

    def _identity(self, kind: str) -> JsonObject:
        return {"id": self.id, "object": kind, "created": self._created,
                "model": self.model.name, "system_fingerprint": self.model.fingerprint}  # fmt: skip

    def _event(self, index: int, said: bytes, logprobs: bytes = b"null", ended: bytes = b'"finish_reason":null') -> bytes:
        return b'%b{"index":%d,%b,"logprobs":%b,%b}%b' % (self._head, index, said, logprobs, ended, self._tail)


class ChatFormat(_Base):
    PREFIX = "chatcmpl"
    CHUNK = "chat.completion.chunk"
    WHOLE = "chat.completion"
    FIRST = b'"delta":{"role":"assistant","content":"","refusal":null}'
    EMPTY = b'"delta":{}'

    def _chunk(self, index: int, delta: Delta) -> bytes:
        """One chunk for each part; the first has all logprobs."""
        logprobs = encode(self._lists(self._logprobs(self._choices[index], delta)))
        events = []
        for part in delta.parts or (Content(""),):
            events.append(self._event(index, b'"delta":' + _delta(part), logprobs))
            logprobs = b"null"
        return b"".join(events)

    def _about_prompt(self) -> JsonObject:
        """The first choice reports the one prompt."""
        return self._scored(self._choices[0])

    def _lists(self, entries: JsonObject | None) -> JsonObject | None:
        if entries:
            return {**entries, "refusal": None}
        return None

    def _logprobs(self, choice: _ChoiceSoFar, delta: Delta) -> JsonObject | None:  # noqa: ARG002 - as the text has it
        if not delta.logprobs:
            return None
        return {
            "content": [
                self._named(token, logprobs.chosen) | {"top_logprobs": [self._named(*pair) for pair in logprobs.top]}
                for token, logprobs in zip(delta.tokens, delta.logprobs, strict=True)
            ]
        }

    def _whole(self, index: int, choice: _ChoiceSoFar) -> JsonObject:
        reply = choice.reply
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}} for call in reply.calls
        ]
        content = reply.content if reply.content or not calls else None
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        if reasoning := reply.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, "logprobs": self._lists(_arrays(choice))}

    def _named(self, token: int, logprob: float) -> JsonObject:
        return {"token": self.model.text_of(token), "logprob": _finite(logprob), "bytes": list(self.model.pieces.bytes_of(token))}


class TextFormat(_Base):
    """Prompt logprobs are in `logprobs` if the prompt is echoed, and separate."""

    PREFIX = "cmpl"
    CHUNK = "text_completion"
    WHOLE = "text_completion"
    FIRST = b""
    EMPTY = b'"text":""'

    def _chunk(self, index: int, delta: Delta) -> bytes:
        return self._event(index, b'"text":' + encode(text_of(delta)), encode(self._logprobs(self._choices[index], delta)))

    def _logprobs(self, choice: _ChoiceSoFar, delta: Delta) -> JsonObject | None:
        """A token's offset is that of the character which it begins or continues."""
        tokens, reported = self._reported(delta)
        if not reported:
            return None
        shown = choice.shown = choice.shown or Detokenizer(self.model.pieces, skip_special_tokens=self._skips)
        starts = [choice.offset]
        for token in tokens:
            starts.append(starts[-1] + len(shown.push([token])))
        choice.offset = starts.pop()
        return {
            "tokens": [self.model.text_of(token) for token in tokens],
            "token_logprobs": [None if entry is None else _finite(entry.chosen) for entry in reported],
            "top_logprobs": [self._top(*pair) for pair in zip(tokens, reported, strict=True)],
            "text_offset": starts,
        }

    def _whole(self, index: int, choice: _ChoiceSoFar) -> JsonObject:
        return {"index": index, "text": choice.reply.content, "logprobs": _arrays(choice)} | self._scored(choice)

    def _reported(self, delta: Delta) -> tuple[Sequence[int], Sequence[Logprobs | None]]:
        if delta.prompt is None:
            return delta.tokens, delta.logprobs
        if (most := self._echoed) is None:
            return (), ()
        entries = [None if entry is None else Logprobs(entry[1].chosen, entry[1].top[:most]) for entry in delta.prompt.logprobs]
        return delta.prompt.tokens, entries

    def _top(self, token: int, entry: Logprobs | None) -> dict[str, float] | None:
        """Logprobs by text, including the token's. Of alternatives with equal text the likeliest
        counts."""
        if entry is None:
            return None
        by_text: dict[str, float] = {}
        for other, value in (*entry.top, (token, entry.chosen)):
            by_text.setdefault(self.model.text_of(other), _finite(value))
        return by_text


def _ended(choice: Choice | Delta) -> dict[str, str | int | None]:
    return {"finish_reason": choice.finish, "stop_reason": choice.stop}


def _array(pieces: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def _arrays(choice: _ChoiceSoFar) -> JsonObject | None:
    return {name: _array(pieces) for name, pieces in choice.lists.items()} or None


def _delta(part: Part) -> bytes:
    match part:
        case Content(text):
            return b'{"content":%b}' % encode(text)
        case Reasoning(text):
            return b'{"reasoning_content":%b,"reasoning":%b}' % (encode(text), encode(text))
        case ToolCallStart(index, number, name):
            begun = {"index": index, "id": number, "type": "function", "function": {"name": name, "arguments": ""}}
            return b'{"tool_calls":[%b]}' % encode(begun)
        case Arguments(index, text):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, encode(text))


def text_of(delta: Delta) -> str:
    return "".join(part.text for part in delta.parts if isinstance(part, Content))


def _finite(logprob: float) -> float:
    if math.isfinite(logprob):
        return logprob
    return _FLOOR
