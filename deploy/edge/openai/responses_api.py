"""POST /v1/responses."""

from functools import partial

import msgspec

from deploy.edge.api import GenerationApi, ParsedRequest
from deploy.edge.openai.openai_error import OPENAI_ERROR
from deploy.edge.openai.response_request import DeclaredTool, InputItem, ResponsesRequest, parse_response_request
from deploy.edge.openai.response_stream import ResponseObject
from deploy.edge.openai.schemas import CHAT_READER


def _read(body: bytes, model: str) -> ParsedRequest:  # noqa: ARG001 - its request names the model
    request = parse_response_request(body)
    request.includes_encrypted()
    chat = CHAT_READER.read(msgspec.json.encode(request.chat()))
    return ParsedRequest(chat.ask(), partial(ResponseObject, request=request))


_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
RESPONSES = GenerationApi(
    path="/v1/responses",
    operation="chat",
    error=OPENAI_ERROR,
    body=ResponsesRequest,
    read=_read,
    parts=(InputItem, DeclaredTool),
    names=_NAMES,
)
