"""What is known of a path before its request is read."""

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
    """A path, its right and the shape of its errors. `operation`: OpenTelemetry's
    gen_ai.operation.name."""

    path: str
    right: Right
    error: ErrorShape = OPENAI_ERROR
    operation: str | None = None


class GenerationApi(HttpEndpoint, kw_only=True):
    """A route that generates. `reader` makes a request with `ask()`, `format` the format of its
    answer. All raise InvalidRequest."""

    right: Right = "generate"
    reader: BodyReader[Any] | FormReader[Any]
    format: Callable[[ServedModel, Any], ResponseFormat]
    media_type: str = JSON
    parts: tuple[type[Struct], ...] = ()


class TokenApi(HttpEndpoint, kw_only=True):
    """A route that needs only the tokenizer. `answer` maps a request and its client's name to JSON.
    InvalidRequest."""

    right: Right = "tokenize"
    reader: BodyReader[Any]
    answer: Callable[[Service, Any, str], Awaitable[Any]]
