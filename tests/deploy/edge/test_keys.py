"""API keys over HTTP: no path answers without one but the open list, rights, quotas, replacement, and what is told of them."""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from msgspec.structs import replace
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from deploy.edge.apis import ENDPOINTS, UNKNOWN, endpoint_of
from deploy.edge.edge_settings import KEYS_VARIABLE, KeySettings, LimitSettings
from deploy.edge.guards.limits import outermost
from deploy.edge.http.http_errors import QuotaExceeded
from deploy.edge.keys import key_ring
from deploy.edge.keys.key_file import ApiKey, digest_of
from deploy.edge.keys.key_ring import KeyRing
from deploy.edge.requests.ask import Ask, RawPrompts
from deploy.edge.routes import create_app
from engine.events import KeyDecision, KeyTokens
from tests.conftest import Nano
from tests.support.edge.api_client import chat_body, error_of
from tests.support.edge.http_edge import Edge, Edges, until, with_ids

pytestmark = pytest.mark.pure

OPEN = {"/health", "/health/live", "/health/ready"}

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY = chat_body(max_tokens=3)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
ALICE, OLD, READER, LATE, SLOW, FEW = "sk-alice", "sk-alice-old", "sk-reader", "sk-late", "sk-slow", "sk-few"
OURS, THEIRS = "sk-ours", "sk-theirs"


def line(key: str, rest: str) -> str:
    return f"- {{sha256: {sha256(key.encode()).hexdigest()}, name: {rest}}}\n"


