"""The checkpoint's chat template, in jinja2's sandbox, with messages guarded against control
tokens.

A sentinel that no message has is put after every "<", the first character of all control tokens, so
only the template writes them. Readers split at control tokens, then remove it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Self

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import CheckpointError, InvalidRequest
from engine.front.arguments import ArgumentsParser
from engine.front.value_schema import ValueSchema
from engine.protocol import JsonObject

# Candidates for the sentinel: the last of the private-use characters, which have no meaning to any template or tokenizer.
_SENTINELS = [chr(code) for code in range(0x10FFF6, 0x10FFFE)]
MAX_CUT = 1 << 15  # values in the cut arguments of a conversation, and 32 for each call: some 0.2 s of CPU
MAX_DEPTH = 64  # of a call's arguments: deeper ones are shown as text
MAX_VALUES = 1 << 16  # strings, numbers, lists and objects of a conversation, keys included
_THINKING: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})
# What a sandboxed template can raise when a message is not what it expects.
_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ChatTemplate:
    """`tokens`: named variables (bos_token and the like); `control`: the control tokens."""

    def __init__(self, source: str, tokens: Mapping[str, str], control: Iterable[str]) -> None:
        self._tokens = dict(tokens)
        self._openers = sorted({name[0] for name in control})
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error

    def thinks_by_default(self) -> bool:
        hello = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True}
        try:
            default, on, off = (self._template.render(self._tokens, **hello, **switches) for switches in _THINKING)
        except _FAULTS:
            return False  # it says so again, and to whom it concerns, when there is a conversation
        return default == on != off

    def render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], **switches: bool
    ) -> tuple[str, str]:
        """(guarded text, its sentinel), of messages and tools in OpenAI's form. InvalidRequest
        names the field."""
        cut = CutCalls()
        try:
            prepared = [_prepared(message, cut) for message in messages]
            sentinel = _sentinel([prepared, tools])
            shown = self._guard(prepared, sentinel)
            declared = self._guard(tools, sentinel) or None
            text = self._template.render(self._tokens | switches, messages=shown, tools=declared, documents=None)
        except _FAULTS as error:
            raise InvalidRequest(
                f"messages: the chat template cannot render them: {error}", param="messages"
            ) from error
        return text, sentinel

    def _guard(self, value: Any, sentinel: str) -> Any:
        """A copy in which no string has, or can help to form, a control token."""
        if isinstance(value, str):
            for opener in self._openers:
                value = value.replace(opener, opener + sentinel)
            return value
        if isinstance(value, Mapping):
            return {self._guard(key, sentinel): self._guard(item, sentinel) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._guard(item, sentinel) for item in value]
        return value


def strip_thoughts(text: str) -> str:
    """An unclosed thought goes to the end."""
    return "".join(part.split("<|channel>")[0] for part in text.split("<channel|>"))


class CutCalls:
    """Closes call arguments that the token limit cut; agents send them back."""

    def __init__(self) -> None:
        self._left = MAX_CUT

    def closed(self, text: str) -> str | None:
        """None if the calls have more than MAX_CUT values in total."""
        values = 32 + text.count(",") + text.count(":") + text.count("[") + text.count("{")
        if values > self._left:
            return None
        self._left -= values
        parser = ArgumentsParser(ValueSchema())
        parser.push(text[1:])
        parser.end()
        return parser.take()


def _prepared(message: JsonObject, cut: CutCalls) -> JsonObject:
    ready = dict(message)
    if message["role"] == "assistant":
        ready["content"] = _without_thoughts(message.get("content"))
        if (thought := message.get("reasoning")) is not None:
            ready |= {"reasoning": thought, "reasoning_content": thought}  # templates read one or the other
    if message.get("tool_calls"):
        ready["tool_calls"] = [_with_mapping(call, cut) for call in message["tool_calls"]]
    return ready


def _without_thoughts(content: Any) -> Any:
    if isinstance(content, str):
        return strip_thoughts(content)
    if isinstance(content, Sequence):
        return [
            part | {"text": strip_thoughts(part["text"])} if part.get("type") == "text" else part for part in content
        ]
    return content


def _with_mapping(call: JsonObject, cut: CutCalls) -> JsonObject:
    """Arguments become a mapping: templates print a JSON string verbatim. Other values go under
    "arguments"."""
    function = dict(call["function"])
    given = function.get("arguments")
    if isinstance(given, str):
        value = _parsed(given, cut)
    else:
        value = given
    if not isinstance(value, Mapping):
        if value:
            value = {"arguments": given if isinstance(given, str) else _to_json(given)}
        else:
            value = {}
    return dict(call) | {"function": function | {"arguments": value}}


class Lexeme(float):
    """A number that prints as written (1e5, 0.10)."""

    _text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number._text = text
        return number

    def __repr__(self) -> str:
        return self._text

    __str__ = __repr__


def _parsed(text: str, cut: CutCalls) -> Any:
    """The JSON value; cut text is closed first. What cannot be read, or is nested too deeply, stays
    text."""
    if not text.strip():
        return None
    try:
        return _flat_enough(_json(text), text)
    except (ValueError, RecursionError):
        whole = cut.closed(text) if text.startswith("{") else None
    if whole is None or not whole.startswith(text):
        return text
    try:
        return _flat_enough(_json(whole), text)
    except (ValueError, RecursionError):
        return text


def _flat_enough(value: Any, text: str) -> Any:
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = [each.values() if isinstance(each, Mapping) else each for each in level if isinstance(each, Mapping | list)]
        level = [item for container in containers for item in container]
        if not level:
            return value
    return text


def _json(text: str) -> Any:
    return json.loads(text, parse_float=Lexeme, parse_int=_integer, parse_constant=_refuse)


def _integer(text: str) -> int | Lexeme:
    number = int(text)
    return number if str(number) == text else Lexeme(text)  # -0


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")


def characters(value: Any) -> int:
    """InvalidRequest: more than MAX_VALUES values."""
    return sum(map(len, _strings(value)))


def _sentinel(value: Any) -> str:
    """InvalidRequest: all occur."""
    strings = list(_strings(value))
    for sentinel in _SENTINELS:
        if not any(sentinel in text for text in strings):
            return sentinel
    raise InvalidRequest("messages: the private-use characters U+10FFF6 to U+10FFFD all occur; leave one out", param="messages")


def _strings(value: Any) -> Iterator[str]:
    """InvalidRequest: more than MAX_VALUES values."""
    left = [value]
    seen = 0
    while left:
        seen += 1
        if seen > MAX_VALUES:
            raise InvalidRequest(f"messages and tools hold more than {MAX_VALUES} values", param="messages")
        match left.pop():
            case str(text):
                yield text
            case Mapping() as entries:
                left += entries.keys()
                left += entries.values()
            case Sequence() as items:
                left += items


def _environment() -> ImmutableSandboxedEnvironment:
    """transformers' settings, filters and globals, which published templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}  # noqa: DTZ005 (templates mean the local clock)
    return environment


def _to_json(value: Any, indent: int | None = None, sort_keys: bool = False) -> str:
    """transformers' tojson: jinja2's own escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
