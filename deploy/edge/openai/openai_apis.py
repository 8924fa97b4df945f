"""OpenAI's chat completions, text completions and Responses as APIs."""

from functools import partial

from deploy.edge.api import GenerationApi, ParsedRequest
from deploy.edge.openai.chat_turns import Message
from deploy.edge.openai.forms import ChatFormat, TextFormat
from deploy.edge.openai.response_request import RESPONSES_READER, DeclaredTool, InputItem, ResponsesRequest
from deploy.edge.openai.response_stream import ResponseObject
from deploy.edge.openai.schemas import CHAT_READER, COMPLETION_READER, ChatRequest, CompletionRequest


def _read_chat(body: bytes) -> ParsedRequest:
    request = CHAT_READER.read(body)
    form = partial(ChatFormat, usage_chunks=request.usage_chunks, prompt_logprobs=request.prompt_logprobs)
    return ParsedRequest(request.ask(), form)


def _read_completion(body: bytes) -> ParsedRequest:
    request = COMPLETION_READER.read(body)
    form = partial(
        TextFormat,
        usage_chunks=request.usage_chunks,
        prompt_logprobs=request.prompt_logprobs,
        echoed_logprobs=request.echoed_logprobs,
    )
    return ParsedRequest(request.ask(), form)


def _read_response(body: bytes) -> ParsedRequest:
    request = RESPONSES_READER.read(body)
    return ParsedRequest(request.ask(), partial(ResponseObject, request=request))


CHAT = GenerationApi(path="/v1/chat/completions", operation="chat", body=ChatRequest, read=_read_chat, parts=(Message,))
COMPLETIONS = GenerationApi(
    path="/v1/completions", operation="text_completion", body=CompletionRequest, read=_read_completion
)
RESPONSES = GenerationApi(
    path="/v1/responses", operation="chat", body=ResponsesRequest, read=_read_response, parts=(InputItem, DeclaredTool)
)
