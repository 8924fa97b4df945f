"""Long and odd lists of tools over HTTP: whatever a client declares is let in, or refused with the place of what is wrong."""

import json
import random
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from deploy.edge.edge_settings import LimitSettings
from engine.errors import Overloaded
from engine.front.constraints import Constraints
from tests.support.edge.api_client import error_of
from tests.support.edge.http_edge import Edge, Edges
from tests.support.engine.tool_lists import ODD, tool_list

pytestmark = pytest.mark.pure

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, CHAT, CHAT, RESPONSES, MESSAGES)


@pytest.fixture(scope="module")
def edge(edges: Edges) -> Edge:
    """One whose context holds the longest lists."""
    return edges(max_len=1 << 20, limits=LimitSettings(body_bytes=8 << 20))


def body(path: str, tools: list[Any], **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "Hello"}]
    functions = [tool["function"] for tool in tools]
    match path:
        case "/v1/responses":
            return {"model": "nano", "input": "Hello", "tools": [{"type": "function"} | each for each in functions], **more}
        case "/v1/messages":
            named = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
            return {"model": "nano", "max_tokens": 5, "messages": said, "tools": named, **more}
    return {"model": "nano", "messages": said, "tools": tools, **more}


def asked(edge: Edge, path: str, tools: list[Any], **more: Any) -> httpx.Response:
    return edge.post(path, body(path, tools, **more))


def wrong(edge: Edge, seeds: range) -> list[str]:
    """Of so many lists, what was neither let in nor refused as it should be."""
    found = []
    for seed in seeds:
        rng = random.Random(seed)
        tools, path = tool_list(rng), rng.choice(PATHS)
        more = {"tool_choice": "required"} if path != MESSAGES and rng.random() < 0.3 else {}
        reply = asked(edge, path, tools, **more)
        strict = path != MESSAGES and any(tool["function"].get("strict") for tool in tools)
        sentence = "" if reply.status_code == 200 else reply.json()["error"]["message"]
        refused = reply.status_code == 400 and sentence.startswith("tools: ") and len(sentence) < 400 and "\n" not in sentence
        if reply.status_code != 200 and not (strict and refused):
            found.append(f"seed {seed}: {reply.status_code} {sentence}")
    return found


def test_lists_of_tools_are_let_in(edge: Edge) -> None:
    """1 to 128 tools with nulls, unions, references, patterns and nonsense: 200, or for strict ones 400 with a sentence."""
    assert wrong(edge, range(25)) == []


@pytest.mark.slow
def test_many_lists_of_tools_are_let_in(edge: Edge) -> None:
    """As above, 500."""
    assert wrong(edge, range(1000, 1500)) == []


def not_let_in(edge: Edge, names: Iterable[str]) -> list[str]:
    """Of those parameters that nobody means, each alone, with which a tool is refused."""
    odd = {name: {"type": "object", "properties": {name: ODD[name]}} for name in names}
    tools = {name: {"type": "function", "function": {"name": "f", "parameters": schema}} for name, schema in odd.items()}
    return [name for name, tool in tools.items() if asked(edge, CHAT, [tool]).status_code != 200]


def test_odd_parameters_are_let_in(edge: Edge) -> None:
    """A tool that is not strict may have any of them: what cannot be kept is left free."""
    assert not_let_in(edge, ODD) == []


