"""What a request of OpenAI's Responses API may say, and what it is as a chat completion.

    instructions, and the system and developer messages that come first      one first message of role system
    reasoning, message, function_call items of the assistant                 reasoning, content and tool_calls of one message
    function_call_output                                                     a message of role tool

    function F of a namespace N                                              function N.F

Nothing is stored: a conversation comes whole, and `store` is accepted without effect, as are metadata, prompt_cache_key,
service_tier, client_metadata, text.verbosity, reasoning.summary and the like. Tools that agents declare everywhere and that are no
functions are not offered to the model: an answer's `tools` are those that were. What else is known and cannot be done is refused by
name.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from deploy.edge.body_reader import _is_neutral, unsupported
from deploy.edge.conversation import MESSAGES, PARTS, TOOLS
from deploy.edge.openai.schemas import Count
from deploy.edge.raw_json import BoundedList, Json, at_most, decode, elements, first_characters, not_null, short_value, shown_as
from engine.errors import InvalidRequest

ENCRYPTED = "reasoning.encrypted_content"
_OWN = "quartet:"  # what we hand out as encrypted content: nothing is secret in it, but clients send back nothing else
_LOGPROBS = "message.output_text.logprobs"
_STRING = {"type": "string"}
_OBJECT = {"type": "object"}
_ITEMS_SCHEMA = {"type": "array", "items": {"$ref": "#/components/schemas/InputItem"}, "minItems": 1, "maxItems": MESSAGES}
_TOOLS_SCHEMA = {"type": "array", "items": {"$ref": "#/components/schemas/DeclaredTool"}, "maxItems": TOOLS}
_INCLUDES = 64
# Agents declare these in every request, and do without them where they are not offered.
_NOT_OFFERED = ("custom", "web_search", "tool_search", "local_shell", "shell", "apply_patch", "image_generation")
# key -> values that ask for nothing, beside null
_ABSENT: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "context_management": ([],),
    "moderation": (),
}
Kind = Annotated[str, Meta(max_length=64)]
Name = Annotated[str, Meta(max_length=256)]


class InputPart(Struct, frozen=True):
    """Of a message's content, of a thought, or of what a call gave."""

    type: Annotated[str, Meta(max_length=64, extra_json_schema={"enum": ["input_text", "output_text", "text", "reasoning_text"]})]
    text: str | None = None


class InputItem(Struct, frozen=True):
    """A message, a thought, a call, or what it gave; which fields it has follows from that."""

    type: Kind | None = None
    role: Annotated[str, Meta(max_length=32)] | None = None
    content: str | Annotated[list[InputPart], Meta(max_length=PARTS)] | None = None
    call_id: Name | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | None = None
    output: Annotated[Raw, shown_as(_STRING, {"type": "array", "items": _OBJECT})] | UnsetType = UNSET
    encrypted_content: str | None = None


class DeclaredTool(Struct, frozen=True):
    """A function that the client runs, a namespace of such functions, or a tool of another kind."""

    type: Kind
    name: Name | None = None
    description: str | None = None
    parameters: Annotated[Raw, shown_as(_OBJECT)] | UnsetType = UNSET
    strict: bool | None = None
    tools: Annotated[Raw, shown_as({"type": "array", "items": _OBJECT, "maxItems": TOOLS})] | UnsetType = UNSET


@dataclass(frozen=True)
class OfferedFunction:
    """A function that the model is offered; `namespace`: that it was declared in."""

    tool: DeclaredTool
    namespace: DeclaredTool | None = None

    @property
    def name(self) -> str | None:
        """By which the model calls it."""
        return self.tool.name if self.namespace is None else _full_name(self.namespace.name, self.tool.name or "")

    def declaration(self) -> dict[str, Any]:
        """As a chat has it; what is wrong with it is found there."""
        tool = self.tool
        about = {"name": self.name, "description": tool.description, "parameters": not_null(tool.parameters), "strict": tool.strict}
        return {"type": "function", "function": {key: value for key, value in about.items() if value is not None}}


class ReasoningConfig(Struct, frozen=True):
    """Whether the model thinks first."""

    effort: Kind | None = None


class TextConfig(Struct, frozen=True):
    """`format`: of the text."""

    format: Annotated[Raw, shown_as(_OBJECT)] | UnsetType = UNSET


class _TextFormat(Struct, frozen=True):
    type: Kind
    name: Name | None = None
    schema: Raw | UnsetType = UNSET
    strict: bool | None = None
    description: str | None = None


class _Chosen(Struct, frozen=True):
    type: Kind
    name: Name | None = None
    mode: Kind | None = None
    tools: Raw | UnsetType = UNSET


class ResponsesRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/responses"""

    model: Annotated[str, Meta(max_length=1024)]
    input: Annotated[Raw, Meta(extra_json_schema={"anyOf": [_STRING, _ITEMS_SCHEMA]})]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    tools: Annotated[Raw, shown_as(_TOOLS_SCHEMA)] | UnsetType = UNSET
    tool_choice: Annotated[Raw, shown_as({"enum": ["auto", "none", "required"]}, _OBJECT)] | UnsetType = UNSET
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    include: Annotated[Raw, shown_as({"type": "array", "items": _STRING, "maxItems": _INCLUDES})] | UnsetType = UNSET
    previous_response_id: Annotated[Raw, shown_as()] | UnsetType = UNSET
    conversation: Annotated[Raw, shown_as()] | UnsetType = UNSET
    background: Annotated[Raw, shown_as({"enum": [False]})] | UnsetType = UNSET
    prompt: Annotated[Raw, shown_as()] | UnsetType = UNSET
    truncation: Annotated[Raw, shown_as({"enum": ["disabled"]})] | UnsetType = UNSET
    top_logprobs: Annotated[Raw, shown_as({"enum": [0]})] | UnsetType = UNSET
    context_management: Annotated[Raw, shown_as({"type": "array", "maxItems": 0})] | UnsetType = UNSET
    moderation: Annotated[Raw, shown_as()] | UnsetType = UNSET

    def chat(self) -> dict[str, Any]:
        """The body of a chat completion that asks for the same. InvalidRequest names what cannot be done."""
        for name, neutral in _ABSENT.items():
            if not _is_neutral(short_value(getattr(self, name), name), neutral):
                raise unsupported(name, " or ".join(msgspec.json.encode(value).decode() for value in (*neutral, None)))
        made = {
            "model": self.model,
            "messages": self._messages(),
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [each.declaration() for each in self.functions()] or None,
            "tool_choice": self.choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": self._response_format(),
        }
        return {key: value for key, value in made.items() if value is not None}

    def functions(self) -> list[OfferedFunction]:
        """The tools that are offered to the model."""
        return list(_functions(self.tools, "tools"))

    def choice(self) -> str | dict[str, Any] | None:
        """tool_choice as a chat has it."""
        if (given := not_null(self.tool_choice)) is None:
            return None
        if first_characters(given)[:1] == b'"':
            word: str = decode(given, "tool_choice", _STRINGS)
            return word
        chosen: _Chosen = decode(given, "tool_choice", _CHOSEN)
        if chosen.type == "function":
            return _named(chosen)
        if chosen.type == "allowed_tools" and (tools := not_null(chosen.tools)) is not None:
            names = [_named(tool) for tool in elements(tools, "tool_choice", _CHOSEN_LIST)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": chosen.mode, "tools": names}}
        raise unsupported("tool_choice.type", "'function' and 'allowed_tools'")

    def includes_encrypted(self) -> bool:
        """Whether thoughts are wanted in the form in which clients send them back. InvalidRequest: something else is."""
        if (given := not_null(self.include)) is None:
            return False
        wanted = elements(given, "include", _STRING_LIST)
        if _LOGPROBS in wanted:
            raise InvalidRequest(f"include: {_LOGPROBS} is not supported here", param="include", code="unsupported_parameter")
        return ENCRYPTED in wanted

    def _messages(self) -> list[dict[str, Any]]:
        if first_characters(self.input)[:1] == b'"':
            asked = [{"role": "user", "content": decode(self.input, "input", _STRINGS)}]
        else:
            asked = list(_chat_messages(_ITEMS.read(self.input, "input")))
        if not asked:
            raise InvalidRequest("input: must not be empty", param="input")
        return _with_instructions(self.instructions, asked)

    def _response_format(self) -> dict[str, Any] | None:
        if self.text is None or (given := not_null(self.text.format)) is None:
            return None
        form: _TextFormat = decode(given, "text.format", _FORMAT)
        if form.type != "json_schema":
            return {"type": form.type}
        about = {"name": form.name, "description": form.description, "schema": not_null(form.schema), "strict": form.strict}
        return {"type": "json_schema", "json_schema": {key: value for key, value in about.items() if value is not None}}


def parse_response_request(body: bytes) -> ResponsesRequest:
    """The request in `body`; InvalidRequest names the first key that is wrong."""
    request: ResponsesRequest = decode(body, "", _REQUEST)
    return request


def encrypted_content_of(thought: str) -> str:
    """A thought as `encrypted_content`."""
    return _OWN + base64.b64encode(thought.encode()).decode()


_REQUEST = msgspec.json.Decoder(ResponsesRequest)
_ITEMS = BoundedList(InputItem, MESSAGES, "content", InputPart, PARTS)
_PART_LIST: msgspec.json.Decoder[Any] = msgspec.json.Decoder(at_most(InputPart, PARTS))
_TOOL_LIST: msgspec.json.Decoder[Any] = msgspec.json.Decoder(at_most(DeclaredTool, TOOLS))
_CHOSEN = msgspec.json.Decoder(_Chosen)
_CHOSEN_LIST: msgspec.json.Decoder[Any] = msgspec.json.Decoder(at_most(_Chosen, TOOLS))
_FORMAT = msgspec.json.Decoder(_TextFormat)
_STRINGS = msgspec.json.Decoder(str)
_STRING_LIST: msgspec.json.Decoder[Any] = msgspec.json.Decoder(at_most(str, _INCLUDES))


def _functions(raw: Json, where: str, namespace: DeclaredTool | None = None) -> Iterator[OfferedFunction]:
    given = not_null(raw)
    for place, tool in enumerate([] if given is None else elements(given, "tools", _TOOL_LIST)):
        match tool.type:
            case "function":
                yield OfferedFunction(tool, namespace)
            case "namespace" if namespace is None:
                if not tool.name:
                    raise InvalidRequest(f"{where}[{place}].name: is required", param="tools")
                yield from _functions(tool.tools, f"{where}[{place}].tools", tool)
            case kind if not kind.startswith(_NOT_OFFERED):
                message = f"{where}[{place}].type: {kind!r} is not supported, only 'function' and namespaces of functions"
                raise InvalidRequest(message, param="tools")


def _full_name(namespace: str | None, name: str) -> str:
    """Of a function in a namespace."""
    return f"{namespace}.{name}" if namespace else name


def _named(chosen: _Chosen) -> dict[str, Any]:
    if chosen.type != "function" or chosen.name is None:
        raise InvalidRequest("tool_choice: a tool is a function with a name", param="tool_choice")
    return {"type": "function", "function": {"name": chosen.name}}


def _with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One first message of role system: templates take no other."""
    size = next((place for place, message in enumerate(messages) if message["role"] not in ("system", "developer")), len(messages))
    texts = [instructions, *(message["content"] for message in messages[:size])]
    text = "\n\n".join(filter(None, texts))
    return [*([{"role": "system", "content": text}] if text else []), *messages[size:]]


