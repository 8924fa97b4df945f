"""Server-sent events without names, as OpenAI's completions stream them."""

from typing import Any

import msgspec

from deploy.edge.answers.response_format import Usage
from deploy.edge.http.error_response import OPENAI_ERROR
from engine.errors import QuartetError

DONE = b"data: [DONE]\n\n"


def data_event(value: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


class DataEvents:
    usage = Usage(0, 0)

    def begin(self, usage: Usage) -> bytes:
        """There is no event before the first token."""
        self.usage = usage
        return b""

    def failure(self, error: QuartetError) -> bytes:
        return data_event(OPENAI_ERROR.body(error))
