"""Requests of agents and of a benchmark, as their sources build them, with a call and its result in the history: served to the end.

Zed: crates/open_ai. Cline: core/api/providers/openai.ts. Vercel's AI SDK: packages/openai-compatible. guidellm: backends/openai.
"""

from typing import Any

import pytest

from tests.support.edge.api_client import events, user
from tests.support.edge.http_edge import Edge
from tests.support.edge.summed import sum_chat

pytestmark = pytest.mark.pure

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path":"a.py"}'}}
READ = {"type": "function", "function": {"name": "read_file", "description": "Reads", "parameters": SCHEMA}}
DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#", "additionalProperties": False}
USAGE = {"include_usage": True}

BODIES: dict[str, dict[str, Any]] = {
    "zed": {
        "messages": [
            {"role": "system", "content": "You are an agent."},
            user([{"type": "text", "text": "Fix"}, {"type": "text", "text": "it"}]),
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I read it."},
            {"role": "tool", "content": "1+1", "tool_call_id": "call_1"},
        ],
        "stream_options": USAGE, "max_completion_tokens": 4096, "temperature": 1.0, "tool_choice": "auto",
        "tools": [READ, {"type": "function", "function": {"name": "now", "description": None, "parameters": None}}],
        "prompt_cache_key": "5e551011", "reasoning_effort": "high",
    },
    "cline": {
        "messages": [
            {"role": "system", "content": "Tools are <read_file><path>...</path></read_file> and others, in XML."},
            user([{"type": "text", "text": "<task>Fix</task>"}]),
            {"role": "assistant", "content": "<thinking>Well.</thinking>\n<read_file><path>a.py</path></read_file>"},
            user([{"type": "text", "text": "[read_file] Result:"}, {"type": "text", "text": "1+1"}]),
        ],
        "temperature": 0, "stream_options": USAGE,
    },
    "vercel": {
        "messages": [
            user("Fix it"),
            {"role": "assistant", "content": "", "reasoning_content": "I read it.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": '{"type":"text","value":"1+1"}'},
        ],
        "tools": [{"type": "function", "function": READ["function"] | {"parameters": SCHEMA | DRAFT, "strict": True}}],
        "tool_choice": "auto", "stream_options": USAGE, "reasoning_effort": "xhigh", "verbosity": "low", "user": "u",
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA | DRAFT, "strict": True, "name": "response"}},
    },
    "guidellm": {
        "messages": [user([{"type": "text", "text": "word " * 8}])],
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 9, "stop": None, "ignore_eos": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("agent", BODIES)
def test_what_agents_send_is_served(edge: Edge, agent: str) -> None:
    """The stream adds up to the reply and ends with its usage; results of calls are in the prompt, by the function's name."""
    edge.configure(max_len=4096)
    edge.script("<read_file> it is")
    body = {"model": "nano", **BODIES[agent]}
    chunks = events(edge, CHAT, body)
    limit = body.get("max_completion_tokens", 4096)
    written = [token for step in edge.core.steps[:limit] for token in step]
    assert sum_chat(chunks)["content"] == edge.text.decode(written)
    assert chunks[-1]["usage"]["completion_tokens"] == len(written)
    prompt = edge.prompt_text()
    assert ("response:read_file" in prompt) == ("tools" in body)


def asked(arguments: str) -> dict[str, dict[str, Any]]:
    """A chat and a response whose history has a call with these arguments, which its agent could not read."""
    call = CALL | {"function": CALL["function"] | {"arguments": arguments}}
    item = {"type": "function_call", "call_id": "call_1", "name": "read_file", "arguments": arguments, "status": "incomplete"}
    said = "no JSON"
    return {
        CHAT: {
            "messages": [user("Fix it"), {"role": "assistant", "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": "call_1", "content": said}],
            "tools": [READ],
        },
        "/v1/responses": {
            "input": [user("Fix it"), item,
                      {"type": "function_call_output", "call_id": "call_1", "output": said}],
            "tools": [{"type": "function", **READ["function"]}],
        },
    }  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_call_that_was_cut_is_no_end_of_a_conversation(edge: Edge, path: str) -> None:
    """The model sees it with what was open closed, and what begins no JSON as its text. Planted: what is nothing shows none."""
    edge.configure(max_len=1 << 16)
    edge.script("again")
    assert edge.post(path, {"model": "nano", **asked('{"path":"a.p')[path]}).status_code == 200
    prompt = edge.prompt_text()
    assert 'call:read_file{path:<|"|>a.p<|"|>}<tool_call|><|tool_response>response:read_file{value:<|"|>no JSON<|"|>}' in prompt
    for sent in ('{"path":a.p', " \n", "<path>a.p</path>", '"a"', "[1]", "1", '{"a":' * 10_000, "{'path': 'a.p'}"):
        edge.core.reset()
        edge.script("again")
        reply = edge.post(path, {"model": "nano", **asked(sent)[path]})
        assert reply.status_code == 200, (sent[:20], reply.text)
        shown = edge.prompt_text().partition("call:read_file{")[2].partition("}<tool_call|>")[0]
        assert shown == (f'arguments:<|"|>{sent}<|"|>' if sent.strip() else ""), sent[:20]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_no_arguments_are_written_in_many_ways(edge: Edge, path: str) -> None:
    """Nothing, an empty object, Go's null and PHP's empty list. Planted: a text, and a list of something, are not nothing."""
    edge.configure(max_len=4096)
    for arguments in ("", "{}", "null", "[]"):
        edge.core.reset()
        edge.script("again")
        reply = edge.post(path, {"model": "nano", **asked(arguments)[path]})
        assert reply.status_code == 200, reply.text
        assert "call:read_file{}<tool_call|>" in edge.prompt_text()
    for arguments in ('"a"', "[1]"):
        edge.core.reset()
        edge.script("again")
        assert edge.post(path, {"model": "nano", **asked(arguments)[path]}).status_code == 200
        assert "call:read_file{}<tool_call|>" not in edge.prompt_text()
