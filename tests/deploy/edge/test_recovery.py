"""Requests that wait in Serve's own proxy: refused while a lost replica is replaced, else left alone. Over real sockets."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NoReturn

import httpx
import pytest
from ray.exceptions import RayError
from ray.serve._private.proxy_response_generator import ProxyResponseGenerator
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentResponseGenerator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy import ray_private, serve_guard
from deploy.edge.guards import recovery
from deploy.edge.guards.recovery import Recovery
from tests.support.edge.http_edge import asgi_server

pytestmark = pytest.mark.pure


class WaitingProxy:
    """Serve's, which has no replica: it answers once `come` is set, or begins to, and ends then, for /begun."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.cancelled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        if scope["path"].endswith("begun"):
            await send(start)
        try:
            while not self.come.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += 1
            await send({"type": "http.response.start", "status": 500, "headers": []})  # as Serve may: nobody hears it
            raise
        if not scope["path"].endswith("begun"):
            await send(start)
        await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def served(proxy: WaitingProxy, routes: dict[str, bool]) -> Iterator[str]:
    with asgi_server(Recovery(proxy, lambda: routes)) as port:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            proxy.come.set()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "PERIOD_S", 0.05)


def test_a_request_for_a_lost_replica_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """503 with Retry-After, in OpenAI's shape, and Serve waits no longer for it. Planted: nobody asks what Serve says."""
    proxy = WaitingProxy()
    with served(proxy, {"/": True}) as url:
        reply = httpx.post(f"{url}/v1/completions", json={}, timeout=20)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        assert reply.json()["error"]["code"] == "engine_restarting"
        assert proxy.cancelled == 1
        monkeypatch.setattr(recovery, "PERIOD_S", 60)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={}, timeout=0.5)


@pytest.mark.parametrize("stays_s", [0.5, 0.0])
def test_a_refusal_does_not_wait_for_serve(stays_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle of Serve's that does not end when it is cancelled: the 503 comes nevertheless. Planted: a wait without a bound."""

    async def stays(scope: Scope, receive: Receive, send: Send) -> None:
        ends = asyncio.get_running_loop().time() + 2
        while asyncio.get_running_loop().time() < ends:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    wait = asyncio.wait
    if not stays_s:
        monkeypatch.setattr(recovery.asyncio, "wait", lambda work, timeout=None, **more: wait(work, **more, timeout=timeout and 9))
    with asgi_server(Recovery(stays, lambda: {"/": True})) as port:
        began = time.monotonic()
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={}, timeout=20)
        took = time.monotonic() - began
    assert (took < 1.5) is bool(stays_s)
    assert (reply.status_code == 503) is bool(stays_s)


@pytest.mark.parametrize(
    ("path", "routes"),
    [("/v1/models", {"/": False}), ("/b/v1", {"/": True, "/b": False}), ("/v1", {"/b": True}), ("/begun", {"/": True})],
    ids=["replicas to come", "another application", "no application", "an answer that has begun"],
)
def test_others_wait(path: str, routes: dict[str, bool]) -> None:
    """Until they are answered, however long it takes."""
    proxy = WaitingProxy()
    with served(proxy, routes) as url:
        threading.Timer(0.3, proxy.come.set).start()
        reply = httpx.get(f"{url}{path}", timeout=20)
    assert (reply.status_code, reply.text, proxy.cancelled) == (200, "ok", 0)


