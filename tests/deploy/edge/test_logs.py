"""Logs as an operator reads them: the file that Ray Serve's own handler writes, as JSON and as text, and the ids on replies."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

from deploy.edge.edge_settings import LimitSettings, LogSettings
from deploy.edge.guards import access_log
from deploy.edge.guards.limits import Limits
from deploy.edge.http.scope import request_id
from deploy.edge.observe import logs
from deploy.edge.routes import create_app
from deploy.settings import Settings
from engine.events import RequestFinished
from tests.support.edge.api_client import chat_body, user, whole_and_streamed
from tests.support.edge.http_edge import Edge, Edges, until
from tests.support.edge.scripted_core import ScriptedCore

pytestmark = pytest.mark.pure

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODY = chat_body(max_tokens=3)
LIMITS = LimitSettings(body_bytes=4096, request_timeout_s=2.0, write_timeout_s=0.4)


SERVE = logging.getLogger("ray.serve")


class LoggedEdge:
    """An edge whose log goes where a replica's goes: through Serve's logger into Serve's file."""

    def __init__(self, edge: Edge, folder: Path) -> None:
        self.edge = edge
        self._folder = folder
        self._file: MemoryHandler | None = None

    @property
    def core(self) -> ScriptedCore:
        return self.edge.core

    def open(self, settings: LogSettings) -> None:
        """As a replica does when it starts."""
        self.close()
        config = LoggingConfig(encoding=settings.format.upper(), logs_dir=str(self._folder), log_level=settings.level.upper())
        configure_component_logger(
            component_name="app_Quartet", component_id="r1", logging_config=config, max_bytes=1 << 24, backup_count=1
        )
        (self._file,) = files = [handler for handler in SERVE.handlers if isinstance(handler, MemoryHandler)]
        SERVE.handlers = [*files]
        logs.install(settings)
        self.edge.configure(logs=settings)

    def close(self) -> None:
        """The file."""
        if self._file is not None and self._file.target is not None:
            self._file.target.close()
            self._file.close()

    def text(self) -> str:
        """The file, once every answer has its line."""
        until(lambda: self.edge.service.open == 0, "the end of the answers")
        self.edge.on_loop(lambda: None)
        (file,) = self._folder.iterdir()
        return file.read_text()

    def lines(self) -> list[dict[str, Any]]:
        """Every line as the JSON object that it is."""
        found = [json.loads(line) for line in self.text().splitlines()]
        assert all(isinstance(line, dict) for line in found)
        return found

    def line(self) -> dict[str, Any]:
        """The only one."""
        (line,) = self.lines()
        return line

    def post(self, body: dict[str, Any], path: str = CHAT, **headers: str) -> httpx.Response:
        return self.edge.post(path, body, headers=headers)


@pytest.fixture(scope="module")
def paced(edges: Edges) -> Edge:
    return edges(limits=LIMITS)


def uninstall() -> None:
    """As before `install`."""
    for package in logs._PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        for handler in [handler for handler in logger.handlers if isinstance(handler, logs.ForwardHandler)]:
            logger.removeHandler(handler)


@pytest.fixture
def logged(paced: Edge, tmp_path: Path) -> Iterator[LoggedEdge]:
    paced.reset()
    made = LoggedEdge(paced, tmp_path)
    before = SERVE.handlers[:], SERVE.level, SERVE.propagate
    made.open(LogSettings(format="json"))
    yield made
    uninstall()
    made.close()
    SERVE.handlers, SERVE.level, SERVE.propagate = before
    paced.configure(logs=LogSettings())


