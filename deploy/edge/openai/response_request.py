"""Requests of OpenAI's Responses API, converted to an Ask.

    instructions, and the system and developer messages that come first      one first message of role system
    reasoning, message, function_call items of the assistant                 reasoning, content and tool_calls of one message
    function_call_output                                                     a message of role tool
    items of other types                                                     skipped: agents keep items of other servers
    function F of a namespace N                                              function N.F

Only functions are offered to the model; an answer's `tools` lists them. docs/api.md lists keys
without effect.
"""

import base64
import binascii
from collections.abc import Iterator
from itertools import dropwhile
from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Meta, Raw, UnsetType

from deploy.edge.bodies.body_reader import AbsentKeys, BodyReader
from deploy.edge.bodies.key_types import (
    STRING,
    Count,
    Kind,
    ModelName,
    Name,
    RawObject,
    RawToolChoice,
    array,
    component,
    shown_as,
)
from deploy.edge.bodies.raw_json import ANYTHING, Json, decode, invalid, list_decoder, not_null, read_list, read_text
from deploy.edge.openai.chat_turns import Content, content_parts
from deploy.edge.openai.schemas import chat_keys_without
from deploy.edge.openai.tool_choice import tool_choice
from deploy.edge.requests.answer_form import form_of
from deploy.edge.requests.ask import Ask, ChatMessage, ChatPrompt, Part, PastCall, without_empty_turns
from deploy.edge.requests.common_keys import (
    MESSAGES,
    TOOLS,
    CommonSamplingKeys,
    Effort,
    RawTools,
    TextForm,
    ThinkingSwitch,
    check_bounds,
    content_of,
    declared_function,
    said_thinking,
)
from engine.protocol import FrozenStruct

ENCRYPTED = "reasoning.encrypted_content"
_OWN = "quartet:"  # what we hand out as encrypted content: nothing is secret in it, but clients send back nothing else
# `include` may also name these, which no answer has: parts of tools that are not offered, and the client's own images.
_NEVER_THERE = ("code_interpreter_call.", "computer_call_output.", "file_search_call.", "message.input_image.", "web_search_call.")
_ITEMS_SCHEMA = array(component("InputItem"), minItems=1, maxItems=MESSAGES)
# Agents declare these in every request, and do without them where they are not offered.
_NOT_OFFERED = ("custom", "web_search", "tool_search", "local_shell", "shell", "apply_patch", "image_generation")
_ORDER = ("reasoning", "message")  # of the items of one message, before its calls
_ABSENT: AbsentKeys = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "context_management": ([],),
    "moderation": (),
}
V = TypeVar("V")


class InputItem(FrozenStruct):
    """A message, a thought, a call or its output; the type decides which fields it has."""

    type: Kind | None = None
    role: Annotated[str, Meta(max_length=32)] | None = None
    content: Content = None
    call_id: str | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | None = None
    input: str | None = None
    action: RawObject = UNSET
    output: Content = None
    encrypted_content: str | None = None

    def __post_init__(self) -> None:
        if self.type is None and self.role is None:
            raise ValueError("it has neither a type nor a role")


class DeclaredTool(FrozenStruct):
    """A function that the client runs, a namespace of such functions, or a tool of another kind."""

    type: Kind
    name: Name | None = None
    description: str | None = None
    parameters: RawObject = UNSET
    strict: bool | None = None
    tools: RawTools = UNSET


class OfferedFunction(FrozenStruct):
    """`path`: its key in the request."""

    tool: DeclaredTool
    path: str
    namespace: DeclaredTool | None

    @property
    def name(self) -> str:
        return _full_name(self.namespace.name if self.namespace else None, self.tool.name or "")


class ReasoningConfig(FrozenStruct):
    effort: Effort | None = None


class ResponsesRequest(CommonSamplingKeys, kw_only=True):
    """POST /v1/responses"""

    model: ModelName | None = None
    input: Annotated[Raw, Meta(extra_json_schema={"anyOf": [STRING, _ITEMS_SCHEMA]})]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[Raw, shown_as(array(component("DeclaredTool"), maxItems=TOOLS))] | UnsetType = UNSET
    tool_choice: RawToolChoice = UNSET
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    text: TextForm | None = None
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None

    def ask(self) -> Ask:
        """InvalidRequest names the key."""
        functions = self.functions()
        return Ask(
            model=self.model,
            prompt=ChatPrompt(
                _with_instructions(self.instructions, self._messages()),
                [declared_function(function.name, function.tool, function.tool.parameters) for function in functions],
                choice=tool_choice(self.tool_choice, parallel=self.parallel_tool_calls is not False),
                thinks=said_thinking(self.enable_thinking, self.thinking, self.reasoning.effort if self.reasoning else None),
                tool_paths=[(function.path, f"{function.path}.parameters") for function in functions],
            ),
            sampling=self.sampling(max_tokens=self.max_output_tokens),
            stream=bool(self.stream),
            form=form_of({"text.format": self.text.format}) if self.text else None,
            prompt_key="input",
        )

    def functions(self) -> list[OfferedFunction]:
        return list(_functions(self.tools, "tools"))

    def includes_encrypted(self) -> bool:
        """InvalidRequest if `include` asks for anything but encrypted thoughts."""
        included = self.include or ()
        for name in included:
            if name != ENCRYPTED and not name.startswith(_NEVER_THERE):
                raise invalid("include", f"{name[:100]!r} is not supported here", code="unsupported_parameter")
        return ENCRYPTED in included

    def _messages(self) -> list[ChatMessage]:
        if (text := read_text(self.input, "input")) is not None:
            return [ChatMessage("user", text)]
        items = read_list(self.input, "input", _ITEMS)
        said = [value.encode() for item in items for value in (item.arguments, item.input) if value]
        check_bounds([*said, *(item.action for item in items)], "input", "the arguments of all calls")
        return without_empty_turns(_chat_messages(items), "input")


