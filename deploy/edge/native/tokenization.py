"""vLLM's /tokenize and /detokenize. A conversation gets exactly a chat completion's ids, so `count`
is its usage.prompt_tokens."""

from typing import Annotated

from msgspec import UNSET, Meta, Raw, UnsetType

from deploy.edge.bodies.body_reader import BodyReader, unsupported
from deploy.edge.bodies.key_types import ID, ModelName, array, shown_as
from deploy.edge.bodies.raw_json import invalid, not_null, token_ids
from deploy.edge.openai.chat_turns import MESSAGES_SCHEMA, ProcessorKeys, TemplateSwitches, read_chat
from deploy.edge.openai.schemas import PROMPT_IDS
from deploy.edge.requests.ask import ChatPrompt
from deploy.edge.requests.common_keys import Effort, RawTools, ThinkingSwitch
from deploy.edge.serving.api import TokenApi
from deploy.edge.serving.service import Service
from engine.protocol import FrozenStruct, JsonObject

_ABSENT = {"continue_final_message": (False,), "chat_template": ("",)}


class TokenizeRequest(FrozenStruct):
    """POST /tokenize: of `prompt`, or of `messages`."""

    model: ModelName | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Annotated[Raw, shown_as(MESSAGES_SCHEMA)] | UnsetType = UNSET
    tools: RawTools = UNSET
    chat_template_kwargs: TemplateSwitches | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    mm_processor_kwargs: ProcessorKeys | None = None

    def chat(self) -> ChatPrompt | None:
        """The conversation, or None for a text. InvalidRequest: both or neither."""
        has_messages = not_null(self.messages) is not None
        if has_messages == (self.prompt is not None):
            raise invalid("prompt", "either a prompt or messages")
        if has_messages and self.add_special_tokens:
            raise unsupported("add_special_tokens", "false where there are messages")  # the template has them all
        if has_messages:
            return read_chat(self)
        return None


class DetokenizeRequest(FrozenStruct):
    """POST /detokenize"""

    tokens: Annotated[Raw, Meta(extra_json_schema=array(ID, maxItems=PROMPT_IDS))]
    model: ModelName | None = None


async def _tokenized(service: Service, request: TokenizeRequest, client: str) -> JsonObject:
    if (chat := await service.pool.run(request.chat)) is not None:
        tokens = await service.jobs.prompt(chat, client)
    else:
        tokens = await service.pool.run(
            lambda: service.jobs.encode(request.prompt or "", add_special_tokens=request.add_special_tokens is not False)
        )
    texts = await service.pool.run(lambda: list(map(service.model.text_of, tokens))) if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": service.settings.max_len, "tokens": tokens, "token_strs": texts}


async def _text_of(service: Service, request: DetokenizeRequest, _: str) -> dict[str, str]:
    return {"prompt": await service.pool.run(lambda: service.jobs.decode(token_ids(request.tokens, "tokens", PROMPT_IDS)))}


TOKENIZE = TokenApi(
    path="/tokenize",
    reader=BodyReader(TokenizeRequest, _ABSENT),
    answer=_tokenized,
)
DETOKENIZE = TokenApi(
    path="/detokenize",
    reader=BodyReader(DetokenizeRequest, {}),
    answer=_text_of,
)