# (method, path, body) and the status it gets.
ASKED: dict[str, tuple[str, str, Any, int]] = {
    "chat": ("POST", CHAT, BODY, 200),
    "stream": ("POST", CHAT, BODY | {"stream": True}, 200),
    "text": ("POST", TEXT, {"model": "nano", "prompt": "a"}, 200),
    "bad": ("POST", CHAT, BODY | {"n": 0}, 400),
    "large": ("POST", CHAT, "x" * 5000, 413),
    "model": ("POST", TEXT, {"model": "b", "prompt": "c"}, 404),
    "path": ("GET", "/nothing", None, 404),
    "method": ("GET", CHAT, None, 405),
    "models": ("GET", "/v1/models", None, 200),
    "health": ("GET", "/health", None, 200),
    "docs": ("GET", "/openapi.json", None, 200),
}


@pytest.mark.parametrize("name", ASKED)
def test_every_reply_and_its_line_carry_the_clients_id(logged: LoggedEdge, name: str) -> None:
    """Once, whatever the reply is; at level debug every route has its one line, and it has the reply's status."""
    logged.open(LogSettings(format="json", level="debug"))
    method, path, body, status = ASKED[name]
    reply = httpx.request(method, f"{logged.edge.url}{path}", json=body, headers={"x-request-id": "a-1"})
    assert (reply.status_code, reply.headers.get_list("x-request-id")) == (status, ["a-1"])
    line = logged.line()
    assert (line["request_id"], line["status"]) == ("a-1", status)


def test_without_a_sane_id_it_is_ours(logged: LoggedEdge) -> None:
    """None given: a new one each time. One that is none is neither echoed nor logged; nor are two of them joined."""
    replies = [logged.post(BODY), logged.post(BODY)]
    bad = [logged.post(BODY, **{"x-request-id": value}) for value in ("a b", "x" * 129, 'a"b', "{}")]
    assert [reply.status_code for reply in replies + bad] == [200] * 6
    ids = [reply.headers["x-request-id"] for reply in replies + bad]
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in ids)
    assert len(set(ids)) == 6
    assert [line["request_id"] for line in logged.lines()] == ids
    assert request_id([(b"X-Request-Id", b"one")]) == "one"
    assert request_id([(b"x-request-id", b"one"), (b"x-request-id", b"two")]) not in ("one", "two", "one,two")


def call(app: Any, path: str, headers: list[tuple[bytes, bytes]]) -> list[Any]:
    """A GET past any HTTP parser: what a server with a worse one would pass on."""
    sent = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET\nFORGED", "path": path, "headers": [(b"host", b"a"), *headers], "query_string": b""}
    asyncio.run(app({**scope, "scheme": "http", "server": ("a", 80), "client": ("b", 1), "root_path": ""}, receive, send))
    return sent


