"""The checkpoint's chat template, in jinja2's sandbox, with every message guarded against control tokens.

A control token in a prompt may come from the template, never from a message. So messages are guarded before they are
rendered: a sentinel character that occurs in none of them goes behind every "<" (every first character of a control
token). No control token survives that, and none can grow where two parts meet. Whoever reads the rendered text cuts it
at its control tokens first, and takes the sentinel out of what lies between afterwards.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import CheckpointError, InvalidRequest

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
EXTRAS = frozenset({"preserve_thinking"})

_SENTINELS = range(0xF0000, 0xFFFFE)  # private use: no meaning to any template or tokenizer
# What a sandboxed template can raise when a message is not what it expects.
_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Conversation:
    """What a template is given. messages and tools are in OpenAI's form; `extra` may hold what EXTRAS names."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    enable_thinking: bool
    add_generation_prompt: bool
    extra: Mapping[str, bool]


class ChatTemplate:
    """A compiled template. `tokens` are its named variables (bos_token and the like), `control` the control tokens."""

    def __init__(self, source: str, tokens: Mapping[str, str], control: Iterable[str]) -> None:
        self._tokens = dict(tokens)
        self._openers = re.compile("[" + re.escape("".join(sorted({name[0] for name in control}))) + "]")
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(self, conversation: Conversation) -> tuple[str, str]:
        """The guarded text, and the sentinel to take out of it. Raises InvalidRequest that names the field."""
        _check_extras(conversation.extra)
        try:
            return self._render(conversation)
        except _FAULTS as error:
            raise InvalidRequest(
                f"messages: the chat template cannot render them: {error}", param="messages"
            ) from error

    def _render(self, conversation: Conversation) -> tuple[str, str]:
        messages = [_prepared(message, place) for place, message in enumerate(conversation.messages)]
        sentinel = _sentinel([messages, conversation.tools])
        variables = self._tokens | dict(conversation.extra)
        text = self._template.render(
            variables,
            messages=self._guard(messages, sentinel),
            tools=self._guard(conversation.tools, sentinel) or None,
            documents=None,
            enable_thinking=conversation.enable_thinking,
            add_generation_prompt=conversation.add_generation_prompt,
        )
        return text, sentinel

    def _guard(self, value: Any, sentinel: str) -> Any:
        """A copy of a JSON value in which no string holds, or can help to form, a control token."""
        if isinstance(value, str):
            return self._openers.sub(lambda opener: opener[0] + sentinel, value)
        if isinstance(value, Mapping):
            return {self._guard(key, sentinel): self._guard(item, sentinel) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._guard(item, sentinel) for item in value]
        return value


def strip_thoughts(text: str) -> str:
    """A reply without its <|channel>...<channel|> spans; an unclosed span goes to the end."""
    return "".join(part.split("<|channel>")[0] for part in text.split("<channel|>"))


def _prepared(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The message as templates want it: a known role, replies without thoughts, tool arguments as mappings."""
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"messages[{place}].role: {role!r} is not one of {', '.join(sorted(ROLES))}", param="messages"
        )
    ready = dict(message)
    if role == "assistant":
        ready["content"] = _without_thoughts(message.get("content"))
    if message.get("tool_calls"):
        where = f"messages[{place}].tool_calls"
        ready["tool_calls"] = [_with_mapping(call, f"{where}[{n}]") for n, call in enumerate(message["tool_calls"])]
    return ready


def _without_thoughts(content: Any) -> Any:
    if isinstance(content, str):
        return strip_thoughts(content)
    if isinstance(content, Sequence):
        return [
            part | {"text": strip_thoughts(part["text"])} if part.get("type") == "text" else part for part in content
        ]
    return content


def _with_mapping(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The call with its arguments as a mapping: OpenAI sends a JSON string, templates would print it verbatim."""
    function = dict(call["function"])
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parse_arguments(arguments, where)
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{where}.function.arguments: not a JSON object", param="messages")
    return dict(call) | {"function": function | {"arguments": arguments}}


def _parse_arguments(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where}.function.arguments: not JSON ({error})", param="messages") from error


def _check_extras(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if name not in EXTRAS:
            allowed = ", ".join(sorted({"enable_thinking", *EXTRAS}))
            raise InvalidRequest(f"chat_template_kwargs.{name}: not one of {allowed}", param="chat_template_kwargs")
        if not isinstance(value, bool):
            raise InvalidRequest(f"chat_template_kwargs.{name}: not a boolean", param="chat_template_kwargs")


def _sentinel(value: Any) -> str:
    """A character that occurs in no string of a JSON value."""
    used = set().union(*_strings(value))
    return next(chr(code) for code in _SENTINELS if chr(code) not in used)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that published templates are written for: transformers' own settings, filters and globals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    return environment


def _to_json(value: Any, indent: int | None = None, sort_keys: bool = False) -> str:
    """transformers' tojson: jinja2's own escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 (templates mean the local clock)
