"""Conversations of OpenAI's chat completions."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, to_builtins

from deploy.edge.bodies.key_types import Kind, Name, RawTextOrObject, array, component, one_of
from deploy.edge.bodies.raw_json import ANYTHING, decode, invalid, list_decoder, not_null, read_list
from deploy.edge.edge_settings import SoftTokens
from deploy.edge.requests.ask import ChatMessage, ChatPrompt, Part, PastCall
from deploy.edge.requests.common_keys import (
    MESSAGES,
    PARTS,
    TOOLS,
    check_bounds,
    media_part,
    said_thinking,
    text_part,
)
from engine.protocol import FrozenStruct, JsonObject, MediaKind

MESSAGES_SCHEMA = array(component("Message"), minItems=1, maxItems=MESSAGES)
_TEXTS = ("text", "refusal", "input_text", "output_text", "reasoning_text")  # kinds of parts that are text
_URL_PARTS: Mapping[str, MediaKind] = {"image_url": "image", "input_image": "image", "video_url": "video", "audio_url": "audio"}
Detail = Literal["low", "high", "original", "auto"]
_DETAILS: Mapping[Detail | None, int] = {"low": 70, "high": 1120, "original": 1120}  # to an image's soft tokens


class InputAudio(FrozenStruct):
    """A clip, in base64 or as a data: URL."""

    data: str | None = None
    format: str | None = None


class MediaUrl(FrozenStruct):
    """An http(s) or data: URL; `detail`: of an image."""

    url: str | None = None
    detail: Detail | None = None


_Url = MediaUrl | str | None  # a text: Mistral's clients


class ContentPart(FrozenStruct):
    """A text, refusal, image, video or clip, by the names of chats or of Responses."""

    type: Annotated[str, one_of(*_TEXTS, *_URL_PARTS, "input_audio")]
    text: str | None = None
    refusal: str | None = None
    image_url: _Url = None
    video_url: _Url = None
    audio_url: _Url = None
    detail: Detail | None = None
    input_audio: InputAudio | None = None


Content = str | Annotated[list[ContentPart], Meta(max_length=PARTS)] | None


class FunctionCall(FrozenStruct):
    """A call of an assistant's turn; `arguments` is JSON in a string, or an object."""

    name: Name
    arguments: RawTextOrObject = UNSET


class ToolCall(FrozenStruct):
    function: FunctionCall
    id: str | None = None
    type: Kind | None = None


class Message(FrozenStruct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    # What OpenAI's replies have, clients send back.
    function_call: None = None
    audio: None = None


class ProcessorKeys(FrozenStruct, forbid_unknown_fields=True):
    """`max_soft_tokens`: of each image, instead of its `detail` (vLLM's)."""

    max_soft_tokens: SoftTokens | None = None


class TemplateSwitches(FrozenStruct, omit_defaults=True):
    """Switches of the chat template: whether the model thinks, and whether earlier turns keep their thoughts. Switches of
    templates for other models have no effect."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None


_MESSAGES = list_decoder(Message, MESSAGES)
_TOOLS = list_decoder(JsonObject, TOOLS)


def read_chat(request: Any) -> ChatPrompt:
    """InvalidRequest names the key."""
    switches = to_builtins(request.chat_template_kwargs or {})
    told = [switches.pop(name, None) for name in ("enable_thinking", "thinking")]
    enabled = next((value for value in (*told, request.enable_thinking) if value is not None), None)
    messages = read_list(request.messages, "messages", _MESSAGES)
    if not messages:
        raise invalid("messages", "must not be empty")
    calls = (call for message in messages for call in message.tool_calls or ())
    check_bounds((call.function.arguments for call in calls), "messages", "the arguments of all tool_calls")
    check_bounds([request.tools], "tools", "they")
    return ChatPrompt(
        [_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        read_list(request.tools, "tools", _TOOLS),
        thinks=said_thinking(enabled, request.thinking, request.reasoning_effort),
        add_generation_prompt=request.add_generation_prompt is not False,
        switches=switches,
        max_soft_tokens=request.mm_processor_kwargs and request.mm_processor_kwargs.max_soft_tokens,
    )


def _message(message: Message, where: str) -> ChatMessage:
    content = message.refusal if message.content is None else message.content
    if content is None and message.role == "user":
        raise invalid(f"{where}.content", "a user's message needs content, not null")
    return ChatMessage(
        "system" if message.role == "developer" else message.role,
        content_parts(content, f"{where}.content") if isinstance(content, list) else content,
        thought=message.reasoning or message.reasoning_content,
        calls=tuple(map(_call, message.tool_calls or ())),
        call_id=message.tool_call_id,
        call_path=f"{where}.tool_call_id",
        name=message.name,
    )


def content_parts(parts: list[ContentPart], where: str) -> list[Part]:
    """InvalidRequest names the part."""
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(parts)]


def _part(part: ContentPart, where: str) -> Part:
    if part.type == "input_audio":
        return media_part("audio", _clip_url(part.input_audio), where)
    if (kind := _URL_PARTS.get(part.type)) is not None:
        value: _Url = getattr(part, f"{kind}_url")
        if isinstance(value, MediaUrl):
            media = value
        else:
            media = MediaUrl(value, part.detail)
        return media_part(kind, media.url, where, _DETAILS.get(media.detail))
    return text_part(part.type, part.refusal or part.text, where, _TEXTS)


def _clip_url(clip: InputAudio | None) -> str | None:
    if clip is None or not clip.data:
        return None
    if clip.data[:5].lower() == "data:":
        return clip.data
    return f"data:audio/{clip.format};base64,{clip.data}"


def _call(call: ToolCall) -> PastCall:
    given = not_null(call.function.arguments)
    return PastCall(call.function.name, None if given is None else decode(given, "messages", ANYTHING), call.id)
