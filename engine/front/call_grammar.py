"""Tool calls as a grammar of Gemma 4's notation, by the declared tools' schemas.

    call: <[48]> called
    called: "call:" (tool_0 | tool_1) <[49]>
    tool_0: "get_weather" object_2
    object_2: "{" "city:" any_string ("," "days:" number_3)? "}"       keys in the order in which templates render them

Undeclared properties need the schema's description. Keywords that the notation cannot enforce are
refused in strict schemas, else left out and logged.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from engine.errors import InvalidRequest
from engine.front.notation import KEY_CHARACTER_OF_GRAMMARS
from engine.front.reply import Markers
from engine.front.string_schema import KEYWORDS as OF_STRINGS
from engine.front.string_schema import SchemaError, compiles, expressions, lark_regex, repeats
from engine.front.value_schema import (
    NUMERIC,
    Comparison,
    Schema,
    ValueSchema,
    as_json_schema,
    has_few_digits,
    listed,
    referred,
    types_of,
)
from engine.matcher import MAX_GRAMMAR_BYTES

_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": OF_STRINGS,
    "integer": (*NUMERIC, "format"),  # which says how wide programs store it, and that is not kept
    "number": (*NUMERIC, "format"),
    "boolean": (),
    "null": (),
}
_BARE_KEY = re.compile(r"""(?!\s)[^"':=,{}\n]+(?<!\s)""")  # what reads as a key without quotes
_REFERRING = ("$ref", "anyOf", "oneOf", "allOf")
# All keywords by which a schema refuses values; any other is an annotation.
_CONSTRAINTS = frozenset(chain(("type", "const", "enum"), _REFERRING, *_KEYWORDS.values(), (
    "not", "if", "contains", "uniqueItems", "additionalItems", "unevaluatedItems", "minProperties", "maxProperties",
    "propertyNames", "patternProperties", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef",
)))  # fmt: skip
# What may allow an object other members than those of `properties`: without it there may be any.
_OPENING = frozenset((
    *_REFERRING, "if", "patternProperties", "unevaluatedProperties", "dependentSchemas", "dependencies", "$dynamicRef",
))  # fmt: skip
_DEPTH = 64
_RULES = 2048
_PATTERNS = 128
_BYTES = MAX_GRAMMAR_BYTES // 2  # of arguments' rules; the rest is for the tools' names and an answer's form

_FREE = rf"""
value: any_string | any_number | any_boolean | any_null | any_object | any_array
any_integer: %json {{"type": "integer"}}
any_number: %json {{"type": "number"}}
any_boolean: "true" | "false"
any_null: "null"
any_object: "{{" (member ("," member)*)? "}}"
member: KEY ":" value
any_array: "[" (value ("," value)*)? "]"
KEY: /{KEY_CHARACTER_OF_GRAMMARS}{{1,64}}/
"""


logger = logging.getLogger(__name__)


class GrammarTooLarge(SchemaError):
    pass


