"""Random JSON Schemas, within what the grammar of Gemma 4's notation keeps: plain ones, and wide ones with every keyword of it."""

import random
from collections.abc import Mapping
from typing import Any

from engine.front.tools import Tools


def tools_of(schemas: Mapping[str, dict[str, Any]]) -> Tools:
    """Tools with these parameters, by name."""
    return Tools([{"type": "function", "function": {"name": name, "parameters": each}} for name, each in schemas.items()])


def schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Any schema within what the notation's grammar keeps."""
    kind = rng.choice(
        ("string", "integer", "number", "boolean", "null", "enum", "either", *(("array", "object") * 2 if depth else ()))
    )
    match kind:
        case "string":
            return {"type": "string"} | ({"minLength": 1, "maxLength": 9} if rng.random() < 0.3 else {})
        case "integer":
            return {"type": "integer"} | ({"minimum": -3, "maximum": rng.choice((5, 70))} if rng.random() < 0.5 else {})
        case "enum":
            return {"enum": rng.sample(["a b", "c", 'd"e', 5, True, None, "", "Ünit"], 3)}
        case "either":
            return {"anyOf": [{"type": "null"}, schema(rng, 0)], "description": "one of two"}
        case "array":
            return {"type": "array", "items": schema(rng, depth - 1)} | (
                {"minItems": 1, "maxItems": 3} if rng.random() < 0.5 else {}
            )
        case "object":
            return members(rng, depth - 1)
    return {"type": kind}


def members(rng: random.Random, depth: int) -> dict[str, Any]:
    """Of an object with one to four properties, some of them required."""
    names = rng.sample(["city", "b", "Z", "ünit", "a-1", "x y"], rng.randint(1, 4))
    properties = {name: schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.5]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_CONSTANTS: tuple[Any, ...] = ("a", "b c", 'q"', "", "é", 1, 2.5, True, None)
_PATTERNS = ("^[a-c]{1,3}$", "^x|^y", "^(foo|bar)?$", r"^\d\d-\w$", "^a/b$", r"^[\w.-]{2}$")
_LEAVES = ("string", "pattern", "length", "integer", "number", "boolean", "null", "enum", "const", "types")
_NODES = ("array", "tuple", "object", "map", "anyOf", "oneOf", "$ref", "allOf")


def wide_members(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Of an object, with every keyword that calls can keep; definitions that are referred to are in it."""
    return _wide_object(rng, depth) | {"$defs": {"p": _wide(rng, 1), "q": _wide(rng, 0)}}


def _wide_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["city", "b", "Z", "ünit", "a-1", "x y", "नाम", "filter[x]", "C#", "price ($)", "<k>|%"], rng.randint(0, 4))
    others = rng.choice(({}, *({"additionalProperties": others} for others in (False, True, {}, _wide(rng, 0)))))
    required = [name for name in names if rng.random() < 0.5]
    return {"type": "object", "properties": {name: _wide(rng, depth) for name in names}, "required": required, **others}


def _wide(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(_LEAVES + (2 * _NODES if depth else ()))
    if rng.random() < 0.07:
        return rng.choice((True, {}))
    return _node(kind, rng, depth - 1) if kind in _NODES else _leaf(kind, rng)


def _leaf(kind: str, rng: random.Random) -> dict[str, Any]:
    match kind:
        case "pattern":
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case "length":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 8)}
        case "integer":
            return {"type": "integer", "minimum": rng.randrange(-5, 3), "exclusiveMaximum": rng.randrange(4, 90)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.choice((1, 2.5, 100))}
        case "enum":
            return {"enum": rng.sample(_CONSTANTS, 3), **rng.choice(({}, {"format": "enum"}))}
        case "const":
            return {"const": rng.choice(_CONSTANTS)}
        case "types":
            return {"type": rng.sample(("string", "integer", "null", "boolean"), 2)}
    return {"type": kind}


def _node(kind: str, rng: random.Random, depth: int) -> dict[str, Any]:
    match kind:
        case "array":
            return {"type": "array", "items": _wide(rng, depth), "minItems": rng.randrange(2), "maxItems": rng.randrange(2, 4)}
        case "tuple":
            size = rng.randint(1, 3)
            ends = ({"items": False}, {"minItems": size, "maxItems": size}, {"items": _wide(rng, depth), "maxItems": size + 1})
            return {"type": "array", "prefixItems": [_wide(rng, depth) for _ in range(size)], **rng.choice(ends)}
        case "object":
            return _wide_object(rng, depth)
        case "map":
            named = rng.choice(({}, {"propertyNames": {"type": "string"}}))
            return {"type": "object", "additionalProperties": _wide(rng, depth), **named}
        case "$ref":
            return {"$ref": f"#/$defs/{rng.choice('pq')}", "description": "either"}
        case "allOf":
            return {"allOf": [_wide(rng, depth)]}
    return {kind: [_wide(rng, depth), _wide(rng, depth)]}
