"""An OpenAI endpoint that answers at known times, counts what it does, and breaks off where its script says so.

Requests are numbered from zero as they come, the calibration's two not counted. A prompt of n words has n + 10 tokens.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Fault = Literal["drop", "no_done", "no_finish", "busy", "bug", "error_event", "hang", "garbage"]
BASE = 10
_CALIBRATION = 2


@dataclass
class Seen:
    """One request: its JSON and the server's clock (perf_counter) when it was read, when each token was written."""

    body: dict[str, Any]
    came: float
    written: list[float] = field(default_factory=list)


class TimedEndpoint:
    """`first_s(number)`: delay of a request's first token; `gap_s`: between tokens; `faults`: number -> how it goes wrong."""

    def __init__(
        self, first_s: Callable[[int], float] = lambda number: 0.0, gap_s: float = 0.0, faults: dict[int, Fault] | None = None
    ) -> None:
        self.first_s, self.gap_s, self.faults = first_s, gap_s, faults or {}
        self.seen: list[Seen] = []
        self.open = self.most_open = 0
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="paced")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[Seen]:
        """Without the calibration's."""
        return self.seen[_CALIBRATION:]

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _main(self) -> None:
        self._loop, self._stop, self._tasks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lengths = [line.partition(":")[2] for line in head.lower().splitlines() if line.startswith("content-length:")]
            body = await reader.readexactly(int(lengths[0])) if lengths else b""
            if head.startswith("POST"):
                await self._complete(json.loads(body), writer)
            else:
                self._get(head.split()[1], writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the client has gone
        finally:
            writer.close()

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            return _reply(writer, 200, json.dumps({"data": [{"id": "paced"}]}))
        return _reply(writer, 404, "{}")

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number, seen = len(self.seen) - _CALIBRATION, Seen(body, time.perf_counter())
        self.seen.append(seen)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            await self._answer(number, seen, writer)
        finally:
            self.open -= 1

    async def _answer(self, number: int, seen: Seen, writer: asyncio.StreamWriter) -> None:
        fault = self.faults.get(number)
        if number >= 0:
            await asyncio.sleep(self.first_s(number))
        if fault in ("busy", "bug"):
            return _reply(writer, 429 if fault == "busy" else 500, '{"error": {"message": "as scripted"}}')
        if fault == "drop":
            return None
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        await self._tokens(seen, writer, fault)
        return None

    async def _tokens(self, seen: Seen, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
        for number in range(seen.body["max_tokens"]):
            if number:
                await asyncio.sleep(self.gap_s)
            if number == 1 and fault == "hang":
                await asyncio.sleep(3600)
            if number == 1 and fault == "error_event":
                return _event(writer, {"error": {"message": "as scripted"}})
            if number == 1 and fault == "garbage":
                return _write(writer, b"data: {oops\n\n")
            seen.written.append(time.perf_counter())
            _event(writer, {"choices": [{"delta": {"content": "x "}}]})
            await writer.drain()
        if fault != "no_finish":
            _event(writer, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        _event(writer, {"choices": [], "usage": self._usage(seen)})
        if fault != "no_done":
            _write(writer, b"data: [DONE]\n\n")
        return None

    def _usage(self, seen: Seen) -> dict[str, int]:
        words = seen.body["messages"][0]["content"].split()
        return {"prompt_tokens": BASE + len(words), "completion_tokens": seen.body["max_tokens"]}


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)


def _event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    _write(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


def _reply(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
    _write(writer, (head + text).encode())
