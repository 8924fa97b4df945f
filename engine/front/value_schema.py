"""A JSON Schema's types and inner schemas, as far as reading a tool call needs."""

import math
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cached_property
from itertools import combinations, permutations, starmap
from typing import Any, TypeGuard
from urllib.parse import quote, unquote

import msgspec

from engine.front.string_schema import FORMATS
from engine.protocol import JsonObject

NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_DIGITS = 4  # of a multipleOf: 50 ms of CPU
_BOUND_STEP = 1e-6  # what an exclusive bound gives up where llguidance would allow the bound itself
_BRANCHES = 64  # of anyOf, oneOf, allOf and $ref together: more are not looked at
_NOTHING: Mapping[str, Sequence[Any]] = {"uniqueItems": (False,), "propertyNames": ({}, True, {"type": "string"})}
_KINDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}  # by the first character
_PYTHON_TYPES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"
}  # fmt: skip

Schema = Mapping[str, Any]  # a JSON Schema that is an object


@dataclass(frozen=True)
class ValueSchema:
    """One value's schema; `root` resolves `#/...` references. True: anything is allowed."""

    schema: Any = True
    root: Any = True

    @cached_property
    def types(self) -> frozenset[str] | None:
        return frozenset(kind for branch in self._branches() for kind in types_of(branch)) or None

    def allows(self, kind: str) -> bool:
        """An integer is also a number."""
        return self.types is None or kind in self.types or (kind == "integer" and "number" in self.types)

    def member(self, key: str) -> "ValueSchema":
        return self._inside(lambda branch: _mapping(branch.get("properties")).get(key, branch.get("additionalProperties")))

    @cached_property
    def constants(self) -> frozenset[bytes] | None:
        """The only values, as JSON, by const or enum; None: others are allowed."""
        constants = _constants_of(self._single_branch)
        if constants is None:
            return None
        return frozenset(msgspec.json.encode(value, order="sorted") for value in constants)

    @property
    def listed_values(self) -> list[Any]:
        return [value for value in _constants_of(self.schema) or () if self.allows(_PYTHON_TYPES[type(value)])]

    @cached_property
    def required(self) -> Mapping[str, frozenset[bytes] | None]:
        return {key: self.member(key).constants for key in map(str, listed(self._single_branch.get("required")))}

    @cached_property
    def only_keys(self) -> KeysView[str] | None:
        """None: other keys are allowed."""
        branch = self._single_branch
        is_closed = branch.get("additionalProperties") is False and "patternProperties" not in branch
        if is_closed:
            return _mapping(branch.get("properties")).keys()
        return None

    def declares(self, key: str) -> bool:
        return any(key in _mapping(branch.get("properties")) for branch in self._branches())

    def element(self, index: int) -> "ValueSchema":
        return self._inside(lambda branch: _element(branch, index))

    def _inside(self, schema_of: Callable[[Schema], Any]) -> "ValueSchema":
        """The union of `schema_of` over the alternatives; one that allows anything wins."""
        schemas = [inner for branch in self._branches() if (inner := schema_of(branch)) is not None and inner is not False]
        if not schemas or not all(isinstance(inner, Mapping) for inner in schemas):
            return ValueSchema(True, self.root)
        return ValueSchema(schemas[0] if len(schemas) == 1 else {"anyOf": schemas}, self.root)

    @cached_property
    def _single_branch(self) -> Schema:
        """The only branch, references followed; empty with alternatives."""
        branches = [branch for branch in self._branches() if "$ref" not in branch]
        if len(branches) == 1:
            return branches[0]
        return {}

    def _branches(self) -> Iterator[Schema]:
        left = [self.schema]
        seen = 0
        while left and seen < _BRANCHES:
            seen += 1
            schema = left.pop()
            if not isinstance(schema, Mapping):
                continue
            yield schema
            if "$ref" in schema:
                left.append(referred(self.root, schema["$ref"]))
            for keyword in ("anyOf", "oneOf", "allOf"):
                left += listed(schema.get(keyword))


def referred(root: Any, reference: Any) -> Any:
    """The target of a local reference (#/$defs/name); None: missing, or an anchor."""
    if not isinstance(reference, str) or reference[:2] not in ("#", "#/"):
        return None
    for step in reference.split("/")[1:]:
        root = _mapping(root).get(unquote(step).replace("~1", "/").replace("~0", "~"))
    return root


def listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if value is None:
        return []
    return [value]


def as_json_schema(schema: Schema) -> JsonObject:
    """Removes OpenAPI's `nullable`, Gemini's capitals, and keywords without effect. Keywords of all
    drafts apply, whatever `$schema` says; `$id` is ignored."""
    kept = {keyword: _spelled(keyword, value) for keyword, value in schema.items() if not _has_no_effect(keyword, value)}
    kept = _with_held_bound(_with_held_bound(kept, "Minimum"), "Maximum")
    if kept.pop("nullable", False) is True:
        return {"anyOf": [{"type": "null"}, kept]}
    return kept


