"""Anthropic's Messages API: what its client sends and reads, thoughts, tools and errors included."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from deploy.edge.edge_settings import LimitSettings
from deploy.edge.guards.limits import Limits
from deploy.edge.routes import create_app
from tests.support.edge.api_client import user, whole_and_streamed
from tests.support.edge.http_edge import Edge, asgi_server, with_ids
from tests.support.edge.summed import sse, sum_message

pytestmark = pytest.mark.pure

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASK: list[Any] = [user("Weather in Paris and Rome?")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS: list[Any] = [{"name": "get_weather", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
THOUGHT = "<|channel>thought\nTwo calls.\n<channel|>"
PARIS = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
ROME = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
RECORDED = Path(__file__).parent / "recorded"


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "nano", "max_tokens": 200, "messages": ASK, "tools": TOOLS} | more


def post(edge: Edge, body: dict[str, Any], path: str = PATH) -> httpx.Response:
    return edge.post(path, body)


def streamed(edge: Edge, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events; each is named as its data is."""
    reply = post(edge, body | {"stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    return sse(reply.text)


def as_known(message: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from answer to answer."""
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {key: value for key, value in message.items() if key != "id"} | {"content": blocks}


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_thoughts_text_and_calls_are_blocks(edge: Edge, batch: int) -> None:
    """In the order of generation, whole and streamed alike, with what they cost; a wrong number would differ."""
    edge.script(f"{THOUGHT}Let me see.{PARIS}{ROME}<|tool_response>", batch=batch)
    edge.core.cached = 32
    whole = post(edge, asked()).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][0]["thinking"] == "Two calls."
    assert whole["content"][0]["signature"]
    assert whole["content"][1]["text"] == "Let me see."
    assert [block["input"] for block in whole["content"][2:]] == [{"city": "Paris", "days": 3}, {"city": "Rome"}]
    assert len({block["id"] for block in whole["content"][2:]}) == 2
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "nano")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    usage, prompt = whole["usage"], len(edge.core.requests[0].tokens)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 32, 32)
    assert usage["output_tokens"] == sum(map(len, edge.core.steps))
    assert usage["output_tokens_details"] == {"thinking_tokens": len(edge.text.encode(THOUGHT, add_bos=False))}
    assert as_known(sum_message(streamed(edge, asked()))) == as_known(whole)


def test_the_first_event_says_what_the_prompt_costs(edge: Edge) -> None:
    """message_start comes with the first token and has no output yet; a count of the same body says the same."""
    edge.script(f"{THOUGHT}hi<turn|>")
    first = streamed(edge, asked())[0]["message"]
    assert (first["content"], first["stop_reason"], first["usage"]["output_tokens"]) == ([], None, 0)
    assert first["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
    assert first["usage"]["input_tokens"] == len(edge.core.requests[0].tokens)
    counted = post(edge, {"model": "nano", "messages": ASK, "tools": TOOLS}, COUNT)
    assert counted.json() == {"input_tokens": first["usage"]["input_tokens"]}


@whole_and_streamed
def test_how_it_ended(edge: Edge, *, stream: bool) -> None:
    """end_turn, max_tokens, and stop_sequence with the sequence."""
    cases = [
        ({}, ("end_turn", None), "all STOP here"),
        ({"max_tokens": 2}, ("max_tokens", None), "al"),
        ({"stop_sequences": ["nowhere", "STOP"]}, ("stop_sequence", "STOP"), "all "),
    ]
    for extra, reason, text in cases:
        edge.script("all STOP here<turn|>")
        body = asked(**extra)
        found = sum_message(streamed(edge, body)) if stream else post(edge, body).json()
        assert (found["stop_reason"], found["stop_sequence"]) == reason
        assert found["content"][0]["text"].startswith(text[:2])
        assert ("STOP" in found["content"][0]["text"]) == (not extra)


def test_a_call_that_is_cut_is_never_completed(edge: Edge) -> None:
    """Its input ends where it ended in a stream, and there is none in a whole answer, which says max_tokens."""
    edge.script(PARIS)
    body = asked(max_tokens=len(edge.core.steps) - 3)
    whole = post(edge, body).json()
    assert (whole["content"], whole["stop_reason"]) == ([], "max_tokens")
    events = streamed(edge, body)
    text = "".join(event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta")
    assert '{"city":"Paris","days":3}'.startswith(text)
    assert text.startswith('{"city"')
    assert not text.endswith("}")


@whole_and_streamed
def test_a_reply_that_ends_inside_of_a_string(edge: Edge, *, stream: bool) -> None:
    """Of a call, by the model's own end: it is whole with what was written."""
    edge.script(f'{ROME}<|tool_call>call:get_weather{{city:<|"|>Par<tool_call|><|tool_response>')
    found = sum_message(streamed(edge, asked())) if stream else post(edge, asked()).json()
    assert found["stop_reason"] == "tool_use"
    assert [block["input"] for block in found["content"]] == [{"city": "Rome"}, {"city": "Par"}]


def test_a_tool_loop(edge: Edge) -> None:
    """The content that came is sent back as it is, with results: the next prompt begins with all that was said."""
    edge.script(f"{THOUGHT}{PARIS}{ROME}<|tool_response>")
    thinking = {"thinking": {"type": "adaptive"}}
    first = post(edge, asked(**thinking)).json()
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "18C"} for call in calls]
    edge.script("It is 18C.<turn|>")
    messages = [*ASK, {"role": "assistant", "content": first["content"]}, user(results)]
    second = post(edge, asked(messages=messages, **thinking)).json()
    assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "It is 18C."}], "end_turn")
    before, after = (list(request.tokens) for request in edge.core.requests)
    said = [*before, *edge.text.encode(THOUGHT + PARIS + ROME, add_bos=False)]
    assert after[: len(said)] == said
    text = edge.text.decode(after[len(said) :], skip_special_tokens=False)
    assert "<|turn>user" not in text, "results have no turn of the user's"


