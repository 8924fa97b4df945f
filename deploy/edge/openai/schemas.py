"""What a request may say. Known keys are validated hard, unknown ones are accepted and ignored, as OpenAI's clients expect.

    body --one pass of msgspec--> typed fields, and lists of unknown size as raw JSON --bounded decoding--> checked request

Decoding stops at the first thing that is wrong. What may be a list of any length stays raw JSON in the first pass and is decoded
with a bound: the first element decides what the others must be, and the first one too many ends it. So no body, however it is
made, costs more than a scan of it. Accepted without effect: user, store, metadata, service_tier, verbosity,
safety_identifier, prompt_cache_key, prompt_cache_retention, prediction, rid, request_id, guided_decoding_backend and the like;
absent_keys.py lists what is refused.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from deploy.edge.openai import absent_keys
from deploy.edge.openai.answer_form import KEYS as FORM_KEYS
from deploy.edge.openai.answer_form import AnswerForm, answer_form
from deploy.edge.openai.forms import UsageChunks
from deploy.edge.openai.tool_choice import tool_choice
from deploy.edge.raw_json import (
    ANYTHING,
    BoundedList,
    Json,
    TokenId,
    at_most,
    brackets,
    check_commas,
    decode,
    elements,
    first_characters,
    not_null,
    short_value,
    shown_as,
    size,
    token_ids,
)
from engine.errors import InvalidRequest
from engine.front.constraints import ToolChoice
from engine.front.template import EXTRAS, MAX_VALUES, ROLES
from engine.logit_adjustments import MAX_ALLOWED_IDS, MAX_BAD_WORDS, MAX_BIAS_IDS

MESSAGES = 4096
PARTS = 1024
PROMPTS = 32
PROMPT_IDS = 1 << 20
STOPS = 64
STOP_IDS = 1024
WORD_CHARACTERS = 256
TOOLS = 128
TOOL_BYTES = 1 << 20  # of a request's declared tools, and of the arguments of all its tool calls
_INT32 = 2**31 - 1
_INT64 = 2**63
_SWITCHES_BYTES = 4096
_BIAS_BYTES = 64  # an entry of logit_bias in JSON

Count = Annotated[int, Meta(ge=1, le=_INT32)]


REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # the model knows two: none, and all others
_STRING = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STRINGS = {"type": "array", "items": _STRING}
_BIASES = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
_SWITCHES_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {name: {"type": "boolean"} for name in ("enable_thinking", *sorted(EXTRAS))},
}
_MESSAGE = {"$ref": "#/components/schemas/Message"}
_NULL_IN_MESSAGES = ("function_call", "audio", "refusal")  # what clients send back unasked, but where it says something


class StreamOptions(Struct, frozen=True):
    """Of a stream: its usage at the end, and with `continuous_usage_stats` in each chunk, too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(Struct, frozen=True):
    """The one kind of content part that is understood today."""

    type: Annotated[str, Meta(max_length=64, extra_json_schema={"enum": ["text"]})]
    text: str | None = None


class FunctionCall(Struct, frozen=True):
    """Of an assistant's turn in the history; `arguments` is JSON in a string, or an object."""

    name: Annotated[str, Meta(max_length=256)]
    arguments: Annotated[Raw, shown_as(_STRING, {"type": "object"})] | UnsetType = UNSET


class ToolCall(Struct, frozen=True):
    """A call in the history."""

    function: FunctionCall
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: Annotated[str, Meta(max_length=64)] | None = None


class Message(Struct, frozen=True):
    """One turn."""

    role: Annotated[str, Meta(max_length=32, extra_json_schema={"enum": sorted(ROLES)})]
    content: str | Annotated[list[TextPart], Meta(max_length=PARTS)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=TOOLS)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    function_call: Annotated[Raw, shown_as()] | UnsetType = UNSET
    audio: Annotated[Raw, shown_as()] | UnsetType = UNSET
    refusal: Annotated[Raw, shown_as()] | UnsetType = UNSET

    def plain(self) -> dict[str, Any]:
        """As the chat template takes it: what is null is not there."""
        kept = msgspec.structs.replace(self, tool_calls=None, **dict.fromkeys(_NULL_IN_MESSAGES, UNSET))
        made: dict[str, Any] = msgspec.to_builtins(kept)
        if self.tool_calls is not None:
            made["tool_calls"] = [_plain_call(call) for call in self.tool_calls]
        return {key: value for key, value in made.items() if value is not None}


