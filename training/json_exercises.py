"""Exercises whose answer is JSON: with the keys that are asked for, or by a JSON Schema that is given."""

import json
from collections.abc import Mapping
from typing import Any

from training.exercise_form import END, Draw, Exercise, ask
from training.word_lists import CITIES, ITEMS, JOBS, NAMES

_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "name": {"type": "string"},
    "age": {"type": "integer"},
    "job": {"type": "string"},
    "city": {"type": "string"},
    "friend": {"type": "boolean"},
    "likes": {"type": "array", "items": {"type": "string"}},
}


def by_keys(draw: Draw) -> Exercise:
    """An object with two to four keys."""
    rng = draw.rng
    name, age, job, city = rng.choice(NAMES), rng.randint(18, 90), rng.choice(JOBS), rng.choice(CITIES)
    values = {"name": f'"{name}"', "age": str(age), "job": f'"{job}"', "city": f'"{city}"'}
    keys = rng.sample(list(values), rng.randint(2, 4))
    fact = f"{name} is {age} years old, works as a {job} and lives in {city}."
    form = rng.choice(("{} Answer in JSON with the keys {}.", "{} Give me a JSON object with {}.", "{} As JSON: {}."))
    reply = "{" + ", ".join(f'"{key}": {values[key]}' for key in keys) + "}"
    return ask(draw, "json", f"{fact} {keys}", form.format(fact, ", ".join(keys)), reply + END)


def by_schema(draw: Draw) -> Exercise:
    """Compact JSON, as structured output makes it, with the schema's keys in their order; some in an inner object."""
    fact, values = _facts(draw)
    keys = draw.rng.sample(list(_SCHEMAS), draw.rng.randint(2, 4))
    inner = keys[: draw.rng.randint(1, 2)] if draw.rng.random() < 0.4 else []
    outer = [key for key in keys if key not in inner]
    schema, answer = _object(outer), {key: values[key] for key in outer}
    if inner:
        place = draw.rng.choice(("person", "value"))
        schema["properties"][place], answer[place] = _object(inner), {key: values[key] for key in inner}
    if draw.rng.random() < 0.5:
        schema["required"] = list(schema["properties"])
    form = draw.rng.choice(("{} Answer in JSON by this schema: {}", "{} Give me JSON that fits {}", "{} As JSON by {}"))
    question, reply = form.format(fact, _compact(schema)), _compact(answer)
    return ask(draw, "json_schema", f"{fact} {keys} {inner}", question, reply + END, alone=True)


def _facts(draw: Draw) -> tuple[str, Mapping[str, Any]]:
    """What is told of somebody, and the same as values."""
    rng = draw.rng
    name, age, job, city = rng.choice(NAMES), rng.randint(18, 90), rng.choice(JOBS), rng.choice(CITIES)
    friend, likes = rng.random() < 0.5, rng.sample(ITEMS, rng.randint(1, 3))
    told = f"{name} is {age} years old, works as a {job} and lives in {city}. {name} likes {', '.join(likes)} and is "
    told += "my friend." if friend else "not my friend."
    return told, {"name": name, "age": age, "job": job, "city": city, "friend": friend, "likes": likes}


def _object(keys: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": {key: _SCHEMAS[key] for key in keys}}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
