"""Random JSON Schemas, within what the grammar of Gemma 4's notation keeps."""

import random
from typing import Any


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
