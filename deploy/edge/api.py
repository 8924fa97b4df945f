"""What is known of a path before its request is read, and of an API: how its body is read, and the format of its answer.

What every API wants of the engine is an Ask. So all are validated, admitted, limited and submitted alike.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from msgspec import Struct

from deploy.edge.ask import Ask
from deploy.edge.error_response import OPENAI_ERROR, ErrorShape
from deploy.edge.response_format import ResponseFormat, ServedModel
from deploy.edge.service import Service
from engine.protocol import FrozenStruct

JSON = "application/json"

Right = Literal["open", "generate", "tokenize", "models", "docs", "all"]  # "open": no key is needed; "all": all rights are


class HttpEndpoint(FrozenStruct, kw_only=True):
    """A path, the right that an API key needs for it, and the shape of its errors.

    `operation`: OpenTelemetry's gen_ai.operation.name, of those that generate.
    """

    path: str
    right: Right
    error: ErrorShape = OPENAI_ERROR
    operation: str | None = None


class ParsedRequest(FrozenStruct):
    """A request that has been read: what is asked of the engine, the format of the answer, and the media type of a whole one."""

    ask: Ask
    format: Callable[[ServedModel], ResponseFormat]
    media_type: str = JSON


class GenerationApi(HttpEndpoint, kw_only=True):
    """A route that generates. `read` takes a body, and raises InvalidRequest.

    `body` and `parts` are for the API's document: the body's type, and types that its raw JSON refers to. `media_type`: the body's.
    """

    right: Right = "generate"
    body: type[Struct]
    read: Callable[[bytes], ParsedRequest]
    media_type: str = JSON
    parts: tuple[type[Struct], ...] = ()


class TokenApi(HttpEndpoint, kw_only=True):
    """A route that answers from the tokenizer alone. `read` takes a body to a request that has a `model`, and `answer` that request
    to what goes out as JSON.

    Both raise InvalidRequest.
    """

    right: Right = "tokenize"
    body: type[Struct]
    read: Callable[[bytes], Any]
    answer: Callable[[Service, Any], Awaitable[Any]]
