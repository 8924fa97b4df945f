"""Tool calls as a grammar: what Gemma 4's notation lets a model write of the declared tools, by their schemas.

    call: <[48]> called
    called: "call:" (tool_0 | tool_1) <[49]>
    tool_0: "get_weather" object_2
    object_2: "{" "city:" string ("," "days:" integer_3)? "}"          keys in the order in which templates render them

Only declared properties can be written. A schema with a keyword that the notation cannot keep is refused by name, or its tool can
be called with any arguments that are well-formed.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest
from engine.front.reply import Markers
from engine.matcher import MAX_GRAMMAR_BYTES

_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LENGTHS = ("minLength", "maxLength")
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions",
                          "deprecated", "readOnly", "writeOnly", "strict"))  # fmt: skip
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "string": frozenset(_LENGTHS),
    "integer": frozenset(_NUMERIC),
    "number": frozenset(_NUMERIC),
    "boolean": frozenset(),
    "null": frozenset(),
}
_BARE_KEY = re.compile(r"[\w$./@-]+(?: [\w$./@-]+)*")
_DEPTH, _RULES, _REPEATS = 64, 2048, 1024

_FREE = r"""
value: string | number | "true" | "false" | "null" | any_object | any_array
any_object: "{" (member ("," member)*)? "}"
member: KEY ":" value
any_array: "[" (value ("," value)*)? "]"
number: %json {"type": "number"}
KEY: /[\w$.\/@-]{1,64}/
"""


class UnsupportedSchema(InvalidRequest):
    """A schema that the notation's grammar cannot keep; the message names the keyword."""


