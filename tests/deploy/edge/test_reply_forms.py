"""Forms of replies over HTTP: every spelling reaches the engine as a grammar of its own, and what cannot be kept is a 400."""

import json
import re
from typing import Any

import pytest
from msgspec.structs import replace

from engine.front.grammar_check import GrammarCheck
from engine.front.reply import Markers
from engine.front.string_schema import FORMATS
from engine.matcher import Matcher
from engine.protocol import Grammar, ThoughtBudget
from tests.support.edge.api_client import chat_body, error_of
from tests.support.edge.http_edge import Edge

pytestmark = pytest.mark.pure

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CLOSED = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"], "additionalProperties": False}
EITHER: dict[str, Any] = {
    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}, {"type": "string"}],
    "$defs": {"A": SCHEMA, "B": CLOSED},
}
PAIR = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}
GEMINIS = {"type": "OBJECT", "properties": {"a": {"type": "ARRAY", "items": {"type": ["STRING"], "nullable": True}}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
NAMES = ("get_weather", "run-it")
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
NAMED = {"type": "function", "function": {"name": "run-it"}}


def asked(edge: Edge, body: dict[str, Any], path: str = CHAT, **settings: Any) -> Grammar | None:
    """The grammar that the engine was sent with a request that is let in."""
    edge.reset()
    edge.configure(**settings)
    reply = edge.post(path, body)
    assert reply.status_code == 200, reply.text
    return edge.core.requests[-1].params.grammar


def writes(edge: Edge, rules: Grammar | None, text: str) -> bool:
    """Whether a reply that says `text`, whole, is within the grammar."""
    assert rules is not None
    matcher = edge.vocabulary.matcher(rules.text)
    return accepts(matcher, edge.text.encode(text, add_bos=False))


def accepts(matcher: Matcher, tokens: list[int]) -> bool:
    for token in tokens:
        if not matcher.mask().tobytes()[token >> 3] >> (token & 7) & 1:
            return False
        matcher.consume(token)
    return matcher.complete


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"b":[1]}', "[1]"),
    ({"response_format": {"type": "json_object", "schema": None, "json_schema": None}}, '{"b":[1]}', "[1]"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a":5}', '{"a":"b"}'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, '{"a":5}', '{"a":"b"}'),
    ({"response_format": {"type": "structural_tag", **TAG}}, 'so <f>{"a":1}</f> it', "so <f>{}</f>"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 5}', '{"a":  5}'),
    ({"structured_outputs": {"json_object": True}}, "{}", "5"),
    ({"structured_outputs": {"regex": "a/b+", "disable_fallback": True}}, "a/bbb", "a/bbba"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "yesno"),
    ({"structured_outputs": {"grammar": 'start: "x"+'}}, "xxx", "xy"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, 'so <f>{"a":1}</f>', "so <f>"),
    ({"guided_json": json.dumps(SCHEMA)}, '{"a":5}', "{}"),
    ({"guided_json": {"properties": {"a": {"type": "integer", "enum": None}}, "$schema": "x"}}, '{"a":5}', "5"),
    ({"guided_json": GEMINIS}, '{"a":[null,"x"]}', '{"a":[5]}'),
    ({"guided_json": GEMINIS | {"nullable": True}}, "{}", "null"),
    ({"guided_json": {"$ref": "#/$defs/Box[int]", "$defs": {"Box[int]": SCHEMA}}}, '{"a":5}', "{}"),
    ({"guided_json": {"$ref": "#/$defs/Box%5Bint%5D", "$defs": {"Box[int]": SCHEMA}}}, '{"a":5}', "{}"),
    ({"guided_json": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/S"}], "$defs": {"S": SCHEMA}}}, "null", "{}"),
    ({"guided_json": {**SCHEMA, "description": "\u5929" * 20_000}}, '{"a":5}', "{}"),
    ({"guided_json": {"$schema": "http://json-schema.org/draft-07/schema#", **PAIR}}, '[1,"a"]', "[1,2]"),
    ({"guided_json": EITHER}, '{"b":"x"}', '{"a":"x"}'),
    ({"guided_json": {"properties": {"v": {"oneOf": EITHER["oneOf"]}}, "$defs": EITHER["$defs"]}}, '{"v":"so"}', '{"v":5}'),
    ({"guided_json": {}, "guided_decoding_backend": "xgrammar"}, "[1,null]", "[1,"),
    ({"guided_regex": "[0-9]{3}"}, "123", "12"),
    ({"guided_choice": ["a b"]}, "a b", "a"),
    ({"guided_grammar": 'root ::= "x" [0-9]+'}, "x12", "x"),
    ({"json_schema": json.dumps(SCHEMA)}, '{"a":5}', '{ "a":5}'),
    ({"regex": "a|b"}, "b", "c"),
    ({"ebnf": 'root ::= ("a" | "b") "c"'}, "bc", "c"),
    ({"structural_tag": json.dumps({"type": "structural_tag", **TAG})}, 'so <f>{"a":1}</f>', 'so <f>{"a":x}</f>'),
]


@pytest.mark.parametrize(("keys", "good", "bad"), FORMS, ids=[json.dumps(keys)[:40] for keys, _, _ in FORMS])
def test_every_spelling_is_kept(edge: Edge, keys: dict[str, Any], good: str, bad: str) -> None:
    """In chats and in completions: what fits the form may be written and what does not may not."""
    for found in (asked(edge, chat_body(**keys)), asked(edge, {"model": "nano", "prompt": "x", **keys}, TEXT)):
        assert writes(edge, found, good)
        assert not writes(edge, found, bad)


THOUGHT = "<|channel>thought\nwell<channel|>"


def test_a_thought_comes_first_where_thinking_is_on(edge: Edge) -> None:
    """On: a thought, then the form; off: the form at once. Text before the thought, and none at all, break the form."""
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    on, off = (asked(edge, chat_body(**form, chat_template_kwargs={"enable_thinking": each})) for each in (True, False))
    said = [f'{THOUGHT}{{"a":1}}', '{"a":1}', f'so{THOUGHT}{{"a":1}}']
    assert [writes(edge, on, each) for each in said] == [True, False, False]
    assert [writes(edge, off, each) for each in said] == [False, True, False]


def test_a_thought_has_a_budget(edge: Edge) -> None:
    """In any chat the engine is told it, with the ids that begin and end a thought and the length of its label; with tools a call
    ends a thought, too. Anthropic's budget_tokens are the same; without the key there is none, and -1 is a 400."""
    markers = Markers.of(edge.text)
    label = len(edge.text.encode("thought\n", add_bos=False))
    budget = ThoughtBudget(8, markers.begin_thought, markers.end_thought, label, None, None)
    on = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 8}
    messages = {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 8}}
    cases = [
        (CHAT, chat_body(**on), budget),
        (CHAT, chat_body(**on, regex="x"), budget),
        (CHAT, chat_body(**on, tools=TOOLS), replace(budget, begin_call=markers.begin_call)),
        (CHAT, chat_body(thinking_token_budget=0), replace(budget, tokens=0)),
        (CHAT, chat_body(**on, n=3, stop=["x"], min_tokens=2), budget),
        ("/v1/messages", chat_body(**messages), budget),
        (CHAT, chat_body(), None),
    ]
    for path, body, wanted in cases:
        asked(edge, body, path)
        assert [request.params.thought for request in edge.core.requests] == [wanted] * body.get("n", 1)
    reply = edge.post(CHAT, chat_body(thinking_token_budget=-1))
    assert error_of(reply, 400)["param"] == "thinking_token_budget"


def call(name: str, arguments: str = "{a:1}") -> str:
    return f"<|tool_call>call:{name}{arguments}<tool_call|>"


ONE, OTHER = call("get_weather"), call("run-it")
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "name": "run-it"}]}}
CHOICES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"tool_choice": "required"}, [ONE, OTHER + ONE], ["", "so", call("f"), call("run-it", "{a:x}"), ONE + "so"]),
    ({"tool_choice": "required", "parallel_tool_calls": False}, [ONE, OTHER], [ONE + OTHER]),
    ({"tool_choice": NAMED}, [OTHER], [ONE, OTHER + OTHER]),
    ({"tool_choice": ALLOWED}, [OTHER, OTHER + OTHER], [ONE]),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, [ONE], ["{}"]),
    ({"response_format": {"type": "json_object"}}, [ONE, "{}"], ["so", call("f")]),
    ({"tool_choice": "none", "response_format": {"type": "json_object"}}, ["{}"], [ONE]),
]