class CallGrammar:
    """`call` is one call, `called` one after its marker."""

    def __init__(self, markers: Markers, tools: Mapping[str, Any], strict: Collection[str] = ()) -> None:
        """`tools`: parameter schemas by name. InvalidRequest if one of `strict` cannot be enforced."""
        self._quote = f"<[{markers.quote}]>"
        self._rules: list[str] = []
        self._bytes = 0
        self._referred: dict[str, str] = {}
        self._patterns = 0  # that are compiled by themselves
        self._comparison = Comparison()
        self._root: Any = None  # the schema of the tool whose rules are being made
        self._strict = False  # and whether all of it must be kept
        arguments = {name: self._arguments(name, schema, name in strict) for name, schema in tools.items()}
        self._rules += [f"tool_{index}: {json.dumps(name)} {rule}" for index, (name, rule) in enumerate(arguments.items())]
        called = " | ".join(f"tool_{index}" for index in range(len(arguments)))
        self._rules.append(f"call: <[{markers.begin_call}]> called")
        self._rules.append(f'called: "call:" ({called}) <[{markers.end_call}]>')

    @property
    def text(self) -> str:
        common = [f"any_string: {self._quote} TEXT {self._quote}", r"TEXT: /(.|\n)*/"]
        return "\n".join([*self._rules, *common]) + _FREE

    def _arguments(self, name: str, schema: Any, strict: bool) -> str:
        if not schema:
            return "any_object"
        self._root = schema
        self._strict = strict
        kept = len(self._rules)
        size = self._bytes
        referred = dict(self._referred)
        try:
            known = as_json_schema({**schema, "nullable": False})  # of an object, whether or not it says so
            if known.keys() & _REFERRING:
                kind = {}
            else:
                kind = {"type": "object"}
            return f"({self._value({**kind, **known}, 0)})"
        except SchemaError as error:
            if strict:
                raise InvalidRequest(
                    f"tools: {name}: {error} cannot be kept by the grammar of calls", "tools", "unsupported_schema"
                ) from None
            del self._rules[kept:]
            self._bytes = size
            self._referred = referred
            return "any_object"

    def _rule(self, kind: str, body: str) -> str:
        if len(self._rules) >= _RULES:
            raise GrammarTooLarge(f"more than {_RULES} rules")
        name = f"{kind}_{len(self._rules)}"
        self._add(f"{name}: {body}")
        return name

    def _add(self, rule: str) -> None:
        self._bytes += len(rule)
        if self._bytes > _BYTES:
            raise GrammarTooLarge(f"a grammar of more than {_BYTES} bytes")
        self._rules.append(rule)

    def _value(self, schema: Any, depth: int) -> str:
        """Unless strict, unsupported keywords are left out, or the value is free within its types."""
        try:
            return self._by_schema(schema, depth)
        except GrammarTooLarge:
            raise
        except SchemaError as error:
            if self._strict:
                raise
            freed = _without(schema, error.keywords, depth)
            if freed is not None:
                return self._value(freed, depth)
            if not depth:
                raise
            return " | ".join(f"any_{kind}" for kind in types_of(schema)) or "value"

    def _by_schema(self, schema: Any, depth: int) -> str:
        if depth > _DEPTH:
            raise GrammarTooLarge(f"nesting deeper than {_DEPTH}")
        if schema is True:
            return "value"
        if not isinstance(schema, Mapping):
            raise SchemaError(f"{json.dumps(schema)[:100]} as a schema")
        schema = as_json_schema(schema)
        for keyword in (*_REFERRING, "const", "enum"):
            if keyword in schema:
                return self._special(keyword, schema, depth)
        types = schema.get("type", "object" if "properties" in schema else None)
        if types is None:
            _only(schema, ())
            return "value"
        return _either([self._typed(name, schema, depth) for name in listed(types)])

    def _special(self, keyword: str, schema: Schema, depth: int) -> str:
        known = {keyword, "type", *(() if keyword in _REFERRING else (*OF_STRINGS, *NUMERIC))}
        _only(schema, known, keyword if "properties" in schema else None)
        inside = ValueSchema({keyword: schema[keyword]}, self._root)
        outer = ValueSchema({"type": schema.get("type")})
        if keyword in _REFERRING and not all(map(outer.allows, inside.types or ())):
            raise SchemaError(f"the schema keyword {keyword!r} with types other than its own 'type'", keyword)
        match keyword:
            case "$ref":
                return self._reference(str(schema["$ref"]), depth)
            case "const" | "enum":
                return _either(self._constants(schema))
            case "allOf" if len(schema["allOf"]) != 1:
                raise SchemaError("the schema keyword 'allOf' with several schemas", keyword)
            case "oneOf" if not self._comparison.are_apart(_branches(schema, keyword), self._root):
                raise SchemaError("the schema keyword 'oneOf' with schemas that a value may fit at once, or so many,", keyword)
        return _either([self._value(branch, depth + 1) for branch in _branches(schema, keyword)])

    def _reference(self, reference: str, depth: int) -> str:
        key = f"{id(self._root)}{reference}"
        if key not in self._referred:
            target = _target(self._root, reference)
            name = self._referred[key] = f"ref_{len(self._referred)}"
            self._add(f"{name}: {self._value(target, depth + 1)}")
        return self._referred[key]

    def _constants(self, schema: Schema) -> Iterator[str]:
        values = ValueSchema(schema).listed_values
        if any(isinstance(value, dict | list) for value in values):
            raise SchemaError("an object or array in enum or const", "enum", "const")
        if texts := [value for value in values if isinstance(value, str)]:
            yield self._string({**schema, "enum": texts})
        if others := [value for value in values if not isinstance(value, str)]:
            yield self._number({"enum": others}, schema)

    def _typed(self, kind: str, schema: Schema, depth: int) -> str:
        known = (_KEYWORDS[name] for name in listed(schema.get("type", kind)))
        _only(schema, {"type", "" if self._strict else "uniqueItems"}.union(*known))
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number({"type": kind}, schema)
        return f"any_{kind}"

    def _number(self, kinds: Schema, schema: Schema) -> str:
        """A number within the schema's bounds. SchemaError: no value fits."""
        bounds = {name: schema[name] for name in NUMERIC if name in schema}
        rule = f"%json {json.dumps({**kinds, **bounds})}"
        if bounds and not (has_few_digits(bounds.get("multipleOf", 1)) and compiles(rule)):
            raise SchemaError(f"{' and '.join(bounds)} that no value fits, or that are too much,", *bounds)
        return self._rule("number", rule)

    def _string(self, schema: Schema) -> str:
        self._patterns += "pattern" in schema
        if self._patterns > _PATTERNS:
            raise GrammarTooLarge(f"more than {_PATTERNS} times the schema keyword 'pattern'")
        if not (kept := expressions(schema)):
            return "any_string"
        return f"{self._quote} {self._rule('TEXT', ' & '.join(map(lark_regex, kept)))} {self._quote}"

    def _array(self, schema: Schema, depth: int) -> str:
        named = [self._rule("item", self._value(item, depth + 1)) for item in schema.get("prefixItems") or ()]
        others = schema.get("items", True)
        most = schema.get("maxItems")
        if others is False and (most is None or most > len(named)):
            schema = {**schema, "maxItems": len(named)}
        repeats(schema, "minItems", "maxItems")
        begun = ' "," '.join(named)
        if schema.get("maxItems") == len(named):
            return self._rule("array", f'"[" {begun} "]"')
        item = self._rule("item", self._value(others, depth + 1))
        more = f'("," {item}){repeats(schema, "minItems", "maxItems", max(1, len(named)))}'
        required = begun or schema.get("minItems")
        return self._rule("array", f'"[" {begun or item} {more} "]"' if required else f'"[" ({item} {more})? "]"')

    def _object(self, schema: Schema, depth: int) -> str:
        required = frozenset(schema.get("required") or ())
        others = schema.get("additionalProperties", bool(required) or "properties" not in schema)
        properties = dict.fromkeys(required, others) | dict(schema.get("properties") or {})
        if not properties and (others is True or others == {}):
            return "any_object"
        members = [(self._member(key, properties[key], depth), key in required) for key in sorted(properties, key=str.lower)]
        more = ""
        if (schema.get("additionalProperties", False) if properties else others) is not False:
            if properties:
                key = self._rule("KEY", f"KEY & ~({' | '.join(map(json.dumps, properties))})")
            else:
                key = "KEY"
            more = self._rule("member", f'{key} ":" ({self._value(others, depth + 1)})')
        return self._rule("object", f'"{{" {self._members(members, more)} "}}"')

    def _member(self, key: str, schema: Any, depth: int) -> str:
        if not _BARE_KEY.fullmatch(key):
            raise SchemaError(f"the key {key[:100]!r}")
        return self._rule("member", f"{json.dumps(key + ':')} ({self._value(schema, depth + 1)})")

    def _members(self, members: Sequence[tuple[str, bool]], more: str) -> str:
        """Members in order, with commas, optional ones perhaps missing; then any of `more`."""
        rest = f'("," {more})*' if more else ""  # what may come when something has come, and when nothing has
        first = f"({more} {rest})?" if more else ""
        for name, required in reversed(members):
            begun = f"{name} {rest}"
            first = begun if required else f"({begun} | {first})" if first else f"({begun})?"
            rest = self._rule("more", f'"," {name} {rest}' if required else f'("," {name})? {rest}')
        return first


