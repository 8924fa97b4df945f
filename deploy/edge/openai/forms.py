"""The two answers, chat and text completion, as bytes: whole, and chunk by chunk.

A stream's JSON is the same from chunk to chunk but for one string: prefix and suffix are encoded once per stream.

    data: {"id":...,"choices":[{"index":0,"delta":{"content":   TEXT   },"logprobs":null,"finish_reason":null}],"usage":null}

First chunk: delta.role. Last: finish_reason. With include_usage one more, without choices, and "usage": null in all others; with
continuous_usage_stats beside it (vLLM's) each says the tokens so far, of all choices together.
Thoughts are `reasoning_content`, and `reasoning` once more: clients read the one or the other.
"""

import abc
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from deploy.edge.openai.openai_error import OPENAI_ERROR
from deploy.edge.response_format import ServedModel, Usage
from engine.errors import QuartetError
from engine.front.generation import Call, Choice, Delta
from engine.front.parts import Arguments, Content, Part, Reasoning, ToolCallStart
from engine.protocol import Logprobs

DONE = b"data: [DONE]\n\n"
_FLOOR = -9999.0  # what OpenAI sends for a probability of zero: JSON has no infinity

UsageChunks = Literal["none", "last", "each"]

encode = msgspec.json.encode


def usage_json(usage: Usage) -> dict[str, Any]:
    """Token counts in OpenAI's words."""
    return _counts(usage.prompt, usage.completion) | {
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Collector(Protocol):
    """One choice of a whole answer in the making: logprobs are encoded as they come, so that no end of an answer takes long."""

    choice: Choice

    def add(self, delta: Delta) -> None: ...

    def json(self, index: int) -> dict[str, Any]: ...


class _Base(abc.ABC):
    """What both forms share: identity, the order of a stream's chunks, and the choices of a whole answer."""

    def __init__(self, model: ServedModel, *, usage_chunks: UsageChunks, prefix: str, chunks: str, whole: str) -> None:
        """`chunks` and `whole`: what `object` says in a stream and in a whole answer."""
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.model, self._usage_chunks, self._object = model, usage_chunks, whole
        self._created = int(time.time())
        self._head = b"data: " + encode(self._identity(chunks))[:-1] + b',"choices":['
        self._tail = b"]}\n\n" if usage_chunks == "none" else b'],"usage":null}\n\n'
        self._prompt_tokens = self._tokens = 0  # for the usage in each chunk
        self._opened: set[int] = set()
        self._choices: dict[int, Collector] = {}

    @abc.abstractmethod
    def _first(self, index: int) -> bytes: ...

    @abc.abstractmethod
    def _chunk(self, index: int, delta: Delta) -> bytes: ...

    @abc.abstractmethod
    def _last(self, index: int, delta: Delta) -> bytes: ...

    @abc.abstractmethod
    def _collector(self) -> Collector: ...

    def begin(self, usage: Usage) -> bytes:
        """Nothing comes before the choices."""
        self._prompt_tokens = usage.prompt
        return b""

    def events(self, index: int, delta: Delta) -> bytes:
        """The first chunk of a choice, what the delta adds, the last chunk."""
        if self._usage_chunks == "each":
            self._tokens += len(delta.tokens)
            self._tail = b'],"usage":%b}\n\n' % encode(_counts(self._prompt_tokens, self._tokens))
        found = b"" if index in self._opened else self._first(index)
        self._opened.add(index)
        if delta.parts or delta.logprobs or delta.prompt:
            found += self._chunk(index, delta)
        return found if delta.finish is None else found + self._last(index, delta)

    def end(self, usage: Usage) -> bytes:
        """The chunk without choices, where it is wanted, and the end."""
        counts = self._head + b'],"usage":' + encode(usage_json(usage)) + b"}\n\n"
        return DONE if self._usage_chunks == "none" else counts + DONE

    def failure(self, error: QuartetError) -> bytes:
        """An error event, without an end."""
        return b"data: " + encode(OPENAI_ERROR.body(error)) + b"\n\n"

    def add(self, index: int, delta: Delta) -> None:
        """One more of a choice."""
        if index not in self._choices:
            self._choices[index] = self._collector()
        self._choices[index].add(delta)

    def full(self, usage: Usage) -> bytes:
        """The answer in one piece, its choices in order."""
        answers = [choice.json(index) for index, choice in sorted(self._choices.items())]
        return encode(self._identity(self._object) | {"choices": answers, "usage": usage_json(usage)} | self._about_prompt())

    def _about_prompt(self) -> dict[str, Any]:
        """What a whole answer says of its prompt."""
        return {}

    def prompt_entries(self, delta: Delta, alternatives: int) -> bytes:
        """Of prompt tokens, in vLLM's form: JSON entries without brackets, each with at most so many alternatives."""
        assert delta.prompt is not None, delta
        pairs = zip(delta.prompt.tokens, delta.prompt.logprobs, strict=True)
        return _inside([None if entry is None else self._prompt_entry(token, *entry, alternatives) for token, entry in pairs])

    def _prompt_entry(self, token: int, rank: int, logprobs: Logprobs, alternatives: int) -> dict[str, Any]:
        """The token itself comes first."""
        top = [(other, place, value) for place, (other, value) in enumerate(logprobs.top[:alternatives], 1) if other != token]
        return {
            str(each): {"logprob": _finite(value), "rank": place, "decoded_token": self.model.text_of(each)}
            for each, place, value in [(token, rank, logprobs.chosen), *top]
        }

    def _identity(self, kind: str) -> dict[str, Any]:
        model = {"model": self.model.name, "system_fingerprint": self.model.fingerprint}
        return {"id": self.id, "object": kind, "created": self._created} | model

    def _event(self, choice: bytes) -> bytes:
        return self._head + choice + self._tail


class ChatFormat(_Base):
    """chat.completion and chat.completion.chunk; a whole one with logprobs of the prompt's tokens, if so many are asked for."""

    def __init__(self, model: ServedModel, *, usage_chunks: UsageChunks, prompt_logprobs: int | None = None) -> None:
        self._prompt_logprobs = prompt_logprobs
        self._prompt: list[bytes] = []
        kinds = {"chunks": "chat.completion.chunk", "whole": "chat.completion"}
        super().__init__(model, usage_chunks=usage_chunks, prefix="chatcmpl", **kinds)

    def _first(self, index: int) -> bytes:
        """The first chunk of a choice."""
        delta = b'{"role":"assistant","content":"","refusal":null}'
        return self._event(b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, delta))

    def _chunk(self, index: int, delta: Delta) -> bytes:
        """A chunk a part; the first has the logprobs of all."""
        logprobs = encode(self._logprobs(delta)) if delta.logprobs else b"null"
        events = []
        for part in delta.parts or (Content(""),):
            events.append(
                self._event(b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}' % (index, _delta(part), logprobs))
            )
            logprobs = b"null"
        return b"".join(events)

    def _last(self, index: int, delta: Delta) -> bytes:
        """The last chunk of a choice."""
        return self._event(b'{"index":%d,"delta":{},"logprobs":null,%b}' % (index, _end(delta)))

    def _collector(self) -> Collector:
        """An empty choice."""
        return _ChatChoice(self)

    def add(self, index: int, delta: Delta) -> None:
        """As the base."""
        super().add(index, delta)
        if delta.prompt is not None and self._prompt_logprobs is not None:
            self._prompt.append(self.prompt_entries(delta, self._prompt_logprobs))

    def _about_prompt(self) -> dict[str, Any]:
        """All choices have one prompt."""
        return {} if self._prompt_logprobs is None else {"prompt_logprobs": _array(self._prompt)}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return {"content": self.entries(delta), "refusal": None}

    def entries(self, delta: Delta) -> list[dict[str, Any]]:
        """An entry a token."""
        return [self._token(*pair) for pair in zip(delta.tokens, delta.logprobs, strict=True)]

    def _token(self, token: int, logprobs: Logprobs) -> dict[str, Any]:
        top = [self._named(other, value) for other, value in logprobs.top]
        return self._named(token, logprobs.chosen) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.model.text_of(token), "logprob": _finite(logprob), "bytes": list(self.model.pieces.bytes_of(token))}


