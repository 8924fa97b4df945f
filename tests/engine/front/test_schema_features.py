"""What pydantic writes into schemas, as an answer's form and as a strict tool: whatever is sampled, pydantic takes."""

import json
import random
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema
import pytest
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, SecretStr, ValidationError, create_model

from engine.errors import InvalidRequest
from engine.front import answer_schema, call_grammar, string_schema, value_schema
from engine.front.call_grammar import CallGrammar
from engine.front.grammar import calls_answer, json_answer
from engine.front.string_schema import SchemaError, expressions
from engine.front.text import TextProcessor
from engine.front.tools import Tools
from tests.conftest import Nano
from tests.support.engine.schemas import tools_of, wide_members
from tests.support.engine.tool_lists import parameters
from tests.support.engine.walker import Walker

pytestmark = pytest.mark.pure

WALKS = 4


@pytest.fixture(scope="module")
def walker(nano: Nano) -> Walker:
    return Walker(TextProcessor.load(nano("31b")))


class Colour(Enum):
    red = "red"
    blue = "light blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]


class Tree(BaseModel):
    value: int | None = None
    branches: "list[Tree]" = []


def having(kind: Any, **more: Any) -> type[BaseModel]:
    """A model with one required member of that type."""
    return create_model("Having", it=(Annotated[kind, Field(**more)], ...))


MODELS: dict[str, type[BaseModel]] = {
    "optional": having(int | None),
    "default": create_model("Default", it=(int, 3), other=(str, ...)),
    "enum": having(Colour),
    "literals": having(Literal["a", 2] | None),
    "const": having(Literal["x"]),
    "union": having(Cat | Dog | None),
    "discriminated": having(Cat | Dog, discriminator="kind"),
    "nested and strict": Strict,
    "recursive": Tree,
    "pattern": having(str, pattern=r"^[a-z]{2}-\d+$"),
    "pattern and length": having(str, pattern="^[ab]+$", min_length=2, max_length=4),
    "bounds": having(int, ge=-3, lt=70),
    "fractions": having(float, gt=0, le=1.5),
    "multiple": having(int, multiple_of=3),
    "length": having(str, min_length=1, max_length=5),
    "long": having(str, min_length=1, max_length=4000),
    "list": having(list[int], min_length=1, max_length=3),
    "lists": having(list[list[bool]]),
    "tuple": having(tuple[int, str, bool]),
    "tuple with a tail": having(tuple[int, str] | tuple[()]),
    "dict": having(dict[str, int]),
    "dict of models": having(dict[str, Cat]),
    "anything": having(Any),
    "date": having(date),
    "datetime": having(datetime),
    "time": having(time),
    "duration": having(timedelta),
    "uuid": having(UUID),
    "url": having(AnyUrl),
    "ipv4": having(IPv4Address),
    "ipv6": having(IPv6Address),
    "formats that nobody knows": create_model("Login", default=(SecretStr, ...), token=(bytes, ...), tries=(int, ...)),
}


def called(walker: Walker, schema: dict[str, Any], seed: int, *, strict: bool = True) -> str:
    """The arguments of a call that is sampled by this schema."""
    schemas = {"f.g-h": schema}
    calls = CallGrammar(walker.markers, schemas, schemas if strict else ())
    (call,) = walker.answer(calls_answer(calls, 1), seed, tools_of(schemas)).calls
    assert call.name == "f.g-h"
    return call.text


def answered(walker: Walker, schema: dict[str, Any], seed: int) -> str:
    """An answer that is sampled by it."""
    return walker.answer(json_answer(schema), seed).content


def invalid(schema: dict[str, Any], text: str) -> bool:
    return not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def refused(model: type[BaseModel], text: str) -> bool:
    """By pydantic, which reads formats, too."""
    try:
        model.model_validate_json(text)
    except ValidationError:
        return True
    return False


@pytest.mark.parametrize("name", MODELS)
def test_what_pydantic_writes_is_kept(walker: Walker, name: str) -> None:
    """As the form of an answer, and as a strict tool's parameters: each reply is valid by jsonschema, each call by the model."""
    model = MODELS[name]
    schema = model.model_json_schema()
    for seed in range(WALKS):
        call, answer = called(walker, schema, seed), answered(walker, schema, seed)
        assert not invalid(schema, call), call
        assert not refused(model, call), call
        assert not invalid(schema, answer), answer


