"""POST /v1/messages and /v1/messages/count_tokens."""

from deploy.edge.anthropic.error_object import ANTHROPIC_ERROR
from deploy.edge.anthropic.message_format import MessageFormat
from deploy.edge.anthropic.message_request import COUNT_READER, MESSAGES_READER, ClientTool, CountRequest, Turn
from deploy.edge.serving.api import GenerationApi, TokenApi
from deploy.edge.serving.service import Service


async def _count(service: Service, request: CountRequest, client: str) -> dict[str, int]:
    return {"input_tokens": len(await service.jobs.prompt(await service.pool.run(request.chat), client))}


MESSAGES_API = GenerationApi(
    path="/v1/messages",
    operation="chat",
    error=ANTHROPIC_ERROR,
    reader=MESSAGES_READER,
    format=MessageFormat,
    parts=(Turn, ClientTool),
)
COUNT_TOKENS = TokenApi(path="/v1/messages/count_tokens", error=ANTHROPIC_ERROR, reader=COUNT_READER, answer=_count)
