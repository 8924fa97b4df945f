"""OpenAI's chat and text completions as APIs."""

from functools import partial

from deploy.edge.api import GenerationApi, ParsedRequest
from deploy.edge.openai.forms import ChatFormat, TextFormat
from deploy.edge.openai.openai_error import OPENAI_ERROR
from deploy.edge.openai.schemas import ChatRequest, CompletionRequest, Message, parse


def _read_chat(body: bytes, model: str) -> ParsedRequest:  # noqa: ARG001 - its request names the model
    request = parse(ChatRequest, body)
    return ParsedRequest(request, partial(ChatFormat, usage_chunks=request.usage_chunks, prompt_logprobs=request.prompt_logprobs))


def _read_completion(body: bytes, model: str) -> ParsedRequest:  # noqa: ARG001 - its request names the model
    request = parse(CompletionRequest, body)
    form = partial(TextFormat, echoed_logprobs=request.echoed_logprobs, prompt_logprobs=request.prompt_logprobs)
    return ParsedRequest(request, partial(form, usage_chunks=request.usage_chunks))


CHAT = GenerationApi(
    path="/v1/chat/completions", operation="chat", error=OPENAI_ERROR, body=ChatRequest, read=_read_chat, parts=(Message,)
)
COMPLETIONS = GenerationApi(
    path="/v1/completions", operation="text_completion", error=OPENAI_ERROR, body=CompletionRequest, read=_read_completion
)