class CallGrammar:
    """Rules for calls of some tools; `text` has them all, `call` is one call, `called` one behind the marker that begins it."""

    def __init__(self, markers: Markers, tools: Mapping[str, Any], strict: Collection[str] = ()) -> None:
        """`tools`: parameters' schemas by name. One that cannot be kept leaves its tool's arguments free; UnsupportedSchema where
        it is one of `strict`."""
        self._quote = f"<[{markers.quote}]>"
        self._rules: list[str] = []
        self._bytes = 0
        self._referred: dict[str, str] = {}
        arguments = {name: self._arguments(schema, name in strict) for name, schema in tools.items()}
        names = [self._rule("tool", f"{_literal(name)} {each}") for name, each in arguments.items()]
        self._rules.append(f"call: <[{markers.begin_call}]> called")
        self._rules.append(f'called: "call:" ({" | ".join(names)}) <[{markers.end_call}]>')

    @property
    def text(self) -> str:
        """The rules, without `start`."""
        common = [f"string: {self._quote} TEXT {self._quote}", r"TEXT: /(.|\n)*/"]
        return "\n".join([*self._rules, *common]) + _FREE

    def _arguments(self, schema: Any, strict: bool) -> str:
        if not schema:
            return "any_object"
        kept, size, referred = len(self._rules), self._bytes, dict(self._referred)
        try:
            return f"({self._value({'type': 'object'} | dict(schema), schema, 0)})"
        except UnsupportedSchema:
            if strict:
                raise
            del self._rules[kept:]
            self._bytes, self._referred = size, referred
            return "any_object"

    def _rule(self, kind: str, body: str) -> str:
        """A new rule's name."""
        if len(self._rules) >= _RULES:
            raise _unsupported(f"more than {_RULES} rules")
        name = f"{kind}_{len(self._rules)}"
        self._add(f"{name}: {body}")
        return name

    def _add(self, rule: str) -> None:
        self._bytes += len(rule)
        if self._bytes > MAX_GRAMMAR_BYTES:
            raise _unsupported(f"a grammar of more than {MAX_GRAMMAR_BYTES} bytes")
        self._rules.append(rule)

    def _value(self, schema: Any, root: Any, depth: int) -> str:
        """What may stand for a value, as the right side of a rule."""
        if depth > _DEPTH:
            raise _unsupported(f"nesting deeper than {_DEPTH}")
        if schema is True or schema == {}:
            return "value"
        if not isinstance(schema, Mapping):
            raise _unsupported("false as a schema")
        for keyword in ("$ref", "anyOf", "oneOf", "const", "enum"):
            if keyword in schema:
                return self._special(keyword, schema, root, depth)
        types = schema.get("type")
        if types is None:
            _only(schema, frozenset())
            return "value"
        return _either([self._typed(str(name).lower(), schema, root, depth) for name in _listed(types)])

    def _special(self, keyword: str, schema: Mapping[str, Any], root: Any, depth: int) -> str:
        _only(schema, frozenset((keyword, "type") if keyword in ("const", "enum") else (keyword,)))
        match keyword:
            case "$ref":
                return self._reference(str(schema["$ref"]), root, depth)
            case "const":
                return self._constant(schema["const"])
            case "enum":
                return _either([self._constant(value) for value in schema["enum"]])
        return _either([self._value(branch, root, depth + 1) for branch in schema[keyword]])

    def _reference(self, reference: str, root: Any, depth: int) -> str:
        """A schema that refers to itself is a rule that does."""
        key = f"{id(root)}{reference}"
        if key not in self._referred:
            name = self._referred[key] = f"ref_{len(self._referred)}"
            self._add(f"{name}: {self._value(_target(root, reference), root, depth + 1)}")
        return self._referred[key]

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {_literal(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, bool | int | float) or value is None:
            return _literal(json.dumps(value))
        raise _unsupported("an object or array in enum or const")

    def _typed(self, kind: str, schema: Mapping[str, Any], root: Any, depth: int) -> str:
        every = frozenset().union(*(_KEYWORDS[str(name).lower()] for name in _listed(schema["type"])))
        _only(schema, every | {"type"})
        match kind:
            case "object":
                return self._object(schema, root, depth)
            case "array":
                return self._array(schema, root, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                bounds = {name: schema[name] for name in _NUMERIC if name in schema}
                return self._rule("number", f"%json {json.dumps({'type': kind} | bounds)}")
            case "boolean":
                return '"true" | "false"'
        return '"null"'

    def _string(self, schema: Mapping[str, Any]) -> str:
        if not any(name in schema for name in _LENGTHS):
            return "string"
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        _check_repeats(least, most)
        terminal = f"TEXT_{len(self._rules)}"
        self._add(rf"{terminal}: /(.|\n){{{least},{'' if most is None else most}}}/")
        return f"{self._quote} {terminal} {self._quote}"

    def _array(self, schema: Mapping[str, Any], root: Any, depth: int) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        _check_repeats(least, most)
        if most == 0:
            return '"[" "]"'
        item = self._rule("item", self._value(schema.get("items", True), root, depth + 1))
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return self._rule("array", f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"')

    def _object(self, schema: Mapping[str, Any], root: Any, depth: int) -> str:
        required = frozenset(schema.get("required") or ())
        properties = dict.fromkeys(required, True) | dict(schema.get("properties") or {})
        if not properties:
            return '"{" "}"' if schema.get("additionalProperties") is False else "any_object"
        members = [(self._member(key, properties[key], root, depth), key in required) for key in sorted(properties, key=str.lower)]
        return self._rule("object", f'"{{" {self._members(members)} "}}"')

    def _member(self, key: str, schema: Any, root: Any, depth: int) -> str:
        if not _BARE_KEY.fullmatch(key):
            raise _unsupported(f"the key {key[:100]!r}")
        return self._rule("member", f"{_literal(key + ':')} ({self._value(schema, root, depth + 1)})")

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Members in order, those that are not required left out or not, commas between what is there."""
        first = behind = ""  # what may come when nothing has come yet, and when something has
        for name, required in reversed(members):
            begun = f"{name} {behind}"
            first = begun if required else f"({begun} | {first})" if first else f"({begun})?"
            behind = self._rule("more", f'"," {name} {behind}' if required else f'("," {name})? {behind}')
        return first


def _unsupported(what: str) -> UnsupportedSchema:
    return UnsupportedSchema(f"tools: {what} cannot be kept by the grammar of calls", param="tools", code="unsupported_schema")


def _only(schema: Mapping[str, Any], known: frozenset[str]) -> None:
    for keyword in schema:
        if keyword not in known and keyword not in _ANNOTATIONS:
            raise _unsupported(f"the schema keyword {keyword[:100]!r}")


def _check_repeats(least: Any, most: Any) -> None:
    if not isinstance(least, int) or not isinstance(most, int | None) or least < 0 or (most is not None and most < least):
        raise _unsupported("lengths that are no numbers, or the wrong way round")
    if max(least, most or 0) > _REPEATS:
        raise _unsupported(f"a length above {_REPEATS}")


def _target(root: Any, reference: str) -> Any:
    for step in reference.removeprefix("#").split("/")[1:]:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    if root is None or not reference.startswith("#"):
        raise _unsupported(f"the reference {reference[:100]!r}")
    return root


def _listed(types: Any) -> list[Any]:
    return types if isinstance(types, list) else [types]


def _either(alternatives: Sequence[str]) -> str:
    return " | ".join(alternatives)


def _literal(text: str) -> str:
    return json.dumps(text)
