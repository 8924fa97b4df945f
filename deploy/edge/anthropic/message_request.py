"""What a request of Anthropic's Messages API may say, and what it is as a chat completion.

    system                                       a first message of role system
    tool_result blocks of a user's message       messages of role tool, before the rest of it
    thinking, text, tool_use blocks              reasoning, content and tool_calls of one message of the assistant

Accepted without effect: metadata, service_tier, cache_control, context_management, betas, output_config.effort,
display, is_error and the like; a thinking block's signature is not looked at. What is known and cannot be done is refused by name.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from deploy.edge.body_reader import unsupported
from deploy.edge.conversation import MESSAGES, PARTS, TOOLS
from deploy.edge.openai.schemas import Count
from deploy.edge.raw_json import BoundedList, Json, at_most, decode, elements, first_characters, not_null, shown_as
from engine.errors import InvalidRequest

# A system block of Claude Code that differs from request to request: with it in the prompt, no prefix would ever be shared.
_BILLING = "x-anthropic-billing-header:"
_STRING = {"type": "string"}
_BLOCKS_SCHEMA = {"type": "array", "items": {"type": "object"}}
_TURNS_SCHEMA = {
    "type": "array",
    "items": {"$ref": "#/components/schemas/Turn"},
    "minItems": 1,
    "maxItems": MESSAGES,
}
_TOOLS_SCHEMA = {"type": "array", "items": {"$ref": "#/components/schemas/ClientTool"}, "maxItems": TOOLS}
_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
Name = Annotated[str, Meta(max_length=256)]
Kind = Annotated[str, Meta(max_length=64)]


class ContentBlock(Struct, frozen=True):
    """A block of any type; which fields it has follows from that."""

    type: Kind
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: Annotated[Raw, shown_as({"type": "object"})] | UnsetType = UNSET
    tool_use_id: Name | None = None
    content: Annotated[Raw, shown_as(_STRING, _BLOCKS_SCHEMA)] | UnsetType = UNSET


class Turn(Struct, frozen=True):
    """A message."""

    role: Annotated[str, Meta(max_length=32, extra_json_schema={"enum": ["user", "assistant", "system"]})]
    content: str | Annotated[list[ContentBlock], Meta(max_length=PARTS)] | None = None


class ClientTool(Struct, frozen=True):
    """A tool that the client runs."""

    name: Name
    input_schema: Annotated[Raw, shown_as({"type": "object"})] | UnsetType = UNSET
    description: str | None = None
    type: Kind | None = None
    strict: bool | None = None


class ToolUseChoice(Struct, frozen=True):
    """Whether, and which, tools are to be used."""

    type: Annotated[str, Meta(max_length=32, extra_json_schema={"enum": [*_CHOICES, "tool"]})]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct, frozen=True):
    """Whether the model thinks first, and of how many tokens its thoughts may be together."""

    type: Annotated[str, Meta(max_length=32, extra_json_schema={"enum": [*_THINKS]})]
    budget_tokens: Count | None = None


class OutputConfig(Struct, frozen=True):
    """`format`: of the text."""

    format: Annotated[Raw, shown_as({"type": "object"})] | UnsetType = UNSET


class _OutputFormat(Struct, frozen=True):
    type: Kind
    schema: Raw


class CountRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens"""

    model: Annotated[str, Meta(max_length=1024)]
    messages: Annotated[Raw, Meta(extra_json_schema=_TURNS_SCHEMA)]
    system: Annotated[Raw, shown_as(_STRING, _BLOCKS_SCHEMA)] | UnsetType = UNSET
    tools: Annotated[Raw, shown_as(_TOOLS_SCHEMA)] | UnsetType = UNSET
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[Raw, shown_as({"type": "object"})] | UnsetType = UNSET
    mcp_servers: Annotated[Raw, shown_as({"type": "array", "maxItems": 0})] | UnsetType = UNSET
    container: Annotated[Raw, shown_as()] | UnsetType = UNSET

    def chat(self) -> dict[str, Any]:
        """The body of a chat completion that asks for the same. InvalidRequest names what cannot be done."""
        self._check_absent()
        made = {
            "model": self.model,
            "messages": [*self._system_message(), *self._messages()],
            "tools": [_declaration(tool, place) for place, tool in enumerate(_tools(self.tools))] or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": False if self.tool_choice and self.tool_choice.disable_parallel_tool_use else None,
            "response_format": self._response_format(),
            "chat_template_kwargs": _thinking(self.thinking),
            "thinking_token_budget": self.thinking.budget_tokens if self.thinking else None,
        }
        return {key: value for key, value in made.items() if value is not None}

    def turns(self) -> list[Turn]:
        """The messages. InvalidRequest: they are none, or too many."""
        found = _TURNS.read(self.messages, "messages")
        if not found:
            raise InvalidRequest("messages: must not be empty", param="messages")
        return found

    def _check_absent(self) -> None:
        if (servers := not_null(self.mcp_servers)) is not None and first_characters(servers) != b"[]":
            raise unsupported("mcp_servers", "[]")
        if not_null(self.container) is not None:
            raise unsupported("container", "null")

    def _system_message(self) -> list[dict[str, Any]]:
        blocks = [block for block in _texts(self.system, "system") if not block.lstrip().startswith(_BILLING)]
        return [{"role": "system", "content": "\n\n".join(blocks)}] if blocks else []

    def _messages(self) -> Iterator[dict[str, Any]]:
        for place, turn in enumerate(self.turns()):
            yield from _chat_messages(turn, f"messages[{place}]")

    def _response_format(self) -> dict[str, Any] | None:
        named = not_null(self.output_config.format) if self.output_config else None
        given = not_null(self.output_format) if named is None else named
        if given is None:
            return None
        form: _OutputFormat = decode(given, "output_config", _FORMAT)
        if form.type != "json_schema":
            raise unsupported("output_config.format.type", "'json_schema'")
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema, "strict": True}}


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[Raw, shown_as({"type": "array", "items": _STRING})] | UnsetType = UNSET
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None

    def chat(self) -> dict[str, Any]:
        """As the base, with what only a generation has."""
        if self.turns()[-1].role == "assistant":
            raise InvalidRequest("messages: the last one is the assistant's; going on with it is not supported", param="messages")
        made = {
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "stop": not_null(self.stop_sequences),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return super().chat() | {key: value for key, value in made.items() if value is not None}


def parse_message(kind: "type[CountRequest]", body: bytes) -> CountRequest:
    """The request in `body`; InvalidRequest names the first key that is wrong."""
    request: CountRequest = decode(body, "", _DECODERS[kind])
    return request


_DECODERS: dict[type[CountRequest], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (CountRequest, MessagesRequest)
}
_TURNS = BoundedList(Turn, MESSAGES, "content", ContentBlock, PARTS)
_BLOCKS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(at_most(ContentBlock, PARTS))
_TOOL_LIST: msgspec.json.Decoder[Any] = msgspec.json.Decoder(at_most(ClientTool, TOOLS))
_FORMAT = msgspec.json.Decoder(_OutputFormat)
_TEXT = msgspec.json.Decoder(str)


def _tools(raw: Json) -> list[ClientTool]:
    return [] if (given := not_null(raw)) is None else elements(given, "tools", _TOOL_LIST)


def _declaration(tool: ClientTool, place: int) -> dict[str, Any]:
    """OpenAI's; what is wrong with it is found there."""
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"tools[{place}].type: {tool.type!r} runs on a server; only 'custom' is supported", param="tools")
    made = {"name": tool.name, "description": tool.description, "parameters": not_null(tool.input_schema), "strict": tool.strict}
    return {"type": "function", "function": {key: value for key, value in made.items() if value is not None}}