FREE = {"pattern": "pattern", "format": "date", "additionalProperties": "dict", "prefixItems": "tuple"}


def without(schema: Any, keyword: str) -> Any:
    """A schema in which `keyword` stands nowhere."""
    if isinstance(schema, dict):
        return {key: without(value, keyword) for key, value in schema.items() if key != keyword}
    return [without(value, keyword) for value in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("keyword", FREE)
def test_a_keyword_that_is_left_out_is_seen(walker: Walker, keyword: str) -> None:
    """Of calls by a schema without it the model takes hardly any."""
    model = MODELS[FREE[keyword]]
    schema = model.model_json_schema()
    rest = without(schema, keyword)
    assert rest != schema
    wrong = sum(refused(model, called(walker, rest, seed)) for seed in range(20))
    assert wrong > 10


def test_annotations_of_others_say_nothing(walker: Walker) -> None:
    """OpenAPI's and anybody's keywords leave a strict tool's schema as it is. Planted: one that refuses values is a 400."""
    about = {"nullable": False, "example": 5, "x-order": 1, "xml": {}, "contentMediaType": "text/plain"}
    schema = {"type": "object", "properties": {"it": {"type": "integer", **about}}, "required": ["it"], **about}
    for seed in range(WALKS):
        assert not invalid(schema, called(walker, schema, seed))
    with pytest.raises(InvalidRequest, match="minProperties"):
        called(walker, schema | {"minProperties": 1}, 1)


def test_what_openapi_calls_nullable_may_be_null(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates show it to the model; what is read then is a null, no text; an answer may have one, too. Planted: none is."""
    values = [{"type": "string", "nullable": True}, {"enum": ["a"], "nullable": True}]
    schemas = [{"type": "object", "properties": {"it": value}, "required": ["it"]} for value in values]

    def nulls(write: Callable[[Walker, dict[str, Any], int], str]) -> int:
        return min(sum(json.loads(write(walker, schema, seed))["it"] is None for seed in range(8)) for schema in schemas)

    for module, write in ((call_grammar, called), (answer_schema, answered)):
        assert 0 < nulls(write) < 8
        monkeypatch.setattr(module, "as_json_schema", lambda schema: {key: schema[key] for key in schema if key != "nullable"})
        assert not nulls(write)


@pytest.mark.parametrize(
    ("schema", "others"),
    [
        ({"type": "integer", "format": "int32", "enum": [0, 1]}, [{"enum": [0, 1]}, {"minimum": 0, "maximum": 1}]),
        ({"type": "string", "anyOf": [{"enum": ["a"]}, {"pattern": "^b$"}]}, [{"enum": ["a", "b"]}]),
        ({"enum": ["", "a", "bcd", 2, 7, True], "minLength": 2, "minimum": 3}, [{"enum": ["bcd", 7, True]}]),
        ({"enum": ["b/\n c", 'b"', "é👍", "a"], "pattern": "^[^a]", "maxLength": 4}, [{"enum": ['b"', "é👍"]}]),
        ({"type": ["string", "null"], "enum": ["x", "2024-02-29", None], "format": "date"}, [{"enum": ["2024-02-29", None]}]),
        ({"enum": [0, 0.5, 3, 4, 6], "multipleOf": 3, "exclusiveMinimum": 0, "maximum": 5}, [{"const": 3}]),
        ({"const": "a", "pattern": "a|b"}, [{"const": "a"}]),
        ({"type": "integer", "minimum": 5, "exclusiveMinimum": True, "maximum": 6}, [{"const": 6}]),  # draft 4's
        ({"type": "integer", "enum": [1.0, 2.5]}, [{"const": 1}]),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"const": 1}}, [{"type": "object"}]),
    ],
)
def test_what_stands_beside_says_what_it_says(walker: Walker, schema: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Of a value's schema, which a strict tool may have, and an answer's form: what is sampled fits what it comes to."""
    wanted = {"type": "object", "properties": {"it": schema}, "required": ["it"], "additionalProperties": False}
    for seed in range(WALKS):
        for text in (called(walker, wanted, seed), answered(walker, wanted, seed)):
            assert not invalid(wanted, text)
            assert not any(invalid({"properties": {"it": other}}, text) for other in others)


def test_bounds_that_are_left_out_beside_an_enum_are_seen(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nothing beside an enum says anything of its numbers, or of its texts."""
    schema = {"properties": {"it": {"enum": [1, 9, "a", "bc"], "minimum": 5, "minLength": 2}}, "required": ["it"]}

    def values() -> set[Any]:
        return {json.loads(called(walker, schema, seed))["it"] for seed in range(20)}

    assert values() == {9, "bc"}
    monkeypatch.setattr(CallGrammar, "_number", lambda calls, kinds, _: calls._rule("number", f"%json {json.dumps(kinds)}"))
    monkeypatch.setattr(call_grammar, "expressions", lambda schema: expressions({"enum": schema["enum"]}))
    assert values() == {1, 9, "a", "bc"}


def declared(seed: int) -> dict[str, Any]:
    """The parameters of a tool of a real server."""
    return parameters(random.Random(seed))


def random_schema(seed: int) -> dict[str, Any]:
    """A schema of any keywords."""
    return wide_members(random.Random(seed))


def kept(walker: Walker, schema: dict[str, Any], seed: int, reasons: str) -> str:
    """What became of a strict call by a schema, which may be refused for these reasons."""
    try:
        text = called(walker, schema, seed)
    except InvalidRequest as error:
        return "refused" if re.search(reasons, str(error)) else str(error)
    return f"seed {seed}: {text}" if invalid(schema, text) else "valid"


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(100, 1100), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("draw", "reasons"), [(random_schema, "'oneOf'|the reference"), (declared, "no reason")]
)
def test_random_schemas_are_kept(walker: Walker, draw: Callable[[int], dict[str, Any]], reasons: str, seeds: range) -> None:
    """Of strict calls by schemas of every keyword, or by those of real servers' tools, each is valid by jsonschema; oneOf with
    branches that overlap is refused."""
    outcomes = [kept(walker, draw(seed), seed, reasons) for seed in seeds]
    assert set(outcomes) <= {"valid", "refused"}
    assert outcomes.count("valid") > 0.6 * len(seeds)


def test_branches_that_both_hold_are_not_one_of(walker: Walker) -> None:
    """oneOf is kept where types, constants, the constants of required members or keys that the other branch may not have tell its
    branches apart, and refused elsewhere."""
    cat, dog = Cat.model_json_schema(), Dog.model_json_schema()
    kindless = {"type": "object", "properties": dog["properties"], "required": ["name"]}
    call = {"type": "object", "properties": {"call": cat}, "required": ["call"], "additionalProperties": False}
    open_call = {"type": "object", "properties": {"call": {"type": "string"}}}
    good = [[cat, dog], [call, dog], [call, {"type": "object", "required": ["name"]}]]
    good += [[{"type": "string"}, {"type": ["integer", "null"]}], [{"const": 1}, {"enum": ["1", 2]}]]
    bad = [[cat, kindless], [{"type": "number"}, {"type": "integer"}], [{"const": 1}, {"enum": [1, 2]}], [{}, cat]]
    bad += [[call, open_call], [open_call, dog]]
    for branches in good:
        schema = {"type": "object", "properties": {"it": {"oneOf": branches}}, "required": ["it"]}
        for seed in range(WALKS):
            jsonschema.validate(json.loads(called(walker, schema, seed)), schema)
    for branches in bad:
        schema = {"type": "object", "properties": {"it": {"oneOf": branches}}, "required": ["it"]}
        with pytest.raises(InvalidRequest, match="oneOf"):
            called(walker, schema, 1)
        json.loads(called(walker, schema, 1, strict=False))


@pytest.mark.parametrize(
    ("declared", "free"),
    [
        ({}, True),
        ({"type": "object"}, True),
        ({"properties": {}, "additionalProperties": True}, True),
        ({"properties": {}}, False),
        ({"type": "object", "properties": {}, "additionalProperties": False}, False),
        (None, False),
    ],
)
def test_a_tool_without_parameters(walker: Walker, declared: dict[str, Any] | None, free: bool) -> None:
    """Its arguments are an empty object; where its schema names none and forbids none, any."""
    schema = Tools([{"type": "function", "function": {"name": "f", "parameters": declared}}]).parameters("f").schema
    assert any(json.loads(called(walker, schema, seed)) for seed in range(WALKS)) is free


def test_a_hundred_properties(walker: Walker) -> None:
    """Half of them required: all calls are valid, and the grammar is compiled in well under its two seconds."""
    properties = {f"property_{place}": {"$ref": "#/$defs/A%20digit"} for place in range(100)}
    required = [f"property_{place}" for place in range(0, 100, 20)]
    definitions = {"A digit": {"type": "integer", "minimum": 0, "maximum": 9}}
    for others in (False, {"type": "boolean"}):
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": others}
        for seed in range(3):
            arguments = json.loads(called(walker, schema | {"$defs": definitions}, seed))
            jsonschema.validate(arguments, schema | {"$defs": definitions})


PATTERNS: list[tuple[str, list[str], list[str]]] = [
    ("ab", ["ab", "xaby", "\nab"], ["a", ""]),
    ("^ab", ["ab", "abx"], ["xab"]),
    ("ab$", ["ab", "xab"], ["abx"]),
    ("^a|b$", ["a", "ax", "xb", "b"], ["xa", "bx"]),
    ("^(a|b)$", ["a", "b"], ["ab", ""]),
    (r"^[|^$()]\$x$", ["|$x", "($x"], ["x$x"]),
    (r"^a/b\/c$", ["a/b/c"], ["a/b"]),
    ("", ["", "anything"], []),
    (r"^\d\w\s$", ["1a ", "7_\n"], ["\u0661a ", "1\u00e9 ", "1a\u2003"]),
    (r"^[\w-.]+@[\d]$", ["a-b.c@1"], ["a+b@1", "\u00e9@1", "a@\u0661"]),
    (r"^[^\d\]-]$", ["a", "\\"], ["1", "]", "-"]),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), PATTERNS)
def test_patterns_are_searched_for(pattern: str, good: list[str], bad: list[str]) -> None:
    """As JSON Schema means them, by Python's regular expressions."""
    (made,) = expressions({"pattern": pattern})
    assert [re.fullmatch(made, text) is not None for text in good + bad] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    "schema",
    [{"pattern": 5}, {"pattern": "("}, {"pattern": "a" * 5000}, {"minLength": -1}, {"maxLength": "a"}],
)
def test_what_is_no_string_schema_is_refused(schema: dict[str, Any]) -> None:
    """By the keyword's name, or as a length."""
    with pytest.raises(SchemaError, match=r"'pattern'|length"):
        expressions(schema)


def test_patterns_are_bounded(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compiled by itself: no request has more of them than a tenth of a second's."""
    compiled = []
    monkeypatch.setattr(string_schema, "_compiles", lambda expression: not compiled.append(expression))
    either = [{"type": "string", "pattern": f"a{place}"} for place in range(5000)]
    schema = {"type": "object", "properties": {"it": {"anyOf": either}}}
    CallGrammar(walker.markers, {f"f{place}": schema for place in range(9)})
    assert len(compiled) == call_grammar._PATTERNS


def test_comparisons_are_bounded(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches of oneOf are compared pair by pair: a few thousand pairs a request, and no more."""
    compared = []
    monkeypatch.setattr(value_schema, "_are_apart", lambda one, other: not compared.append(1))
    schema = {"type": "object", "properties": {"it": {"oneOf": [{"const": place} for place in range(60)]}}}
    CallGrammar(walker.markers, {f"f{place}": schema for place in range(9)})
    wide = {"type": "object", "properties": {"it": {"oneOf": [{"const": place} for place in range(5000)]}}}
    CallGrammar(walker.markers, {"f": wide})
    assert 60 * 59 // 2 <= len(compared) <= value_schema.Comparison().pairs
