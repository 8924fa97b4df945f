"""The keys of a chat or text completion. Known keys are validated, unknown ones ignored.
docs/api.md lists keys without effect, absent_keys.py the refused ones."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct
from msgspec.structs import replace

from deploy.edge.bodies.body_reader import AbsentKeys, BodyReader, unsupported
from deploy.edge.bodies.key_types import (
    IDS,
    STRING,
    STRINGS,
    Alternatives,
    Count,
    ModelName,
    Natural,
    Priority,
    RawIds,
    RawObject,
    RawText,
    RawTextOrObject,
    RawTexts,
    RawToolChoice,
    array,
    shown_as,
)
from deploy.edge.bodies.raw_json import (
    check_commas,
    first_characters,
    invalid,
    list_decoder,
    not_null,
    read_list,
    read_text,
    token_ids,
)
from deploy.edge.openai import absent_keys
from deploy.edge.openai.chat_turns import MESSAGES_SCHEMA, ProcessorKeys, TemplateSwitches, read_chat
from deploy.edge.openai.tool_choice import tool_choice
from deploy.edge.requests.answer_form import KEYS, form_of
from deploy.edge.requests.ask import Ask, ChatPrompt, RawPrompts
from deploy.edge.requests.common_keys import CommonSamplingKeys, Effort, RawTools, ShortText, ThinkingSwitch
from engine.logit_adjustments import MAX_ALLOWED_IDS, MAX_BAD_WORDS, MAX_BIAS_IDS
from engine.protocol import FrozenStruct

PROMPTS = 32
PROMPT_IDS = 1 << 20
STOP_IDS = 128

_Bias = Annotated[float, Meta(ge=-100, le=100)]
_TEXTS = list_decoder(str, PROMPTS)
_ID_LISTS = list_decoder(Annotated[list[Natural], Meta(min_length=1)], PROMPTS)


class SamplingKeys(CommonSamplingKeys):
    """Keys of sampling and of the form of the answer."""

    n: Count | None = None
    max_tokens: Count | None = None
    min_tokens: Natural | None = None
    logit_bias: Annotated[dict[Natural, _Bias], Meta(max_length=MAX_BIAS_IDS)] | None = None
    bad_words: Annotated[list[ShortText], Meta(max_length=MAX_BAD_WORDS // 2)] | None = None  # two spellings each
    allowed_token_ids: RawIds = UNSET
    stop_token_ids: RawIds = UNSET
    ignore_eos: bool | None = None
    speculative: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: ShortText | None = None
    priority: Priority = None
    prompt_logprobs: Alternatives = None
    response_format: RawObject = UNSET
    structured_outputs: RawObject = UNSET
    guided_json: RawTextOrObject = UNSET
    guided_regex: RawText = UNSET
    guided_choice: RawTexts = UNSET
    guided_grammar: RawText = UNSET
    json_schema: RawTextOrObject = UNSET
    regex: RawText = UNSET
    ebnf: RawText = UNSET
    structural_tag: RawTextOrObject = UNSET

    def asking(self, prompt: ChatPrompt | RawPrompts, max_tokens: int | None, *, stream: bool | None, **about: Any) -> Ask:
        """`about`: what the APIs write differently. InvalidRequest."""
        if self.prompt_logprobs is not None and stream:
            raise invalid("prompt_logprobs", "not with stream: true")
        allowed = not_null(self.allowed_token_ids)
        return Ask(
            prompt=prompt,
            sampling=self.sampling(
                max_tokens=max_tokens,
                stop_ids=tuple(token_ids(self.stop_token_ids, "stop_token_ids", STOP_IDS)),
                biases=self.logit_bias or {},
                allowed_ids=None if allowed is None else token_ids(allowed, "allowed_token_ids", MAX_ALLOWED_IDS),
                bad_words=tuple(self.bad_words or ()),
            ),
            stream=bool(stream),
            form=form_of({key: getattr(self, key) for key in KEYS}),
            salt=self.cache_salt or "",
            priority=self.priority or 0,
            **{"prompt_logprobs": self.prompt_logprobs, **about},
        )


class StreamOptions(FrozenStruct):
    """Whether a stream has its usage at the end, and with `continuous_usage_stats` in each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionKeys(SamplingKeys, kw_only=True):
    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def usage_chunks(self) -> Literal["none", "last", "each"]:
        if (options := self.stream_options) is None:
            return "none"
        if not self.stream:
            raise invalid("stream_options", "only with stream: true")
        return "each" if options.continuous_usage_stats else "last" if options.include_usage else "none"

    @property
    def echoed_logprobs(self) -> int | None:
        """Alternatives of each echoed token, or None."""
        return None


