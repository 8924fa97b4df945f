"""A client's request, independent of its API."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from msgspec.structs import force_setattr

from deploy.edge.bodies.raw_json import invalid
from engine.front.constraints import ToolChoice
from engine.protocol import FrozenStruct, JsonObject, MediaKind


class Text(FrozenStruct):
    text: str


class Media(FrozenStruct):
    """`budget`: most soft tokens of an image."""

    kind: MediaKind
    url: str
    budget: int | None = None

    @property
    def is_remote(self) -> bool:
        return self.url[:5].lower() != "data:"


Part = Text | Media  # what a content may consist of; each API has one function from a part's JSON to it


class PastCall(FrozenStruct):
    """JSON text in `arguments` keeps its numbers as written."""

    name: str
    arguments: Any
    id: str | None

    def plain(self) -> JsonObject:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`call_id`: the call that it answers; `call_path`: the client's path of that call."""

    role: str
    content: str | Sequence[Part] | None
    thought: str | None = None
    calls: tuple[PastCall, ...] = ()
    call_id: str | None = None
    name: str | None = None
    call_path: str = field(default="", compare=False)

    def plain(self) -> JsonObject:
        content: Any = self.content
        if not isinstance(content, str | None):
            content = [{"type": "text", "text": part.text} if isinstance(part, Text) else {"type": part.kind} for part in content]
        fields = {
            "role": self.role,
            "name": self.name,
            "content": content,
            "reasoning": self.thought,
            "tool_calls": [call.plain() for call in self.calls] or None,
            "tool_call_id": self.call_id,
        }
        return {key: value for key, value in fields.items() if value is not None}


class ChatPrompt(FrozenStruct):
    """InvalidRequest if a tool result has no earlier call. `max_soft_tokens`: of each image;
    `tool_paths`: the client's, if not a chat's."""

    messages: Sequence[ChatMessage]
    tools: Sequence[JsonObject] = ()
    choice: ToolChoice = ToolChoice()
    thinks: bool | None = None
    thought_tokens: int | None = None
    add_generation_prompt: bool = True
    switches: Mapping[str, bool] = {}
    max_soft_tokens: int | None = None
    tool_paths: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        calls: set[str | None] = {None}
        for message in self.messages:
            if message.call_id not in calls:
                raise invalid(message.call_path, f"no call before it has the id {str(message.call_id)[:100]!r}")
            calls.update(call.id for call in message.calls)
        force_setattr(self, "messages", list(_with_results_in_order(self.messages)))

    @property
    def media(self) -> list[Media]:
        contents = [message.content for message in self.messages if not isinstance(message.content, str | None)]
        return [part for content in contents for part in content if isinstance(part, Media)]


def _with_results_in_order(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Templates match results to calls by position only."""
    order: dict[str | None, int] = {}
    for is_result, run in groupby(messages, lambda message: message.role == "tool"):
        turns = list(run)
        yield from sorted(turns, key=lambda message: order.get(message.call_id, 0)) if is_result else turns
        order = {call.id: index for index, call in enumerate(call for turn in turns for call in turn.calls)}


def without_empty_turns(messages: Sequence[ChatMessage], key: str) -> list[ChatMessage]:
    """Leave out assistant turns that would render nothing. InvalidRequest if `key` has no other
    turn."""
    shown = [
        message
        for message in messages
        if message.role != "assistant" or message.content or message.calls or (message.thought and message is messages[-1])
    ]
    if not shown:
        raise invalid(key, "must not be empty")
    return shown


class RawPrompts(FrozenStruct):
    """With `echo` an answer begins with its prompt."""

    sources: Sequence[str | list[int]]
    echo: bool = False


class Sampling(FrozenStruct, kw_only=True):
    """None: the default. `speculative` allows drafts, which change no token."""

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    speculative: bool = True
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    biases: Mapping[int, float] = {}
    allowed_ids: Sequence[int] | None = None
    bad_words: tuple[str, ...] = ()


class AnswerForm(FrozenStruct):
    rules: str
    key: str


LazyForm = Callable[[], AnswerForm | None]  # takes a while; InvalidRequest names the key that is wrong


class Ask(FrozenStruct, kw_only=True):
    """`logprobs`, `prompt_logprobs`: alternatives per token, or None. `prompt_key`: named in later
    errors."""

    prompt: ChatPrompt | RawPrompts
    model: str | None = None
    sampling: Sampling = Sampling()
    stream: bool = False
    form: LazyForm | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    salt: str = ""
    priority: int = 0
    prompt_key: str = "messages"
