"""What models really wrote and servers read wrongly, by the number of the public report; whole, and token by token."""

import json
import random

import pytest

from engine.front.tools import NO_TOOLS
from tests.support.engine.replies import IDS, Said, parsed, segments, tokens
from tests.support.engine.schemas import tools_of

pytestmark = pytest.mark.pure


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
PROPERTIES: dict[str, dict[str, object]] = {
    "bash": {"command": TEXT},
    "f": {},
    "g": {},
    "web_search": {"query": TEXT, "limit": NUMBER},
    "move": {"command": TEXT, "angle": NUMBER},
    "light": {"area": TEXT, "state": {"type": ["string", "null"]}, "level": {"anyOf": [NUMBER, {"type": "null"}]}},
    "create-pdf-file": {"filename": TEXT, "content": TEXT},
    "execute_python": {"code": TEXT, "data_refs": {"type": "array", "items": TEXT}},
}
TOOLS = tools_of({name: {"type": "object", "properties": each} for name, each in PROPERTIES.items()})


def calls(*found: tuple[str, object], content: str = "", reasoning: str = "") -> Said:
    """Said, with arguments as compact JSON."""
    compact = [(name, json.dumps(value, ensure_ascii=False, separators=(",", ":"))) for name, value in found]
    return Said(content, reasoning, compact)