class ChatRequest(CompletionKeys, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[Raw, Meta(extra_json_schema=MESSAGES_SCHEMA)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives = None
    tools: RawTools = UNSET
    tool_choice: RawToolChoice = UNSET
    chat_template_kwargs: TemplateSwitches | None = None
    add_generation_prompt: bool | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: Natural | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    mm_processor_kwargs: ProcessorKeys | None = None

    def ask(self) -> Ask:
        """InvalidRequest names the key."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs: true")
        chat = replace(
            read_chat(self),
            choice=tool_choice(self.tool_choice, parallel=self.parallel_tool_calls is not False),
            thought_tokens=self.thinking_token_budget,
        )
        return self.asking(
            chat,
            self.max_completion_tokens or self.max_tokens,
            stream=self.stream,
            model=self.model,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(CompletionKeys, kw_only=True):
    """POST /v1/completions"""

    prompt: Annotated[Raw, shown_as(STRING, STRINGS, IDS, array(IDS))]
    max_tokens: Natural | None = None
    max_completion_tokens: Natural | None = None
    logprobs: Alternatives = None
    echo: bool | None = None
    best_of: Count | None = None

    @property
    def echoed_logprobs(self) -> int | None:
        if self.echo:
            return self.logprobs
        return None

    def ask(self) -> Ask:
        """InvalidRequest names the key."""
        if self.max_completion_tokens is None:
            limit = self.max_tokens
        else:
            limit = self.max_completion_tokens
        if limit == 0 and not self.echo:
            raise invalid("max_tokens", "0 only with echo: true")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "the value of n")
        scored = [count for count in (self.prompt_logprobs, self.echoed_logprobs) if count is not None]
        return self.asking(
            RawPrompts(_prompts(self.prompt), echo=bool(self.echo)),
            limit,
            stream=self.stream,
            model=self.model,
            logprobs=self.logprobs,
            prompt_logprobs=max(scored, default=None),
            prompt_key="prompt",
        )


def chat_keys_without(kind: type[Struct]) -> AbsentKeys:
    """Keys of a chat that another `kind` must refuse."""
    keys: AbsentKeys = {**dict.fromkeys(ChatRequest.__struct_fields__, ()), **absent_keys.CHAT, "n": (1,), "logprobs": (False,)}
    without_effect = ("stream_options", "enable_thinking", "thinking")
    return {name: neutral for name, neutral in keys.items() if name not in without_effect and not hasattr(kind, name)}


CHAT_READER = BodyReader(ChatRequest, absent_keys.CHAT)
COMPLETION_READER = BodyReader(CompletionRequest, {**chat_keys_without(CompletionRequest), **absent_keys.COMPLETION})


def _prompts(raw: Raw) -> list[str | list[int]]:
    """Texts or lists of token ids. InvalidRequest."""
    first = first_characters(raw)
    if first == b'["':
        return read_list(raw, "prompt", _TEXTS)
    if first == b"[[":
        check_commas(raw, "prompt", PROMPT_IDS)
        if bytes(raw).count(b"[") > 1 + PROMPTS:
            raise invalid("prompt", f"more than {PROMPTS} prompts")
        return read_list(raw, "prompt", _ID_LISTS)
    text = read_text(raw, "prompt")
    return [token_ids(raw, "prompt", PROMPT_IDS) if text is None else text]
