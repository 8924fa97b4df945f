"""POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from deploy.edge.anthropic.error_object import ANTHROPIC_ERROR
from deploy.edge.anthropic.message_format import MessageFormat
from deploy.edge.anthropic.message_request import COUNT_READER, MESSAGES_READER, ClientTool, CountRequest, MessagesRequest, Turn
from deploy.edge.api import GenerationApi, ParsedRequest, TokenApi
from deploy.edge.ask import ChatPrompt
from deploy.edge.service import Service


def _read(body: bytes, model: str) -> ParsedRequest:  # noqa: ARG001 - its request names the model
    return ParsedRequest(MESSAGES_READER.read(body).ask(), MessageFormat)


def _read_count(body: bytes) -> tuple[str, ChatPrompt]:
    request = COUNT_READER.read(body)
    return request.model, request.chat()


async def _count(service: Service, body: bytes) -> dict[str, Any]:
    model, chat = await service.pool.read(_read_count, body)
    service.jobs.check_model(model)
    return {"input_tokens": len(await service.pool.run(lambda: service.jobs.prompt(chat)))}


MESSAGES_API = GenerationApi(
    path="/v1/messages", operation="chat", error=ANTHROPIC_ERROR, body=MessagesRequest, read=_read, parts=(Turn, ClientTool)
)
COUNT_TOKENS = TokenApi(path="/v1/messages/count_tokens", error=ANTHROPIC_ERROR, body=CountRequest, answer=_count)