class Sampling(Struct, frozen=True, kw_only=True):
    """What both kinds of completion have in common."""

    model: Annotated[str, Meta(max_length=1024)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[Raw, shown_as(_BIASES)] | UnsetType = UNSET
    bad_words: Annotated[Raw, shown_as(_STRINGS)] | UnsetType = UNSET
    allowed_token_ids: Annotated[Raw, shown_as(_IDS)] | UnsetType = UNSET
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    stop: Annotated[Raw, shown_as(_STRING, _STRINGS)] | UnsetType = UNSET
    stop_token_ids: Annotated[Raw, shown_as(_IDS)] | UnsetType = UNSET
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-_INT32, le=_INT32)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    response_format: Annotated[Raw, shown_as({"type": "object"})] | UnsetType = UNSET
    structured_outputs: Annotated[Raw, shown_as({"type": "object"})] | UnsetType = UNSET
    guided_json: Annotated[Raw, shown_as(_STRING, {"type": "object"})] | UnsetType = UNSET
    guided_json_object: Annotated[Raw, shown_as({"type": "boolean"})] | UnsetType = UNSET
    guided_regex: Annotated[Raw, shown_as(_STRING)] | UnsetType = UNSET
    guided_choice: Annotated[Raw, shown_as(_STRINGS)] | UnsetType = UNSET
    guided_grammar: Annotated[Raw, shown_as(_STRING)] | UnsetType = UNSET
    json_schema: Annotated[Raw, shown_as(_STRING, {"type": "object"})] | UnsetType = UNSET
    regex: Annotated[Raw, shown_as(_STRING)] | UnsetType = UNSET
    ebnf: Annotated[Raw, shown_as(_STRING)] | UnsetType = UNSET
    structural_tag: Annotated[Raw, shown_as(_STRING, {"type": "object"})] | UnsetType = UNSET

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. InvalidRequest: they are none, or too many."""
        return _stops(self.stop)

    @property
    def stop_ids(self) -> list[int]:
        """Token ids that end the answer. InvalidRequest: they are none, or too many."""
        return token_ids(self.stop_token_ids, "stop_token_ids", STOP_IDS)

    @property
    def biases(self) -> dict[int, float]:
        """What logit_bias says of each id. InvalidRequest: too many, no ids, or no numbers from -100 to 100."""
        if (given := not_null(self.logit_bias)) is None:
            return {}
        if size(given) > _BIAS_BYTES * MAX_BIAS_IDS or bytes(given).count(b",") >= MAX_BIAS_IDS:
            raise InvalidRequest(f"logit_bias: more than {MAX_BIAS_IDS} token ids", param="logit_bias")
        found: dict[int, float] = decode(given, "logit_bias", _BIAS)
        return found

    @property
    def allowed_ids(self) -> list[int] | None:
        """Of allowed_token_ids; None where it says nothing. InvalidRequest: they are none, or too many."""
        if not_null(self.allowed_token_ids) is None:
            return None
        return token_ids(self.allowed_token_ids, "allowed_token_ids", MAX_ALLOWED_IDS)

    @property
    def forbidden_words(self) -> list[str]:
        """Of bad_words. InvalidRequest: they are no strings, too many, or too long."""
        if (given := not_null(self.bad_words)) is None:
            return []
        words = elements(given, "bad_words", _WORDS)
        if any(len(word) > WORD_CHARACTERS for word in words):
            raise InvalidRequest(f"bad_words: a word has more than {WORD_CHARACTERS} characters", param="bad_words")
        return words

    @property
    def usage_chunks(self) -> UsageChunks:
        """Where a stream says its usage. InvalidRequest: in each chunk, and not at the end."""
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats and not options.include_usage:
            raise InvalidRequest("stream_options.continuous_usage_stats: only with include_usage: true", param="stream_options")
        return "each" if options.continuous_usage_stats else "last" if options.include_usage else "none"

    def check(self) -> None:
        """What types alone do not say; raises InvalidRequest that names the key."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only with stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs: not with stream: true", param="prompt_logprobs")

    @property
    def demands_form(self) -> bool:
        """Whether it may demand a form of its answer."""
        return any(not_null(getattr(self, name)) is not None for name in FORM_KEYS)

    def read_form(self) -> AnswerForm | None:
        """What its answer must look like; takes a while. InvalidRequest names the key that is wrong."""
        form = answer_form({name: getattr(self, name) for name in FORM_KEYS})
        if form is not None and (self.min_tokens or self.ignore_eos):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidRequest(f"{name}: not with {form.param}, whose answers end where they are complete", param=name)
        return form