def _choice(choice: ToolUseChoice | None) -> str | dict[str, Any] | None:
    """tool_choice in OpenAI's words."""
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        raise InvalidRequest(f"tool_choice.type: not one of {', '.join((*_CHOICES, 'tool'))}", param="tool_choice")
    return _CHOICES[choice.type]


def _thinking(config: ThinkingConfig | None) -> dict[str, bool] | None:
    if config is None:
        return None
    if config.type not in _THINKS:
        raise InvalidRequest(f"thinking.type: not one of {', '.join(_THINKS)}", param="thinking")
    return {"enable_thinking": _THINKS[config.type]}


def _texts(raw: Json, where: str) -> list[str]:
    """Of a text, or of text blocks."""
    if (given := not_null(raw)) is None:
        return []
    key = where.partition("[")[0]
    if first_characters(given)[:1] == b'"':
        return [decode(given, key, _TEXT)]
    blocks = elements(given, key, _BLOCKS)
    return [_text(block, f"{where}[{place}]") for place, block in enumerate(blocks)]


def _text(block: ContentBlock, where: str) -> str:
    key = where.partition("[")[0]
    if block.type != "text":
        raise InvalidRequest(f"{where}: blocks of type {block.type!r} are not supported here, only 'text'", param=key)
    if block.text is None:
        raise InvalidRequest(f"{where}: a text block has a text", param=key)
    return block.text


def _chat_messages(turn: Turn, where: str) -> list[dict[str, Any]]:
    """One turn as messages of a chat."""
    if turn.role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{where}.role: {turn.role!r} is not one of user, assistant, system", param="messages")
    if not isinstance(turn.content, list):
        return [{"role": turn.role, "content": turn.content or ""}]
    if turn.role == "assistant":
        return [_reply(turn.content, f"{where}.content")]
    return _asked(turn.role, turn.content, f"{where}.content")


def _reply(blocks: list[ContentBlock], where: str) -> dict[str, Any]:
    """What the model has said. A thought that nobody can read is left out."""
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block, f"{where}[{place}]"))
            case _:
                texts.append(_text(block, f"{where}[{place}]"))
    made = {"role": "assistant", "content": "".join(texts), "reasoning_content": "\n".join(filter(None, thoughts))}
    return {key: value for key, value in (made | {"tool_calls": calls}).items() if value or key == "content"}


def _call(block: ContentBlock, where: str) -> dict[str, Any]:
    """Its input stays the text that it is: numbers are rendered as they were written."""
    if block.id is None or block.name is None:
        raise InvalidRequest(f"{where}: a tool_use block has an id and a name", param="messages")
    given = not_null(block.input)
    try:
        arguments = {} if given is None else {"arguments": bytes(given).decode()}
    except UnicodeDecodeError:
        raise InvalidRequest(f"{where}.input: it is not UTF-8", param="messages") from None
    return {"id": block.id, "type": "function", "function": {"name": block.name, **arguments}}


def _asked(role: str, blocks: list[ContentBlock], where: str) -> list[dict[str, Any]]:
    """Results first; a turn that is nothing but results has no message of its own."""
    results, parts = [], []
    for place, block in enumerate(blocks):
        if block.type == "tool_result":
            results.append(_result(block, f"{where}[{place}]"))
        elif text := _text(block, f"{where}[{place}]"):
            parts.append({"type": "text", "text": text})
    return [*results, {"role": role, "content": parts}] if parts or not results else results


def _result(block: ContentBlock, where: str) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise InvalidRequest(f"{where}: a tool_result block has a tool_use_id", param="messages")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": "".join(_texts(block.content, f"{where}.content"))}