def encrypted_content_of(thought: str) -> str:
    return _OWN + base64.b64encode(thought.encode()).decode()


RESPONSES_READER = BodyReader(ResponsesRequest, {**chat_keys_without(ResponsesRequest), **_ABSENT})
_ITEMS = list_decoder(InputItem, MESSAGES)
_TOOL_LIST = list_decoder(DeclaredTool, TOOLS)


def _functions(raw: Json, where: str, namespace: DeclaredTool | None = None) -> Iterator[OfferedFunction]:
    check_bounds([raw], "tools", "they")
    for index, tool in enumerate(read_list(raw, where, _TOOL_LIST)):
        path = f"{where}[{index}]"
        match tool.type:
            case "function" | "namespace" if not tool.name:
                raise invalid(f"{path}.name", "is required")
            case "function":
                yield OfferedFunction(tool, path, namespace)
            case "namespace" if namespace is None:
                yield from _functions(tool.tools, f"{path}.tools", tool)
            case kind if not kind.startswith(_NOT_OFFERED):
                raise invalid(f"{path}.type", f"{kind!r} is not supported, only 'function' and namespaces of functions")


def _full_name(namespace: str | None, name: str) -> str:
    if namespace:
        return f"{namespace}.{name}"
    return name


def _with_instructions(instructions: str | None, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Templates take only one system message."""
    later = list(dropwhile(lambda message: message.role == "system", messages))
    first = (str(message.content) for message in messages[: len(messages) - len(later)])
    text = "\n\n".join(filter(None, [instructions, *first]))
    if text:
        return [ChatMessage("system", text), *later]
    return later


def _chat_messages(items: list[InputItem]) -> list[ChatMessage]:
    runs: list[list[ChatMessage]] = []
    before = -1
    for index, item in enumerate(items):
        message = _message(item, f"input[{index}]")
        if message is None:
            continue
        kind = item.type or "message"
        rank = -1
        if message.role == "assistant":
            if kind in _ORDER:
                rank = _ORDER.index(kind)
            else:
                rank = len(_ORDER)
        if 0 <= before <= rank:
            runs[-1].append(message)
        else:
            runs.append([message])
        before = rank
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _joined(run: list[ChatMessage]) -> ChatMessage:
    thoughts = "\n".join(message.thought for message in run if message.thought)
    calls = tuple(call for message in run for call in message.calls)
    return ChatMessage("assistant", "".join(str(message.content) for message in run), thought=thoughts or None, calls=calls)


def _message(item: InputItem, where: str) -> ChatMessage | None:
    match item.type or "message":
        case "message" if item.role == "user":
            return ChatMessage("user", _content(item.content, f"{where}.content"))
        case "message" if item.role in ("assistant", "system", "developer"):
            return ChatMessage("assistant" if item.role == "assistant" else "system", _text(item.content, f"{where}.content"))
        case "message":
            raise invalid(f"{where}.role", "not one of user, assistant, system, developer")
        case "reasoning":
            return ChatMessage("assistant", "", thought=_thought(item, where) or None)
        case "function_call":
            return _past_call(item, _full_name(item.namespace, _required(item.name, f"{where}.name")), item.arguments, where)
        case "custom_tool_call":
            return _past_call(item, _required(item.name, f"{where}.name"), {"input": item.input or ""}, where)
        case "local_shell_call" if item.call_id is not None:
            action = not_null(item.action)
            return _past_call(item, "local_shell", {} if action is None else decode(action, "input", ANYTHING), where)
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            path = f"{where}.call_id"
            output = _content(item.output, f"{where}.output")
            return ChatMessage("tool", output, call_id=_required(item.call_id, path), call_path=path)
        case "item_reference":
            raise invalid(f"{where}.type", "nothing is stored here: send the item itself, not an item_reference")
    return None


def _past_call(item: InputItem, name: str, arguments: Any, where: str) -> ChatMessage:
    return ChatMessage("assistant", "", calls=(PastCall(name, arguments, _required(item.call_id, f"{where}.call_id")),))


def _thought(item: InputItem, where: str) -> str:
    """Empty if another server encrypted it."""
    if item.content:
        return _text(item.content, f"{where}.content")
    given = item.encrypted_content or ""
    if not given.startswith(_OWN):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_OWN), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise invalid(f"{where}.encrypted_content", "it is not as it was handed out") from error


def _content(content: Content, where: str) -> str | list[Part]:
    if isinstance(content, list):
        return content_of(content_parts(content, where))
    return _required(content, where)


def _text(content: Content, where: str) -> str:
    text = _content(content, where)
    if not isinstance(text, str):
        raise invalid(where, "only text is supported here")
    return text


def _required(value: V | None, where: str) -> V:
    if value is None:
        raise invalid(where, "is required")
    return value
