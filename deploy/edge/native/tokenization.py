"""vLLM's /tokenize and /detokenize: a prompt's token ids, of a text or of a conversation, and the text of token ids.

A conversation has exactly the ids that a chat completion of it would begin with, so that `count` is its usage.prompt_tokens.
"""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from deploy.edge.api import TokenAnswer, TokenApi
from deploy.edge.ask import ChatPrompt
from deploy.edge.body_reader import BodyReader, unsupported
from deploy.edge.common_keys import MESSAGES, TOOLS
from deploy.edge.key_types import ModelName, RawObject, shown_as
from deploy.edge.openai.chat_turns import Message, read_chat
from deploy.edge.openai.openai_error import OPENAI_ERROR
from deploy.edge.openai.schemas import PROMPT_IDS
from deploy.edge.raw_json import not_null, token_ids
from deploy.edge.service import Service
from engine.errors import InvalidRequest

_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": PROMPT_IDS}
_MESSAGES_SCHEMA = {"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1, "maxItems": MESSAGES}
_TOOLS_SCHEMA = {"type": "array", "items": {"type": "object"}, "maxItems": TOOLS}
_ABSENT = {"continue_final_message": (False,), "chat_template": ("",)}


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /tokenize: of `prompt`, or of `messages`."""

    model: ModelName | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Annotated[Raw, shown_as(_MESSAGES_SCHEMA)] | UnsetType = UNSET
    tools: Annotated[Raw, shown_as(_TOOLS_SCHEMA)] | UnsetType = UNSET
    chat_template_kwargs: RawObject = UNSET
    add_generation_prompt: bool | None = None

    def chat(self) -> ChatPrompt | None:
        """The conversation; None: there is a text instead. InvalidRequest: both, or neither."""
        messages = not_null(self.messages)
        if (messages is None) == (self.prompt is None):
            raise InvalidRequest("prompt: either a prompt or messages", param="prompt")
        if messages is None:
            return None
        if self.add_special_tokens:
            raise unsupported("add_special_tokens", "false where there are messages")  # the template has them all
        return read_chat(messages, self.tools, self.chat_template_kwargs, generation_prompt=self.add_generation_prompt)


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /detokenize"""

    tokens: Annotated[Raw, Meta(extra_json_schema=_IDS_SCHEMA)]
    model: ModelName | None = None


async def _tokenized(service: Service, request: TokenizeRequest) -> TokenAnswer:
    service.jobs.check_model(request.model)
    if (chat := await service.pool.run(request.chat)) is not None:
        tokens = await service.jobs.prompt(chat)
        return lambda: _about(service, request, tokens)
    with_bos = request.add_special_tokens is not False
    return lambda: _about(service, request, service.jobs.encode(request.prompt or "", add_special_tokens=with_bos))


def _about(service: Service, request: TokenizeRequest, tokens: list[int]) -> dict[str, Any]:
    texts = [service.model.text_of(token) for token in tokens] if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": service.settings.max_len, "tokens": tokens, "token_strs": texts}


async def _text_of(service: Service, request: DetokenizeRequest) -> TokenAnswer:
    service.jobs.check_model(request.model)
    return lambda: {"prompt": service.jobs.decode(token_ids(request.tokens, "tokens", PROMPT_IDS))}


TOKENIZE = TokenApi(
    path="/tokenize",
    error=OPENAI_ERROR,
    body=TokenizeRequest,
    read=BodyReader(TokenizeRequest, _ABSENT).read,
    answer=_tokenized,
    parts=(Message,),
)
DETOKENIZE = TokenApi(
    path="/detokenize",
    error=OPENAI_ERROR,
    body=DetokenizeRequest,
    read=BodyReader(DetokenizeRequest, {}).read,
    answer=_text_of,
)
