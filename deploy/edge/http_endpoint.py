"""What is known of a path before its request is read."""

from dataclasses import dataclass
from typing import Literal

from deploy.edge.error_response import OPENAI_ERROR, ErrorShape

Right = Literal["open", "generate", "tokenize", "models", "docs"]  # "open": no key is needed


@dataclass(frozen=True, kw_only=True)
class HttpEndpoint:
    """A path, the right that an API key needs for it, and the shape of its errors.

    `operation`: OpenTelemetry's gen_ai.operation.name, of those that generate.
    """

    path: str
    right: Right
    error: ErrorShape = OPENAI_ERROR
    operation: str | None = None