LINES = (
    line(OLD, "alice")
    + line(ALICE, "alice, expires: 2090-01-01")
    + line(READER, "reader, rights: [models]")
    + line(LATE, "late, expires: 2020-01-01")
    + line(SLOW, "slow, concurrent: 1")
    + line(FEW, "few, tokens: 40, requests: 1000")
    + line(OURS, "ours, models: [other, nano]")
    + line(THEIRS, "theirs, models: [other]")
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def status(edge: Edge, key: str) -> int:
    """How the list of models is answered."""
    return edge.get("/v1/models", headers=bearer(key)).status_code


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys"


def replaced(file: Path, text: str) -> None:
    """The file has another text, of which nobody reads a part."""
    file.with_name("new").write_text(text)
    file.with_name("new").replace(file)


@pytest.fixture(scope="module")
def shared(edges: Edges, keys_file: Path) -> Edge:
    keys_file.write_text(LINES)
    ring = KeyRing(KeySettings(file=str(keys_file)))
    return edges(keys=ring, limits=LimitSettings(cors_origins=("https://page.example",)))


@pytest.fixture
def edge(shared: Edge, keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> Edge:
    """With the keys of LINES in force, and a file that is looked at for each request."""
    monkeypatch.setattr(key_ring, "FILE_CHECK_PERIOD_S", 0.0)
    replaced(keys_file, LINES)
    until(lambda: status(shared, OLD) == 200, "the keys are read again")
    shared.reset()
    return shared


def routes(edge: Edge) -> list[tuple[str, str]]:
    """Every path of the application, with a value for its parameters, and each of its methods."""
    app = create_app(edge.service)
    while not isinstance(app, FastAPI):
        app = getattr(app, "_app", None) or app.app
    found = [route for route in app.routes if isinstance(route, APIRoute | Route)]
    assert len(found) == len(app.routes), "a kind of route that is not looked at"
    return [(method, route.path.replace("{model:path}", "nano")) for route in found for method in sorted(route.methods or ())]


def is_unauthenticated(answer: dict[str, Any]) -> bool:
    """In OpenAI's words or in Anthropic's."""
    return answer["error"].get("code") == "invalid_api_key" or answer["error"]["type"] == "authentication_error"


def answering(edge: Edge, asked: list[tuple[str, str]], headers: dict[str, str]) -> set[str]:
    """The paths that say anything but 401 with `invalid_api_key` and WWW-Authenticate."""
    found = set()
    with httpx.Client(base_url=edge.url) as client:
        for method, path in asked:
            reply = client.request(method, path, headers=headers)
            told = reply.status_code == 401 and (method == "HEAD" or is_unauthenticated(reply.json()))
            if not told or reply.headers["www-authenticate"] != "Bearer":
                found.add(path)
    return found


STRANGE = (
    "/", "//health", "/health/", "/Health", "/health/x", "/health%2Fready/..", "/v1", "/v1/models/", "/nothing", "/health/ready/",
    "/-/routes", "/-/healthz", "/v1/embeddings",
)  # fmt: skip


def test_no_path_answers_without_a_key_but_the_open_list(edge: Edge) -> None:
    """All routes of the application by all their methods, methods that no route has, and paths that are close to an open one."""
    for headers in ({}, bearer("sk-wrong"), {"x-api-key": "sk-wrong"}):
        assert answering(edge, routes(edge), headers) == OPEN
    assert answering(edge, [(method, CHAT) for method in METHODS], {}) == set()
    assert answering(edge, [("GET", path) for path in STRANGE], {}) == set()
    assert edge.get("/metrics").status_code == 404  # open, but not there unless a setting asks for it
    assert edge.core.requests == []


def test_a_path_that_answers_without_a_key_is_noticed(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one path too many in the open list, and a gate that is not there."""
    monkeypatch.setitem(ENDPOINTS, "/v1/models", replace(ENDPOINTS["/v1/models"], right="open"))
    assert answering(edge, routes(edge), {}) == OPEN | {"/v1/models"}
    for path, endpoint in ENDPOINTS.items():
        monkeypatch.setitem(ENDPOINTS, path, replace(endpoint, right="open"))
    assert answering(edge, routes(edge), {}) == {path for _, path in routes(edge)}


def test_every_route_has_a_right(edge: Edge) -> None:
    """None is left to the rule for what is not listed, which would shut out whoever has not all rights."""
    assert [path for _, path in routes(edge) if endpoint_of({"path": path}) is UNKNOWN] == []


ACCEPTED = [
    {"authorization": f"Bearer {ALICE}"}, {"authorization": f"bearer {ALICE}"}, {"AUTHORIZATION": f"BEARER   {ALICE}"},
    {"x-api-key": ALICE}, {"X-Api-Key": ALICE}, {"authorization": f"Bearer {ALICE}", "x-api-key": ALICE},
]  # fmt: skip
REFUSED = [
    [("authorization", ALICE)], [("authorization", f"Basic {ALICE}")], [("authorization", "Bearer")],
    [("authorization", f"Bearer {ALICE} x")], [("authorization", f"Bearer {ALICE.upper()}")], [("x-api-key", "")],
    [("authorization", f"Bearer {ALICE}"), ("x-api-key", READER)], [("x-api-key", ALICE), ("x-api-key", READER)],
    [("authorization", f"Bearer {ALICE}"), ("authorization", ALICE)], [("authorization", f"Bearer {LATE}")],
    [("authorization", f"Bearer {sha256(ALICE.encode()).hexdigest()}")], [("cookie", f"authorization=Bearer {ALICE}")],
]  # fmt: skip


def test_a_key_is_sent_one_way(edge: Edge) -> None:
    """As a bearer token in any case, as x-api-key or as both: exactly one, whole, and not expired; its hash is none."""
    for headers in ACCEPTED:
        assert edge.get("/v1/models", headers=headers).status_code == 200, headers
    for pairs in REFUSED:
        reply = edge.get("/v1/models", headers=pairs)
        assert error_of(reply, 401)["code"] == "invalid_api_key", pairs


def test_a_key_may_what_its_line_says(edge: Edge) -> None:
    """403 where the right is missing, and where a path is not listed; who has all rights is told that there is no such path."""
    with httpx.Client(base_url=edge.url, headers=bearer(READER)) as client:
        assert client.get("/v1/models").status_code == client.get("/v1/models/nano").status_code == 200
        for reply in (client.post(CHAT, json=BODY), client.get("/docs"), client.get("/openapi.json"), client.get("/nothing")):
            assert error_of(reply, 403)["code"] == "insufficient_permissions"
    with httpx.Client(base_url=edge.url, headers=bearer(ALICE)) as client:
        assert [client.get(path).status_code for path in ("/docs", "/openapi.json", "/nothing")] == [200, 200, 404]
        assert client.get("/openapi.json").json()["security"] == [{"bearer": []}, {"x-api-key": []}]


def test_a_key_may_ask_for_its_models(edge: Edge) -> None:
    """By name or without one, to generate and to count tokens; the list has these alone. Planted: a key of another model."""
    unnamed = {key: value for key, value in BODY.items() if key != "model"}
    asked = [(CHAT, BODY), (CHAT, unnamed), (TEXT, {"prompt": "a", "max_tokens": 1}), ("/tokenize", {"prompt": "a"})]
    asked.append(("/v1/messages", BODY))
    for path, body in asked:
        assert edge.post(path, body, headers=bearer(OURS)).status_code == 200, path
        refused = edge.post(path, body, headers=bearer(THEIRS))
        assert (refused.status_code, "may not use the model `nano`" in refused.text) == (403, True), path
    for key, names, code in ((OURS, ["nano"], 200), (THEIRS, [], 404), (ALICE, ["nano"], 200)):
        assert [card["id"] for card in edge.get("/v1/models", headers=bearer(key)).json()["data"]] == names
        assert edge.get("/v1/models/nano", headers=bearer(key)).status_code == code


def test_rights_hold_below_a_root_path(edge: Edge) -> None:
    """It stands before every path, as uvicorn has http_options.root_path. Planted: without it these are paths that nobody knows."""
    asked = [("/health/live", {}), ("/v1/models", bearer(READER)), ("/docs", bearer(READER))]

    async def statuses(root: str) -> list[int]:
        transport = httpx.ASGITransport(with_ids(create_app(edge.service)), root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/llm") as client:
            return [(await client.get(path, headers=headers)).status_code for path, headers in asked]

    assert edge.run(statuses("/llm")) == [200, 200, 403]
    assert edge.run(statuses("")) == [401, 403, 403]


def test_health_tells_addresses_to_key_holders_only(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """From this machine, too: whoever stands behind a proxy on it looks like this machine."""
    monkeypatch.setitem(edge.service.about, "metrics", "http://127.0.0.1:9/metrics")
    found = [edge.get("/health/ready", headers=headers) for headers in ({}, bearer("sk-wrong"), bearer(ALICE))]
    assert [reply.status_code for reply in found] == [200, 200, 200]
    assert ["metrics" in reply.json() for reply in found] == [False, False, True]


def test_a_browser_may_ask_before_it_has_a_key(edge: Edge) -> None:
    """Its question carries none; what it then sends must, and the refusal is readable to its page."""
    origin = {"origin": "https://page.example"}
    wants = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    assert httpx.options(f"{edge.url}{CHAT}", headers=wants).status_code == 200
    refused = edge.post(CHAT, BODY, headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
    assert edge.post(CHAT, BODY, headers=origin | bearer(ALICE)).status_code == 200


def test_keys_are_replaced_without_a_dropped_stream(edge: Edge, keys_file: Path) -> None:
    """A stream of a key that is taken out goes on to its end; the next request with it gets 401, and the new key is let in."""
    edge.core.answer_endlessly(0.01)
    body = BODY | {"stream": True, "max_tokens": 60, "ignore_eos": True}
    with edge.stream(CHAT, body, headers=bearer(OLD)) as reply:
        parts = reply.iter_text()
        text = next(parts)
        replaced(keys_file, line("sk-new", "alice"))
        until(lambda: status(edge, OLD) == 401, "the old key is out of force")
        assert status(edge, "sk-new") == 200
        assert "[DONE]" not in text, "the stream was over before the keys changed"
        text += "".join(parts)
    assert reply.status_code == 200
    assert text.rstrip().endswith("data: [DONE]")
    assert '"error"' not in text


def test_a_file_that_is_wrong_changes_nothing(edge: Edge, keys_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The keys that were in force stay, and one line says why; an empty file is not wrong, and shuts everybody out."""
    caplog.set_level(logging.ERROR, logger=key_ring.__name__)

    for wrong in ("nonsense", None):
        caplog.clear()
        keys_file.unlink() if wrong is None else replaced(keys_file, LINES + wrong)
        until(lambda: bool(status(edge, ALICE) == 200 and caplog.records), "the file is looked at")
        assert {status(edge, ALICE) for _ in range(3)} == {200}
        assert len(caplog.records) == 1
        assert "stay as they were" in caplog.text
    replaced(keys_file, "# nobody\n")
    until(lambda: status(edge, ALICE) == 401, "nobody has a key")


def test_a_file_that_hangs_holds_nobody_up(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not answer: requests wait for it for a moment, and go by the keys in force."""
    monkeypatch.setattr(key_ring, "FILE_CHECK_TIMEOUT_S", 0.2)
    hung = []
    released = threading.Event()

    def read(settings: KeySettings) -> str:
        hung.append(True)
        released.wait(50)
        hung.append(False)
        return LINES

    monkeypatch.setattr(key_ring, "read", read)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: status(edge, ALICE), range(8)))
    looks = list(hung)
    released.set()
    assert found == [200] * 8
    assert looks == [True], "they waited for the file, or looked at it again"


def test_a_holder_has_so_many_requests_at_once(edge: Edge) -> None:
    """The second beside a stream is a 429 with Retry-After; when the stream has ended there is room, and others always have it."""
    edge.core.answer_endlessly(0.01)
    with edge.stream(CHAT, BODY | {"stream": True, "max_tokens": 200}, headers=bearer(SLOW)) as reply:
        parts = reply.iter_text()
        next(parts)
        second = edge.get("/v1/models", headers=bearer(SLOW))
        assert error_of(second, 429)["code"] == "rate_limit_exceeded"
        assert second.headers["retry-after"] == "1"
        assert status(edge, ALICE) == 200
    until(lambda: status(edge, SLOW) == 200, "its place is free")


def test_tokens_are_counted_as_the_answer_used_them(edge: Edge) -> None:
    """Not as it might have: so one that asked for many and took few leaves room; and then the rest is used up, and 429."""
    reply = edge.post(CHAT, BODY | {"max_tokens": 200}, headers=bearer(FEW))
    usage = reply.json()["usage"]
    used = KeyTokens("few", usage["total_tokens"])
    until(lambda: used in edge.events, "its end")
    assert 0 < used.count < 40
    edge.core.steps = [[300]] * 60
    assert edge.post(CHAT, BODY | {"max_tokens": 60}, headers=bearer(FEW)).status_code == 200
    until(lambda: sum(isinstance(event, KeyTokens) and event.key == "few" for event in edge.events) == 2, "its end")
    refused = edge.post(CHAT, BODY, headers=bearer(FEW))
    assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
    assert 2 <= int(refused.headers["retry-after"]) <= 120
    assert len(edge.core.requests) == 2


def test_what_becomes_of_a_request_is_told_with_its_holder(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    """Events and access lines have the holder's name, and no key, good or bad, is in any of them."""
    caplog.set_level(logging.DEBUG)
    for key, path in ((ALICE, "/v1/models"), (READER, CHAT), ("sk-wrong", "/v1/models"), (SLOW, "/health")):
        httpx.request("POST" if path == CHAT else "GET", f"{edge.url}{path}", headers=bearer(key))
    until(lambda: sum(isinstance(event, KeyDecision) for event in edge.events) == 3, "the ends of the requests")
    edge.on_loop(lambda: None)
    decided = [event for event in edge.events if isinstance(event, KeyDecision)]
    assert decided == [KeyDecision("alice", "admitted"), KeyDecision("reader", "forbidden"), KeyDecision("", "unauthenticated")]
    lines = [record.getMessage() for record in caplog.records if "/v1/" in record.getMessage() and "status=" in record.getMessage()]
    assert [" key=alice" in each for each in lines] == [True, False, False]
    assert [" key=reader" in each for each in lines] == [False, True, False]
    for key in (ALICE, READER, "sk-wrong"):
        assert key not in caplog.text
        assert sha256(key.encode()).hexdigest() not in caplog.text


def salt(edge: Edge, headers: dict[str, str], **body: Any) -> str:
    """What the core is given for a request."""
    edge.core.requests.clear()
    edge.post(CHAT, BODY | body, headers=headers).raise_for_status()
    (request,) = edge.core.requests
    return request.salt


def test_holders_share_no_cached_prefixes(edge: Edge) -> None:
    """Unless the setting says so; both keys of one holder find what either has left, however they are sent."""
    own, other = salt(edge, bearer(ALICE)), salt(edge, bearer(SLOW))
    assert own == salt(edge, bearer(OLD)) == salt(edge, {"x-api-key": ALICE})
    assert len({own, other, salt(edge, bearer(ALICE), cache_salt="x"), salt(edge, bearer(SLOW), cache_salt="x")}) == 4
    with edge.configured(limits=msgspec.structs.replace(edge.service.settings.limits, isolate_cache=False)):
        assert salt(edge, bearer(ALICE)) == salt(edge, bearer(SLOW)) not in (own, other)


def salts(edge: Edge, joined: Callable[[str, str], str] | None = None) -> int:
    """How many different salts come of clients and cache_salts that are made of each other's parts."""
    found = set()
    with edge.configured(limits=LimitSettings(isolate_cache=True)):
        words = ["", "a", "b", "/", "a/", "/b", "a/b", "1:a", "key a", "header a"]
        names = [f"key {word}" for word in words[1:]] + [f"header {word}" for word in words]
        tenants = [sha256(name.encode()).hexdigest() for name in names]
        for name, word in product(names, [*words, *tenants, *(f"{tenant}/a" for tenant in tenants)]):
            ask = Ask(prompt=RawPrompts([]), salt=word)
            found.add(joined(name, word) if joined else edge.service.salt(ask, name))
    return len(found) - len(names) * (len(words) + 2 * len(tenants))


def test_no_two_tenants_and_salts_meet(shared: Edge) -> None:
    """Whatever a client puts into cache_salt: every pair has a salt of its own. Planted: joined by a slash alone, some meet."""
    assert salts(shared) == 0
    assert salts(shared, lambda tenant, word: f"{tenant}/{word}") < 0


def test_the_guard_around_serve_reads_no_body_without_a_key(keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever the application will refuse is passed on without a byte of its body; with a key, and without keys, it is read."""
    keys_file.write_text(LINES)
    passed = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append((await receive())["body"])
        assert (await receive())["type"] == "http.disconnect"

    def asked(*headers: tuple[bytes, bytes], path: str = CHAT) -> None:
        messages = [{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}]

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            raise AssertionError("the guard answered")

        middleware, *_ = outermost()
        scope = {"type": "http", "method": "POST", "path": path, "headers": [*headers]}
        asyncio.run(middleware.cls(app, **middleware.kwargs)(scope, receive, send))

    asked()
    monkeypatch.setenv(KEYS_VARIABLE, msgspec.json.encode(KeySettings(file=str(keys_file))).decode())
    asked()
    asked((b"authorization", b"Bearer sk-wrong"))
    asked((b"x-api-key", READER.encode()))
    asked((b"x-api-key", READER.encode()), path="/v1/models")
    asked((b"x-api-key", ALICE.encode()))
    assert passed == [b"{}", b"", b"", b"", b"{}", b"{}"]


def test_keys_that_cannot_be_read_shut_the_door(nano: Nano, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, or no such variable: it does not start. Keys in the environment are in force like those of a file."""
    for settings in (KeySettings(file=str(tmp_path / "none")), KeySettings(variable="QUARTET_TEST_KEYS")):
        with pytest.raises(Exception, match=r"keys\.(file|variable): "):
            KeyRing(settings)
    monkeypatch.setenv("QUARTET_TEST_KEYS", LINES)
    assert KeyRing(KeySettings(variable="QUARTET_TEST_KEYS")).find(ALICE.encode()) is not None


def apart(find: Callable[[bytes], object], one: bytes, other: bytes, rounds: int = 400) -> float:
    """By what part `find` takes longer or less for one key than for the other right beside it: of all rounds, the median."""
    ratios = []
    for _ in range(rounds):
        times = {}
        for key in random.sample([one, other], 2):
            begun = time.perf_counter_ns()
            find(key)
            times[key] = time.perf_counter_ns() - begun
        ratios.append(times[other] / times[one])
    return abs(median(ratios) - 1)


def test_the_time_of_a_wrong_key_tells_nothing(tmp_path: Path) -> None:
    """Of 200 keys the last takes as long as the first, and a wrong one that resembles the first as one that resembles none; whether
    a key is right at all, the reply tells."""
    keys = [f"sk-{number:040d}" for number in range(200)]
    path = tmp_path / "keys"
    path.write_text("".join(line(key, f"k{number}") for number, key in enumerate(keys)))
    ring = KeyRing(KeySettings(file=str(path)))

    def early(presented: bytes) -> ApiKey | None:
        digest = digest_of(presented)
        return next((key for key in ring._keys if key.digest == digest), None)

    first, last, similar, wrong = (key.encode() for key in (keys[0], keys[-1], keys[0][:-1] + "x", "z" * 43))
    assert ring.find(first) is not None
    assert ring.find(wrong) is None
    pairs = [(first, last), (similar, wrong)]
    assert [apart(ring.find, *pair) for pair in pairs] == pytest.approx([0.0] * 2, abs=0.05)  # some .01: where a match is noted
    assert apart(early, first, last) > 1, "planted: a search that ends where it finds"


@pytest.mark.parametrize("forgets", [False, True])
def test_keys_that_are_read_again_keep_what_was_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool) -> None:
    """A holder whose one request is open gets no second one when the file changes. Planted: what was used is forgotten."""
    monkeypatch.setattr(key_ring, "FILE_CHECK_PERIOD_S", 0.0)
    file = tmp_path / "keys"
    file.write_text(LINES)
    ring = KeyRing(KeySettings(file=str(file)))
    key = ring.find(SLOW.encode())
    assert key is not None
    asyncio.run(ring.open(key))
    if forgets:
        ring._quotas._here.clear()
    replaced(file, LINES + line("sk-new", "new"))
    asyncio.run(ring.refresh())
    assert ring.find(b"sk-new") is not None
    with nullcontext() if forgets else pytest.raises(QuotaExceeded):
        asyncio.run(ring.open(key))


def test_the_file_is_read_at_most_once_a_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not within a period of the start, nor of the last look; once for each period after it, by the first request."""
    now, looks = [100.0], []
    monkeypatch.setattr(key_ring, "time", SimpleNamespace(monotonic=lambda: now[0]))
    file = tmp_path / "keys"
    file.write_text(LINES)
    ring = KeyRing(KeySettings(file=str(file)))
    read = key_ring.read

    def counted(settings: KeySettings) -> str:
        looks.append(now[0])
        return read(settings)

    monkeypatch.setattr(key_ring, "read", counted)
    for now[0] in (100.9, 101.0, 101.5, 101.9, 102.0, 103.5, 104.4, 104.5):
        asyncio.run(ring.refresh())
    assert looks == [101.0, 102.0, 103.5, 104.5]
