"""Events without names, as OpenAI's completions stream them, and all who follow them."""

from typing import Any

import msgspec

from deploy.edge.error_response import OPENAI_ERROR
from deploy.edge.response_format import Usage
from engine.errors import QuartetError

DONE = b"data: [DONE]\n\n"


def data_event(value: Any) -> bytes:
    """Return one event."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


class DataEvents:
    """How a stream of such events begins, and how it breaks off. `usage`: when it began."""

    usage = Usage(0, 0)

    def begin(self, usage: Usage) -> bytes:
        """Nothing comes before the first token."""
        self.usage = usage
        return b""

    def failure(self, error: QuartetError) -> bytes:
        """An error event, without an end."""
        return data_event(OPENAI_ERROR.body(error))