@pytest.mark.parametrize(("keys", "good", "bad"), CHOICES)
def test_tool_choice_is_kept(edge: Edge, keys: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """required, named, allowed_tools, one call or several, and calls beside a form."""
    found = asked(edge, chat_body(tools=TOOLS, **keys))
    assert found is not None
    assert found.trigger is None
    assert [text for text in good if not writes(edge, found, text)] == []
    assert [text for text in bad if writes(edge, found, text)] == []


def test_calls_that_the_model_begins_are_kept(edge: Edge) -> None:
    """auto: the grammar begins behind the marker; tool_grammar says how much it keeps, a tool's strict more. Without tools, and
    where the choice is none, there is no grammar."""
    markers = Markers.of(edge.text)
    behind = [text.removeprefix("<|tool_call>") for text in (ONE, call("run-it", "{b:2}"), call("f"))]
    strict = [{"type": "function", "function": TOOLS[1]["function"] | {"strict": True}}, TOOLS[0]]
    free = {"type": "object", "properties": {"b": {"not": {}}}}
    loose = [{"type": "function", "function": {"name": "run-it", "parameters": free}}, TOOLS[0]]
    found = {}
    for setting in ("strict", "names", "off"):
        for at, tools in enumerate((TOOLS, strict, loose)):
            rules = asked(edge, chat_body(tools=tools), tool_grammar=setting)
            assert rules is None or rules.trigger == markers.begin_call
            found[setting, at] = rules and [writes(edge, rules, text) for text in behind]
    assert found["strict", 0] == found["strict", 1] == found["names", 1] == found["off", 1] == [True, False, False]
    assert found["strict", 2] == found["names", 0] == found["names", 2] == [True, True, False]
    assert found["off", 0] is found["off", 2] is None
    assert asked(edge, chat_body()) is asked(edge, chat_body(tools=TOOLS, tool_choice="none")) is None


def test_a_wish_of_ours_gives_way(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of schemas that take too long to compile only names are kept; of strict tools, and of forms, it is a 400."""
    other = {"type": "object", "properties": {"late": {"type": "integer"}}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "run-it", "parameters": other}}]
    slow = GrammarCheck(lambda rules: "too slow" if "late" in rules else None)
    monkeypatch.setattr(edge.service.jobs, "grammars", slow)
    behind = call("run-it", "{b:2}").removeprefix("<|tool_call>")
    assert writes(edge, asked(edge, chat_body(tools=tools)), behind)
    assert writes(edge, asked(edge, chat_body(tools=tools, tool_choice="required")), call("run-it", "{b:2}"))
    tools[0]["function"] |= {"strict": True}
    for refused in (chat_body(tools=tools), chat_body(tools=tools[:0], response_format=form(**other))):
        reply = edge.post(CHAT, refused)
        assert reply.status_code == 400
        assert "too slow" in reply.text


def form(**schema: Any) -> dict[str, Any]:
    """A response_format."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def test_formats_that_nobody_knows_say_nothing(edge: Edge) -> None:
    """As JSON Schema has it: pydantic's "password" and zod's "cuid" leave a string free. Planted: known formats are kept, and a
    constant that looks like a format, too."""
    for name in ("password", "binary", "cuid"):
        schema = form(type="object", properties={"format": {"type": "string", "format": name}})
        found = asked(edge, chat_body(response_format=schema))
        assert writes(edge, found, '{"format":"so"}')
        assert not writes(edge, found, '{"format":5}')
    for name in FORMATS:
        assert not writes(edge, asked(edge, chat_body(response_format=form(type="string", format=name))), '"so !"')
    assert not writes(edge, asked(edge, chat_body(response_format=form(const={"format": "cuid"}))), "{}")


def test_unique_items_that_are_not_asked_for_say_nothing(edge: Edge) -> None:
    """uniqueItems: false, in a form and in a strict tool; the same item may come twice. Planted: true is refused."""
    found = asked(edge, chat_body(response_format=form(type="array", items={"type": "integer"}, uniqueItems=False)))
    assert writes(edge, found, "[1, 1]")
    for unique, status in ((False, 200), (True, 400)):
        parameters = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": unique}}}
        tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}]
        assert edge.post(CHAT, chat_body(tools=tools)).status_code == status
        assert edge.post(CHAT, chat_body(response_format=form(**parameters))).status_code == status


