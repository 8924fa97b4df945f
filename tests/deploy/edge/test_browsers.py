"""What a web page of another site, and a neighbour on the network, may do and learn."""

import json
import time
from collections.abc import Iterator

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from deploy.edge.edge_settings import LIMITS_VARIABLE, LimitSettings, guard_limits
from deploy.edge.guards.limits import outermost
from deploy.edge.http.error_response import JsonResponse
from deploy.edge.http.scope import is_from_loopback
from tests.support.edge.api_client import chat_body, error_of
from tests.support.edge.http_edge import Edge, Edges, asgi_server

pytestmark = pytest.mark.pure

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY = chat_body(max_tokens=1)
PAGE = "https://page.example"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 415), ("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("multipart/form-data", 415),
        ("text/json", 415),
        ("application/json", 200), ("Application/JSON", 200), ("application/json; charset=utf-8", 200),
    ],
)
def test_a_body_must_say_that_it_is_json(edge: Edge, kind: str | None, status: int) -> None:
    """In any case, with parameters. A page may send the first three without asking: 415, and the engine hears nothing."""
    reply = edge.post(CHAT, content=json.dumps(BODY), headers={"content-type": kind} if kind else {})
    assert (reply.status_code, len(edge.core.requests)) == (status, status == 200)
    assert status == 200 or error_of(reply, 415)["code"] == "unsupported_media_type"


@pytest.fixture(scope="module")
def known(edges: Edges) -> Edge:
    limits = LimitSettings(hosts=("localhost", "127.0.0.1", "[::1]", "llm.example"), cors_origins=(PAGE,))
    return edges(limits=limits)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "llm.example", "LLM.example:443")),
        *((host, 403) for host in ("rebound.example", "localhost.example", "127.0.0.2", "[::2]", "example")),
    ],
)
def test_known_hosts_alone_are_accepted(known: Edge, host: str, status: int) -> None:
    """With any port, in any case. A name of the attacker's that leads to loopback is none of them."""
    reply = known.get("/v1/models", headers={"host": host})
    assert reply.status_code == status
    assert status == 200 or error_of(reply, 403)["code"] == "host_not_allowed"


def asked_by(edge: Edge, origin: str) -> httpx.Response:
    """The question that a browser asks before a page of `origin` may post JSON."""
    wants = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    return httpx.options(f"{edge.url}{CHAT}", headers=wants)


def test_cors_is_off_unless_an_origin_is_listed(edge: Edge, known: Edge) -> None:
    """Off by default; with the setting, the named origin alone, for its question and for its request."""
    assert "access-control-allow-origin" not in asked_by(edge, PAGE).headers
    assert "access-control-allow-origin" not in asked_by(known, "https://other.example").headers
    granted = asked_by(known, PAGE)
    assert (granted.status_code, granted.headers["access-control-allow-origin"]) == (200, PAGE)
    reply = known.post(CHAT, BODY, headers={"origin": PAGE})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, PAGE)


@pytest.mark.parametrize(("origin", "allowed"), [(PAGE, PAGE), ("https://other.example", None)])
def test_a_page_reads_what_the_guard_refuses(origin: str, allowed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard around Serve, if the page's origin is listed; its question is answered, and no answer says anything twice."""
    limits = LimitSettings(body_bytes=2048, body_timeout_s=0.2, cors_origins=(PAGE,))
    monkeypatch.setenv(LIMITS_VARIABLE, guard_limits(limits, "127.0.0.1"))

    def slowly() -> Iterator[bytes]:
        yield b"{"
        time.sleep(0.4)
        yield b"}"

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        reply = JsonResponse({}, headers={"vary": "Origin"} | ({"access-control-allow-origin": allowed} if allowed else {}))
        await reply(scope, receive, send)

    guarded = served
    for kind, arguments, options in outermost():
        guarded = kind(guarded, *arguments, **options)
    with asgi_server(guarded) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"origin": origin}) as page:
        wants = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-api-key"}
        replies = [page.post(CHAT, content=body) for body in (b"x" * 4096, slowly())]
        replies += [page.get("/", headers={"host": "a b"}), page.get("/"), page.options(CHAT, headers=wants)]
    assert [reply.status_code for reply in replies] == [413, 408, 400, 200, 200 if allowed else 400]
    exposed = replies[1].headers["access-control-expose-headers"].split(", ")
    assert {name for name in ("x-should-retry", "retry-after", "server") if name in exposed} == {"x-should-retry", "retry-after"}
    for reply in replies:
        assert reply.headers.get_list("access-control-allow-origin") == ([allowed] if allowed else []), reply
        assert reply.headers["vary"].split(", ").count("Origin") == 1


@pytest.mark.parametrize(
    ("client", "forwarded", "here"),
    [
        ("127.0.0.1", (), True), ("::1", (), True), ("127.0.0.1", ("127.0.0.1",), True),
        ("127.0.0.1", ("10.0.0.9, 127.0.0.1",), True), ("127.0.0.1", ("127.0.0.1, 10.0.0.9",), False),
        ("127.0.0.1", ("127.0.0.1", "10.0.0.9"), False), ("127.0.0.1", ("somebody",), False), ("10.0.0.9", ("127.0.0.1",), False),
        ("10.0.0.9", (), False),
    ],
)
def test_only_this_machine_is_here(client: str, forwarded: tuple[str, ...], here: bool) -> None:
    """The connection must come from loopback, and so must what the nearest proxy says; what a client says of itself is nothing."""
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    assert is_from_loopback({"type": "http", "client": (client, 1), "headers": headers}) is here


def test_addresses_are_for_this_machine(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """/health/ready names the exporter to loopback, and says no more than that it is ready to others."""
    monkeypatch.setitem(edge.service.about, "metrics", "http://127.0.0.1:9/metrics")
    assert "metrics" in edge.get("/health/ready").json()
    far = edge.get("/health/ready", headers={"x-forwarded-for": "10.0.0.9"})
    assert (far.status_code, far.json()) == (200, {"status": "ready", "model": "nano"})