def test_a_parameter_that_is_not_let_in_is_seen(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of those above are refused where nulls count as values, or where what cannot be built is neither found nor loosened."""
    names = ["null anyOf", "null allOf", "null oneOf", "null format", "no multiple"]
    with monkeypatch.context() as patched:
        patched.setattr("engine.front.call_grammar.as_json_schema", lambda schema: schema)
        assert not_let_in(edge, names) == names[:3]
    monkeypatch.setattr(Constraints, "looser", lambda constraints: None)
    assert not_let_in(edge, names) == []
    monkeypatch.setattr("engine.front.call_grammar.compiles", lambda _: True)
    assert not_let_in(edge, names) == names[4:]


def parameters(kind: int) -> dict[str, Any]:
    match kind % 3:
        case 0:
            return {"type": "string", "enum": ["a", "b", "c"]}
        case 1:
            return {"type": "integer", "minimum": 1, "maximum": 10 + kind}
    return {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "string"}}}}


@pytest.mark.parametrize("count", [60, 300])
def test_many_tools_of_twelve_parameters(edge: Edge, count: int) -> None:
    """More than the rules of arguments have room for: the first tools' arguments are kept, the last one's are any object."""
    edge.reset()
    properties = {f"parameter_{place}": parameters(place) for place in range(12)}
    schema = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": f"tool_{at}", "parameters": schema}} for at in range(count)]
    reply = asked(edge, CHAT, tools)
    assert reply.status_code == 200, reply.text
    rules = edge.core.requests[-1].params.grammar
    assert rules is not None
    assert f'tool_{count - 1}: "tool_{count - 1}" any_object' in rules.text
    assert 'tool_0: "tool_0" (object_' in rules.text


def test_the_place_of_a_strict_tool_is_named(edge: Edge) -> None:
    """Which of several tools cannot be kept, and why."""
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a$", "minLength": 5}}}
    functions = [{"name": "fine", "parameters": {}}, {"name": "broken", "strict": True, "parameters": bad}]
    reply = asked(edge, CHAT, [{"type": "function", "function": each} for each in functions])
    assert error_of(reply, 400)["message"].startswith("tools: broken: a pattern, a format, lengths or enum that together")


def written(path: str, name: str, schema: Any = None) -> Any:
    """A tool as the API at `path` writes it."""
    (tool,) = body(path, [{"type": "function", "function": {"name": name, "parameters": schema or {}}}])["tools"]
    return tool


def namespace(tool: Any) -> Any:
    return {"type": "namespace", "name": "n", "tools": [tool]}


@pytest.mark.parametrize(
    ("path", "before", "inside", "place"),
    [
        (CHAT, written(CHAT, "g"), False, "tools[1].function .parameters"),
        (RESPONSES, {"type": "custom"}, False, "tools[1] .parameters"),
        (RESPONSES, {"type": "custom"}, True, "tools[1].tools[0] .parameters"),
        (MESSAGES, written(MESSAGES, "g"), False, "tools[1] .input_schema"),
    ],
)
def test_what_is_wrong_has_the_path_that_was_sent(edge: Edge, *, path: str, before: Any, inside: bool, place: str) -> None:
    """A name's, and a place's in a schema; tools that are not offered count."""
    tool, schema = place.split()
    broken = {"properties": {"a": {"type": "text"}}}
    for sent, where in (
        (written(path, "no name"), f"{tool}.name: "),
        (written(path, "f", broken), f"{tool}{schema}.properties.a.type: "),
    ):
        asked = body(path, []) | {"tools": [before, namespace(sent) if inside else sent]}
        for url in (path, f"{MESSAGES}/count_tokens") if path == MESSAGES else (path,):
            reply = edge.post(url, asked)
            assert (reply.status_code, reply.json()["error"]["message"][: len(where)]) == (400, where)


FAILING: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": []}}}}, "response_format"),
    ({"guided_json": {"type": "string", "pattern": "^a$", "minLength": 5}}, "guided_json"),
    ({"guided_grammar": "start: A\nA: ~(" + " | ".join(f"~/.*a(a|b){{{at}}}/" for at in range(10, 30)) + ")"}, "guided_grammar"),
    ({"guided_grammar": "start: A\nA: ~(~/a/ | ~/b/)"}, "guided_grammar"),
    ({"guided_grammar": "start: a\na: a"}, "guided_grammar"),
]


@pytest.mark.parametrize(("form", "param"), FAILING, ids=[json.dumps(form)[:60] for form, _ in FAILING])
def test_a_grammar_that_fails_when_it_is_built_is_refused(edge: Edge, form: dict[str, Any], param: str) -> None:
    """A schema that refers to itself, an empty language, patterns that cost too much: a 400 of one short sentence, no dump."""
    edge.reset()
    reply = edge.post(CHAT, body(CHAT, [], **form) | {"tools": None})
    error = error_of(reply, 400)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: the grammar: ")
    assert len(error["message"]) < 200, error
    assert "\n" not in error["message"]
    assert "<state>" not in error["message"]
    assert edge.core.requests == []


def test_a_busy_compiler_refuses_no_plain_request(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own wish for a grammar gives way where too many others wait; what was asked for is a 429, to be tried again."""
    edge.reset()

    async def busy(rules: str, param: str, client: str) -> None:
        raise Overloaded("too many grammars are being compiled")

    monkeypatch.setattr(edge.service.jobs.grammars, "check", busy)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert asked(edge, CHAT, tools).status_code == 200
    assert edge.core.requests[-1].params.grammar is None
    assert asked(edge, CHAT, tools, tool_choice="required").status_code == 429
