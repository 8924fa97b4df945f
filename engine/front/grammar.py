"""What a reply must look like, as one grammar: a thought first, where thinking is on, then an answer of some form, or tool calls.

    start: <[100]> "thought\\n" thought <[101]> answer            answer: %json {...}, a regex, words, Lark, or calls

JSON may have one space after a comma or colon: a model that has learned to write one loses its thread without it. Models that
may write any white space write it without end. What a grammar leaves no choice in the model writes in tokens of its own choice:
to force the tokenizer's upon it llguidance would tokenize all that follows at each token, under the interpreter's lock, which
the whole batch waits for (6 ms of 10 kB).
"""

import enum
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.errors import InvalidRequest
from engine.front.call_grammar import CallGrammar
from engine.front.reply import Markers
from engine.front.string_schema import lark_regex
from engine.front.tools import SCHEMAS_BY_NAME
from engine.front.value_schema import Comparison, Schema, as_json_schema, listed, referred
from engine.protocol import JsonObject

_OTHERS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_COMBINED = ("allOf", "not", "if", "dependentSchemas")
_BRANCHES = ("anyOf", "oneOf", "$ref")
_VALUES = frozenset(("const", "enum", "default", "examples"))
_MAX_CHOICES = 1024
_MOST_CHOICES = 200_000  # a tenth of a second
_MAX_GBNF, _MAX_GBNF_RULES = 16 << 10, 512
_HEAD = '%llguidance {"no_forcing": true}\n'
_SPACING = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\])+/?|(?:#|//).*')  # what has no end goes to the end: in one pass
_NESTED_JSON = re.compile(r"%json\s*")
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|\??start[ \t]*:(?!:))", re.MULTILINE)


# Whether a thought comes before the answer; `begun`: the prompt has begun it.
Thought = enum.Enum("Thought", "none optional forced begun")


def json_answer(schema: Schema) -> str:
    """JSON by a schema."""
    return f"answer: {_json(schema)}"


def _without_one_of(root: Schema, comparison: Comparison, schema: JsonObject) -> JsonObject:
    """With anyOf for oneOf, where that is the same: llguidance compares no references."""
    branches = schema.get("oneOf")
    if isinstance(branches, list) and "anyOf" not in schema and comparison.are_apart(branches, root):
        schema["anyOf"] = schema.pop("oneOf")
    return schema


class _Combination(Exception):
    """A schema says something of an object that another one describes, too."""


def _close(schema: JsonObject) -> JsonObject:
    """What has `properties` is an object, and has no more than these where it does not say what others may be, as in calls: a model
    that may write any key writes keys without end."""
    properties = schema.get("properties")
    if schema.keys() & _COMBINED or (properties and schema.keys() & _BRANCHES):
        raise _Combination
    if isinstance(properties, Mapping):
        schema.setdefault("type", "object")
        if not schema.keys() & _OTHERS and properties.keys() >= set(map(str, listed(schema.get("required")))):
            schema["additionalProperties"] = False
    return schema


