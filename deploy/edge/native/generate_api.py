"""SGLang's /generate, as its benchmark client uses it: one raw prompt, one choice.

    data: {"text": ALL SO FAR, "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"}}

sampling_params takes a text completion's keys, by these names or SGLang's.
"""

import secrets

import msgspec
from msgspec import UNSET, Raw

from deploy.edge.answers.response_format import OneChoice, ServedModel, Usage
from deploy.edge.bodies.body_reader import BodyReader, unsupported
from deploy.edge.bodies.key_types import Count, Name, Natural, Priority, RawIds, RawObject, Seed
from deploy.edge.bodies.raw_json import invalid, not_null, read_small, token_ids
from deploy.edge.openai.absent_keys import COMMON
from deploy.edge.openai.data_events import DONE, DataEvents, data_event
from deploy.edge.openai.schemas import PROMPT_IDS, SamplingKeys
from deploy.edge.requests.ask import Ask, RawPrompts
from deploy.edge.serving.api import GenerationApi
from engine.front.generation import Delta
from engine.protocol import FrozenStruct, JsonObject

_MAX_NEW_TOKENS = 128  # SGLang's default
_PARAMS_BYTES = 64 << 10
_ABSENT = {name: neutral for name, neutral in COMMON.items() if name != "input_ids"} | {
    "return_logprob": (False,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": ([],),
    "return_routed_experts": (False,),
}
_KEYS = msgspec.json.Decoder(dict[str, Raw])


class GenerateParams(SamplingKeys):
    """How tokens are chosen."""

    max_new_tokens: Count | None = None
    min_new_tokens: Natural | None = None
    sampling_seed: Seed = None


class GenerateTextRequest(FrozenStruct):
    """POST /generate: of `text`, or of `input_ids`."""

    text: str | None = None
    input_ids: RawIds = UNSET
    sampling_params: RawObject = UNSET
    stream: bool | None = None
    rid: Name | None = None
    priority: Priority = None

    def ask(self) -> Ask:
        """InvalidRequest names the key."""
        params = self._params()
        if params.n not in (None, 1):
            raise unsupported("sampling_params.n", "1")
        own = {"min_tokens": params.min_new_tokens, "seed": params.sampling_seed, "priority": self.priority}
        params = msgspec.structs.replace(params, **{name: value for name, value in own.items() if value is not None})
        limit = params.max_new_tokens or params.max_tokens or _MAX_NEW_TOKENS
        key = "input_ids" if self.text is None else "text"
        return params.asking(RawPrompts([self._prompt()]), limit, stream=self.stream, prompt_key=key)

    def _prompt(self) -> str | list[int]:
        text = self.text
        if (text is None) == (not_null(self.input_ids) is None):
            raise invalid("text", "either a text or input_ids")
        if text is None:
            return token_ids(self.input_ids, "input_ids", PROMPT_IDS)
        return text

    def _params(self) -> GenerateParams:
        read_small(self.sampling_params, "sampling_params", _KEYS, _PARAMS_BYTES)  # raises what its keys do not
        return _PARAMS.read(not_null(self.sampling_params) or b"{}")


_PARAMS = BodyReader(GenerateParams, COMMON)


class GenerateFormat(OneChoice, DataEvents):
    """Every event repeats the whole text, as in SGLang."""

    def __init__(self, _: ServedModel, request: GenerateTextRequest) -> None:
        super().__init__()
        self.id = request.rid or secrets.token_hex(16)

    def events(self, index: int, delta: Delta) -> bytes:
        self.add(index, delta)
        return data_event(self._said())

    def end(self, usage: Usage) -> bytes:  # noqa: ARG002 - every event has the counts
        return DONE

    def full(self, usage: Usage) -> bytes:
        self.usage = usage
        return msgspec.json.encode(self._said() | {"output_ids": self.choice.tokens})

    def _said(self) -> JsonObject:
        tokens = len(self.choice.tokens)
        others = {"length": {"type": "length", "length": tokens}, None: None}
        finish = others.get(self.choice.finish, {"type": "stop", "matched": self.choice.stop})
        counts = {"prompt_tokens": self.usage.prompt, "cached_tokens": self.usage.cached, "completion_tokens": tokens}
        return {"text": self.choice.content, "meta_info": {"id": self.id, "finish_reason": finish, **counts}}


GENERATE = GenerationApi(
    path="/generate", operation="text_completion", reader=BodyReader(GenerateTextRequest, _ABSENT), format=GenerateFormat
)
