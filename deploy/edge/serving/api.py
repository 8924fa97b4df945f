"""Routes as the folder of an API declares them."""

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from deploy.edge.answers.response_format import JSON, ResponseFormat, ServedModel
from deploy.edge.bodies.body_reader import BodyReader
from deploy.edge.bodies.form_reader import FormReader
from deploy.edge.http.endpoint import HttpEndpoint, Right
from deploy.edge.serving.service import Service


class GenerationApi(HttpEndpoint, kw_only=True):
    """`reader` makes a request with `ask()`, `format` its answer's format. All raise
    InvalidRequest."""

    right: Right = "generate"
    reader: BodyReader[Any] | FormReader[Any]
    format: Callable[[ServedModel, Any], ResponseFormat]
    media_type: str = JSON
    parts: tuple[type[Struct], ...] = ()


class TokenApi(HttpEndpoint, kw_only=True):
    """`answer` maps a request and its client's name to JSON. InvalidRequest."""

    right: Right = "tokenize"
    reader: BodyReader[Any]
    answer: Callable[[Service, Any, str], Awaitable[Any]]