def _spelled(keyword: str, value: Any) -> Any:
    match keyword, value:
        case "type", str():
            return value.lower()
        case "type", [*names]:
            return [str(name).lower() for name in names]
        case "$ref", str():  # whose names may have brackets: Box[int]
            return quote(value, safe="#%/:$")
    return value


def _has_no_effect(keyword: str, value: Any) -> bool:
    match keyword:
        case "const":
            return False
        case "format":
            return str(value) not in FORMATS
        case "$schema" | "$id":
            return True
    return value is None or value in _NOTHING.get(keyword, ())


def _with_held_bound(schema: JsonObject, side: str) -> JsonObject:
    """llguidance would allow an exclusive whole bound with the other less than 1 away, as in 0 < x
    < 0.5."""
    exclusive = f"exclusive{side}"
    inclusive = side.lower()
    bound = schema.get(exclusive)
    if bound is True:  # draft 4
        bound = schema.get(inclusive)
    if not _is_finite(bound) or bound != int(bound):
        return schema
    direction = 1 if side == "Minimum" else -1
    given = schema.get(inclusive)
    if _is_finite(given) and direction * (given - bound) > 0:
        return schema
    other = "Maximum" if side == "Minimum" else "Minimum"
    opposite = [schema[name] for name in (other.lower(), f"exclusive{other}") if _is_finite(schema.get(name))]
    if not any(0 < direction * (value - bound) < 1 for value in opposite):
        return schema
    kept = {keyword: value for keyword, value in schema.items() if keyword != exclusive}
    return {**kept, inclusive: bound + direction * _BOUND_STEP}


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def has_few_digits(multiple: Any) -> bool:
    """Whether `multipleOf` has at most four significant digits, which bound a grammar's states."""
    try:
        return len(Decimal(str(multiple)).normalize().as_tuple().digits) <= _DIGITS
    except InvalidOperation:
        return True  # it is no number, which llguidance refuses


@dataclass
class Comparison:
    """Compares at most `pairs` branches of oneOf, microseconds each."""

    pairs: int = 4096

    def are_apart(self, branches: Sequence[Any], root: Any) -> bool:
        """Whether no value fits two of the schemas; False if unknown."""
        self.pairs -= len(branches) * (len(branches) - 1) // 2
        schemas = [ValueSchema(branch, root) for branch in branches]
        return self.pairs >= 0 and all(starmap(_are_apart, combinations(schemas, 2)))


def _are_apart(left: ValueSchema, right: ValueSchema) -> bool:
    """By types, constants, required members and their constants."""
    if left.types is not None and right.types is not None and not _with_numbers(left.types) & _with_numbers(right.types):
        return True
    if left.constants is not None and right.constants is not None:
        return not left.constants & right.constants
    if any(one.only_keys is not None and other.required.keys() - one.only_keys for one, other in permutations((left, right))):
        return True
    constants = [(left.required[key], right.required[key]) for key in left.required.keys() & right.required.keys()]
    return any(first is not None and second is not None and not first & second for first, second in constants)


def _with_numbers(types: frozenset[str]) -> frozenset[str]:
    if "integer" in types:
        return types | {"number"}
    return types


def json_kind(text: str) -> str | None:
    """None if it is not JSON, such as a cut object."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)  # numbers as they are, however large
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None
    value = text.strip()
    return _KINDS.get(value[0]) or ("integer" if value.lstrip("-").isdigit() else "number")


def types_of(schema: Any) -> list[str]:
    branch = _mapping(schema)
    named = [str(name).lower() for name in listed(branch.get("type"))]
    types = named or [_PYTHON_TYPES[type(value)] for value in _constants_of(branch) or ()]
    if types and branch.get("nullable") is True:
        return [*types, "null"]
    return types


def _constants_of(branch: Schema) -> list[Any] | None:
    """Of const or enum; 1.0 equals the integer."""
    match branch:
        case {"const": value}:
            values = [value]
        case {"enum": [*values]}:
            pass
        case _:
            return None
    return [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]


def _element(branch: Schema, index: int) -> Any:
    """By `prefixItems` and `items`, or a list of `items` and `additionalItems` (older drafts)."""
    named = branch.get("prefixItems") or ()
    others = branch.get("items")
    if isinstance(others, list):
        named = others
        others = branch.get("additionalItems")
    if index < len(named):
        return named[index]
    return others


def _mapping(value: Any) -> Schema:
    if isinstance(value, Mapping):
        return value
    return {}
