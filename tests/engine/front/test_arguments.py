"""Arguments in Gemma's notation to JSON: what the schema changes, what streams when, and what it costs."""

import gc
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from engine.front.arguments import ArgumentsParser
from engine.front.notation import MARK
from engine.front.value_schema import ValueSchema
from tests.support.engine.replies import QUOTE, Segment, segments

pytestmark = pytest.mark.pure

STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def made(text: str, schema: Any = True, *, size: int | None = None) -> str:
    """The JSON of `text`, which begins behind the opening bracket; in pieces of `size` characters."""
    parser = ArgumentsParser(ValueSchema(schema, schema))
    for part in pieces(segments(text), size):
        parser.push(MARK if part == QUOTE else str(part))
    parser.end()
    return parser.take()


def pieces(parts: Iterable[Segment], size: int | None) -> Iterable[Segment]:
    for part in parts:
        if isinstance(part, int) or size is None:
            yield part
        else:
            yield from (part[at : at + size] for at in range(0, len(part), size))


def properties(**schemas: Any) -> dict[str, Any]:
    return {"type": "object", "properties": schemas}


SCHEMAS: list[tuple[str, Any, str]] = [
    ("a:12}", properties(a=STRING), '{"a":"12"}'),
    ("a:true}", properties(a=STRING), '{"a":"true"}'),
    ("a:null}", properties(a=STRING), '{"a":null}'),
    ("a:12}", properties(a={"type": ["string", "integer"]}), '{"a":12}'),
    ("a:1.5}", properties(a={"anyOf": [STRING, INTEGER]}), '{"a":"1.5"}'),
    ("a:12}", properties(a={"$ref": "#/$defs/name"}) | {"$defs": {"name": STRING}}, '{"a":"12"}'),
    ('a:<|"|>12<|"|>}', properties(a=STRING), '{"a":"12"}'),
    ('a:<|"|>12<|"|>}', properties(a=INTEGER), '{"a":12}'),
    ('a:<|"|>true<|"|>}', properties(a={"type": "boolean"}), '{"a":true}'),
    ('a:<|"|>twelve<|"|>}', properties(a=INTEGER), '{"a":"twelve"}'),
    ('a:<|"|>1.5<|"|>}', properties(a=INTEGER), '{"a":"1.5"}'),
    ('a:<|"|>[1,"x"]<|"|>}', properties(a={"type": "array"}), '{"a":[1,"x"]}'),
    ("a:True,b:None}", properties(a={"type": "boolean"}, b={"type": ["integer", "null"]}), '{"a":true,"b":null}'),
    ("a:True}", True, '{"a":"True"}'),
    ("a:[1,true,2,3]}", properties(a={"prefixItems": [STRING, {"type": "boolean"}], "items": STRING}), '{"a":["1",true,"2","3"]}'),
    ("a:12}", {"anyOf": [properties(a=INTEGER, b=STRING), properties(a=STRING)]}, '{"a":12}'),
    ('a:<|"|>12<|"|>}', {"anyOf": [properties(a=INTEGER, b=STRING), properties(a=STRING)]}, '{"a":"12"}'),
    ("a:12}", {"anyOf": [properties(a=True), properties(a=STRING)]}, '{"a":12}'),
    ("a:[true]}", properties(a={"anyOf": [{"prefixItems": [{"type": "boolean"}]}, {"prefixItems": [STRING]}]}), '{"a":[true]}'),
    ("a:[1,2,3]}", properties(a={"items": [STRING, INTEGER], "additionalItems": STRING}), '{"a":["1",2,"3"]}'),
    ("a:[1,2]}", properties(a={"items": [STRING]}), '{"a":["1",2]}'),
    ("a:[1,2]}", properties(a={"items": [STRING], "additionalItems": False}), '{"a":["1",2]}'),
    ("a:[1,2]}", properties(a={"prefixItems": [], "items": STRING}), '{"a":["1","2"]}'),
    ("a:[1,[2]]}", properties(a={"items": [STRING, {"items": [INTEGER]}]}), '{"a":["1",[2]]}'),
    ('a:[1,<|"|>2<|"|>]}', properties(a={"type": "array", "items": STRING}), '{"a":["1","2"]}'),
    ("a:{b:1}}", properties(a={"type": "object", "additionalProperties": STRING}), '{"a":{"b":"1"}}'),
    ("a:5}", properties(a={"enum": ["5", "6"]}), '{"a":"5"}'),
    ("a:5}", properties(a={"const": 5}), '{"a":5}'),
    ('नाम:<|"|>x<|"|>,उम्र:3,ชื่อ:<|"|>y<|"|>,e\u0301:1}', True, '{"नाम":"x","उम्र":3,"ชื่อ":"y","e\u0301":1}'),
    (
        'First Name:<|"|>x<|"|>,Last Name:<|"|>y<|"|>}',
        properties(**{"First Name": STRING, "Last Name": STRING}),
        '{"First Name":"x","Last Name":"y"}',
    ),
]


