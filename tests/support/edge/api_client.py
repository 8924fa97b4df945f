"""What tests of the API ask an edge with: OpenAI's own client, the events of a stream, and answers for the scripted core."""

from typing import Any

import httpx
import openai

from tests.support.edge.http_edge import Edge


def client(edge: Edge) -> openai.OpenAI:
    """OpenAI's, without retries."""
    return openai.OpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0, timeout=10)


def token_steps(edge: Edge, text: str) -> list[list[int]]:
    """`text` as steps of one token each, a byte at a time where the vocabulary has no piece."""
    return [[token] for token in edge.text.encode(text, add_bos=False)]


def events(edge: Edge, path: str, body: dict[str, Any]) -> list[str]:
    """The data of every event of a stream."""
    reply = httpx.post(f"{edge.url}{path}", json=body | {"stream": True}, timeout=10)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in reply.text.split("\n\n") if line)
    return [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    """What a reply of this status says of its error, in OpenAI's shape."""
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error
