"""An engine that has every token of an answer ready, and a client without a network: what is left is the edge's own work."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp

from engine.front.stream import Clock, Stream
from engine.protocol import FinishReason, Output, SamplingParams

BODY = b'{"model":"nano","stream":true,"max_tokens":%d,"messages":[{"role":"user","content":"Hello"}]}'


class ReadyEngine:
    """Every token of an answer is there, one a turn of the loop."""

    dead: str | None = None
    open = 0

    def __init__(self) -> None:
        self._last = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def health(self) -> None:
        """As EngineClient.health: it lives."""

    def generate(self, prompt: Sequence[int], params: SamplingParams, **_: object) -> Stream:
        """As EngineClient.generate."""
        self._last += 1
        now = time.monotonic()
        stream = Stream(self._last, lambda *_: None, Clock(now, now, now, now, params.max_tokens))
        task = asyncio.ensure_future(_feed(stream, params.max_tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream


async def _feed(stream: Stream, tokens: int) -> None:
    for left in range(tokens - 1, -1, -1):
        stream.push(Output(id=stream.id, tokens=[300], finish=None if left else FinishReason.length))
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def request(app: ASGIApp, tokens: int) -> int:
    """One stream; how many chunks it was."""
    chunks = 0
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "root_path": ""}
    heads = [(b"host", b"a"), (b"x-request-id", b"bench"), (b"content-type", b"application/json")]
    said = iter([{"type": "http.request", "body": BODY % tokens, "more_body": False}])

    async def receive() -> Any:
        message = next(said, None)
        if message is None:
            await asyncio.Event().wait()
        return message

    async def send(message: Any) -> None:
        nonlocal chunks
        chunks += message["type"] == "http.response.body"

    await app({**scope, "headers": heads, "scheme": "http", "server": ("a", 80), "client": ("b", 1)}, receive, send)
    return chunks
