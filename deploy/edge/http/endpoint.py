"""A path's properties, known before its request is read."""

from typing import Literal

from deploy.edge.http.error_response import OPENAI_ERROR, ErrorShape
from engine.protocol import FrozenStruct

# "open": no key is needed; "all": all rights are that a key has which names none
Right = Literal["open", "generate", "tokenize", "models", "docs", "adapters", "all"]


class HttpEndpoint(FrozenStruct, kw_only=True):
    """`error`: the shape of its errors. `operation`: OpenTelemetry's gen_ai.operation.name."""

    path: str
    right: Right
    error: ErrorShape = OPENAI_ERROR
    operation: str | None = None