@whole_and_streamed
def test_one_call_where_parallel_use_is_disabled(edge: Edge, *, stream: bool) -> None:
    """tool_choice auto with disable_parallel_tool_use ends with the first call."""
    edge.script(f"{PARIS}{ROME}<|tool_response>")
    body = asked(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    found = sum_message(streamed(edge, body)) if stream else post(edge, body).json()
    assert [block["input"] for block in found["content"]] == [{"city": "Paris", "days": 3}]
    assert found["stop_reason"] == "tool_use"


def test_a_named_tool_is_a_tool_use(edge: Edge) -> None:
    """A message that had to call one tool waits for its result, as any that calls: stop_reason is tool_use."""
    edge.script(f"{PARIS}<|tool_response>")
    found = post(edge, asked(tool_choice={"type": "tool", "name": "get_weather"})).json()
    assert ([block["type"] for block in found["content"]], found["stop_reason"]) == (["tool_use"], "tool_use")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
# What the error's message names -> values, each of which is refused, of the key that it begins with.
BAD: dict[str, tuple[Any, ...]] = {
    "model": (None,),
    "max_tokens": (None, 0),
    "messages": ([], "x", [*ASK, {"role": "assistant", "content": "It"}]),
    "messages[0].role": ([{"role": "tool", "content": "x"}],),
    "messages[0].content": ([{"role": "user"}], [user(None)]),
    "messages[0].content[0]": (
        [user([{"type": "text"}])],
        [user([{"type": "tool_result", "content": "x"}])],
    ),
    "system": ([IMAGE], 5),
    "temperature": (1.5,),
    "stop_sequences": (["a"] * 17, [""]),
    "tools[0].type": ([{"type": "web_search_20250305", "name": "web_search"}],),
    "tools[1]": ([TOOLS[0], TOOLS[0]],),
    "tool_choice": ({"type": "maybe"}, {"type": "tool"}),
    "thinking": ({"type": "deeply"},),
    "mcp_servers": ([{"name": "x"}],),
    "container": ("x",),
    "compaction": ({"type": "summarize"},),
    "thread": ({"type": "create"},),
    "stop": (["a"],),
    "seed": (1,),
    "response_format": ({"type": "json_object"},),
    "output_config": ({"format": {"type": "xml", "schema": {}}},),
}
BAD_CONTENT: list[tuple[Any, str]] = [
    ([IMAGE], "reads no images"),
    ([{"type": "search_result", "source": "https://a.example", "content": []}], "[0]: parts of type 'search_result' are not"),
    ("word " * 400, "tokens"),
]
REFUSED = [(named.partition("[")[0], value, named) for named, values in BAD.items() for value in values]
REFUSED += [("thinking", {"type": "enabled", "budget_tokens": budget}, "max_tokens: must be greater") for budget in (200, 1024)]
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [IMAGE]}
REFUSED.append(("messages", [user("x"), {"role": "assistant", "content": [USE]}, user([RESULT])], "reads no images"))
REFUSED += [("messages", [user(content)], named) for content, named in BAD_CONTENT]


@pytest.mark.parametrize(("key", "value", "named"), REFUSED, ids=[f"{number}-{case[-1]}" for number, case in enumerate(REFUSED)])
def test_a_bad_body_is_refused_in_anthropics_shape(edge: Edge, key: str, value: Any, named: str) -> None:
    """400, invalid_request_error, the key in its message; the engine hears nothing."""
    reply = post(edge, {key: value for key, value in asked(**{key: value}).items() if value is not None})
    assert reply.status_code == 400, reply.text
    refusal = reply.json()
    assert (refusal["type"], refusal["error"]["type"]) == ("error", "invalid_request_error")
    assert named in refusal["error"]["message"]
    assert not edge.core.requests