# A key, a value of it that cannot be kept, and what is said of it.
WRONG_VALUES: list[tuple[str, Any, str]] = [
    ("response_format", form(type="object", properties={"a": {"not": {}}}), r'Unimplemented keys: \["not"\]'),
    ("response_format", form(type="array", uniqueItems=True), "uniqueItems"),
    ("response_format", form(oneOf=[{"$ref": "#/$defs/A"}, {"type": "object"}], **{"$defs": {"A": SCHEMA}}), "oneOf"),
    ("response_format", form(oneOf=[{"required": 5, "anyOf": 5}, {"required": [{}], "$ref": []}]), "."),
    ("response_format", form(description="x" * 70_000), "more than 66560 bytes"),
    ("response_format", {"type": "json_schema"}, "needs a schema"),
    ("response_format", {"type": "yaml"}, "'yaml' is not one of"),
    ("response_format", {"type": "structural_tag", "format": {}}, "only structures with triggers"),
    ("response_format", "json", "object"),
    ("guided_json", "{", "no JSON"),
    ("guided_json", 5, "JSON Schema"),
    ("guided_json", {"$defs": {f"{at}": {"$ref": f"#/$defs/{at + 1}"} for at in range(1000)}, "$ref": "#/$defs/0"}, "nested"),
    ("guided_regex", "a(", "regex"),
    ("guided_regex", "", "empty"),
    ("guided_choice", [], "1 to"),
    ("ebnf", "root ::= (", "Expected"),
    ("ebnf", "root ::= " + "(" * 5000, "nested"),
    ("structured_outputs", {"json": SCHEMA, "regex": "a"}, "only one of json, regex"),
    ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
    ("structured_outputs", {"jason": {}}, "must have one of"),
    ("structural_tag", {**TAG, "triggers": ["<g"]}, "none of the triggers"),
    ("tool_choice", "required", "needs tools"),
    (
        "tools",
        [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}}],
        "'not'",
    ),
]
WRONG: list[tuple[dict[str, Any], str, str]] = [
    *(({key: value}, key, says) for key, value, says in WRONG_VALUES),
    ({"regex": "a", "guided_regex": "a"}, "guided_regex", "only one of them"),
    ({"regex": "a", "min_tokens": 3}, "min_tokens", "not with regex"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "not with regex"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "requires a call"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "must be none"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f' is not declared"),
]


@pytest.mark.parametrize(("keys", "param", "says"), WRONG, ids=[json.dumps(keys)[:40] for keys, _, _ in WRONG])
def test_what_cannot_be_kept_is_refused(edge: Edge, keys: dict[str, Any], param: str, says: str) -> None:
    """A 400 that names the key and what is wrong; nothing reaches the engine."""
    edge.reset()
    reply = edge.post(CHAT, chat_body(**keys))
    error = error_of(reply, 400)
    assert error["param"] == param
    assert re.search(says, error["message"]), error
    assert len(error["message"]) < 600
    assert edge.core.requests == []


def test_forms_that_ask_for_nothing(edge: Edge) -> None:
    """text, false, null and an empty structured_outputs are no form."""
    for keys in ({"type": "text"}, None):
        assert asked(edge, chat_body(response_format=keys)) is None
    assert asked(edge, chat_body(structured_outputs={}, guided_json=None)) is None
