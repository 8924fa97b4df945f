"""What tests of the API ask an edge with: OpenAI's own client, a body, the events of a stream, and errors."""

from typing import Any

import httpx
import openai
import pytest

from tests.support.edge.http_edge import Edge
from tests.support.edge.summed import sse

whole_and_streamed = pytest.mark.parametrize("stream", [False, True])


def client(edge: Edge) -> openai.OpenAI:
    """OpenAI's, without retries."""
    return openai.OpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0, timeout=10)


def user(content: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": content}


def chat_body(content: Any = "Hello", **more: Any) -> dict[str, Any]:
    """A chat in which the user says `content`."""
    return {"model": "nano", "messages": [user(content)], **more}


def events(edge: Edge, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of every event of a stream; behind the last one stands [DONE], unless it is an error."""
    reply = edge.post(path, body | {"stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = sse(reply.text)
    assert reply.text.endswith("data: [DONE]\n\n") != ("error" in found[-1])
    return found


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    """What a reply of this status says of its error, in OpenAI's shape."""
    assert reply.status_code == status, reply.text
    return reply.json()["error"]
