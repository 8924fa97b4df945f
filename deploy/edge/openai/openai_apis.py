"""The routes of OpenAI's APIs."""

from deploy.edge.openai.chat_turns import Message
from deploy.edge.openai.forms import ChatFormat, TextFormat
from deploy.edge.openai.response_request import RESPONSES_READER, DeclaredTool, InputItem
from deploy.edge.openai.response_stream import ResponseObject
from deploy.edge.openai.schemas import CHAT_READER, COMPLETION_READER
from deploy.edge.serving.api import GenerationApi

CHAT = GenerationApi(
    path="/v1/chat/completions", operation="chat", reader=CHAT_READER, format=ChatFormat, parts=(Message,)
)
COMPLETIONS = GenerationApi(
    path="/v1/completions", operation="text_completion", reader=COMPLETION_READER, format=TextFormat
)
RESPONSES = GenerationApi(
    path="/v1/responses", operation="chat", reader=RESPONSES_READER, format=ResponseObject, parts=(InputItem, DeclaredTool)
)
