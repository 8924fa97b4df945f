"""POST /v1/messages and /v1/messages/count_tokens."""

from functools import partial
from typing import Any

import msgspec

from deploy.edge.anthropic.error_object import ANTHROPIC_ERROR
from deploy.edge.anthropic.message_format import MessageFormat
from deploy.edge.anthropic.message_request import ClientTool, CountRequest, MessagesRequest, Turn, parse_message
from deploy.edge.api import GenerationApi, ParsedRequest, TokenApi
from deploy.edge.ask import ChatPrompt
from deploy.edge.openai.schemas import CHAT_READER, ChatRequest
from deploy.edge.service import Service


def _chat(kind: type[CountRequest], body: bytes) -> ChatRequest:
    return CHAT_READER.read(msgspec.json.encode(parse_message(kind, body).chat()))


def _read(body: bytes, model: str) -> ParsedRequest:  # noqa: ARG001 - its request names the model
    return ParsedRequest(_chat(MessagesRequest, body).ask(), MessageFormat)


async def _count(service: Service, body: bytes) -> dict[str, Any]:
    request = await service.pool.read(partial(_chat, CountRequest), body)
    service.jobs.check_model(request.model)
    chat = request.ask().prompt
    assert isinstance(chat, ChatPrompt)
    return {"input_tokens": len(await service.pool.run(lambda: service.jobs.prompt(chat)))}


MESSAGES_API = GenerationApi(
    path="/v1/messages",
    operation="chat",
    error=ANTHROPIC_ERROR,
    body=MessagesRequest,
    read=_read,
    parts=(Turn, ClientTool),
    names={"stop": "stop_sequences"},
)
COUNT_TOKENS = TokenApi(path="/v1/messages/count_tokens", error=ANTHROPIC_ERROR, body=CountRequest, answer=_count)
