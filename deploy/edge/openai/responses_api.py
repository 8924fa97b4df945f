"""POST /v1/responses."""

from functools import partial

from deploy.edge.api import GenerationApi, ParsedRequest
from deploy.edge.openai.response_request import RESPONSES_READER, DeclaredTool, InputItem, ResponsesRequest
from deploy.edge.openai.response_stream import ResponseObject


def _read(body: bytes) -> ParsedRequest:
    request = RESPONSES_READER.read(body)
    return ParsedRequest(request.ask(), partial(ResponseObject, request=request))


RESPONSES = GenerationApi(
    path="/v1/responses",
    operation="chat",
    body=ResponsesRequest,
    read=_read,
    parts=(InputItem, DeclaredTool),
)
