"""Grammars of answers and of tool calls: whatever is sampled within their masks is what was asked for, by judges of others."""

import json
import math
import random
import time
from itertools import product
from typing import Any
from unittest.mock import ANY

import jsonschema
import numpy as np
import pytest

from engine.errors import GenerationFailed, InvalidRequest
from engine.front import call_grammar
from engine.front.call_grammar import CallGrammar
from engine.front.grammar import Thought, calls_answer, choice_answer, grammar, json_answer, lark_answer, regex_answer
from engine.front.text import TextProcessor
from engine.front.value_schema import ValueSchema
from engine.matcher import Matcher, Vocabulary
from engine.pieces import Pieces
from engine.step_masks import mask_words
from tests.conftest import Nano
from tests.support.engine.schemas import members, tools_of
from tests.support.engine.walker import Walker

pytestmark = pytest.mark.pure

CASES = 40


@pytest.fixture(scope="module")
def walker(nano: Nano) -> Walker:
    return Walker(TextProcessor.load(nano("31b")))


def well_called(walker: Walker, seed: int) -> bool:
    """Whether calls by two random tools name them, parse and validate."""
    rng = random.Random(seed)
    schemas = {name: members(rng, 2) for name in ("get_weather", "run-it")}
    most = rng.choice((None, 1, 2))
    answer = calls_answer(CallGrammar(walker.markers, schemas, schemas), most)
    choice = walker.said(grammar(walker.markers, answer, rng.choice((Thought.none, Thought.optional))), rng, tools_of(schemas))
    try:
        for call in choice.calls:
            jsonschema.validate(json.loads(call.text), schemas[call.name])
    except (KeyError, ValueError, jsonschema.ValidationError):
        return False
    return choice.content == "" and 1 <= len(choice.calls) <= (most or 1000)


@pytest.mark.parametrize("seeds", [range(CASES), pytest.param(range(1000, 2000), marks=pytest.mark.slow)])
def test_calls_keep_their_schemas(walker: Walker, seeds: range) -> None:
    """required and named: of random schemas every call parses, names a tool and is valid by jsonschema; nothing stands beside."""
    assert [seed for seed in seeds if not well_called(walker, seed)] == []