@pytest.mark.parametrize(("arguments", "shown"), [([1], '{arguments:<|"|>[1]<|"|>}'), ({"a": 1}, "{a:1}")])
def test_arguments_that_are_no_object_are_shown_as_text(edge: Edge, arguments: Any, shown: str) -> None:
    """As agents keep them; an object's members are the call's."""
    call = {"role": "assistant", "content": [USE | {"input": arguments}]}
    assert post(edge, asked(messages=[user("x"), call, user("y")])).status_code == 200
    assert f"call:f{shown}" in edge.prompt_text()


def test_a_thread_is_refused_in_the_words_by_which_a_client_goes_on_without(edge: Edge) -> None:
    """As its tool runner reads them; a refusal of anything else, or of another key, lacks them."""
    code = {"error_code": "thread_unsupported_request"}
    assert post(edge, asked(thread={"type": "create"})).json()["error"]["details"] == code
    assert "details" not in post(edge, asked(container="x")).json()["error"]
    edge.script("Fine.")
    assert post(edge, asked(thread=None)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", PATH, {"model": "other"}, 404, "not_found_error"),
        ("POST", PATH, {"system": "x" * (33 << 20)}, 413, "request_too_large"),
        ("POST", f"{PATH}/batches", {}, 404, "not_found_error"),
        ("GET", PATH, None, 405, "invalid_request_error"),
    ],
)
def test_other_errors_have_the_shape_too(edge: Edge, method: str, path: str, body: Any, status: int, kind: str) -> None:
    """Before the route, in it, and where there is none; with the request's id."""
    reply = httpx.request(method, f"{edge.url}{path}", json=None if body is None else asked(**body))
    assert reply.json()["request_id"] == reply.headers["request-id"]
    assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (status, "error", kind)


def test_a_stream_that_fails_ends_with_one_error_event(edge: Edge) -> None:
    """No message_stop comes after it, and no finish of another kind before it; it has the request's id."""
    edge.script("some words come")
    edge.core.fail_after = 2
    reply = post(edge, asked(stream=True))
    events = sse(reply.text)
    assert events[-1]["request_id"] == reply.headers["request-id"]
    kinds = [event["type"] for event in events]
    assert kinds[-1] == "error"
    assert "message_delta" not in kinds
    assert events[-1]["error"]["type"] == "api_error"


@pytest.mark.parametrize("name", ["claude_code_start", "claude_code_tools"])
def test_what_claude_code_sends_is_served(edge: Edge, name: str) -> None:
    """Its recorded bodies, to the end; a header in the disguise of a system block, new each time, is not rendered."""
    body = json.loads((RECORDED / f"{name}.json").read_text())
    edge.configure(max_len=1 << 16)
    edge.script(f"{THOUGHT}Done.<turn|>")
    found = sum_message(streamed(edge, body | {"model": "nano"}))
    assert [block["type"] for block in found["content"]] == ["thinking", "text"]
    prompt = edge.prompt_text()
    assert "You are Claude Code" in prompt
    assert "billing-header" not in prompt
    assert "declaration:Bash" in prompt


@pytest.mark.parametrize("served", [True, False])
def test_replies_have_the_id_under_anthropics_name(edge: Edge, *, served: bool) -> None:
    """`request-id`, which its client gives as `message._request_id`: of answers, streams, counts and errors, also where Ray Serve
    sends `x-request-id`. Other APIs' replies lack it."""

    async def replied() -> list[httpx.Response]:
        app = create_app(edge.service)
        transport = httpx.ASGITransport(with_ids(app) if served else app)
        async with httpx.AsyncClient(base_url="http://a", headers={"x-request-id": "a-1"}, transport=transport) as api:
            replies = [await api.post(PATH, json=body) for body in (asked(), asked(stream=True), {})]
            replies += [await api.post(path, json=asked()) for path in (COUNT, f"{PATH}/batches")]
            return [*replies, await api.get("/v1/models")]

    *replies, other = edge.run(replied())
    assert [reply.status_code for reply in replies] == [200, 200, 400, 200, 404]
    for reply in replies:
        assert reply.headers.get_list("request-id") == ["a-1"], reply
        assert reply.headers.get_list("x-request-id") == (["a-1"] if served else [])
    assert "request-id" not in other.headers


@pytest.mark.parametrize(("path", "names"), [(PATH, {"request-id", "x-request-id"}), ("/v1/models", {"x-request-id"})])
def test_what_is_refused_before_it_is_read_has_an_id(path: str, names: set[str]) -> None:
    """By the guard around Serve, where nothing else brings one."""

    async def unreached(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the guard let it pass")

    with asgi_server(Limits(unreached, LimitSettings(header_bytes=1024))) as port:
        reply = httpx.get(f"http://127.0.0.1:{port}{path}", headers={"x-request-id": "a-1", "x-pad": "y" * 2000})
    assert reply.status_code == 431
    assert {name for name, value in reply.headers.items() if value == "a-1"} == names
    assert reply.json().get("request_id") == ("a-1" if path == PATH else None)
