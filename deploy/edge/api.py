"""An API, as the routes see it: an endpoint, how its body is read, and the format of its answer.

What every API wants of the engine is an Ask. So all are validated, admitted, limited and submitted alike.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from deploy.edge.ask import Ask
from deploy.edge.http_endpoint import HttpEndpoint, Right
from deploy.edge.response_format import ResponseFormat, ServedModel
from deploy.edge.service import Service
from engine.errors import InvalidRequest


@dataclass(frozen=True)
class ParsedRequest:
    """A request that has been read: what is asked of the engine, and the format of the answer."""

    ask: Ask
    format: Callable[[ServedModel], ResponseFormat]


@dataclass(frozen=True, kw_only=True)
class GenerationApi(HttpEndpoint):
    """A route that generates. `read` takes a body and the served model's name, and raises InvalidRequest.

    `body` and `parts` are for the API's document: the body's type, and types that its raw JSON refers to. `names`: its own names
    for keys of OpenAI's, so that an error names what the client has written.
    """

    right: Right = "generate"
    body: type[Struct]
    read: Callable[[bytes, str], ParsedRequest]
    parts: tuple[type[Struct], ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def in_client_terms(self, error: InvalidRequest) -> InvalidRequest:
        """The same error, with the client's own name for the key."""
        param = error.param or ""
        if param not in self.names:
            return error
        name, message = self.names[param], str(error)
        return InvalidRequest(name + message.removeprefix(param) if message.startswith(param) else message, name, error.code)


@dataclass(frozen=True, kw_only=True)
class TokenApi(HttpEndpoint):
    """A route that answers from the tokenizer alone: `answer` gives what goes out as JSON, and raises InvalidRequest."""

    right: Right = "tokenize"
    body: type[Struct]
    answer: Callable[[Service, bytes], Awaitable[Any]]
    parts: tuple[type[Struct], ...] = ()
