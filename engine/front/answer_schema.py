"""Rewrites or refuses what llguidance would get wrong in an answer's JSON Schema.

JSON may have one space after a comma or colon: models that learned it fail without, and any white
space could go on without end.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from engine.errors import InvalidRequest
from engine.front.string_schema import MOST, SchemaError, compiles, expressions, lark_regex, searched
from engine.front.tools import SCHEMAS_BY_NAME
from engine.front.value_schema import NUMERIC, Comparison, Schema, as_json_schema, has_few_digits, listed, referred
from engine.protocol import JsonObject

_OTHERS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_COMBINED = ("allOf", "not", "if", "dependentSchemas")
_BRANCHES = ("anyOf", "oneOf", "$ref")
_VALUES = frozenset(("const", "enum", "default", "examples"))
_MOST_CHOICES = 200_000  # a tenth of a second
_KEY_PATTERNS = 128  # of a schema with named properties: each takes a millisecond
_SPACING = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}


def json_rule(schema: Schema) -> str:
    check_patterns(schema)
    kept = _changed({**schema, "nullable": False}, as_json_schema)  # references begin at the root
    if "$id" in schema:  # an inner schema's has no effect: check_patterns has refused references there
        kept["$id"] = schema["$id"]
    kept = _changed(kept, _Keywords().checked)
    kept = _changed(kept, partial(_without_one_of, kept, Comparison()))
    with suppress(_Combination):  # then it stays as it is
        kept = _changed(kept, _close)
    return f"%json {json.dumps(kept | {'x-guidance': _SPACING})}"


class _Keywords:
    def __init__(self) -> None:
        self._key_patterns = 0

    def checked(self, schema: JsonObject) -> JsonObject:
        """Drops a `format` that conflicts with its `pattern`. InvalidRequest names the keyword."""
        if "multipleOf" in schema:
            _check_multiple(schema)
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and len(pattern) > MOST:
            raise InvalidRequest(f"the schema keyword 'pattern' has more than {MOST} characters")
        if isinstance(pattern, str) and "format" in schema:
            schema = _with_format_that_fits(schema)
        if isinstance(schema.get("patternProperties"), Mapping):
            self._check_key_patterns(schema)
        return schema

    def _check_key_patterns(self, schema: Schema) -> None:
        """llguidance never ends a key whose pattern only keys already written match."""
        names = schema.get("properties")
        if isinstance(names, Mapping):
            named = " | ".join(map(json.dumps, names))
        else:
            named = ""
        for pattern in schema["patternProperties"]:
            if len(pattern) > MOST:
                raise InvalidRequest(f"the schema keyword 'patternProperties' has a key of more than {MOST} characters")
            if not named:
                continue
            self._key_patterns += 1
            if self._key_patterns > _KEY_PATTERNS:
                raise InvalidRequest(f"more than {_KEY_PATTERNS} times the schema keyword 'patternProperties' with 'properties'")
            with suppress(SchemaError):  # llguidance says why
                if not compiles(f"TEXT\nTEXT: {lark_regex(searched(pattern))} & ~({named})"):
                    raise InvalidRequest(
                        f"{pattern[:100]!r} of the schema keyword 'patternProperties' matches no key but those of 'properties',"
                        " or is too much"
                    )


def _check_multiple(schema: Schema) -> None:
    bounds = {name: schema[name] for name in NUMERIC if name in schema}
    if not has_few_digits(schema["multipleOf"]) or not compiles(f"%json {json.dumps({'type': 'number', **bounds})}"):
        given = json.dumps(schema["multipleOf"])[:100]
        raise InvalidRequest(f"the schema keyword 'multipleOf' with {given}, which is too much, or which no value within bounds is")


def _with_format_that_fits(schema: JsonObject) -> JsonObject:
    try:
        expressions({"pattern": schema["pattern"], "format": schema["format"]})
    except SchemaError:
        return {keyword: value for keyword, value in schema.items() if keyword != "format"}
    return schema


def _without_one_of(root: Schema, comparison: Comparison, schema: JsonObject) -> JsonObject:
    """Replace oneOf by anyOf where that is equivalent: llguidance compares no references."""
    branches = schema.get("oneOf")
    if isinstance(branches, list) and "anyOf" not in schema and comparison.are_apart(branches, root):
        schema["anyOf"] = schema.pop("oneOf")
    return schema


class _Combination(Exception):
    """The schema extends an object described elsewhere."""


def _close(schema: JsonObject) -> JsonObject:
    """Allows undeclared keys only if the schema does: else models never stop."""
    properties = schema.get("properties")
    if schema.keys() & _COMBINED or (properties and schema.keys() & _BRANCHES):
        raise _Combination
    if isinstance(properties, Mapping):
        schema.setdefault("type", "object")
        if not schema.keys() & _OTHERS and properties.keys() >= set(map(str, listed(schema.get("required")))):
            schema["additionalProperties"] = False
    return schema


def _changed(schema: Any, change: Callable[[JsonObject], JsonObject]) -> Any:
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
    """Bounds llguidance's work per character: parts of a pattern times those that hold together."""
    if isinstance(schema, list):
        return max((_choices(branch, root, known) for branch in schema), default=1)
    if not isinstance(schema, Mapping):
        return 1
    apart = [1.0]
    together = 1.0
    for item in schema.items():
        match item:
            case "$defs" | "definitions", _ if schema is root:
                pass
            case "$id", str() if schema is not root and '"$ref"' in json.dumps(schema):  # they point elsewhere
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


def check_patterns(schema: Any) -> None:
    """InvalidRequest if one string's patterns could cost minutes and gigabytes; RecursionError."""
    if _choices(schema, schema, {}) > _MOST_CHOICES:
        raise InvalidRequest("by the schema's allOf, $ref and branches one string has to match too many or too long patterns")