@pytest.mark.parametrize(("text", "schema", "expected"), SCHEMAS)
def test_the_schema_decides_what_is_ambiguous(text: str, schema: Any, expected: str) -> None:
    """A bare number where only a string may stand is one; a quoted one where none may is a number; everything else as written."""
    assert {made(text, schema, size=size) for size in (None, 1, 2, 3)} == {expected}


def test_references_in_circles_end() -> None:
    """A schema that refers to itself is followed a bounded way."""
    schema = properties(a={"$ref": "#/properties/a"}, b={"$ref": "#/nowhere"}, c={"anyOf": [{"$ref": "#"}] * 3})
    assert made("a:1,b:2,c:{a:3}}", schema) == '{"a":1,"b":2,"c":{"a":3}}'


def test_strings_go_out_as_they_come() -> None:
    """Every piece of a string is there at once, escaped; a number when it is over; what ends a string when that is certain."""
    parser = ArgumentsParser(ValueSchema())
    steps = [
        ("te", "{"),
        ("xt:", '"text":'),
        (QUOTE, '"'),
        ('say "', 'say \\"'),
        ("ü\n", "ü\\n"),
        (QUOTE, ""),
        (",", ""),
        ("n:", '","n":'),
        ("1", ""),
        ("2", ""),
        (",", "12"),
        ("xs:[1,2,3", ',"xs":[1,2'),
        ("]}", ",3]}"),
    ]
    for part, out in steps:
        parser.push(MARK if part == QUOTE else str(part))
        assert parser.take() == out, part
    assert parser.ended


PAIRS = 20_000


SHAPES: dict[str, Callable[[], list[Segment]]] = {
    "a string": lambda: ["a:", QUOTE, *["some 'text' \"\\ "] * PAIRS, QUOTE, "}"],
    "quotes": lambda: ["a:", QUOTE, *["x", QUOTE] * PAIRS, "}"],
    "numbers": lambda: ["a:[", *["12345,"] * PAIRS, "1]}"],
    "bare strings": lambda: ["a:[", *["word, "] * PAIRS, "x]}"],
    "one bare string": lambda: ["a:", *["word "] * PAIRS, "}"],
    "bare members": lambda: [*["key:word, "] * PAIRS, "}"],
    "a key without end": lambda: [*["key "] * PAIRS],
    "escapes": lambda: ['a:"', *['\\"\\u00'] * PAIRS, '"}'],
    "half escapes": lambda: ["a:'", *["\\"] * PAIRS, "'}"],
    "nested": lambda: ["a:", *["[{b:"] * PAIRS],
    "brackets": lambda: ["a:", *["[", "]", "}", ")"] * PAIRS],
    "space": lambda: ["a:", QUOTE, "x", QUOTE, *["  "] * PAIRS, "}"],
    "members": lambda: [*["key:", QUOTE, "word", QUOTE, ","] * PAIRS, "}"],
}


def cost(parts: list[Segment]) -> float:
    """CPU seconds to read them a token at a time; the least of three. What other tests have left is not collected meanwhile."""
    taken = []
    gc.freeze()
    for _ in range(3):
        parser, began = ArgumentsParser(ValueSchema()), time.process_time()
        for part in parts:
            parser.push(MARK if part == QUOTE else str(part))
            parser.take()
        parser.end()
        taken.append(time.process_time() - began)
    gc.unfreeze()
    return min(taken)


@pytest.mark.parametrize("shape", SHAPES)
def test_time_is_linear(shape: str) -> None:
    """200 kB of anything cost ten times what 20 kB cost, not a hundred times, and well under a second."""
    parts = SHAPES[shape]()
    short, long = cost(parts[: len(parts) // 10]), cost(parts)
    assert long < 25 * short + 0.05, (short, long)
    assert long < 4


def test_a_parser_that_reads_anew_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound above does not hold for one that looks at all of a string's text at every token."""
    push = ArgumentsParser.push

    def anew(parser: ArgumentsParser, text: str) -> None:
        push(parser, text)
        json.dumps("".join(parser._out))

    monkeypatch.setattr(ArgumentsParser, "push", anew)
    monkeypatch.setattr(ArgumentsParser, "take", lambda parser: "")
    parts = SHAPES["a string"]()[:5000]
    assert cost(parts) > 25 * cost(parts[:500]) + 0.05
