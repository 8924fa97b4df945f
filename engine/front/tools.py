"""The tools that a request declares in OpenAI's form, checked and found by the names that models
use."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest
from engine.front.value_schema import Schema, ValueSchema, listed, referred
from engine.protocol import JsonObject

NAME = re.compile(r"[\w.:/-]{1,128}")
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_KINDS: Mapping[type[Any], str] = {dict: "an object", list: "a list", str: "a string"}
_LONGEST_PATH = 200  # characters of where a schema stands


class Tools:
    """InvalidRequest names a wrong declaration. `paths`: the client's, of each function and its
    parameters, if not OpenAI's."""

    def __init__(self, declarations: Sequence[JsonObject], paths: Sequence[tuple[str, str]] = ()) -> None:
        self._schemas: dict[str, ValueSchema] = {}
        self.strict: set[str] = set()  # those whose schemas must be kept
        for index, declaration in enumerate(declarations):
            where = f"tools[{index}]"
            function, schema = paths[index] if paths else (f"{where}.function", f"{where}.function.parameters")
            if (kind := declaration.get("type", "function")) != "function":
                raise _wrong(f"{where}.type", f"only 'function' is supported, not {_shown(kind)}")
            name, parameters = _checked(declaration.get("function"), function, schema)
            if name in self._schemas:
                raise _wrong(f"{function}.name", f"{name!r} is declared twice")
            self._schemas[name] = ValueSchema(parameters, parameters)
            if declaration["function"].get("strict") is True:
                self.strict.add(name)

    @property
    def names(self) -> list[str]:
        return list(self._schemas)

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def declares(self, name: str) -> bool:
        return name in self._schemas

    def resolve(self, name: str) -> str:
        """The tool that the model means: `tool` for an undeclared `server:tool`."""
        last = re.split(r"[:/.]", name)[-1]
        if name not in self._schemas and last in self._schemas:
            return last
        return name

    def parameters(self, name: str) -> ValueSchema:
        return self._schemas.get(name, ValueSchema())

    def may_become_call(self, text: str) -> bool:
        return any(f"call:{name}".startswith(text) for name in self._schemas)


NO_TOOLS = Tools(())


def _wrong(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {why}", param="tools")


def _checked(function: Any, where: str, schema: str) -> tuple[str, Schema]:
    if not isinstance(function, Mapping):
        raise _wrong(where, "must be an object")
    name = function.get("name")
    parameters = function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(f"{where}.name", f"{_shown(name)} is no name of 1 to 128 letters, digits and _ - . : /")
    _of_kind(str, function, "description", where)
    if parameters is None:
        return name, {"properties": {}}  # OpenAI's: it has no arguments
    _check_parameters(parameters, schema)
    return name, parameters


def _check_parameters(parameters: Any, where: str) -> None:
    if not isinstance(parameters, Mapping):
        raise _wrong(where, "must be a JSON Schema, an object")
    if str(parameters.get("type") or "object").lower() != "object":
        raise _wrong(f"{where}.type", f"must be 'object', not {_shown(parameters['type'])}")
    left: list[tuple[str, Any]] = [(where, parameters)]
    seen = set()
    while left:
        where, schema = left.pop()
        if id(schema) not in seen:
            seen.add(id(schema))
            left += _checked_schema(schema, parameters, where)


def _checked_schema(schema: Any, root: Any, where: str) -> list[tuple[str, Any]]:
    """Schemas inside this one, and its reference's, with their places."""
    if isinstance(schema, bool):
        return []
    if not isinstance(schema, Mapping):
        raise _wrong(where, "must be a JSON Schema: an object, true or false")
    _check_keywords(schema, where)
    inside = [(f".{keyword}", inner) for keyword in _SCHEMAS for inner in listed(schema.get(keyword))]
    for keyword in SCHEMAS_BY_NAME:
        inside += [(f".{keyword}.{name}", inner) for name, inner in _of_kind(dict, schema, keyword, where).items()]
    for keyword in _SCHEMA_LISTS:
        inside += [(f".{keyword}[{index}]", inner) for index, inner in enumerate(_of_kind(list, schema, keyword, where))]
    target = referred(root, schema.get("$ref"))  # which need not stand where schemas do
    if target is not None:  # else it points nowhere: what it stands for may be anything
        inside.append((".$ref", target))
    return [(f"{where}{step}"[:_LONGEST_PATH], inner) for step, inner in inside]


def _check_keywords(schema: Schema, where: str) -> None:
    for name in listed(schema.get("type")):
        if not isinstance(name, str) or name.lower() not in _TYPES:
            raise _wrong(f"{where}.type", f"{_shown(name)} is not one of {', '.join(_TYPES)}")
    _of_kind(list, schema, "enum", where)
    if not all(isinstance(name, str) for name in _of_kind(list, schema, "required", where)):
        raise _wrong(f"{where}.required", "must be a list of strings")
    _of_kind(str, schema, "description", where)


def _of_kind(kind: type[Any], schema: Schema, keyword: str, where: str) -> Any:
    value = schema.get(keyword)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise _wrong(f"{where}.{keyword}", f"must be {_KINDS[kind]}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:100]