@dataclass
class _Reply:
    """What the assistant has said between two turns of others, as far as it is one message: thought, text, calls in that order."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        made = {"reasoning_content": "\n".join(self.thoughts), "tool_calls": self.calls}
        said = {key: value for key, value in made.items() if value}
        return {"role": "assistant", "content": "".join(self.texts), **said}


def _chat_messages(items: list[InputItem]) -> Iterator[dict[str, Any]]:
    reply: _Reply | None = None
    for place, item in enumerate(items):
        where, kind = f"input[{place}]", item.type or "message"
        if reply is not None and not _continues(reply, kind, item.role):
            yield reply.message()
            reply = None
        if kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": _required(item.call_id, f"{where}.call_id"), "content": _output(item, where)}
        elif kind == "message" and item.role != "assistant":
            yield _asked(item, where)
        else:
            reply = reply or _Reply()
            _add(reply, kind, item, where)
    if reply is not None:
        yield reply.message()


def _continues(reply: _Reply, kind: str, role: str | None) -> bool:
    """Whether an item goes into the same message: each kind comes behind those before it."""
    match kind:
        case "reasoning":
            return not reply.texts and not reply.calls
        case "message":
            return role == "assistant" and not reply.calls
    return kind == "function_call"


def _add(reply: _Reply, kind: str, item: InputItem, where: str) -> None:
    match kind:
        case "reasoning":
            reply.thoughts += filter(None, [_thought(item, where)])
        case "message":
            reply.texts.append(_text(item.content, f"{where}.content"))
        case "function_call":
            name = _full_name(item.namespace, _required(item.name, f"{where}.name"))
            function = {"name": name, "arguments": item.arguments}
            reply.calls.append({"id": _required(item.call_id, f"{where}.call_id"), "type": "function", "function": function})
        case _:
            hint = ": nothing is stored here, send the item itself" if kind == "item_reference" else ""
            raise InvalidRequest(f"{where}.type: items of type {kind[:64]!r} are not supported{hint}", param="input")


def _thought(item: InputItem, where: str) -> str:
    """Its text; what somebody else has encrypted is nothing to us."""
    if item.content is not None:
        return _text(item.content, f"{where}.content")
    given = item.encrypted_content or ""
    if not given.startswith(_OWN):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_OWN), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{where}.encrypted_content: it is not as it was handed out", param="input") from error


def _asked(item: InputItem, where: str) -> dict[str, Any]:
    if item.role not in ("user", "system", "developer"):
        raise InvalidRequest(f"{where}.role: not one of user, assistant, system, developer", param="input")
    return {"role": item.role, "content": _text(item.content, f"{where}.content")}


def _output(item: InputItem, where: str) -> str:
    if (given := not_null(item.output)) is None:
        raise InvalidRequest(f"{where}.output: is required", param="input")
    if first_characters(given)[:1] == b'"':
        text: str = decode(given, "input", _STRINGS)
        return text
    return _text(elements(given, "input", _PART_LIST), f"{where}.output")


def _text(content: str | list[InputPart] | None, where: str) -> str:
    """Of a content. InvalidRequest: some of it is no text."""
    if not isinstance(content, list):
        return content or ""
    for place, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text", "reasoning_text"):
            raise InvalidRequest(f"{where}[{place}]: parts of type {part.type!r} are not supported, only text", param="input")
        if part.text is None:
            raise InvalidRequest(f"{where}[{place}]: a text part has a text", param="input")
    return "".join(part.text or "" for part in content)


def _required(value: str | None, where: str) -> str:
    if value is None:
        raise InvalidRequest(f"{where}: is required", param="input")
    return value
