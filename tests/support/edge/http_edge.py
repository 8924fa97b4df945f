"""The HTTP edge without Ray and without ranks: the real app and the real EngineClient, with a scripted core behind its socket.

client --HTTP--> uvicorn --> with_ids --> create_app(Service) --> EngineClient ==socket pair== ScriptedCore
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import uvicorn
from msgspec.structs import replace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.edge.edge_settings import LimitSettings
from deploy.edge.guards.http_protocol import UpgradeIgnored
from deploy.edge.http.scope import request_id
from deploy.edge.keys.key_ring import KeyRing
from deploy.edge.media.media_preparer import MediaPreparer
from deploy.edge.routes import create_app
from deploy.edge.service_settings import Defaults, ServiceSettings
from deploy.edge.serving.service import Service
from engine.events import Event, RequestFinished
from engine.front.client import EngineClient
from engine.front.grammar_check import GrammarCheck
from engine.front.text import TextProcessor
from engine.matcher import Vocabulary
from engine.protocol import MediaKind
from tests.support.edge.scripted_core import ScriptedCore
from tests.support.edge.served_settings import service_settings


def with_ids(app: ASGIApp) -> ASGIApp:
    """Gives a request without a sane id one, and puts it on the reply: as Ray Serve does behind our guard."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        known = (b"x-request-id", request_id(scope["headers"]).encode())

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), known]}
            await send(message)

        others = [header for header in scope["headers"] if header[0].lower() != known[0]]
        await app({**scope, "headers": [*others, known]}, receive, stamped)

    return served


async def never() -> Message:
    """A `receive` to which no message comes."""
    return await asyncio.Future()


class Edge:
    """A running edge on a free loopback port, its loop in a thread of its own. `url` is the API's base."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: LimitSettings | None = None,
        keys: KeyRing | None = None,
        vocab: int = 1024,
        max_len: int = 256,
        media: frozenset[MediaKind] = frozenset(),
        row_samples: int = 0,
        adapters: Mapping[str, str] | None = None,
        adapter_folder: str | None = None,
        most_adapters: int = 0,
        rank_links: Any = None,
        metrics: tuple[str, Callable[[], bytes]] | None = None,
    ) -> None:
        self.core = ScriptedCore()
        self.events: list[Event] = []
        self.folder = folder
        self.text = TextProcessor.load(folder)
        self.name = "nano"
        self._limits = limits or LimitSettings()
        self._defaults = Defaults.read(folder)
        self._keys = keys
        self._metrics = metrics
        self._served: dict[str, Any] = {"vocab": vocab, "max_len": max_len, "media_kinds": media, "row_samples": row_samples}
        self._served |= {"adapters": adapters or {}, "adapter_folder": adapter_folder, "most_adapters": most_adapters}
        self.rank_links = rank_links
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="edge")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(20), "the edge did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the edge did not stop"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """`body` as JSON, or a text that is to be taken for JSON; `options` are httpx'."""
        if isinstance(body, str | bytes):
            return self.post(path, content=body, headers={"content-type": "application/json"}, **options)
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **options)

    def stream(self, path: str, body: Any, **options: Any) -> AbstractContextManager[httpx.Response]:
        """The same, to be read as it comes."""
        return httpx.stream("POST", f"{self.url}{path}", json=body, timeout=60, **options)

    @property
    def ends(self) -> list[RequestFinished]:
        """Of requests, by the events so far."""
        return [event for event in list(self.events) if isinstance(event, RequestFinished)]

    def script(self, reply: str, batch: int = 1) -> None:
        """The core answers with `reply`, `batch` tokens a step; a byte is a token where the vocabulary has no piece."""
        ids = self.text.encode(reply, add_bos=False)
        self.core.steps = [ids[at : at + batch] for at in range(0, len(ids), batch)]

    def prompt_text(self, request: int = 0) -> str:
        """The prompt of a request that has reached the core, control tokens and all."""
        return self.text.decode(list(self.core.requests[request].tokens), skip_special_tokens=False)

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run `work` where the app runs, and return what it returns."""

        async def call() -> Any:
            return work()

        return self.run(call())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def start(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Run `work` beside the app, until it ends or is cancelled."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def configure(self, **changes: Any) -> ServiceSettings:
        """Serve until the next reset with some settings changed; returns those before."""
        before = self.service.settings
        self.service.settings = self.service.jobs.settings = replace(before, **changes)
        return before

    @contextmanager
    def configured(self, **changes: Any) -> Iterator[None]:
        """With some settings changed."""
        before = self.configure(**changes)
        try:
            yield
        finally:
            self.service.settings = self.service.jobs.settings = before

    def settle(self) -> None:
        """Until the requests so far have ended: their records and events come behind the last bytes of their answers."""
        until(lambda: not self._server.server_state.tasks, "the requests before have ended")

    def reset(self) -> None:
        """A fresh script for the next test, the settings of the start, and no events, not even later of the requests before."""
        self.settle()
        self.service.settings = self.service.jobs.settings = self._settings
        self.core.reset()
        self.events.clear()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        core = asyncio.create_task(self.core.serve())
        self.client = EngineClient(self.core.front, self.core.memory.fd, sink=self.events.append)
        await self.client.start()
        self._settings = service_settings(self.name, defaults=self._defaults, limits=self._limits, **self._served)
        self.vocabulary = Vocabulary(self.text.pieces, self.text.eos_ids, self.text.vocab_size)
        grammars = GrammarCheck(self.vocabulary.complaint)
        self.service = Service(
            self._settings, self.text, self.client, grammars, MediaPreparer(), self._keys, self.events.append, None, {},
            metrics=self._metrics, rank_links=self.rank_links,
        )  # fmt: skip
        listener = socket.socket(proto=socket.IPPROTO_TCP)  # named: else asyncio leaves Nagle's algorithm on, and chunks 40 ms late
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        served = with_ids(create_app(self.service))
        config = uvicorn.Config(served, lifespan="off", ws="none", http=UpgradeIgnored, log_level="critical", loop="asyncio")
        self._server = server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        running = asyncio.create_task(server._serve([listener]))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        self._up.set()
        await self._stop.wait()
        server.should_exit = True
        server.force_exit = True
        await running
        self.service.end(0)
        await self.client.close()
        core.cancel()
        await asyncio.gather(core, return_exceptions=True)
        self.core.close()


Edges = Callable[..., Edge]  # makes one


@contextmanager
def asgi_server(app: ASGIApp) -> Iterator[int]:
    """The port where uvicorn serves `app`, as Ray Serve has it do."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, "the start of the server")
        yield int(server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(20)


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait for `condition`; AssertionError names `what` did not happen."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)