def _only(schema: Schema, known: Collection[str], to_blame: str | None = None) -> None:
    """SchemaError for a keyword outside `known`. `to_blame`: the keyword to leave out instead."""
    for keyword in schema:
        if keyword in _CONSTRAINTS and keyword not in known:
            raise SchemaError(f"the schema keyword {keyword[:100]!r}", to_blame or keyword)


def _without(schema: Any, keywords: Sequence[str], depth: int) -> Schema | None:
    """The schema without these keywords, which allows no less; None if it has none."""
    dropped = set(keywords).intersection(schema if isinstance(schema, Mapping) else ())
    if not dropped:
        return None
    for keyword in dropped:
        _note_freed(keyword)
    kept = {keyword: value for keyword, value in schema.items() if keyword not in dropped}
    if "oneOf" in dropped and "anyOf" not in schema:
        return {**kept, "anyOf": schema["oneOf"]}
    if dropped & {"const", "enum"} and (types := types_of(schema)):
        kept["type"] = list(dict.fromkeys(types))
    if not depth:
        kept.setdefault("type", "object")
    if "patternProperties" in dropped:
        kept["additionalProperties"] = True
    elif dropped & _OPENING and "properties" in kept:
        kept.setdefault("additionalProperties", True)
    return kept


@lru_cache(maxsize=256)
def _note_freed(keyword: str) -> None:
    logger.warning("the grammar of tool calls does not hold the schema keyword %r in some schemas that are not strict", keyword)


def _branches(schema: Schema, keyword: str) -> list[Any]:
    kind = {"type": schema["type"]} if "type" in schema else {}
    return [{**kind, **branch} if isinstance(branch, Mapping) else branch for branch in schema[keyword]]


def _target(root: Any, reference: str) -> Any:
    """SchemaError: no target, or an endless chain."""
    target = following = referred(root, reference)
    for _ in range(_DEPTH):
        if not isinstance(following, Mapping) or "$ref" not in following:
            break
        following = referred(root, following["$ref"])
    else:
        following = None
    if following is None:
        raise SchemaError(f"the reference {reference[:100]!r}", "$ref")
    return target


def _either(alternatives: Iterable[str]) -> str:
    if not (joined := " | ".join(alternatives)):
        raise SchemaError("an empty list of what a value may be")
    return joined
