"""What is known of a path before its request is read, and of an API: who reads its body, and the format of its answer.

What every API wants of the engine is an Ask. So all are validated, admitted, limited and submitted alike.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from msgspec import Struct

from deploy.edge.body_reader import BodyReader
from deploy.edge.error_response import OPENAI_ERROR, ErrorShape
from deploy.edge.form_reader import FormReader
from deploy.edge.response_format import JSON, ResponseFormat, ServedModel
from deploy.edge.service import Service
from engine.protocol import FrozenStruct

# "open": no key is needed; "all": all rights are that a key has which names none
Right = Literal["open", "generate", "tokenize", "models", "docs", "adapters", "all"]


class HttpEndpoint(FrozenStruct, kw_only=True):
    """A path, the right that an API key needs for it, and the shape of its errors.

    `operation`: OpenTelemetry's gen_ai.operation.name, of those that generate.
    """

    path: str
    right: Right
    error: ErrorShape = OPENAI_ERROR
    operation: str | None = None


class GenerationApi(HttpEndpoint, kw_only=True):
    """A route that generates. `reader` takes a body to a request, whose `ask()` is what it wants of the engine, and `format` makes
    the format of its answer. All raise InvalidRequest.

    `parts`: for the API's document, types that its raw JSON refers to. `media_type`: the body's.
    """

    right: Right = "generate"
    reader: BodyReader[Any] | FormReader[Any]
    format: Callable[[ServedModel, Any], ResponseFormat]
    media_type: str = JSON
    parts: tuple[type[Struct], ...] = ()


class TokenApi(HttpEndpoint, kw_only=True):
    """A route that answers from the tokenizer alone. `reader` takes a body to a request that has a `model`, and `answer` that
    request and its client's name to what goes out as JSON.

    Both raise InvalidRequest.
    """

    right: Right = "tokenize"
    reader: BodyReader[Any]
    answer: Callable[[Service, Any, str], Awaitable[Any]]
