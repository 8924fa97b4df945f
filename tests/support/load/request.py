"""One request of an OpenAI endpoint, from the moment it is sent to its end, with the clock points of everything between.

    sent --------- first ------ event ------ ... ------ last -- done          all on time.perf_counter, seconds
      |--- ttft -----|            |--- gap ---|                              first, event: an event with what the model wrote
      |--- e2e ------------------------------------------------|            last: the last such event, or the finish

    tpot = (last - first) / (n - 1) over the n tokens that the server's usage counts; None below two tokens
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

Content = str | list[dict[str, Any]] | list[int]  # of a message: text, or parts; or a prompt's token ids
End = Literal["finished", "refused", "failed", "cut", "timeout", "unreachable"]
ENDS: tuple[End, ...] = ("finished", "refused", "failed", "cut", "timeout", "unreachable")
_REFUSALS = (429, 503)
_SAID = ("content", "reasoning_content", "reasoning", "tool_calls")  # keys of a delta that hold what the model wrote


@dataclass(frozen=True)
class Endpoint:
    """Where requests go: `url` is the API's base without /v1."""

    url: str
    model: str
    timeout_s: float = 600.0

    def request(self, prompt: Content, tokens: int) -> tuple[str, dict[str, Any]]:
        """(address, JSON) for exactly `tokens` output tokens."""
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        body = {"model": self.model, "max_tokens": tokens, **options}
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return f"{self.url}/v1/completions", body | {"prompt": prompt}
        return f"{self.url}/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}


@dataclass
class RequestResult:
    """What became of one request. Times are seconds on the client's clock; tokens as the server's usage counts them."""

    number: int
    asked_tokens: int
    sent: float
    end: End | None = None
    detail: str = ""
    first: float | None = None
    last: float | None = None
    done: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def e2e(self) -> float:
        return self.done - self.sent

    @property
    def tpot(self) -> float | None:
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)


async def ask(client: httpx.AsyncClient, target: Endpoint, record: RequestResult, prompt: Content) -> None:
    """Send one request and fill its record; whatever happens, it has an end afterwards."""
    try:
        async with asyncio.timeout(target.timeout_s):
            record.end, record.detail = await _exchange(client, target, record, prompt)
    except TimeoutError:
        record.end, record.detail = "timeout", f"no end within {target.timeout_s:g} s"
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        record.end, record.detail = "unreachable", str(error)
    except httpx.HTTPError as error:
        record.end, record.detail = "cut", f"{type(error).__name__}: {error}"
    finally:
        record.done = time.perf_counter()


async def _exchange(client: httpx.AsyncClient, target: Endpoint, record: RequestResult, prompt: Content) -> tuple[End, str]:
    address, body = target.request(prompt, record.asked_tokens)
    async with client.stream("POST", address, json=body) as reply:
        if reply.status_code != httpx.codes.OK:
            text = " ".join((await reply.aread()).decode(errors="replace").split())
            return ("refused" if reply.status_code in _REFUSALS else "failed"), f"{reply.status_code}: {text[:200]}"
        return await _follow(reply, record)


async def _follow(reply: httpx.Response, record: RequestResult) -> tuple[End, str]:
    """A stream, event by event. Whole means: a finish reason, and [DONE] behind it."""
    finish, closed = None, False
    async for now, data in _events(reply):
        if data == b"[DONE]":
            closed = True
            break
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            return "failed", f"an event is no JSON object: {data[:80]!r}"
        if event.get("error"):
            return "failed", f"error event: {json.dumps(event['error'])[:200]}"
        finish = take(event, now, record) or finish
    if closed and finish:
        return "finished", ""
    return "cut", "the stream ended without [DONE]" if not closed else "no finish_reason"


def take(event: dict[str, Any], now: float, record: RequestResult) -> str | None:
    """Fold one event that came at `now` into its record; returns its finish reason, if it has one."""
    usage = event.get("usage")
    if usage:
        record.prompt_tokens, record.output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    finish = None
    for choice in event.get("choices") or ():
        finish = choice.get("finish_reason") or finish
        says = choice.get("text") or any((choice.get("delta") or {}).get(key) for key in _SAID)
        if says and record.first is None:
            record.first = now
        elif says and record.last is not None:
            record.gaps.append(now - record.last)
        if says or (finish and record.first is not None):
            record.last = now
    return finish


async def _events(reply: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """(when its bytes came, data) of each server-sent event."""
    rest = b""
    async for block in reply.aiter_bytes():
        now = time.perf_counter()
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip()