def _changed(schema: Any, change: Callable[[JsonObject], JsonObject]) -> Any:
    """A schema, each object in which is what `change` makes of it, the innermost first."""
    if isinstance(schema, list):
        return [_changed(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = dict(schema)
    for key in schema.keys() - _VALUES:
        inner = schema[key]
        named = key in SCHEMAS_BY_NAME and isinstance(inner, Mapping)
        kept[key] = {name: _changed(subschema, change) for name, subschema in inner.items()} if named else _changed(inner, change)
    return change(kept)


def _choices(schema: Any, root: Any, known: dict[str, float]) -> float:  # noqa: C901 - a case for each keyword
    """A bound of what llguidance tries for a character of one string: each part of a pattern with each of all others that hold.
    `known`: of what references point at."""
    if isinstance(schema, list):
        return max((_choices(branch, root, known) for branch in schema), default=1)
    if not isinstance(schema, Mapping):
        return 1
    apart, together = [1.0], 1.0
    for item in schema.items():
        match item:
            case "$defs" | "definitions", _ if schema is root:
                pass
            case "$id", str() if schema is not root:  # references in it point elsewhere
                return math.inf
            case "pattern", str(text):
                apart.append(4 + len(text) / 6)
            case "$ref", str(name):
                if name not in known:
                    known[name] = 1
                    known[name] = _choices(referred(root, name), root, known) if name[1:2] in ("", "/") else _MOST_CHOICES
                together *= known[name]
            case "allOf", [*schemas]:
                together *= math.prod(_choices(branch, root, known) for branch in schemas)
            case "anyOf" | "oneOf" | "patternProperties", inner:
                together *= _choices(inner, root, known)
            case _, inner:
                apart.append(_choices(inner, root, known))
    return max(apart) * together


def _check_patterns(schema: Any) -> None:
    """InvalidRequest: one string has so many patterns that a character could take a core minutes, and gigabytes; RecursionError."""
    if _choices(schema, schema, {}) > _MOST_CHOICES:
        raise InvalidRequest("by the schema's allOf, $ref and branches one string has to match too many or too long patterns")


def _json(schema: Schema) -> str:
    _check_patterns(schema)
    kept = _changed({**schema, "nullable": False}, as_json_schema)  # references begin at the root
    kept = _changed(kept, partial(_without_one_of, kept, Comparison()))
    with suppress(_Combination):  # then it stays as it is
        kept = _changed(kept, _close)
    return f"%json {json.dumps(kept | {'x-guidance': _SPACING})}"


class Structure(NamedTuple):
    """A part of a structural tag: JSON by `schema` between two texts; `trigger` is how `begin` begins."""

    trigger: str
    begin: str
    schema: Schema
    end: str


def tagged_answer(structures: Sequence[Structure]) -> str:
    """Free text in which every trigger begins one of its structures."""
    rules = ["answer: (" + " | ".join(f"tag_{index}" for index in range(len(structures))) + ")* FREE", r"FREE: /(.|\n)*/"]
    for index, structure in enumerate(structures):
        texts = structure.begin.removeprefix(structure.trigger), structure.end
        begin, end = (f" {json.dumps(text)}" if text else "" for text in texts)
        rules.append(f"trigger_{index}[lazy]: FREE {json.dumps(structure.trigger)}")
        rules.append(f"tag_{index}: trigger_{index}{begin} {_json(structure.schema)}{end}")
    return "\n".join(rules)


def regex_answer(pattern: str) -> str:
    """Text that matches a regular expression from its first to its last character."""
    return f"answer: ANSWER\nANSWER: {lark_regex(pattern)}"


def choice_answer(choices: Sequence[str]) -> str:
    if not choices or len(choices) > _MAX_CHOICES or "" in choices:
        raise InvalidRequest(f"must be 1 to {_MAX_CHOICES} texts that are not empty")
    return "answer: " + " | ".join(json.dumps(choice) for choice in choices)


def lark_answer(grammar: str) -> str:
    """A grammar of the client's own, in Lark with a rule `start`, or in GBNF with a rule `root`."""
    rules = (grammar if _LARK.search(grammar) else _from_gbnf(grammar)).replace("%llguidance {}", "", 1)
    if "&" in _QUOTED.sub("", rules):
        raise InvalidRequest("& between terminals may take for ever: write ~(~A | ~B) for A & B")
    for nested in _NESTED_JSON.finditer(rules):
        with suppress(ValueError):  # llguidance says why
            _check_patterns(json.JSONDecoder(parse_int=float).raw_decode(rules, nested.end())[0])
    return f"answer: %lark {{\n{rules}\n}}"


def _from_gbnf(grammar: str) -> str:
    """Translate to Lark. It takes the square of the rules' number, so that there is a bound."""
    if len(grammar) > _MAX_GBNF or grammar.count("::=") > _MAX_GBNF_RULES:
        most = f"{_MAX_GBNF} characters or {_MAX_GBNF_RULES} rules"
        raise InvalidRequest(f"GBNF of more than {most}: write it in Lark, with a rule start")
    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise InvalidRequest("it is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - what is wrong with a grammar comes as bare Exception, IndexError, ValueError, too
        raise InvalidRequest(f"neither Lark with a rule start nor GBNF: {error}"[:300]) from None


def calls_answer(calls: CallGrammar, most: int | None, answer: str | None = None) -> str:
    """One call or more, `most` of them; or an answer of a form, where that is one."""
    some_calls = f"call{{1,{'' if most is None else most}}}"
    if answer is None:
        return f"answer: {some_calls}\n{calls.text}"
    return f"answer: form | {some_calls}\nform:{answer.removeprefix('answer:')}\n{calls.text}"


def begun_call(calls: CallGrammar) -> str:
    """A whole grammar of what follows the marker that begins a call."""
    return f"{_HEAD}start: called\n{calls.text}"


def grammar(markers: Markers | None, answer: str, thought: Thought) -> str:
    """The whole of it. Without markers, as in completions, there are no thoughts."""
    if markers is None:
        return f"{_HEAD}start: answer\n{answer}\n"
    inside = f"thought <[{markers.end_thought}]>"
    before = f'<[{markers.begin_thought}]> "thought\\n" {inside}'
    starts = {
        Thought.none: "answer",
        Thought.optional: f"({before})? answer",
        Thought.forced: f"{before} answer",
        Thought.begun: f"{inside} answer",
    }
    return f"{_HEAD}start: {starts[thought]}\nthought: /(.|\\n)*/\n{answer}\n"