class ChatRequest(Sampling, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MESSAGES})]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    tools: Annotated[Raw, shown_as({"type": "array", "items": {"type": "object"}, "maxItems": TOOLS})] | UnsetType = UNSET
    tool_choice: Annotated[Raw, shown_as({"enum": ["auto", "none", "required"]}, {"type": "object"})] | UnsetType = UNSET
    chat_template_kwargs: Annotated[Raw, shown_as(_SWITCHES_SCHEMA)] | UnsetType = UNSET
    add_generation_prompt: bool | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    reasoning_effort: Annotated[str, Meta(extra_json_schema={"enum": [*REASONING_EFFORTS]})] | None = None

    def turns(self) -> list[Message]:
        """The messages, decoded anew at each call. InvalidRequest: they are none, or too many."""
        found = _MESSAGES.read(self.messages, "messages")
        if not found:
            raise InvalidRequest("messages: must not be empty", param="messages")
        _check_turns(found)
        return found

    @property
    def declared_tools(self) -> list[dict[str, Any]]:
        """The tools. InvalidRequest: they are none, or too large."""
        return _tools(self.tools)

    @property
    def template_options(self) -> dict[str, bool]:
        """What chat_template_kwargs says, and whether to think, which reasoning_effort may say. InvalidRequest names no switch."""
        effort = {} if self.reasoning_effort is None else {"enable_thinking": self.reasoning_effort != "none"}
        return effort | _switches(self.chat_template_kwargs, "chat_template_kwargs")

    @property
    def chosen_tools(self) -> ToolChoice:
        """Which of the tools may, and whether any must, be called. InvalidRequest: it does not say so."""
        return tool_choice(self.tool_choice, parallel=self.parallel_tool_calls is not False)

    def _check_tool_choice(self) -> None:
        choice = self.chosen_tools
        if choice.mode == "required" and (self.min_tokens or self.ignore_eos):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidRequest(f"{name}: not with a tool_choice that requires a call", param=name)

    def check(self) -> None:
        """As the base, and what only chat has."""
        super().check()
        self._check_tool_choice()
        if self.reasoning_effort is not None and self.reasoning_effort not in REASONING_EFFORTS:
            raise InvalidRequest(f"reasoning_effort: not one of {', '.join(REASONING_EFFORTS)}", param="reasoning_effort")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs: true", param="top_logprobs")


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """POST /v1/completions"""

    prompt: Annotated[Raw, shown_as(_STRING, _STRINGS, _IDS, {"type": "array", "items": _IDS})]
    max_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    echo: bool | None = None
    best_of: Count | None = None

    def check(self) -> None:
        """As the base, and what only completions have."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens: 0 only with echo: true", param="max_tokens")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "only the value of n")

    @property
    def echoed_logprobs(self) -> int | None:
        """Alternatives of each echoed token of the prompt; None: it is not echoed, or has no logprobs."""
        return self.logprobs if self.echo else None

    def prompts(self) -> list[str | list[int]]:
        """Texts, or lists of token ids. InvalidRequest: they are neither, or too many."""
        first = first_characters(self.prompt)
        if first == b'["':
            return elements(self.prompt, "prompt", _TEXTS)
        if first == b"[[":
            check_commas(self.prompt, "prompt", PROMPT_IDS)
            return elements(self.prompt, "prompt", _ID_LISTS)
        if first[:1] == b'"':
            return [decode(self.prompt, "prompt", _TEXT)]
        return [token_ids(self.prompt, "prompt", PROMPT_IDS)]


R = TypeVar("R", bound=Sampling)


def parse(kind: type[R], body: bytes) -> R:
    """The request in `body`; InvalidRequest names the first key that is wrong."""
    decoder, absent = _DECODERS[kind]
    request: R = decode(body, "", decoder)
    for name, neutral in absent.items():
        if not absent_keys.is_neutral(short_value(getattr(request, name), name), neutral):
            raise unsupported(name, " or ".join(msgspec.json.encode(value).decode() for value in neutral))
    request.check()
    return request


def unsupported(name: str, allowed: str = "") -> InvalidRequest:
    """What a known key without its function is answered with."""
    rest = f": {allowed}" if allowed.startswith("only") else f": only {allowed}" if allowed else ""
    return InvalidRequest(f"{name} is not supported here{rest}", param=name.partition(".")[0], code="unsupported_parameter")


_TEXT: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)
_TEXTS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(at_most(str, PROMPTS))
_WORDS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(at_most(str, MAX_BAD_WORDS // 2))  # two spellings each
_BIAS: msgspec.json.Decoder[dict[int, float]] = msgspec.json.Decoder(dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]])
_STOP_TEXTS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(at_most(str, STOPS))
_MESSAGES = BoundedList(Message, MESSAGES, "content", TextPart, PARTS)
_ID_LISTS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(at_most(Annotated[list[TokenId], Meta(min_length=1)], PROMPTS))
_OBJECTS: msgspec.json.Decoder[list[dict[str, Any]]] = msgspec.json.Decoder(Annotated[list[dict[str, Any]], Meta(max_length=TOOLS)])
_SWITCHES: msgspec.json.Decoder[dict[str, bool]] = msgspec.json.Decoder(dict[str, bool])


def _decoder(kind: type[R], absent: Mapping[str, tuple[Any, ...]]) -> tuple[msgspec.json.Decoder[R], Mapping[str, tuple[Any, ...]]]:
    """Of `kind`, with the keys that are absent here as raw JSON beside its own."""
    own = {name: neutral for name, neutral in absent.items() if name not in kind.__struct_fields__}
    fields = [(name, Raw | UnsetType, UNSET) for name in own]
    return msgspec.json.Decoder(msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True, frozen=True)), own


_DECODERS: dict[type[Sampling], Any] = {
    ChatRequest: _decoder(ChatRequest, absent_keys.CHAT),
    CompletionRequest: _decoder(CompletionRequest, absent_keys.COMPLETION),
}


def _stops(raw: Json) -> tuple[str, ...]:
    if (given := not_null(raw)) is None:
        return ()
    if first_characters(given)[:1] == b'"':
        return (decode(given, "stop", _TEXT),)
    return tuple(elements(given, "stop", _STOP_TEXTS))


def _tools(raw: Json) -> list[dict[str, Any]]:
    if (given := not_null(raw)) is None:
        return []
    if size(given) > TOOL_BYTES:
        raise InvalidRequest(f"tools: {size(given)} bytes exceed the limit of {TOOL_BYTES}", param="tools")
    if brackets(given) > MAX_VALUES:
        raise InvalidRequest(f"tools: more than {MAX_VALUES} brackets", param="tools")
    tools: list[dict[str, Any]] = decode(given, "tools", _OBJECTS)
    return tools


def _switches(raw: Json, key: str) -> dict[str, bool]:
    if (given := not_null(raw)) is None:
        return {}
    if size(given) > _SWITCHES_BYTES:
        raise InvalidRequest(f"{key}: too many keys", param=key)
    found: dict[str, bool] = decode(given, key, _SWITCHES)
    return found


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """As the chat template takes it."""
    given = not_null(call.function.arguments)
    arguments = None if given is None else decode(given, "messages", ANYTHING)
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def _check_turns(messages: list[Message]) -> None:
    for place, message in enumerate(messages):
        _check_nulls(message, f"messages[{place}]")
        _check_parts(message, f"messages[{place}].content")
    arguments = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    if sum(map(size, arguments)) > TOOL_BYTES:
        raise InvalidRequest(f"messages: the arguments of all tool_calls exceed {TOOL_BYTES} bytes", param="messages")
    if sum(map(brackets, arguments)) > MAX_VALUES:
        raise InvalidRequest(f"messages: the arguments of all tool_calls hold more than {MAX_VALUES} brackets", param="messages")


def _check_nulls(message: Message, where: str) -> None:
    for name in _NULL_IN_MESSAGES:
        if not_null(getattr(message, name)) is not None:
            raise InvalidRequest(f"{where}.{name}: is not supported, only null", param="messages", code="unsupported_parameter")


def _check_parts(message: Message, where: str) -> None:
    if message.content is None and message.role == "user":
        raise InvalidRequest(f"{where}: a user's message needs content, not null", param="messages")
    for part in message.content if isinstance(message.content, list) else ():
        if part.type != "text":
            raise InvalidRequest(f"{where}: parts of type {part.type!r} are not supported, only 'text'", param="messages")
        if part.text is None:
            raise InvalidRequest(f"{where}: a text part has a text", param="messages")
