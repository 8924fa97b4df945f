"""OpenAI's Responses API: items and events as its own client types them, conversations that come whole, what agents send."""

import json
from functools import cache
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pytest
from openai.types.responses import ResponseIncludable, ResponseStreamEvent
from pydantic import TypeAdapter

from deploy.edge.openai.response_request import encrypted_content_of
from tests.support.edge.api_client import client, error_of, user
from tests.support.edge.http_edge import Edge
from tests.support.edge.summed import sse, sum_response

pytestmark = pytest.mark.pure

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "name": "get_weather", "description": "d", "parameters": SCHEMA}
THOUGHT = "<|channel>thought\nTwo calls.\n<channel|>"
PARIS = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
ROME = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
ARGUMENTS = ['{"city":"Paris","days":3}', '{"city":"Rome"}']
RECORDED = Path(__file__).parent / "recorded"


@cache
def events_of_openai() -> TypeAdapter[Any]:
    return TypeAdapter(ResponseStreamEvent)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "nano", "input": "Weather in Paris and Rome?", "tools": [TOOL]} | more


def post(edge: Edge, body: dict[str, Any]) -> httpx.Response:
    return edge.post(PATH, body)


def streamed(edge: Edge, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events, each of one of OpenAI's own types."""
    reply = post(edge, body | {"stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    found = sse(reply.text)
    for event in found:
        assert events_of_openai().validate_python(event).type == event["type"]
    return found


def as_known(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from answer to answer."""
    output = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    return {key: value for key, value in response.items() if key not in ("id", "created_at")} | {"output": output}


@pytest.mark.parametrize("batch", [1, 1000])
def test_thoughts_text_and_calls_are_items(edge: Edge, batch: int) -> None:
    """In the order of generation, whole and streamed alike, deltas and last event alike; with what they cost."""
    edge.script(f"{THOUGHT}Let me see.{PARIS}{ROME}<|tool_response>", batch=batch)
    edge.core.cached = 32
    whole = post(edge, asked()).json()
    thought, message, *calls = whole["output"]
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert (thought["content"], thought["encrypted_content"]) == ([{"type": "reasoning_text", "text": "Two calls."}], None)
    assert message["content"][0]["text"] == "Let me see."
    assert [call["arguments"] for call in calls] == ARGUMENTS
    assert len({item["id"] for item in whole["output"]} | {call["call_id"] for call in calls}) == 6
    assert (whole["status"], whole["store"], whole["error"]) == ("completed", False, None)
    assert whole["usage"]["input_tokens"] == len(edge.core.requests[0].tokens)
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 32
    assert whole["usage"]["output_tokens"] == sum(map(len, edge.core.steps))
    thinking = {"reasoning_tokens": len(edge.text.encode(THOUGHT, add_bos=False))}
    assert whole["usage"]["output_tokens_details"] == thinking
    events = streamed(edge, asked())
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert as_known(events[-1]["response"]) == as_known(whole)
    assert sum_response(events) == ["Two calls.", "Let me see.", *ARGUMENTS]


@pytest.mark.parametrize("metadata", [None, {}, {"user": "7", "é": ""}])
def test_metadata_comes_back(edge: Edge, metadata: dict[str, str] | None) -> None:
    """In the whole response and in each of a stream; without any there is an empty object."""
    given = asked(metadata=metadata)
    shown = [post(edge, given).json(), *(event["response"] for event in streamed(edge, given) if "response" in event)]
    assert [response["metadata"] for response in shown] == [metadata or {}] * 4


def test_what_a_stream_repeats_of_a_body_stands_on_one_line(edge: Edge) -> None:
    """A body with line ends: each of a stream's lines is an event's name or its data."""
    edge.script("Yes.<turn|>")
    body = asked(stream=True, tool_choice={"type": "function", "name": "get_weather"}, text={"format": {"type": "text"}})
    lines = edge.post(PATH, json.dumps(body, indent=2)).text.split("\n")
    assert {line.partition(": ")[0] for line in lines} == {"event", "data", ""}


def test_openais_stream_helper_puts_it_together(edge: Edge) -> None:
    """What it shows on the way ends as its final response, which is that of the whole answer."""
    edge.script(f"{THOUGHT}Let me see.{PARIS}<|tool_response>")
    with client(edge) as api:
        whole = api.responses.create(model="nano", input="x", tools=[TOOL])  # type: ignore[list-item]
        with api.responses.stream(model="nano", input="x", tools=[TOOL]) as stream:  # type: ignore[list-item]
            texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
    assert texts[-1] == final.output_text == whole.output_text == "Let me see."
    assert [item.type for item in final.output] == [item.type for item in whole.output]


def test_thoughts_between_calls_are_as_they_were_thought(edge: Edge) -> None:
    """Each is an item, or a block of a message, without the newline that joins them in a chat's one text; whole and streamed. A
    call is whole however large its number."""
    call = "<|tool_call>call:get_weather{days:1e999}<tool_call|>"
    edge.script(f"{THOUGHT}{call}{THOUGHT}{call}<|tool_response>")
    body = asked(input="Go")
    for response in (post(edge, body).json(), streamed(edge, body)[-1]["response"]):
        thoughts = [item["content"][0]["text"] for item in response["output"] if item["type"] == "reasoning"]
        assert thoughts == ["Two calls."] * 2
    message = {"model": "nano", "max_tokens": 99, "messages": [user("Go")], "tools": [{"name": "get_weather", "input_schema": {}}]}
    content = edge.post("/v1/messages", message).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "tool_use"] * 2
    assert content[2]["thinking"] == "Two calls."
    chat = edge.post("/v1/chat/completions", {"model": "nano", "messages": [user("Go")]}).json()["choices"][0]["message"]
    assert chat["reasoning_content"] == "Two calls.\nTwo calls."


def test_a_developers_later_message_is_of_the_system(edge: Edge) -> None:
    """Gemma knows no other role; the prompt is that of a system message, by both APIs."""
    for role in ("developer", "system"):
        messages = [user("Go"), {"role": role, "content": "Be short."}, user("On")]
        post(edge, asked(input=messages)).raise_for_status()
        edge.post("/v1/chat/completions", {"model": "nano", "messages": messages}).raise_for_status()
    first, chat, *others = [list(request.tokens) for request in edge.core.requests]
    assert others == [first, chat]


def test_a_tool_loop_with_openais_client(edge: Edge) -> None:
    """The output is sent back as it came, with results: the next prompt begins with all that was said."""
    edge.script(f"{THOUGHT}{PARIS}{ROME}<|tool_response>")
    question = [user("Weather?")]
    settings = {"model": "nano", "tools": [TOOL], "reasoning": {"effort": "high"}}
    with client(edge) as api:
        first = api.responses.create(input=question, include=["reasoning.encrypted_content"], **settings)
        thought = first.output[0]
        assert thought.type == "reasoning"
        assert thought.encrypted_content == encrypted_content_of("Two calls.")
        calls = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "18C"} for call in calls]
        edge.script("It is 18C.<turn|>")
        second = api.responses.create(input=[*question, *first.output, *results], **settings)
    assert second.output_text == "It is 18C."
    before, after = (list(request.tokens) for request in edge.core.requests)
    said = [*before, *edge.text.encode(THOUGHT + PARIS + ROME, add_bos=False)]
    assert after[: len(said)] == said


def test_functions_of_a_namespace(edge: Edge) -> None:
    """As agents declare what MCP servers have: the model calls them by both names, the call that comes names each, and so does its
    history, which is the very tokens that came; without its namespace it would be another function."""
    edge.script(PARIS.replace("get_weather", "mcp__sky.get_weather") + ROME + "<|tool_response>")
    edge.configure(max_len=1024)
    namespace = {"type": "namespace", "name": "mcp__sky", "description": "d", "tools": [TOOL, {"type": "custom", "name": "c"}]}
    body = asked(tools=[namespace, TOOL], reasoning={"effort": "high"})
    whole, events = post(edge, body).json(), streamed(edge, body)
    calls = [(call.get("namespace"), call["name"], call["arguments"]) for call in whole["output"]]
    assert calls == [("mcp__sky", "get_weather", ARGUMENTS[0]), (None, "get_weather", ARGUMENTS[1])]
    assert as_known(events[-1]["response"]) == as_known(whole)
    done = [event["name"] for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done == ["get_weather"] * 2
    assert [[each["name"] for each in tool.get("tools", [tool])] for tool in whole["tools"]] == [["get_weather"]] * 2
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "18C"} for call in whole["output"]]
    question = user(body["input"])
    bare = [{key: value for key, value in call.items() if key != "namespace"} for call in whole["output"]]
    for said in (whole["output"], bare):
        post(edge, body | {"input": [question, *said, *results]}).raise_for_status()
    before, _, after, other = [list(request.tokens) for request in edge.core.requests]
    reply = [*before, *(token for step in edge.core.steps[:-1] for token in step)]
    assert after[: len(reply)] == reply
    assert other[: len(reply)] != reply


@pytest.mark.parametrize("reply", ["some words that go on", PARIS], ids=["text", "call"])
def test_what_is_cut_is_incomplete(edge: Edge, reply: str) -> None:
    """max_output_tokens: the response says so, the item too, and a call's arguments are never done."""
    edge.script(reply)
    body = asked(max_output_tokens=len(edge.core.steps) - 3)
    whole, events = post(edge, body).json(), streamed(edge, body)
    last = events[-1]
    assert (last["type"], whole["status"]) == ("response.incomplete", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert as_known(last["response"]) == as_known(whole)
    (item,) = whole["output"]
    assert item["status"] == "incomplete"
    assert sum_response(events) == [item.get("arguments") or item["content"][0]["text"]]
    assert "response.function_call_arguments.done" not in [event["type"] for event in events]
    assert not item.get("arguments", "").endswith("}")


def test_a_stream_that_fails_ends_with_response_failed(edge: Edge) -> None:
    """What had come is in it, incomplete; before the first token an error is a plain reply."""
    edge.script("some words come")
    edge.core.fail_after = 2
    events = streamed(edge, asked())
    failed = events[-1]["response"]
    assert [event["type"] for event in events].count("response.failed") == 1
    assert (events[-1]["type"], failed["status"], failed["error"]["code"]) == ("response.failed", "failed", "server_error")
    assert [item["status"] for item in failed["output"]] == ["incomplete"]
    edge.core.fail_after = 0
    reply = post(edge, asked(stream=True))
    assert error_of(reply, 500)["code"] == "generation_failed"


# The key that the error names -> values of it, each of which is refused.
BAD: dict[str, tuple[Any, ...]] = {
    "input": (
        None,
        [],
        5,
        [{"role": "wizard", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"type": "item_reference", "id": "x"}],
        [user([{"type": "input_image", "image_url": "x"}])],
        [{"type": "function_call", "name": "f", "arguments": "{}"}],
        [{"type": "function_call_output", "call_id": "a"}],
        [{"type": "reasoning", "encrypted_content": "quartet:?"}],
        "word " * 400,
    ),
    "previous_response_id": ("resp_1",),
    "background": (True,),
    "truncation": ("auto",),
    "top_logprobs": (2,),
    "response_format": ({"type": "json_object"},),
    "max_tokens": (5,),
    "n": (2,),
    "min_tokens": (3,),
    "guided_regex": ("a",),
    "include": (["message.output_text.logprobs"], ["reasoning.encrypted_content", "reasoning.text"]),
    "tools": (
        [{"type": "mcp", "server_label": "x"}],
        [{"type": "function"}],
        [{"type": "namespace", "tools": [TOOL]}],
        [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}],
        [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m"}]}],
        [{"type": "namespace", "name": "n", "tools": [TOOL, TOOL]}],
    ),
    "tool_choice": ({"type": "web_search"},),
    "reasoning": ({"effort": "hard"},),
    "text.format": ({"format": {"type": "xml"}},),
    "max_output_tokens": (0,),
    "metadata": ([], {"a": 1}, {"a": "x" * 513}, dict.fromkeys("abcdefghijklmnopq", "")),
}


@pytest.mark.parametrize(("param", "value"), [(param, value) for param, values in BAD.items() for value in values])
def test_a_bad_body_is_refused_by_name(edge: Edge, param: str, value: Any) -> None:
    """OpenAI's client raises BadRequestError with the name of the key in this API; the engine hears nothing."""
    body = asked(**{param.partition(".")[0]: value})
    reply = post(edge, {key: value for key, value in body.items() if value is not None})
    assert error_of(reply, 400)["param"] == param
    assert not edge.core.requests


def test_a_tool_as_chats_have_it_lacks_its_name(edge: Edge) -> None:
    """What stands under `function` there stands beside the type here: the error says what is missing, in this API's words."""
    nested = {"type": "function", "function": {"name": "get_weather"}}
    inside = {"type": "namespace", "name": "n", "tools": [nested]}
    for tools, place in (([TOOL, nested], "tools[1]"), ([inside], "tools[0].tools[0]")):
        assert error_of(post(edge, asked(tools=tools)), 400)["message"] == f"{place}.name: is required"


@pytest.mark.parametrize("name", get_args(ResponseIncludable))
def test_what_would_never_be_there_may_be_included(edge: Edge, name: str) -> None:
    """Of all that OpenAI's client knows only logprobs are refused: agents ask for what tools gave that they were not offered."""
    assert post(edge, asked(include=[name])).status_code == (400 if name.endswith("logprobs") else 200)


@pytest.mark.parametrize("name", ["codex_start", "codex_tools"])
def test_what_codex_sends_is_served(edge: Edge, name: str) -> None:
    """Its recorded bodies, to the end; tools that are no functions are not offered, and the answer says which were."""
    body = json.loads((RECORDED / f"{name}.json").read_text()) | {"model": "nano"}
    call = '<|tool_call>call:exec_command{cmd:<|"|>ls<|"|>}<tool_call|>'
    edge.configure(max_len=1 << 16)
    edge.script(f"{THOUGHT}{call}<|tool_response>")
    events = streamed(edge, body)
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
    assert response["output"][0]["encrypted_content"] == encrypted_content_of("Two calls.")
    assert [tool["name"] for tool in response["tools"]] == ["exec_command", "write_stdin", "update_plan", "view_image"]
    prompt = edge.prompt_text()
    assert prompt.count("<|turn>system") == 1
    assert "apply_patch" not in prompt
    assert ("I run the test." in prompt) == (name == "codex_tools")


def test_what_is_not_stored_cannot_be_asked_for(edge: Edge) -> None:
    """GET of a response is a 404 that OpenAI's client reads."""
    with client(edge) as api, pytest.raises(openai.NotFoundError):
        api.responses.retrieve("resp_1")