class _ChatChoice:
    """A choice of a chat completion."""

    def __init__(self, form: ChatFormat) -> None:
        self.choice = Choice()
        self._format = form
        self._entries: list[bytes] = []

    def add(self, delta: Delta) -> None:
        self.choice.add(delta)
        if delta.logprobs:
            self._entries.append(_inside(self._format.entries(delta)))

    def json(self, index: int) -> dict[str, Any]:
        content, calls = self.choice.content, [_call(call) for call in self.choice.calls]
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        message |= {"refusal": None, "annotations": []}
        if reasoning := self.choice.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        logprobs = {"content": _array(self._entries), "refusal": None} if self._entries else None
        return {"index": index, "message": message, "logprobs": logprobs} | _ended(self.choice)


class TextFormat(_Base):
    """text_completion, whole and in chunks. Alternatives of the prompt's tokens: in logprobs, where it is echoed, and apart."""

    def __init__(
        self,
        model: ServedModel,
        *,
        usage_chunks: UsageChunks,
        echoed_logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        self.prompt_logprobs, self._echoed = prompt_logprobs, echoed_logprobs
        kinds = {"chunks": "text_completion", "whole": "text_completion"}
        super().__init__(model, usage_chunks=usage_chunks, prefix="cmpl", **kinds)
        self._offsets: dict[int, int] = {}

    def _first(self, index: int) -> bytes:
        """Nothing comes before the text."""
        self._offsets[index] = 0
        return b""

    def _chunk(self, index: int, delta: Delta) -> bytes:
        """More text."""
        lists, self._offsets[index] = self.logprobs(delta, self._offsets[index])
        content, logprobs = encode(_text_of(delta)), encode(lists)
        return self._event(b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (index, content, logprobs))

    def _last(self, index: int, delta: Delta) -> bytes:
        """The last chunk of a choice."""
        return self._event(b'{"index":%d,"text":"","logprobs":null,%b}' % (index, _end(delta)))

    def _collector(self) -> Collector:
        """An empty choice."""
        return _TextChoice(self)

    def logprobs(self, delta: Delta, offset: int) -> tuple[dict[str, list[Any]] | None, int]:
        """(four lists, an entry a token each, where there are some; characters behind them), `offset` before them.

        Control tokens are not counted: the text is without them.
        """
        tokens, reported = self._reported(delta)
        starts = [offset]
        for token in tokens:
            starts.append(starts[-1] + (0 if token in self.model.pieces.special else len(self.model.text_of(token))))
        if not reported:
            return None, starts[-1]
        lists: dict[str, list[Any]] = {
            "tokens": [self.model.text_of(token) for token in tokens],
            "token_logprobs": [None if entry is None else _finite(entry.chosen) for entry in reported],
            "top_logprobs": [self._top(*pair) for pair in zip(tokens, reported, strict=True)],
            "text_offset": starts[:-1],
        }
        return lists, starts[-1]

    def _reported(self, delta: Delta) -> tuple[Sequence[int], Sequence[Logprobs | None]]:
        """Tokens of the text, and their logprobs where there are some."""
        if delta.prompt is None:
            return delta.tokens, delta.logprobs
        if (most := self._echoed) is None:
            return (), ()
        entries = [None if entry is None else Logprobs(entry[1].chosen, entry[1].top[:most]) for entry in delta.prompt.logprobs]
        return delta.prompt.tokens, entries

    def _top(self, token: int, entry: Logprobs | None) -> dict[str, float] | None:
        """By text, the token itself among them, as OpenAI has it; of alternatives that show alike the likeliest."""
        found: dict[str, float] = {}
        for other, value in () if entry is None else (*entry.top, (token, entry.chosen)):
            found.setdefault(self.model.text_of(other), _finite(value))
        return None if entry is None else found


class _TextChoice:
    """A choice of a text completion."""

    def __init__(self, form: TextFormat) -> None:
        self.choice = Choice()
        self._format = form
        self._offset = 0
        self._lists: dict[str, list[bytes]] = {}
        self._prompt: list[bytes] = []

    def add(self, delta: Delta) -> None:
        self.choice.add(delta)
        lists, self._offset = self._format.logprobs(delta, self._offset)
        for name, entries in (lists or {}).items():
            self._lists.setdefault(name, []).append(_inside(entries))
        if delta.prompt is not None and (alternatives := self._format.prompt_logprobs) is not None:
            self._prompt.append(self._format.prompt_entries(delta, alternatives))

    def json(self, index: int) -> dict[str, Any]:
        logprobs = {name: _array(pieces) for name, pieces in self._lists.items()} or None
        prompt = {} if self._format.prompt_logprobs is None else {"prompt_logprobs": _array(self._prompt)}
        return {"index": index, "text": self.choice.content, "logprobs": logprobs} | prompt | _ended(self.choice)


def _end(delta: Delta) -> bytes:
    """How a choice ended; `stop_reason` is vLLM's."""
    return b'"finish_reason":%b,"stop_reason":%b' % (encode(delta.finish), encode(delta.stop))


def _ended(choice: Choice) -> dict[str, str | int | None]:
    return {"finish_reason": choice.finish, "stop_reason": choice.stop}


def _inside(entries: list[Any]) -> bytes:
    """A list as JSON, without its brackets."""
    return encode(entries)[1:-1]


def _array(pieces: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def _delta(part: Part) -> bytes:
    """What a chunk of chat says."""
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


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _text_of(delta: Delta) -> str:
    return "".join(part.text for part in delta.parts if isinstance(part, Content))


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _FLOOR