@pytest.mark.parametrize("encoding", ["json", "text"])
def test_a_line_cannot_be_forged(logged: LoggedEdge, encoding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newlines in id, path and method leave one line, which says none of it; what code of ours logs is one line as well. Planted:
    text that is not escaped."""
    logged.open(LogSettings(format=encoding, level="debug"))
    call(create_app(logged.edge.service), "/a\nERROR FORGED", [(b"x-request-id", b"a\nERROR FORGED")])
    text = logged.text()
    assert len(text.splitlines()) == 1
    assert "FORGED" not in text
    assert "OTHER unknown" in text
    for lines in (2, 3 if encoding == "json" else 6):
        logging.getLogger("deploy.anything").warning("a %s", "b\nERROR 2026 {app} FORGED\u2028FORGED\x85FORGED")
        assert len(logged.text().splitlines()) == lines
        monkeypatch.setattr("deploy.edge.observe.logs.one_line", lambda text: text)


def test_serves_fields_stand_in_each_line(logged: LoggedEdge) -> None:
    """One schema a file: when, how grave, which component; ours keep their numbers as numbers."""
    logged.post(BODY)
    line = logged.line()
    assert line["levelname"] == "INFO"
    assert line["component_name"] == "app_Quartet"
    assert {"asctime", "message", "process", "filename"} <= set(line)
    assert all(isinstance(line[name], float) for name in ("prepare_s", "queue_s", "ttft_s", "e2e_s"))


def differences(line: dict[str, Any], usage: dict[str, int], finish: str, ended: RequestFinished) -> list[str]:
    """Where an access line differs from the reply and from the engine's events; times to a microsecond."""
    assert ended.ttft_s is not None
    assert ended.queue_s is not None
    pairs = {
        "prompt_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "finish_reason": finish,
        "queue_s": pytest.approx(ended.queue_s, abs=1e-6),
        "ttft_s": pytest.approx(ended.ttft_s, abs=1e-6),
    }
    return [name for name, value in pairs.items() if line[name] != value]


@whole_and_streamed
def test_the_access_line_says_what_the_reply_and_the_engine_say(logged: LoggedEdge, *, stream: bool) -> None:
    """Tokens and finish as the client was told them, times as the metrics have them; each planted difference shows."""
    logged.core.queue_s, logged.core.prefill_s, logged.core.delay_s = 0.02, 0.03, 0.01
    options = {"stream_options": {"include_usage": True}} if stream else {}
    reply = logged.post(BODY | {"stream": stream} | options)
    shown = reply.json() if not stream else json.loads(reply.text.split("\n\n")[-3].removeprefix("data: "))
    line = logged.line()
    (ended,) = logged.edge.ends
    assert differences(line, shown["usage"], "length", ended) == []
    for name, fault in (("prompt_tokens", 1), ("output_tokens", -1), ("queue_s", 1e-3), ("ttft_s", -1e-3)):
        assert differences({**line, name: line[name] + fault}, shown["usage"], "length", ended) == [name]
    assert line["prepare_s"] + ended.e2e_s <= line["e2e_s"] + 1e-6
    told = {name: line[name] for name in ("http_method", "http_route", "status", "model", "stream", "n", "client_gone")}
    assert told == {
        "http_method": "POST", "http_route": CHAT, "status": 200, "model": "nano", "stream": stream, "n": 1, "client_gone": False,
    }  # fmt: skip


def test_choices_are_added_up(logged: LoggedEdge) -> None:
    """n = 3: the tokens of all of them, and each finish that occurred."""
    reply = logged.post(BODY | {"n": 3})
    line = logged.line()
    assert (line["n"], line["finish_reason"]) == (3, "length")
    assert line["output_tokens"] == reply.json()["usage"]["completion_tokens"] == 9


def leave(logged: LoggedEdge) -> None:
    logged.core.answer_endlessly(0.02)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{logged.edge.url}{CHAT}", json=BODY | {"max_tokens": 99}, timeout=httpx.Timeout(10, read=1.0))


def late(logged: LoggedEdge) -> None:
    logged.core.answer_endlessly(0.05)
    logged.post(BODY | {"stream": True, "max_tokens": 99})


def fail(logged: LoggedEdge) -> None:
    logged.core.fail_after = 1
    logged.post(BODY | {"stream": True})


def refuse(logged: LoggedEdge) -> None:
    logged.core.refuse = "too long"
    logged.post(BODY)


def stop(logged: LoggedEdge) -> None:
    logged.post(BODY | {"stop": logged.edge.text.decode([301]), "max_tokens": 50})


def finish(logged: LoggedEdge) -> None:
    logged.post(BODY | {"max_tokens": 50, "stream": True})


ENDS: dict[str, tuple[Callable[[LoggedEdge], None], int, int]] = {
    "client_gone": (leave, 499, logging.INFO),
    "deadline": (late, 200, logging.ERROR),
    "error": (fail, 200, logging.ERROR),
    "refused": (refuse, 400, logging.INFO),
    "stop string": (stop, 200, logging.INFO),
    "stop": (finish, 200, logging.INFO),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_has_the_metrics_word(logged: LoggedEdge, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """finish_reason is the outcome under which quartet_requests_total counts the request, and our failures are errors. Planted: a
    failure that is called otherwise."""
    act, status, level = ENDS[end]
    for planted in (False, True) if end == "error" else (False,):
        if planted:
            monkeypatch.setattr("deploy.edge.observe.record._OUTCOMES", {Exception: "stop"})
        act(logged)
        until(lambda planted=planted: len(logged.edge.ends) == 1 + planted, "the engine's word")
        line, ended = logged.lines()[-1], logged.edge.ends[-1]
        assert (line["finish_reason"] == ended.outcome) is not planted
        assert (line["status"], line["levelname"]) == (status, logging.getLevelName(level))
        assert line["client_gone"] is (end == "client_gone")


@pytest.fixture(scope="module")
def mortal(edges: Edges) -> Edge:
    return edges()


def test_the_engines_end_is_named_in_the_log_only(mortal: Edge, logged: LoggedEdge) -> None:
    """Which process died is for the operator: in the line of each request that it took along, with its code."""
    mortal.configure(logs=LogSettings(format="json"))
    mortal.on_loop(lambda: mortal.client.fail("rank 2 was killed by SIGKILL"))
    reply = mortal.post(CHAT, BODY)
    assert reply.status_code == 503
    assert "SIGKILL" not in reply.text
    mortal.on_loop(lambda: None)
    line = logged.line()
    assert (line["error"], line["error_code"], line["levelname"]) == ("EngineDead", "engine_restarting", "ERROR")
    assert line["error_message"] == "rank 2 was killed by SIGKILL"


def canaries(logged: LoggedEdge) -> list[str]:
    """Requests with a word of their own in every place where a client may write; which of those words the log has."""
    post = logged.post
    logged.core.steps = [[token] for token in range(300, 330)]
    answer = post(BODY | {"max_tokens": 30}).json()["choices"][0]["message"]["content"]
    assert len(answer) >= 30
    post(BODY | {"messages": [user("canarya")], "user": "canaryb", "metadata": {"canaryc": "canaryd"}})
    post(BODY | {"messages": [{"role": "canarye", "content": "x"}]})
    post(BODY | {"messages": [user([{"type": "canaryf", "text": "y"}])]})
    post(BODY | {"stop": "canaryg" * 60})
    post(BODY | {"model": "canaryh"})
    post(BODY | {"logit_bias": {"canaryi": "canaryj"}, "tool_choice": "canaryk"})
    post({"model": "nano", "prompt": "canaryl", "max_tokens": 2, "stream": True}, TEXT)
    post({"model": "nano", "prompt": "canarym" * 500, "max_tokens": 2}, TEXT)
    post(BODY, "/v1/canaryn")
    post(BODY, **{"authorization": "Bearer canaryo", "user-agent": "canaryp", "cookie": "canaryq", "x-canaryr": "x"})
    post(BODY | {"chat_template_kwargs": {"canarys": "canaryt"}, "response_format": {"type": "canaryu"}, "n": "canaryv"})
    post(BODY | {"reasoning_effort": "x - at `$.canary"})
    logged.edge.get("/v1/models/canaryw?canaryx=canaryy")
    logged.edge.post(CHAT, b'{"canaryz')
    text = logged.text()
    return [word for word in ("canary", answer, answer[:10]) if word in text]


@pytest.mark.parametrize("encoding", ["json", "text"])
def test_nothing_that_a_client_wrote_is_logged(logged: LoggedEdge, encoding: Any) -> None:
    """Neither prompts nor answers, nor names, keys, headers, paths or values that are refused; not at level debug either."""
    logged.open(LogSettings(format=encoding, level="debug"))
    assert canaries(logged) == []
    assert len(logged.text().splitlines()) == 15


def test_an_error_that_quotes_its_client_would_show(logged: LoggedEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: with a refusal's sentence in the line, the search above finds the client's words."""
    monkeypatch.setattr("deploy.edge.observe.record._error_fields", lambda error: {"error": str(error)})
    assert canaries(logged) == ["canary"]


def test_a_text_line_has_all_fields(logged: LoggedEdge) -> None:
    """As Serve's text lines begin, then name=value; the id stands where Serve puts it."""
    logged.open(LogSettings(format="text"))
    logged.post(BODY, **{"x-request-id": "a-1"})
    line = logged.text().rstrip("\n")
    assert line.startswith("INFO ")
    head, _, rest = line.partition(f" a-1 -- POST {CHAT} ")
    assert head.endswith("app_Quartet r1"), line
    assert dict(pair.split("=") for pair in rest.split(" ")).keys() >= {"status", "finish_reason", "ttft_s", "output_tokens"}


def test_access_off_leaves_what_is_our_fault(logged: LoggedEdge) -> None:
    """No line for what went well or was refused; one for a failure. Probes have none at info in either case."""
    logged.open(LogSettings(format="json", access=False))
    logged.post(BODY)
    logged.post(BODY | {"n": 0})
    logged.edge.get("/health")
    logged.core.fail_after = 1
    logged.post(BODY)
    line = logged.line()
    assert (line["status"], line["error"], line["error_message"]) == (500, "GenerationFailed", "the logits are not finite")


def test_probes_are_not_worth_a_line(logged: LoggedEdge) -> None:
    """A balancer asks every second; other routes have theirs."""
    for path in ("/health", "/health/live", "/health/ready", "/v1/models", "/v1/models/nano"):
        assert logged.edge.get(path).status_code == 200
    assert [line["http_route"] for line in logged.lines()] == ["/v1/models", "/v1/models/{model}"]


def test_a_refusal_before_serve_has_an_id_and_a_line(logged: LoggedEdge) -> None:
    """The limits stand around Ray Serve too, where no journal does."""

    async def never(*_: Any) -> None:
        raise AssertionError("refused requests go no further")

    for given in (b"a b", b"fine"):
        sent = call(Limits(never, LimitSettings(header_bytes=1024)), "/x", [(b"x-request-id", given), (b"x-pad", b"y" * 2000)])
        assert sent[0]["status"] == 431
        line = logged.lines()[-1]
        assert line["request_id"].encode() == dict(sent[0]["headers"])[b"x-request-id"]
        assert (line["request_id"] == given.decode(), line["status"]) == (given == b"fine", 431)


def test_a_line_of_anybody_within_a_request_carries_its_id(logged: LoggedEdge) -> None:
    """Whoever logs while a request is served need not know which one it is; outside of one there is none."""
    seen = logging.getLogger("engine.anything")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.info("within")
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    call(access_log.AccessLog(app, logged.edge.service), "/health", [(b"x-request-id", b"a-1")])
    seen.info("outside")
    assert [line.get("request_id") for line in logged.lines()] == ["a-1", None]


CONFIGS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, None),
    ({"access": False}, None),
    ({"format": "json"}, {"encoding": "JSON", "log_level": "INFO", "enable_access_log": False}),
    ({"format": "json", "access": False}, {"encoding": "JSON", "log_level": "INFO", "enable_access_log": True}),
    ({"level": "warning"}, {"encoding": "TEXT", "log_level": "WARNING"}),
    ({"folder": "/var/log/q"}, {"encoding": "TEXT", "log_level": "INFO", "logs_dir": "/var/log/q"}),
]


@pytest.mark.parametrize(("values", "expected"), CONFIGS)
def test_serve_is_told_only_what_the_settings_ask_for(values: dict[str, Any], expected: dict[str, Any] | None) -> None:
    """Defaults leave the YAML's own logging_config alone, and what we say is what Serve understands."""
    made = logs.serve_config(Settings.read({"model": "a/b", "logs": values}).logs)
    assert made == expected
    if made is not None:
        assert LoggingConfig(**made).model_dump().items() >= made.items()


def test_a_bug_is_a_500_with_its_name_and_no_sentence(logged: LoggedEdge) -> None:
    """An exception of nobody's: its type in the line, its text nowhere in it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError("canary")

    with pytest.raises(ZeroDivisionError):
        call(access_log.AccessLog(app, logged.edge.service), "/v1/models", [])
    assert logged.line()["status"] == 500
    assert "canary" not in logged.text()
