"""What a JSON Schema says of one value, as far as reading a tool call needs it: its types, and the schemas inside it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

_BRANCHES = 64  # of anyOf, oneOf, allOf and $ref together: more are not looked at
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "boolean", "false": "boolean", "null": "null"}
_PYTHON_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


@dataclass(frozen=True)
class ValueSchema:
    """One value's schema; `root` is where `#/...` references point. Without a schema anything is allowed."""

    schema: Any = True
    root: Any = field(default=True, repr=False)

    @cached_property
    def types(self) -> frozenset[str] | None:
        """The JSON types that are allowed; None: the schema does not say."""
        found = [_types_of(branch) for branch in self._branches()]
        known = [types for types in found if types is not None]
        return frozenset().union(*known) if known else None

    def allows(self, kind: str) -> bool:
        """Whether a value of this JSON type may stand here; an integer is a number, too."""
        return self.types is None or kind in self.types or (kind == "integer" and "number" in self.types)

    def member(self, key: str) -> "ValueSchema":
        """Of an object's `key`."""
        for branch in self._branches():
            if key in _mapping(branch.get("properties")):
                return ValueSchema(branch["properties"][key], self.root)
        return self._inside("additionalProperties")

    def declares(self, key: str) -> bool:
        """Whether an object has a property of this name."""
        return any(key in _mapping(branch.get("properties")) for branch in self._branches())

    def element(self) -> "ValueSchema":
        """Of an array's elements."""
        return self._inside("items")

    def _inside(self, keyword: str) -> "ValueSchema":
        inner = (branch[keyword] for branch in self._branches() if isinstance(branch.get(keyword), Mapping))
        return ValueSchema(next(inner, True), self.root)

    def _branches(self) -> Iterator[Mapping[str, Any]]:
        """The schema and its alternatives, references followed."""
        left, seen = [self.schema], 0
        while left and seen < _BRANCHES:
            seen += 1
            schema = left.pop()
            if not isinstance(schema, Mapping):
                continue
            yield schema
            if "$ref" in schema:
                left.append(referred(self.root, schema["$ref"]))
            for keyword in ("anyOf", "oneOf", "allOf"):
                left += schema.get(keyword) or ()


def literal_kind(text: str) -> str | None:
    """The JSON type of a bare literal as JSON writes it: number, integer, boolean or null; None: it is none."""
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return "integer" if text.lstrip("-").isdigit() else "number"
    return None


def json_kind(text: str) -> str | None:
    """The JSON type of `text`; None: it is not JSON."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None
    return "null" if value is None else _PYTHON_TYPES[type(value)]


def _types_of(branch: Mapping[str, Any]) -> frozenset[str] | None:
    """What one schema says without its alternatives; None where it says nothing."""
    match branch:
        case {"type": str(name)}:
            return frozenset({name.lower()})
        case {"type": [*names]}:
            return frozenset(str(name).lower() for name in names)
        case {"const": value}:
            return frozenset({_kind_of(value)})
        case {"enum": [*values]}:
            return frozenset(map(_kind_of, values))
    return None


def _kind_of(value: Any) -> str:
    return "null" if value is None else _PYTHON_TYPES.get(type(value), "string")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def referred(root: Any, reference: Any) -> Any:
    """What a local reference (#/$defs/name) points at; True, which allows anything, where it points nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    for step in reference.removeprefix("#").split("/")[1:]:
        root = _mapping(root).get(step.replace("~1", "/").replace("~0", "~"), True)
    return root
