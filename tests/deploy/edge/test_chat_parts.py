"""Thoughts and tool calls over HTTP, as OpenAI's own client sees them: whole, streamed, and sent back."""

import json
from typing import Any

import pytest

from engine.protocol import AbortReason
from tests.support.edge.api_client import client, events, user, whole_and_streamed
from tests.support.edge.http_edge import Edge, until
from tests.support.edge.summed import sum_chat

pytestmark = pytest.mark.pure

CHAT = "/v1/chat/completions"
ASK: list[Any] = [user("Weather in Paris and Rome?")]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}}]
THOUGHT = "<|channel>thought\nTwo calls.\n<channel|>"
PARIS = '<|tool_call>call:get_weather{city:<|"|>Paris "日本"<|"|>,days:3}<tool_call|>'
ROME = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
ARGUMENTS = ['{"city":"Paris \\"日本\\"","days":3}', '{"city":"Rome"}']


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "nano", "messages": ASK, "tools": TOOLS} | more


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_thoughts_and_parallel_calls(edge: Edge, batch: int) -> None:
    """Whole and streamed say the same: reasoning under both its names, two calls, no content, and how many tokens were thoughts."""
    edge.script(f"{THOUGHT}{PARIS}{ROME}<|tool_response>", batch=batch)
    whole = edge.post(CHAT, asked()).json()
    message, usage = whole["choices"][0]["message"], whole["usage"]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert message["content"] is None
    assert message["reasoning_content"] == message["reasoning"] == "Two calls."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ARGUMENTS
    assert [(call["type"], call["function"]["name"]) for call in message["tool_calls"]] == [("function", "get_weather")] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": len(edge.text.encode(THOUGHT, add_bos=False)), "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    chunks = events(edge, CHAT, asked(stream_options={"include_usage": True}))
    streamed = sum_chat(chunks)
    assert streamed["reasoning_content"] == streamed["reasoning"] == "Two calls."
    assert [(name, arguments) for _, name, arguments in streamed["calls"]] == [("get_weather", each) for each in ARGUMENTS]
    assert (streamed["content"], streamed["finish"]) == ("", "tool_calls")
    assert chunks[-1]["usage"] == usage


def test_openais_stream_helper_puts_calls_together(edge: Edge) -> None:
    """Its events name each call when it is done, and the final message is that of a whole answer."""
    edge.script(f"Let me see.{PARIS}{ROME}<|tool_response>")
    with client(edge) as api, api.chat.completions.stream(model="nano", messages=ASK, tools=TOOLS) as stream:
        done = [event.arguments for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert done == ARGUMENTS
    assert final.message.content == "Let me see."
    assert [call.function.arguments for call in final.message.tool_calls or ()] == ARGUMENTS
    assert final.finish_reason == "tool_calls"


def test_arguments_stream_as_they_come(edge: Edge) -> None:
    """A string's text is on its way before the call is over; nothing waits for a closing bracket."""
    edge.script(f'<|tool_call>call:get_weather{{city:<|"|>{"word " * 50}<|"|>}}<tool_call|><|tool_response>')
    edge.core.delay_s = 0.002
    chunks = events(edge, CHAT, asked())
    pieces = [call["function"]["arguments"] for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", ())]
    assert len(pieces) > 40
    assert max(map(len, pieces)) < 20
    assert json.loads("".join(pieces)) == {"city": "word " * 50}


def test_a_tool_loop_with_openais_client(edge: Edge) -> None:
    """The message that came is sent back as it is, with results: the next prompt begins with all that was said."""
    edge.script(f"{THOUGHT}{PARIS}{ROME}<|tool_response>")
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    with client(edge) as api:
        first = api.chat.completions.create(model="nano", messages=ASK, tools=TOOLS, extra_body=thinking).choices[0].message
        calls = first.tool_calls or []
        results = [{"role": "tool", "tool_call_id": call.id, "content": "18C"} for call in calls]
        edge.script("It is 18C.<turn|>")
        messages = [*ASK, first.model_dump(exclude_none=True), *results]
        second = api.chat.completions.create(model="nano", messages=messages, tools=TOOLS, extra_body=thinking).choices[0]
    assert (second.message.content, second.finish_reason) == ("It is 18C.", "stop")
    before, after = (list(request.tokens) for request in edge.core.requests)
    said = [*before, *edge.text.encode(THOUGHT + PARIS + ROME, add_bos=False)]
    assert after[: len(said)] == said
    assert len(after) > len(said)


@pytest.mark.parametrize("parallel", [True, False])
@whole_and_streamed
def test_a_cut_call_says_length(edge: Edge, *, stream: bool, parallel: bool) -> None:
    """Its arguments are not completed, and the finish is length, not tool_calls, whether or not more calls might have come."""
    edge.script(PARIS)
    body = asked(max_tokens=len(edge.core.steps) - 4, parallel_tool_calls=parallel)
    if stream:
        found = sum_chat(events(edge, CHAT, body))
        arguments, finish = found["calls"][0][2], found["finish"]
    else:
        choice = edge.post(CHAT, body).json()["choices"][0]
        arguments, finish = choice["message"]["tool_calls"][0]["function"]["arguments"], choice["finish_reason"]
    assert finish == "length"
    assert ARGUMENTS[0].startswith(arguments)
    assert not arguments.endswith("}")


@whole_and_streamed
def test_one_call_where_parallel_ones_are_not_wanted(edge: Edge, *, stream: bool) -> None:
    """parallel_tool_calls: false ends the request with its first call, in the engine, too."""
    edge.script(f"{PARIS}{ROME}<|tool_response>")
    body = asked(parallel_tool_calls=False)
    if stream:
        found = sum_chat(events(edge, CHAT, body))
        calls, finish = [call[2] for call in found["calls"]], found["finish"]
    else:
        choice = edge.post(CHAT, body).json()["choices"][0]
        calls, finish = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]], choice["finish_reason"]
    assert (calls, finish) == (ARGUMENTS[:1], "tool_calls")
    until(lambda: edge.core.aborts[-1:] == [(edge.core.requests[-1].id, AbortReason.stop_string)], "the engine is told")


