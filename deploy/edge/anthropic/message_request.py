"""Requests of Anthropic's Messages API, converted to an Ask.

    system                                       a first message of role system
    tool_result blocks of a user's message       messages of role tool, before the rest of it
    thinking, text, tool_use blocks              reasoning, content and tool_calls of one message of the assistant

Accepted without effect: metadata, service_tier, cache_control, context_management, betas,
output_config.effort, display, is_error, a thinking block's signature and the like. Other known keys
that cannot be obeyed are refused.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, UnsetType

from deploy.edge.bodies.body_reader import AbsentKeys, BodyReader
from deploy.edge.bodies.key_types import (
    Count,
    Kind,
    ModelName,
    Name,
    RawObject,
    Share,
    TopK,
    array,
    component,
    one_of,
    shown_as,
)
from deploy.edge.bodies.raw_json import invalid, list_decoder, not_null, read_list
from deploy.edge.requests.answer_form import form_of
from deploy.edge.requests.ask import Ask, ChatMessage, ChatPrompt, Part, PastCall, Sampling, Text, without_empty_turns
from deploy.edge.requests.common_keys import (
    MESSAGES,
    PARTS,
    TOOLS,
    StopTexts,
    TextForm,
    check_bounds,
    content_of,
    declared_function,
    media_part,
    text_part,
)
from engine.front.constraints import ToolChoice
from engine.protocol import FrozenStruct

# Anthropic's that are not there, and those of OpenAI's chats that would change the answer.
_REFUSED = ("compaction", "container", "thread", "frequency_penalty", "logit_bias", "max_completion_tokens", "n",
            "presence_penalty", "response_format", "seed", "stop")  # fmt: skip
_ABSENT: AbsentKeys = {"mcp_servers": ([],), **dict.fromkeys(_REFUSED, ())}
# A system block of Claude Code that differs from request to request: with it in the prompt, no prefix would ever be shared.
_BILLING = "x-anthropic-billing-header:"


class MediaSource(FrozenStruct):
    """An image: its bytes in base64, or its URL."""

    type: Annotated[str, one_of("base64", "url")]
    media_type: Kind | None = None
    data: str | None = None
    url: str | None = None

    @property
    def address(self) -> str | None:
        if self.data:
            return f"data:{self.media_type};base64,{self.data}"
        return self.url


class ContentBlock(FrozenStruct):
    """A block of any type; the type decides which fields it has."""

    type: Kind
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: Name | None = None
    input: RawObject = UNSET
    tool_use_id: str | None = None
    content: "_Content | None" = None
    source: MediaSource | str | None = None


_Content = str | Annotated[list[ContentBlock], Meta(max_length=PARTS)]


class Turn(FrozenStruct):
    role: Literal["user", "assistant", "system"]
    content: _Content


class ClientTool(FrozenStruct):
    """A tool that the client runs."""

    name: Name
    input_schema: RawObject = UNSET
    description: str | None = None
    type: Kind | None = None
    strict: bool | None = None


class ToolUseChoice(FrozenStruct):
    type: Literal["auto", "any", "none", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(FrozenStruct):
    """Whether the model thinks first, and the budget of all thoughts in tokens."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Count | None = None


