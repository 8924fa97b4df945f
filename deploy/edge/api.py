"""An API, as the routes see it: a path, how its body is read, and the format of its answer.

Every API says in OpenAI's terms what it wants of the engine: a chat, or a completion of raw prompts. So all are validated,
admitted, limited and submitted alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from deploy.edge.openai.schemas import ChatRequest, CompletionRequest
from deploy.edge.response_format import ResponseFormat, ServedModel


@dataclass(frozen=True)
class Wanted:
    """A request that has been read: what is asked of the engine, and the format of the answer."""

    request: ChatRequest | CompletionRequest
    format: Callable[[ServedModel], ResponseFormat]


@dataclass(frozen=True)
class GenerationApi:
    """A route that generates. `read` takes a body and the served model's name, and raises InvalidRequest.

    `body` and `parts` are for the API's document: the body's type, and types that its raw JSON refers to.
    """

    path: str
    body: type[Struct]
    read: Callable[[bytes, str], Wanted]
    parts: tuple[type[Struct], ...] = ()