CASES: dict[str, tuple[str, Said]] = {
    # the first marker of a string is missing
    "sglang 39240": (
        '<|tool_call>call:web_search{query:weather in Tokyo<|"|>}<tool_call|>',
        calls(("web_search", {"query": "weather in Tokyo"})),
    ),
    "sglang 39240, a comma": (
        '<|tool_call>call:web_search{query:Paris, France<|"|>,limit:5}<tool_call|>',
        calls(("web_search", {"query": "Paris, France", "limit": 5})),
    ),
    "sglang 39240, brackets": (
        '<|tool_call>call:bash{command:find . -exec grep {} \\; | tail, x: 1<|"|>}<tool_call|>',
        calls(("bash", {"command": "find . -exec grep {} \\; | tail, x: 1"})),
    ),
    # both are
    "ollama 15315": (
        "<|tool_call>call:web_search{query:weather in Tokyo,limit:5}<tool_call|>",
        calls(("web_search", {"query": "weather in Tokyo", "limit": 5})),
    ),
    # the call's beginning is missing, or half of it
    "vllm 53431": ('<|tool_call>:bash{command:<|"|>ls<|"|>}<tool_call|>', calls(("bash", {"command": "ls"}))),
    "vllm 54256": (
        '<|channel>thought\nLook.\n<channel|>call:bash{command:<|"|>cat a.c<|"|>}',
        calls(("bash", {"command": "cat a.c"}), reasoning="Look."),
    ),
    "vllm 54256, with an end": (
        '<|channel>thought\nLook.\n<channel|>\ncall:bash{command:<|"|>ls<|"|>}<tool_call|>',
        calls(("bash", {"command": "ls"}), reasoning="Look."),
    ),
    "vllm 54256, undeclared": ("<|channel>thought\n<channel|>call:me{soon}", Said("call:me{soon}")),
    "vllm 54256, prose": ("Please call:bash{ls} now", Said("Please call:bash{ls} now")),
    "prose that begins so": ("call: bash is a shell", Said("call: bash is a shell")),
    "a sentence about calls": ("<|tool_call> is how I begin a call{x}", Said("<|tool_call> is how I begin a call{x}")),
    # JSON's and Python's way to write
    "vllm 51284": (
        '<|tool_call>call:f{data_refs:["ds_1"],other:[\'a, b\'],opts:{"mode": "fast"},n=[1]}<tool_call|>',
        calls(("f", {"data_refs": ["ds_1"], "other": ["a, b"], "opts": {"mode": "fast"}, "n": [1]})),
    ),
    "vllm 53642": ('<|tool_call>call:bash(command:<|"|>ls -a<|"|>)<tool_call|>', calls(("bash", {"command": "ls -a"}))),
    "omlx 1846": (
        "<|tool_call>call:web_search(query='a (b), c', limit=3)<tool_call|>",
        calls(("web_search", {"query": "a (b), c", "limit": 3})),
    ),
    "vmlx-swift 61": ('<|tool_call>call:f({"ids":["a","b"]})<tool_call|>', calls(("f", {"ids": ["a", "b"]}))),
    "double braces": (
        '<|tool_call>call:f{{"city":"Paris","at":{"lat":1}}}<tool_call|>',
        calls(("f", {"city": "Paris", "at": {"lat": 1}})),
    ),
    "omlx 1854": (
        "<|tool_call>call:google:mcp:text:create-pdf-file{filename: 'output.pdf', content: 'a, b: {c} it\\'s'}<tool_call|>",
        calls(("create-pdf-file", {"filename": "output.pdf", "content": "a, b: {c} it's"})),
    ),
    "omlx 1854, a brace": ('<|tool_call>call:f{"content": "has } brace"}<tool_call|>', calls(("f", {"content": "has } brace"}))),
    # markers inside a string stand for quotes
    "vllm 44715": (
        '<|tool_call>call:f{code:<|"|>sql(<|"|><|"|><|"|> SELECT <|"|><|"|><|"|>).df()<|"|>,data_refs:[<|"|>x<|"|>]}<tool_call|>',
        calls(("f", {"code": 'sql(""" SELECT """).df()', "data_refs": ["x"]})),
    ),
    "vllm 44715, a dict": (
        '<|tool_call>call:execute_python{code:<|"|>d = {<|"|>a<|"|>: [<|"|>b<|"|>, <|"|>c<|"|>]}\nprint(d)<|"|>}<tool_call|>',
        calls(("execute_python", {"code": 'd = {"a": ["b", "c"]}\nprint(d)'})),
    ),
    "ollama 16075": (
        '<|tool_call>call:f{text:<|"|>ends with <tool_call|> and } so<|"|>,n:1}<tool_call|>',
        calls(("f", {"text": "ends with <tool_call|> and } so", "n": 1})),
    ),
    "vllm 39069": (
        '<|tool_call>call:f{content:<|"|>She said "hello" loudly\\<|"|>}<tool_call|>',
        calls(("f", {"content": 'She said "hello" loudly\\'})),
    ),
    "yzma 243": (
        '<|tool_call>call:move{command:<|"|>look<|"|>angle:90}<tool_call|>',
        calls(("move", {"command": "look", "angle": 90})),
    ),
    # loops without end
    "sglang 29578": ('<|tool_call>call:f{x:[[<|"|>a]b<|"|>]]}<tool_call|>', calls(("f", {"x": [["a]b"]]}))),
    "sglang 28857": ("<|tool_call>call:f{x:[1]]}<tool_call|>", calls(("f", {"x": [1], "]": None}))),
    "vllm 41991": ("<|tool_call>call:f{x:[1, ],y:[,]}<tool_call|>", calls(("f", {"x": [1], "y": []}))),
    "unsloth 5811": ("<|tool_call>call:f{x:[1}<tool_call|>", calls(("f", {"x": ["1}"]}))),
    # values
    "sglang: null is a word": ("<|tool_call>call:f{a:null,b:None}<tool_call|>", calls(("f", {"a": None, "b": "None"}))),
    "vllm-mlx 383": (
        '<|tool_call>call:light{area:12,state:null,level:None}<tool_call|><|tool_call>call:light{level:<|"|>3<|"|>}<tool_call|>',
        calls(("light", {"area": "12", "state": None, "level": None}), ("light", {"level": 3})),
    ),
    "Rapid-MLX 1102": (
        '<|tool_call>call:f{arguments:{message:<|"|>How are you?<|"|>},n:1}<tool_call|>',
        calls(("f", {"arguments": {"message": "How are you?"}, "n": 1})),
    ),
    # several calls, and where they stand
    "vllm 42875": (
        '<|tool_call>call:f{}<tool_call|><|tool_call>call:g{q:<|"|>1<|"|>}<tool_call|>',
        calls(("f", {}), ("g", {"q": "1"})),
    ),
    "vllm 41967": (
        "Sure.<|tool_call>call:f{a:1}<tool_call|>\n<|tool_call>call:f{a:2}<tool_call|>",
        calls(("f", {"a": 1}), ("f", {"a": 2}), content="Sure."),
    ),
    "sglang 25073": ("<|tool_call>call:unknown{}<tool_call|>", calls(("unknown", {}))),
    "sglang: a thought ended by a call": (
        "<|channel>thought\nA<|tool_call>call:f{}<tool_call|>",
        calls(("f", {}), reasoning="A"),
    ),
    "osaurus 128": (
        'DOUBLED=<product*2> <|tool_call>call:f{a:<|"|><b><|"|>}<tool_call|>',
        calls(("f", {"a": "<b>"}), content="DOUBLED=<product*2> "),
    ),
    "vllm 45449": ("<|tool_call>call:f<tool_call|>", calls(("f", {}))),
    "text behind calls": ("<|tool_call>call:f{}<tool_call|>\nDone.", calls(("f", {}), content="\nDone.")),
    "vllm 39885": ("thought\nhm<channel|>Hi", Said("thought\nhmHi")),
}