class CountRequest(FrozenStruct):
    """POST /v1/messages/count_tokens"""

    model: ModelName
    messages: Annotated[Raw, Meta(extra_json_schema=array(component("Turn"), minItems=1, maxItems=MESSAGES))]
    system: _Content | None = None
    tools: Annotated[Raw, shown_as(array(component("ClientTool"), maxItems=TOOLS))] | UnsetType = UNSET
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: TextForm | None = None
    output_format: RawObject = UNSET

    def chat(self) -> ChatPrompt:
        """InvalidRequest names the key."""
        check_bounds([self.tools], "tools", "they")
        tools = read_list(self.tools, "tools", _TOOL_LIST)
        for index, tool in enumerate(tools):
            if tool.type not in (None, "custom"):
                raise invalid(f"tools[{index}].type", f"{tool.type!r} is not supported, only 'custom'")
        turns = read_list(self.messages, "messages", _TURNS)
        blocks = (block for turn in turns if isinstance(turn.content, list) for block in turn.content)
        check_bounds((block.input for block in blocks), "messages", "the inputs of all tool_use blocks")
        said = [message for index, turn in enumerate(turns) for message in _chat_messages(turn, f"messages[{index}]")]
        messages = without_empty_turns(said, "messages")
        texts = [_text(block, f"system[{index}]").text for index, block in enumerate(_blocks(self.system))]
        system = "\n\n".join(text for text in texts if not text.lstrip().startswith(_BILLING))
        if system:
            messages.insert(0, ChatMessage("system", system))
        return ChatPrompt(
            messages,
            [declared_function(tool.name, tool, tool.input_schema) for tool in tools],
            choice=_choice(self.tool_choice),
            thinks=self.thinking.type != "disabled" if self.thinking else None,
            thought_tokens=self.thinking.budget_tokens if self.thinking else None,
            tool_paths=[(f"tools[{index}]", f"tools[{index}].input_schema") for index in range(len(tools))],
        )


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: StopTexts | None = None
    temperature: Share = None
    top_p: Share = None
    top_k: TopK = None

    def ask(self) -> Ask:
        """InvalidRequest names the key."""
        chat = self.chat()
        if chat.messages[-1].role == "assistant":
            raise invalid("messages", "the last one is the assistant's; going on with it is not supported")
        if (chat.thought_tokens or 0) >= self.max_tokens:
            raise invalid("max_tokens", "must be greater than thinking.budget_tokens")
        return Ask(
            model=self.model,
            prompt=chat,
            sampling=Sampling(
                max_tokens=self.max_tokens,
                stops=tuple(self.stop_sequences or ()),
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
            ),
            stream=bool(self.stream),
            form=form_of({
                "output_config.format": self.output_config.format if self.output_config else UNSET,
                "output_format": self.output_format,
            }),
        )


COUNT_READER = BodyReader(CountRequest, _ABSENT)
MESSAGES_READER = BodyReader(MessagesRequest, _ABSENT)
_TURNS = list_decoder(Turn, MESSAGES)
_TOOL_LIST = list_decoder(ClientTool, TOOLS)


def _choice(choice: ToolUseChoice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name", "is required")
        return ToolChoice("required", (choice.name,), one=True)
    return ToolChoice("required" if choice.type == "any" else choice.type, one=bool(choice.disable_parallel_tool_use))


def _part(block: ContentBlock, where: str) -> Part:
    if block.type == "image":
        return media_part("image", block.source.address if isinstance(block.source, MediaSource) else None, where)
    return _text(block, where)


def _text(block: ContentBlock, where: str) -> Text:
    return text_part(block.type, block.text, where)


def _blocks(content: _Content | None) -> list[ContentBlock]:
    if isinstance(content, str):
        return [ContentBlock("text", content)]
    return content or []


def _chat_messages(turn: Turn, where: str) -> list[ChatMessage]:
    if not isinstance(turn.content, list):
        return [ChatMessage(turn.role, turn.content)]
    if turn.role == "assistant":
        return [_reply(turn.content, f"{where}.content")]
    return _client_messages(turn.role, turn.content, f"{where}.content")


def _reply(blocks: list[ContentBlock], where: str) -> ChatMessage:
    texts = []
    thoughts = []
    calls = []
    for index, block in enumerate(blocks):
        match block.type:
            case "thinking" | "redacted_thinking":
                thoughts.append(block.thinking or "")
            case "tool_use":
                calls.append(_call(block, f"{where}[{index}]"))
            case _:
                texts.append(_text(block, f"{where}[{index}]").text)
    return ChatMessage("assistant", "".join(texts), thought="\n".join(filter(None, thoughts)) or None, calls=tuple(calls))


def _call(block: ContentBlock, where: str) -> PastCall:
    """Keeps the input's text, so that numbers are rendered as written."""
    if block.id is None or block.name is None:
        raise invalid(where, "a tool_use block has an id and a name")
    given = not_null(block.input)
    try:
        return PastCall(block.name, None if given is None else bytes(given).decode(), block.id)
    except UnicodeDecodeError:
        raise invalid(f"{where}.input", "it is not UTF-8") from None


def _client_messages(role: str, blocks: list[ContentBlock], where: str) -> list[ChatMessage]:
    """Results come first. A turn with results only has no message of its own."""
    results = []
    parts = []
    for index, block in enumerate(blocks):
        if block.type == "tool_result":
            results.append(_result(block, f"{where}[{index}]"))
        elif (part := _part(block, f"{where}[{index}]")) != Text(""):
            parts.append(part)
    if parts or not results:
        return [*results, ChatMessage(role, parts)]
    return results


def _result(block: ContentBlock, where: str) -> ChatMessage:
    if block.tool_use_id is None:
        raise invalid(where, "a tool_result block has a tool_use_id")
    parts = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(_blocks(block.content))]
    return ChatMessage("tool", content_of(parts), call_id=block.tool_use_id, call_path=f"{where}.tool_use_id")