def test_a_mask_that_is_not_kept_is_seen(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that looks past its mask is told with the first token that the grammar forbids."""
    everything = np.full(mask_words(walker.text.vocab_size), -1, np.int32)
    monkeypatch.setattr(Matcher, "mask", lambda matcher: everything)
    for seed in range(20):
        with pytest.raises((GenerationFailed, AssertionError)):
            well_called(walker, seed)


@pytest.mark.parametrize("thought", [Thought.none, Thought.optional, Thought.forced])
def test_json_keeps_its_schema(walker: Walker, thought: Thought) -> None:
    """Random schemas: the content is valid by jsonschema and compact; a thought comes before it where it must, and nowhere else."""
    thoughts = 0
    for seed in range(CASES // 2):
        rng = random.Random(seed)
        schema = members(rng, 2)
        choice = walker.said(grammar(walker.markers, json_answer(schema), thought), rng)
        jsonschema.validate(json.loads(choice.content), schema)
        assert "\n" not in choice.content
        thoughts += walker.markers.begin_thought in choice.tokens
    assert thoughts in {Thought.none: (0,), Thought.forced: (CASES // 2,)}.get(thought, range(1, CASES // 2))


A_OR_B = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        (A_OR_B, A_OR_B | {"additionalProperties": False}),
        ({"items": A_OR_B}, {"items": A_OR_B | {"additionalProperties": False}}),
        ({"$defs": {"properties": A_OR_B}}, {"$defs": {"properties": A_OR_B | {"additionalProperties": False}}}),
        ({"anyOf": [{"type": "null"}, A_OR_B]}, {"anyOf": [{"type": "null"}, A_OR_B | {"additionalProperties": False}]}),
        ({"properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "enum": None, "additionalProperties": None} | A_OR_B,
            A_OR_B | {"additionalProperties": False},
        ),
        *(
            (schema, schema)
            for schema in (
                {"const": None}, {"type": "object"},
                A_OR_B | {"additionalProperties": True}, A_OR_B | {"patternProperties": {"^x": True}},
                A_OR_B | {"required": ["a", "c"]}, A_OR_B | {"anyOf": [{"required": ["b"]}, {"properties": {"c": True}}]},
                {"allOf": [A_OR_B, {"properties": {"c": True}}]}, {"const": A_OR_B},
            )
        ),
    ],
)
def test_objects_are_closed(schema: dict[str, Any], kept: dict[str, Any]) -> None:
    """An object has only the properties that its schema names, unless it says something of others or of the object elsewhere; what
    names some is one. Keywords that are null, and the dialect, say nothing."""
    assert json.loads(json_answer(schema).removeprefix("answer: %json ")) == kept | {"x-guidance": ANY}


def test_an_answer_has_no_key_of_its_own(walker: Walker) -> None:
    """Where a schema says nothing of other keys, answers have none; where it allows any, some answers have."""
    keys = [
        {key for seed in range(CASES // 2) for key in json.loads(walker.answer(json_answer(A_OR_B | extra), seed).content)}
        for extra in ({"type": "object"}, {"type": "object", "additionalProperties": {"type": "null"}})
    ]
    assert keys[0] == {"a", "b"}
    assert keys[1] - keys[0]


@pytest.mark.parametrize(
    ("answer", "pattern"),
    [
        (regex_answer(r"[a-c]/\d{2}"), r"[a-c]/\d{2}"), (regex_answer(r"[/a]\\/b\/\d"), r"[/a]\\/b\/\d"),
        (choice_answer(["yes", "no", 'may"be']), r"yes|no|may\"be"),
        (lark_answer('start: "x" tail\ntail: "z"+'), r"xz+"), (lark_answer('?start: "x" tail\ntail: "z"+'), r"xz+"),
    ],
)
def test_other_forms(walker: Walker, answer: str, pattern: str) -> None:
    """A regular expression, words, and a grammar of the client's own."""
    for seed in range(10):
        content = walker.answer(answer, seed).content
        assert jsonschema.Draft202012Validator({"pattern": f"^({pattern})$"}).is_valid(content)


def test_arguments_come_in_the_order_of_templates(walker: Walker) -> None:
    """Keys are written as dictsort renders them, so that a call that is sent back is the same tokens."""
    wanted = {"type": "object", "properties": {key: {"type": "null"} for key in ("b", "A", "c")}, "required": ["b", "A", "c"]}
    answer = calls_answer(CallGrammar(walker.markers, {"f": wanted}, "f"), 1)
    tokens = walker.walk(grammar(walker.markers, answer, Thought.none), random.Random(1))
    assert walker.text.decode(tokens, skip_special_tokens=False) == "<|tool_call>call:f{A:null,b:null,c:null}<tool_call|>"


def test_constants_are_of_the_type_beside_them(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of enum and const only values that the schema's type allows can be written. Planted fault: any type is allowed."""
    parts = [{"type": "string", "enum": ["a", 1, None]}, {"type": ["integer", "null"], "enum": ["a", 1, None, 2.5]}, {"const": "a"}]

    def said() -> list[set[Any]]:
        rules = [CallGrammar(walker.markers, {"f": {"properties": {"a": part}, "required": ["a"]}}, "f") for part in parts]
        answers = [[walker.answer(calls_answer(rule, 1), seed, tools_of({"f": {}})) for seed in range(20)] for rule in rules]
        return [{json.loads(answer.calls[0].text)["a"] for answer in each} for each in answers]

    assert said() == [{"a"}, {1, None}, {"a"}]
    monkeypatch.setattr(ValueSchema, "allows", lambda *_: True)
    assert said() == [{"a", 1, None}, {"a", 1, None, 2.5}, {"a"}]


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "pattern": "(?=a)b"}, "'(?=' in the schema keyword 'pattern'"),
    ({"type": "string", "pattern": "(^a)|b"}, "'pattern'"),
    ({"type": "string", "pattern": "[z-a]"}, "'pattern'"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "'allOf'"),
    ({"type": "integer", "anyOf": [{"type": "number"}, {"type": "integer"}]}, "'anyOf' with types other than its own 'type'"),
    ({"type": "string", "$ref": "#/properties/b"}, "'$ref' with types"),
    ({"type": "array", "prefixItems": [{}, {}], "maxItems": 1}, "lengths"),
    ({"type": "object", "additionalProperties": {"not": {}}}, "'not'"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"not": {}}, "'not'"),
    ({"enum": [{}]}, "enum"),
    ({"$ref": "#/nowhere"}, "#/nowhere"),
    ({"$ref": "#anchor"}, "#anchor"),
    ({"$ref": "#/properties/a"}, "#/properties/a"),
    ({"$ref": "#/properties/a/$defs/b", "$defs": {"b": {"$ref": []}}}, "$defs/b"),
    ({"type": "array", "maxItems": 100_000}, "length"),
    ({"enum": []}, "an empty list"),
    ({"enum": ["a"], "minLength": 2}, "that no text has"),
    ({"enum": [1, 2], "minimum": 3}, "minimum that no value fits"),
    ({"const": 1, "maximum": "x"}, "maximum that no value fits"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "'oneOf'"),
    ({"type": "integer", "const": "a"}, "an empty list"),
    ({"type": []}, "an empty list"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum and maximum that no value fits"),
    ({"type": "integer", "minimum": 5, "exclusiveMinimum": "4"}, "minimum and exclusiveMinimum that no value fits"),
    ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "minimum and maximum that no value fits"),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "maximum and exclusiveMinimum that no value fits"),
    ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "multipleOf that no value fits"),
    ({"type": "integer", "minimum": -(1 << 63)}, "minimum that no value fits, or that are too much"),
    ({"type": "integer", "multipleOf": 999_999_937}, "multipleOf that no value fits, or that are too much"),
    ({"type": "string", "pattern": "^a$", "minLength": 5}, "that no text has"),
    ({"type": "string", "pattern": "a.{400}b.{400}", "maxLength": 1000}, "that together are too much"),
    ({"type": "object", "properties": {"a:b": {}}}, "a:b"),
]