@pytest.mark.parametrize("case", CASES)
def test_reported_replies(case: str) -> None:
    """Each is understood as the model meant it, and nothing of it is lost."""
    text, said = CASES[case]
    rng = random.Random(case)
    assert parsed(tokens(segments(text)), tools=TOOLS)[0] == said
    for _ in range(20):
        assert parsed(tokens(segments(text), rng), tools=TOOLS, rng=rng)[0] == said


# vllm 39214: what one request left in the parser was in the next one's answer
def test_requests_share_nothing() -> None:
    """A parser belongs to one reply: what a reply leaves unfinished is not in another."""
    half, whole = tokens(segments('<|tool_call>call:f{a:<|"|>x')), tokens(segments('<|tool_call>call:f{a:<|"|>y<|"|>}<tool_call|>'))
    assert parsed(half, tools=TOOLS, cut=True)[0].calls == [("f", '{"a":"x')]
    assert parsed(whole, tools=TOOLS)[0].calls == [("f", '{"a":"y"}')]


CUT: dict[str, tuple[str, Said]] = {
    "a command": ('<|tool_call>call:bash{command:<|"|>rm -rf /tmp/x', Said(calls=[("bash", '{"command":"rm -rf /tmp/x')])),
    "a command without its first marker": (
        "<|tool_call>call:bash{command:rm -rf /tmp/x",
        Said(calls=[("bash", '{"command":')]),
    ),
    "a number": ("<|tool_call>call:f{n:12", Said(calls=[("f", '{"n":')])),
    "a key": ("<|tool_call>call:f{n:12,ab", Said(calls=[("f", '{"n":12')])),
    "a name": ("Sure.<|tool_call>call:ba", Said("Sure.")),
    "no name yet": ("<|tool_call>", Said()),
    "after the last bracket": ('<|tool_call>call:bash{command:<|"|>ls<|"|>}', Said(calls=[("bash", '{"command":"ls"}')])),
    "what might have become a call": ("call:ba", Said("call:ba")),
    "a label": ("<|channel>tho", Said()),
}


@pytest.mark.parametrize("case", CUT)
def test_cut_replies(case: str) -> None:
    """What the limit of tokens cuts is not made whole: part of a command may be another command; half a word is left out."""
    text, said = CUT[case]
    rng = random.Random(case)
    assert parsed(tokens(segments(text)), tools=TOOLS, cut=True)[0] == said
    assert parsed(tokens(segments(text), rng), tools=TOOLS, cut=True, rng=rng)[0] == said


def test_without_tools_calls_are_text() -> None:
    """A request without tools has no calls: what the model wrote is readable, markers included."""
    text = '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'
    assert parsed(tokens(segments(text)), tools=NO_TOOLS)[0] == Said(text)


def test_ids_are_unique() -> None:
    """call_ and 24 hex digits, another for every call."""
    made = parsed(tokens([each for _ in range(50) for each in (IDS["<|tool_call>"], "call:f{}", IDS["<tool_call|>"])]))[0]
    assert len(made.calls) == 50  # that their ids differ is checked where parts are added up
