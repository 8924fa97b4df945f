"""SGLang's /generate, as its benchmark client speaks it: one raw prompt, one choice, a stream whose text grows.

    data: {"text": ALL SO FAR, "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"}}

What sampling_params says is a text completion's by the same names, or by OpenAI's, and what is absent there is refused there.
"""

import secrets
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from deploy.edge.api import GenerationApi, ParsedRequest
from deploy.edge.openai.absent_keys import is_neutral
from deploy.edge.openai.openai_error import OPENAI_ERROR
from deploy.edge.openai.schemas import CompletionRequest, parse, unsupported
from deploy.edge.raw_json import decode, first_characters, not_null, short_value, shown_as, size
from deploy.edge.response_format import ServedModel, Usage
from engine.errors import InvalidRequest, QuartetError
from engine.front.generation import Choice, Delta

_OPENAI = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_MAX_NEW_TOKENS = 128  # SGLang's default
_PARAMS_BYTES = 64 << 10
# A text completion has `priority`, and refuses the others unless they ask for nothing.
_ABSENT_THERE = ("lora_path", "image_data", "input_embeds", "custom_logit_processor", "return_hidden_states", "session_params")
_PASSED_ON = (*_ABSENT_THERE, "priority")
_ABSENT: dict[str, tuple[Any, ...]] = {
    "return_logprob": (False,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": ([],),
    "return_routed_experts": (False,),
}
_STRING = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_NULL = Annotated[Raw, shown_as()] | UnsetType
_OFF = Annotated[Raw, shown_as({"enum": [False]})] | UnsetType


class GenerateTextRequest(Struct, frozen=True, kw_only=True):
    """POST /generate: of `text`, or of `input_ids`."""

    text: Annotated[Raw, shown_as(_STRING)] | UnsetType = UNSET
    input_ids: Annotated[Raw, shown_as(_IDS)] | UnsetType = UNSET
    sampling_params: Annotated[Raw, shown_as({"type": "object"})] | UnsetType = UNSET
    stream: bool | None = None
    rid: Annotated[str, Meta(max_length=256)] | None = None
    return_logprob: _OFF = UNSET
    top_logprobs_num: Annotated[Raw, shown_as({"enum": [0]})] | UnsetType = UNSET
    token_ids_logprob: Annotated[Raw, shown_as({"type": "array", "maxItems": 0})] | UnsetType = UNSET
    return_routed_experts: _OFF = UNSET
    lora_path: _NULL = UNSET
    image_data: _NULL = UNSET
    input_embeds: _NULL = UNSET
    custom_logit_processor: _NULL = UNSET
    return_hidden_states: _OFF = UNSET
    session_params: _NULL = UNSET
    priority: Annotated[Raw, shown_as({"type": "integer"})] | UnsetType = UNSET

    def completion(self, model: str) -> dict[str, Any]:
        """The body of a text completion that asks for the same. InvalidRequest names what cannot be done."""
        for name, neutral in _ABSENT.items():
            if not is_neutral(short_value(getattr(self, name), name), neutral):
                raise unsupported(name, f"only {msgspec.json.encode(neutral[0]).decode()}")
        passed = {name: value for name in _PASSED_ON if (value := not_null(getattr(self, name))) is not None}
        return {"model": model, "prompt": self._prompt(), "stream": self.stream} | passed | self._sampling()

    def _prompt(self) -> Raw:
        text, ids = not_null(self.text), not_null(self.input_ids)
        if (text is None) == (ids is None):
            raise InvalidRequest("text: either a text or input_ids", param="text")
        if text is not None and first_characters(text)[:1] != b'"':
            raise InvalidRequest("text: one text a request", param="text")
        if ids is not None and first_characters(ids) == b"[[":
            raise InvalidRequest("input_ids: one list of token ids a request", param="input_ids")
        return text or ids or Raw(b"")

    def _sampling(self) -> dict[str, Raw | int]:
        given = not_null(self.sampling_params)
        if size(self.sampling_params) > _PARAMS_BYTES:
            raise InvalidRequest(f"sampling_params: more than {_PARAMS_BYTES} bytes", param="sampling_params")
        found: dict[str, Raw] = {} if given is None else decode(given, "sampling_params", _PARAMS)
        if not is_neutral(short_value(found.pop("n", UNSET), "sampling_params"), (1,)):
            raise unsupported("sampling_params.n", "only 1")
        return {"max_tokens": _MAX_NEW_TOKENS} | {_OPENAI.get(name, name): value for name, value in found.items()}


_REQUEST = msgspec.json.Decoder(GenerateTextRequest)
_PARAMS = msgspec.json.Decoder(dict[str, Raw])


class GenerateFormat:
    """The answer: a stream repeats all of the text in every event, as SGLang does."""

    def __init__(self, model: ServedModel, rid: str | None) -> None:  # noqa: ARG002 - it does not say what model it is
        self.id = rid or secrets.token_hex(16)
        self._choice = Choice()
        self._text = ""
        self._usage = Usage(0, 0)

    def begin(self, usage: Usage) -> bytes:
        """Nothing yet."""
        self._usage = usage
        return b""

    def events(self, index: int, delta: Delta) -> bytes:
        """The text so far."""
        self.add(index, delta)
        return b"data: " + msgspec.json.encode({"text": self._text, "meta_info": self._about()}) + b"\n\n"

    def end(self, usage: Usage) -> bytes:  # noqa: ARG002 - every event has the counts
        """No more of it."""
        return b"data: [DONE]\n\n"

    def failure(self, error: QuartetError) -> bytes:
        """An error event, without an end."""
        return b"data: " + msgspec.json.encode(OPENAI_ERROR.body(error)) + b"\n\n"

    def add(self, index: int, delta: Delta) -> None:  # noqa: ARG002 - there is one choice
        """One more."""
        self._choice.add(delta)
        if self._choice.texts:
            self._text += "".join(self._choice.texts)
            self._choice.texts.clear()

    def full(self, usage: Usage) -> bytes:
        """The whole answer."""
        self._usage = usage
        return msgspec.json.encode({"text": self._text, "output_ids": self._choice.tokens, "meta_info": self._about()})

    def _about(self) -> dict[str, Any]:
        counts = {"prompt_tokens": self._usage.prompt, "cached_tokens": self._usage.cached}
        return {"id": self.id, "finish_reason": self._finish(), "completion_tokens": len(self._choice.tokens)} | counts

    def _finish(self) -> dict[str, Any] | None:
        match self._choice.finish:
            case None:
                return None
            case "length":
                return {"type": "length", "length": len(self._choice.tokens)}
        return {"type": "stop", "matched": self._choice.stop}


def _read(body: bytes, model: str) -> ParsedRequest:
    request: GenerateTextRequest = decode(body, "", _REQUEST)
    completion = parse(CompletionRequest, msgspec.json.encode(request.completion(model)))
    return ParsedRequest(completion, partial(GenerateFormat, rid=request.rid))


_NAMES = {own: name for name, own in _OPENAI.items()}
GENERATE = GenerationApi(
    path="/generate", operation="text_completion", error=OPENAI_ERROR, body=GenerateTextRequest, read=_read, names=_NAMES
)