@pytest.mark.parametrize(("part", "says"), UNSUPPORTED)
def test_what_cannot_be_kept_is_refused_or_left_free(walker: Walker, part: dict[str, Any], says: str) -> None:
    """strict: a 400 that names it; otherwise that value is any of its types, and all others keep their schemas."""
    tools = {
        "f": {"type": "object", "properties": {"a": part, "b": {"const": 1}}, "required": ["b"]},
        "g": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    with pytest.raises(InvalidRequest, match="tools: ") as caught:
        CallGrammar(walker.markers, tools, tools)
    assert says in str(caught.value)
    assert caught.value.code == "unsupported_schema"
    free, said = calls_answer(CallGrammar(walker.markers, tools), 1), dict[str, list[Any]](f=[], g=[])
    for seed in range(12):
        (call,) = walker.answer(free, seed, tools_of({name: {} for name in "fg"})).calls
        said[call.name].append(json.loads(call.text))
    assert all(arguments == {} for arguments in said["g"])
    assert all(arguments == arguments | {"b": 1} and len(arguments) <= 2 for arguments in said["f"])
    assert all(said.values())


def values(walker: Walker, part: dict[str, Any]) -> list[Any]:
    """Of a required argument by this schema, in a dozen calls of a tool that is not strict."""
    tools = {"f": {"type": "object", "properties": {"a": part}, "required": ["a"]}}
    free = calls_answer(CallGrammar(walker.markers, tools), 1)
    calls = [walker.answer(free, seed, tools_of({"f": {}})).calls[0] for seed in range(12)]
    return [json.loads(call.text)["a"] for call in calls]


@pytest.mark.parametrize(
    ("part", "types"),
    [
        ({"type": "array", "items": {"type": "integer"}, "contains": {}}, ["array"]),
        ({"type": ["string", "null"], "pattern": "(?=a)b"}, ["string", "null"]),
        ({"type": "INTEGER", "minimum": 5, "maximum": 3, "nullable": True}, ["integer", "null"]),
        ({"type": "number", "not": {"const": 3}}, ["number"]),
        ({"type": "object", "patternProperties": {"a": {}}}, ["object"]),
        ({"enum": [True, [1]]}, ["boolean", "array"]),
    ],
)
def test_what_cannot_be_kept_keeps_its_types(
    walker: Walker, monkeypatch: pytest.MonkeyPatch, part: dict[str, Any], types: list[str]
) -> None:
    """A keyword that cannot be kept leaves the type; where all of its schema is left out, others come."""

    def are_kept() -> bool:
        return all(jsonschema.Draft202012Validator({"type": types}).is_valid(value) for value in values(walker, part))

    assert are_kept()
    monkeypatch.setattr(call_grammar, "_without", lambda *_: {})
    assert not are_kept()


def test_a_keyword_that_is_left_out_frees_itself_alone(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an array the elements are kept beside it. Planted: it frees its whole schema, and elements are anything."""
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2}

    def elements(part: dict[str, Any]) -> list[Any]:
        return [element for value in values(walker, part) for element in value]

    for freed in ({"uniqueItems": True}, {"contains": {}}, {"not": {}}):
        assert set(elements(numbers | freed)) <= set(range(10))
    monkeypatch.setattr(call_grammar, "_without", lambda *_: None)
    assert not all(isinstance(element, int) for element in elements(numbers | {"contains": {}}))


def test_a_schema_by_many_references_is_written_once(walker: Walker) -> None:
    """Under whatever names: a grammar's size is bounded while it is made, and a tool that needs more is free, or refused."""
    letters = [(letter, f"%{ord(letter):x}") for letter in "defs"] + [("/",), ("a", "%61")]
    schema = {
        "properties": {f"p{at}": {"$ref": "#/$" + "".join(path)} for at, path in enumerate(product(*letters))},
        "$defs": {"a": {"enum": [f"value {at}" for at in range(2000)]}},
    }
    assert len(CallGrammar(walker.markers, {"f": schema}).text) < 2000
    with pytest.raises(InvalidRequest, match="bytes"):
        CallGrammar(walker.markers, {"f": schema}, {"f"})


def deep(levels: int) -> dict[str, Any]:
    made = {"type": "integer"}
    for _ in range(levels):
        made = {"type": "object", "properties": {"a": made}, "required": ["a"]}
    return made


MANY: dict[str, Any] = {"type": "string", "allOf": [{"pattern": f"^(z|x{{50}}.*(a|b)*a(a|b){{{at}}}.*)$"} for at in range(10, 30)]}
BOMBS: dict[str, str] = {
    "repeats of repeats": regex_answer("((a{1,1000}){1,1000}){1,1000}"),
    "catastrophe": regex_answer("(a*)*(a*)*(a*)*b(.|x)*(.|y)*"),
    "many words": choice_answer([f"word {place}" for place in range(1000)]),
    "deep": json_answer(deep(150)),
    "intersection": lark_answer("start: A\nA: ~(" + " | ".join(f"~/.*a(a|b){{{count}}}/" for count in range(10, 30)) + ")"),
    "wide": json_answer({"anyOf": [{"type": "object", "properties": {f"k{place}": {}}} for place in range(500)]}),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_cost_little(walker: Walker, bomb: str) -> None:
    """Refused, or compiled and walked for a while, within a second of CPU; what cannot be built is refused."""
    began = time.process_time()
    rules = grammar(walker.markers, BOMBS[bomb], Thought.none)
    refused = walker.vocabulary.complaint(rules)
    try:
        matcher, rng = walker.vocabulary.matcher(rules), random.Random(1)
        matcher.mask()
        assert refused is None
        for _ in range(20):
            matcher.consume(walker._next(matcher, rng, hurry=False))
    except GenerationFailed as error:
        print(f"{bomb}: {error}")
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (lambda: json_answer({"type": "object", "uniqueItems": True, "if": {}}), "if"),
        (lambda: regex_answer("a("), "regex"),
        (lambda: regex_answer("(?=a)b"), "look"),
        (lambda: lark_answer("nothing"), ""),
        (lambda: lark_answer('other ::= "x"'), "root"),
        (lambda: lark_answer("root ::= other"), "other"),
        (lambda: lark_answer('root ::= "\\'), "neither Lark"),
        (lambda: lark_answer('root ::= "a"{' + "9" * 5000 + "}"), "neither Lark"),
        (lambda: lark_answer("root ::= " + "(" * 5000), "nested"),
        (lambda: lark_answer("\n" * 60_000), "GBNF of more than"),
        (lambda: lark_answer('root ::= "x"\n' * 600), "GBNF of more than"),
        (lambda: lark_answer('start: A // "\nA: /a&/ & /b/ // "'), "for A & B"),
        (lambda: lark_answer('start: a\na: %json {"x": ' + "9" * 5000 + "," + json.dumps(MANY)[1:]), "too many"),
        (lambda: json_answer(MANY), "too many"),
        (lambda: json_answer({"$defs": {"a": {"pattern": "b", "$ref": "#/$defs/a"}, "c": MANY}, "$ref": "#/$defs/c"}), "too many"),
        (lambda: json_answer({"properties": {"default": MANY}}), "too many"),
        (lambda: json_answer({"$defs": {"a": {"$id": "b:c", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}), "too many"),
        (lambda: choice_answer([]), "texts"),
    ],
)
def test_bad_grammars_are_refused(walker: Walker, rules: Any, says: str) -> None:
    """A sentence says what of it cannot be kept."""
    try:
        complaint = walker.vocabulary.complaint(grammar(walker.markers, rules(), Thought.none))
    except InvalidRequest as error:
        complaint = str(error)
    assert complaint is not None
    assert says in complaint


def test_what_would_cost_a_core_too_much_is_refused_unbuilt(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be built, at once, which is the planted fault: its fiftieth character takes minutes. Patterns apart, or few of one
    string, are let in."""
    few = {"allOf": MANY["allOf"][:4], "$ref": "#/$defs/a", "$defs": {"a": {"pattern": "x"}}}
    members = {f"p{at}": each for at, each in enumerate(MANY["allOf"])} | {"$id": {"type": "string"}}
    apart = {"type": "object", "properties": members}
    for schema in (few, apart, {"pattern": "a" * 4096}, {"anyOf": [*MANY["allOf"]]}):
        json_answer(schema)
    assert lark_answer('start: "a&b" /c&d/ // &\n')
    monkeypatch.setattr("engine.front.answer_schema._MOST_CHOICES", math.inf)
    matcher = walker.vocabulary.matcher(grammar(walker.markers, json_answer(MANY), Thought.none))
    assert not matcher.inner.get_error()


def test_a_vocabulary_that_cannot_write_it_ends_the_request() -> None:
    """A state without an allowed token is an error of that reply, not a loop."""
    poor = Vocabulary(Pieces((b"a", b"b", b"<end>"), frozenset({2})), [2], 3)
    matcher = poor.matcher("%llguidance {}\nstart: /[xy]+/\n")
    with pytest.raises(GenerationFailed):
        matcher.mask()


def test_no_mask_is_made_behind_an_end() -> None:
    """Where only an end may come, its mask is the last one: a row with drafts gives no token behind it, as one without."""
    known = Vocabulary(Pieces((b"a", b"b", b"<end>"), frozenset({2})), [2], 3)
    matcher = known.matcher('%llguidance {"no_forcing": true}\nstart: "ab"\n')
    assert [[mask.tobytes()[0] for mask in masks] for masks in known.masks([matcher], [[0, 1, 2, 2]])] == [[0b001, 0b010, 0b100]]


def test_nothing_is_tokenized_for_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text without a choice costs no tokenizing: any piece of it may come, and the tokenizer is not asked, which would hold
    the interpreter for as long as all that follows is tokenized, at each token. Without the grammar's head it is."""
    asked = []

    def encode(_: object, plain: str) -> list[int]:
        asked.append(plain)
        return [1] * (len(plain) // 2)

    monkeypatch.setattr("engine.matcher._Pieces.__call__", encode)
    known = Vocabulary(Pieces((b"a", b"aa", b"<end>"), frozenset({2})), [2], 3)
    rules = grammar(None, choice_answer(["a" * 5000]), Thought.none)
    matcher = known.matcher(rules)
    for _ in range(20):
        assert matcher.mask().tobytes()[0] == 0b011
        matcher.consume(1)
    assert not asked
    known.matcher(rules.replace('{"no_forcing": true}', "{}", 1)).mask()
    assert max(map(len, asked)) > 1000