def test_what_serve_does_not_say_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller does not answer, or not yet again: the request goes on waiting, and it is asked once a period."""
    asked = []
    over = threading.Event()

    def routes() -> dict[str, bool]:
        asked.append(over.wait(20))
        return {} if len(asked) == 2 else {"/": True}

    async def main() -> list[bool]:
        guard = Recovery(WaitingProxy(), routes)
        silent = [await guard._is_lost("/x") for _ in range(3)]
        over.set()
        monkeypatch.setattr(recovery, "PERIOD_S", 60)
        found = [await guard._is_lost("/x") for _ in range(2)]
        for _ in range(2):
            guard._looked -= 60
            found.append(await guard._is_lost("/x"))
        return silent + found

    assert asyncio.run(main()) == [False, False, False, True, True, False, True]
    assert asked == [True] * 3


BROKEN = ValueError("the handle broke")


async def fails_when_cancelled(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        raise BROKEN


@dataclass(frozen=True)
class Leaving:
    """A client that leaves once Serve is `asked`; it has `left` then."""

    asked: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)


def left_behind(
    app: ASGIApp, routes: Callable[[], dict[str, bool]], client: Leaving | None = None
) -> tuple[list[Message], list[str]]:
    """(what a client gets, None: one that stays; what asyncio says of errors that nobody has asked for)."""
    sent = []
    unasked = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unasked.append(context["message"]))
        scope = {"type": "http", "method": "GET", "path": "/v1", "headers": []}
        request = asyncio.ensure_future(Recovery(app, routes)(scope, asyncio.Event().wait, send))  # type: ignore[arg-type]
        if client is not None:
            assert await asyncio.to_thread(client.asked.wait, 20)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            client.left.set()
        else:
            async with asyncio.timeout(20):
                await request
        await asyncio.get_running_loop().shutdown_default_executor()  # the thread that asks Serve has ended
        del request
        await asyncio.sleep(0.05)
        gc.collect()

    asyncio.run(main())
    return sent, unasked


@pytest.mark.parametrize(("lost", "statuses"), [(True, [503]), (False, [])], ids=["refused", "left"])
def test_what_fails_when_it_is_given_up_is_logged(lost: bool, statuses: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """Of a request that is refused, and of one whose client leaves: once, with its traceback, and not by the collector."""
    client = Leaving()

    def routes() -> dict[str, bool]:
        client.asked.set()
        return {"/": lost}

    sent, unasked = left_behind(fails_when_cancelled, routes, None if lost else client)
    assert [message["status"] for message in sent if "status" in message] == statuses
    assert unasked == []
    assert [record.exc_info and record.exc_info[1] for record in caplog.records if record.name == "ray.serve"] == [BROKEN]


class LostHandle(DeploymentResponseGenerator):  # type: ignore[type-arg]
    """The answer of a replica that is gone: it never comes, and ends as Serve's own do once it is cancelled."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    async def __anext__(self) -> NoReturn:
        await self._over.wait()
        raise RequestCancelledError("r1")

    def cancel(self) -> None:
        self._over.set()

    def cancelled(self) -> bool:
        return self._over.is_set()


async def serves_proxy(scope: Scope, receive: Receive, send: Send) -> None:
    """What Serve's does with a handle: it waits for its answer, and for the client to leave."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(left())
    try:
        async for _ in ProxyResponseGenerator(LostHandle(), disconnected_task=leaving):
            pass
    finally:
        leaving.cancel()


def test_serves_handle_of_a_lost_replica_ends_as_if_the_client_had_left() -> None:
    """Serve asks for its own errors then. Planted: its task is cancelled, and nobody asks for the handle's error."""
    sent, unasked = left_behind(serves_proxy, lambda: {"/": True})
    assert (sent[0]["status"], unasked) == (503, [])


def test_what_fails_while_serve_is_asked_is_the_servers() -> None:
    """It has ended: it is not refused, and its error goes where any request's goes."""
    asked, over = threading.Event(), threading.Event()

    def routes() -> dict[str, bool]:
        asked.set()
        return {"/": over.wait(20)}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while not asked.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.001)
        over.set()
        raise BROKEN

    with pytest.raises(ValueError, match="the handle broke"):
        left_behind(app, routes)


def test_that_serve_cannot_be_asked_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A request waits on, and the error is said though its client has left."""
    client = Leaving()

    def routes() -> NoReturn:
        client.asked.set()
        client.left.wait(20)
        raise KeyError("deployments")

    assert left_behind(WaitingProxy(), routes, client)[1] == []
    assert ["deployments" in str(record.exc_info) for record in caplog.records if record.name == "ray.serve"] == [True]


@pytest.mark.parametrize("error", [RayServeException("There is no Serve instance"), RayError()])
def test_without_a_controller_serve_says_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own error for that is none of Ray's."""

    def client() -> NoReturn:
        raise error

    monkeypatch.setattr(ray_private, "_get_global_client", client)
    assert serve_guard.routes() == {}


@pytest.mark.parametrize(
    ("status", "replicas", "lost"),
    [
        ("HEALTHY", [], False),
        ("UNHEALTHY", ["STARTING"], True),
        ("UNHEALTHY", ["STARTING", "RUNNING"], False),
        ("UPDATING", [], False),
        ("UPSCALING", ["STARTING"], False),
        ("DEPLOY_FAILED", [], True),
    ],
)
def test_what_counts_as_lost(status: str, replicas: list[str], lost: bool) -> None:
    """As Serve names its states: no replica runs, though nobody has asked for that."""
    assert serve_guard.is_lost({"status": status, "replicas": [{"state": state} for state in replicas]}) is lost