def test_without_tools_a_call_is_text(edge: Edge) -> None:
    """tool_choice none, or no tools: the model's markup is the content, readable."""
    for body in (asked(tool_choice="none"), {"model": "nano", "messages": ASK}):
        edge.script(f"{ROME}<turn|>")
        choice = edge.post(CHAT, body).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (ROME, "stop")
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True), ("high", True), (None, False)])
def test_reasoning_effort_switches_thinking(edge: Edge, effort: str | None, *, thinks: bool) -> None:
    """none: off; anything else: on; chat_template_kwargs decide where both are given."""
    edge.post(CHAT, asked(reasoning_effort=effort)).raise_for_status()
    edge.post(CHAT, asked(reasoning_effort=effort, chat_template_kwargs={"enable_thinking": False}))
    think = edge.text.control_id("<|think|>")
    assert [think in request.tokens for request in edge.core.requests] == [thinks, False]


@pytest.mark.parametrize(
    ("setting", "default", "wish", "thinks"),
    [
        ("on", False, None, True),
        ("on", False, "none", False),
        ("off", True, None, False),
        ("off", True, "high", True),
        ("auto", True, None, True),
        ("auto", False, None, False),
        ("auto", True, "none", False),
    ],
)
def test_the_servers_default_of_thinking(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, setting: str, default: bool, wish: str | None, thinks: bool
) -> None:
    """The setting decides where a request does not say, and auto leaves it to the template; what the request says wins."""
    edge.configure(thinking=setting)
    monkeypatch.setattr(edge.text, "thinks_by_default", default)
    explicit = ({"chat_template_kwargs": {"enable_thinking": each}} for each in (thinks, not thinks))
    for said in ({"reasoning_effort": wish}, *explicit):
        body = {"model": "nano", "messages": ASK, "response_format": {"type": "json_object"}}
        edge.post(CHAT, body | said).raise_for_status()
    seen, same, other = ((bytes(request.tokens), request.params.grammar) for request in edge.core.requests)
    assert seen == same
    assert all(one != two for one, two in zip(seen, other, strict=True))  # the prompt says so, and the form begins with the thought


def test_logprobs_beside_calls(edge: Edge) -> None:
    """Every token has its entry, markers and calls included, whole and streamed."""
    edge.script(f"{THOUGHT}Hi{ROME}<|tool_response>", batch=2)
    size = sum(map(len, edge.core.steps))
    whole = edge.post(CHAT, asked(logprobs=True)).json()["choices"][0]
    chunks = events(edge, CHAT, asked(logprobs=True))
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert len(whole["logprobs"]["content"]) == size
    assert streamed == whole["logprobs"]["content"]
