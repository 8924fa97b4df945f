"""What a request may say. Known keys are validated hard, unknown ones are accepted and ignored, as OpenAI's clients expect.

A known key whose function does not exist here is refused unless it has its neutral value: nothing is silently left out.
Accepted without effect: user, store, metadata, service_tier, parallel_tool_calls, safety_identifier, prompt_cache_key,
prompt_cache_retention, verbosity, priority, rid and the like.
"""

from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from engine.errors import InvalidRequest

_INT32 = 2**31 - 1
_INT64 = 2**63
_SHOWN_ERRORS = 3

Text = Annotated[str, Field(max_length=4 << 20)]
Count = Annotated[int, Field(ge=1, le=_INT32)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=_INT32)]], Field(min_length=1, max_length=1 << 20)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class StreamOptions(_Model):
    include_usage: bool | None = None


class ResponseFormat(_Model):
    type: str


class TextPart(_Model):
    """The one kind of content part that is understood today."""

    type: str = Field(max_length=64)
    text: Text | None = None


class Message(_Model):
    """One turn. Other keys (tool_calls, name, reasoning_content, ...) reach the template as they are."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    role: str = Field(max_length=32)
    content: Text | list[TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = Field(default=None, max_length=128)


class Sampling(_Model):
    """What both kinds of completion have in common."""

    model: str = Field(max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=_INT32)]] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse what does not exist here; raises InvalidRequest that names the key."""
        neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
        for name, value in neutral.items():
            if getattr(self, name) not in (None, value):
                raise unsupported(name, f"only {value}")
        if self.logit_bias:
            raise unsupported("logit_bias", "only an empty one")
        if self.response_format is not None and self.response_format.type != "text":
            raise unsupported("response_format", "only {'type': 'text'}")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only with stream: true", param="stream_options")


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=16)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        """As the base, and what only chat has."""
        super().check()
        if self.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", "only 'auto' and 'none'")
        for name in ("functions", "function_call", "audio", "chat_template", "continue_final_message"):
            if getattr(self, name):
                raise unsupported(name)
        if self.modalities not in (None, [], ["text"]):
            raise unsupported("modalities", "only ['text']")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs: true", param="top_logprobs")
        for place, message in enumerate(self.messages):
            _check_parts(message, f"messages[{place}].content")


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: Text | list[Text] | TokenIds | list[TokenIds]
    logprobs: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Count | None = None

    def check(self) -> None:
        """As the base, and what only completions have."""
        super().check()
        if self.echo:
            raise unsupported("echo")
        if self.suffix:
            raise unsupported("suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "only the value of n")

    def one_prompt(self) -> str | list[int]:
        """The text or the token ids; a list of one prompt is that prompt."""
        prompt = self.prompt
        if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int)):
            return prompt  # type: ignore[return-value]
        if len(prompt) != 1:
            raise InvalidRequest(f"prompt: one prompt a request, not {len(prompt)}", param="prompt")
        return prompt[0]  # type: ignore[return-value]


R = TypeVar("R", bound=Sampling)


def parse(kind: type[R], body: bytes) -> R:
    """The request in `body`; InvalidRequest names the first keys that are wrong."""
    try:
        request = kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        raise _complaint(details) from None
    request.check()
    return request


def unsupported(name: str, allowed: str = "") -> InvalidRequest:
    """What a known key without its function is answered with."""
    rest = f": {allowed}" if allowed else ""
    return InvalidRequest(f"{name} is not supported here{rest}", param=name, code="unsupported_parameter")


def _check_parts(message: Message, where: str) -> None:
    for part in message.content if isinstance(message.content, list) else ():
        if part.type != "text":
            raise InvalidRequest(f"{where}: parts of type {part.type!r} are not supported, only 'text'", param="messages")
        if part.text is None:
            raise InvalidRequest(f"{where}: a text part has a text", param="messages")


def _complaint(details: list[Any]) -> InvalidRequest:
    """pydantic's findings as one sentence; a union reports a line per arm, so only a few are shown."""
    if details[0]["type"] == "json_invalid":
        return InvalidRequest(f"The body is not JSON: {details[0]['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    if not details[0]["loc"]:
        return InvalidRequest("The body must be a JSON object", code="invalid_json")
    lines = list(dict.fromkeys(f"{_path(detail)}: {detail['msg']}" for detail in details))
    more = f" (and {len(lines) - _SHOWN_ERRORS} more)" if len(lines) > _SHOWN_ERRORS else ""
    return InvalidRequest("; ".join(line[:300] for line in lines[:_SHOWN_ERRORS]) + more, param=str(details[0]["loc"][0]))


def _path(detail: Any) -> str:
    """`messages[0].role`, without the names that pydantic gives to a union's arms."""
    out = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            out += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "dict", "list", "TextPart"):
            out += f".{part}" if out else part
    return out[:200]
