"""The HTTP edge without Ray and without ranks: the real app and the real EngineClient, with a scripted core behind its socket.

client --HTTP--> uvicorn --> create_app(Service) --> EngineClient ==socket pair== FakeCore, which says what `steps` says
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn

from deploy.edge.edge_settings import LimitSettings
from deploy.edge.routes import create_app
from deploy.edge.service import Defaults, Service
from engine.events import Event
from engine.front.client import EngineClient
from engine.front.text import TextProcessor
from engine.protocol import (
    Abort,
    AbortReason,
    Control,
    FinishReason,
    FrameReader,
    GenerateRequest,
    Logprobs,
    Output,
    TokenBatch,
    decode_front_message,
    encode_message,
    frame,
)
from tests.support.engine.load_figures import load, pool

LOAD = load(pools=[pool("sliding", 3, 7), pool("full", 0, 9)])


@dataclass
class FakeCore:
    """Answers every request with `steps` (token ids of each step), then `finish`; cut at max_tokens as the real one does."""

    steps: list[list[int]] = field(default_factory=lambda: [[300], [301], [302]])
    finish: FinishReason = FinishReason.stop
    delay_s: float = 0.0
    forever: bool = False
    refuse: str | None = None
    fail_after: int | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    aborts: list[tuple[int, AbortReason]] = field(default_factory=list)
    sent: int = 0

    async def serve(self, sock: socket.socket) -> None:
        """Until the other end closes."""
        sock.setblocking(False)
        frames, loop = FrameReader(), asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        while data := await loop.sock_recv(sock, 1 << 16):
            for raw in frames.feed(data):
                await self._handle(decode_front_message(raw), sock)

    async def _handle(self, message: GenerateRequest | Abort | Control, sock: socket.socket) -> None:
        match message:
            case GenerateRequest():
                self.requests.append(message)
                self._tasks[message.id] = asyncio.create_task(self._answer(message, sock))
            case Abort():
                self.aborts.append((message.id, message.reason))
                self._tasks.pop(message.id).cancel()
                success = message.reason is AbortReason.stop_string
                await self._say(sock, Output(id=message.id, finish=FinishReason.stop if success else FinishReason.abort))
            case Control():
                await self._send(sock, TokenBatch(outputs=[], load=LOAD))

    async def _answer(self, request: GenerateRequest, sock: socket.socket) -> None:
        if self.refuse is not None:
            await self._say(sock, Output(id=request.id, finish=FinishReason.error, error=self.refuse, invalid=True))
            return
        left = request.params.max_tokens
        place = 0
        while left > 0 and (self.forever or place < len(self.steps)):
            if self.fail_after == place:
                await self._say(sock, Output(id=request.id, finish=FinishReason.error, error="the logits are not finite"))
                return
            tokens = self.steps[place % len(self.steps)][:left]
            left -= len(tokens)
            place += 1
            last = not self.forever and place == len(self.steps)
            finish = FinishReason.length if left == 0 else self.finish if last else None
            await self._say(sock, Output(id=request.id, tokens=tokens, logprobs=_logprobs(request, tokens), finish=finish))
            await asyncio.sleep(self.delay_s)

    async def _say(self, sock: socket.socket, output: Output) -> None:
        self.sent += len(output.tokens)
        await self._send(sock, TokenBatch(outputs=[output], load=LOAD))

    async def _send(self, sock: socket.socket, batch: TokenBatch) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, frame(encode_message(batch)))


def _logprobs(request: GenerateRequest, tokens: list[int]) -> list[Logprobs]:
    count = request.params.logprobs
    if count is None:
        return []
    return [Logprobs(-0.5 - index, [(token + place, -0.5 - place) for place in range(count)]) for index, token in enumerate(tokens)]


class Edge:
    """A running edge on a free loopback port, its loop in a thread of its own. `url` is the API's base."""

    def __init__(self, folder: Path, *, limits: LimitSettings | None = None, vocab: int = 1024, max_len: int = 256) -> None:
        self.core = FakeCore()
        self.events: list[Event] = []
        self.text = TextProcessor.load(folder)
        self.name = "nano"
        self._limits = limits or LimitSettings()
        self._defaults = Defaults.read(folder)
        self._sizes = {"vocab": vocab, "max_len": max_len}
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="edge")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(20), "the edge did not start"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the edge did not stop"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run `work` where the app runs, and return what it returns."""

        async def call() -> Any:
            return work()

        return self.run(call())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def reset(self) -> None:
        """A fresh script for the next test."""
        self.core.__dict__.update({name: value for name, value in FakeCore().__dict__.items() if not name.startswith("_")})

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        ours, theirs = socket.socketpair()
        core = asyncio.create_task(self.core.serve(theirs))
        self.client = EngineClient(ours, sink=self.events.append)
        await self.client.start()
        self.service = Service(
            name=self.name, text=self.text, engine=self.client, defaults=self._defaults, limits=self._limits, **self._sizes
        )
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(create_app(self.service), lifespan="off", ws="none", log_level="critical", loop="asyncio")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        running = asyncio.create_task(server._serve([listener]))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        self._up.set()
        await self._stop.wait()
        server.should_exit = True
        server.force_exit = True
        await running
        await self.client.close()
        core.cancel()
        await asyncio.gather(core, return_exceptions=True)
        theirs.close()


def until(condition: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
    """Wait for `condition`; AssertionError names `what` did not happen."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)
