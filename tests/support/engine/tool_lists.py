"""Lists of tools as programs declare them: parameters of the servers that agents use most, and what generators of schemas write."""

import random
from typing import Any

Schema = dict[str, Any]


def _text(**more: Any) -> Schema:
    return {"type": "string", **more}


def _whole(**more: Any) -> Schema:
    return {"type": "integer", **more}


def _list(items: Any, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _object(required: list[str] | None = None, more: Schema | None = None, /, **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, **({"required": required} if required else {}), **(more or {})}


# Of servers for files, GitHub, Slack, Postgres, browsers, search, notes, calendars, shells.
_PLAIN: dict[str, Schema] = {
    "path": _text(description="A path, absolute or within the workspace"),
    "paths": _list(_text(), minItems=1),
    "edits": _list(_object(["oldText", "newText"], {"additionalProperties": False}, oldText=_text(), newText=_text())),
    "dryRun": {"type": "boolean", "default": False},
    "head": {"type": "number", "description": "First lines"},
    "excludePatterns": _list(_text(), default=[]),
    "sort": _text(enum=["created", "updated", "comments"], default="created"),
    "since": _text(format="date-time"),
    "page": _whole(exclusiveMinimum=0),
    "issue_number": {"type": ["integer", "null"], "minimum": 1},
    "channel_id": _text(pattern="^[CGD][A-Z0-9]{8,}$"),
    "thread_ts": _text(pattern=r"^\d{10}\.\d{6}$"),
    "limit": _whole(minimum=1, maximum=1000, default=100),
    "sql": _text(minLength=1),
    "params": _list({"type": ["string", "number", "boolean", "null"]}),
    "selector": _text(maxLength=512),
    "coordinate": {"type": "array", "prefixItems": [_whole(), _whole()], "minItems": 2, "maxItems": 2},
    "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 600},
    "wait_until": {"anyOf": [{"const": "load"}, {"const": "networkidle"}]},
    "viewport": _object(["width", "height"], width=_whole(minimum=1), height=_whole(minimum=1)),
    "domains": {"anyOf": [_list(_text()), {"type": "null"}], "default": None},
    "country": {"enum": ["DE", "NL", None, 7, True, 1.5]},
    "uuid": _text(format="uuid"), "email": _text(format="email"), "date": _text(format="date"), "ip": _text(format="ipv4"),
    "port": _whole(format="int32"), "regex": _text(format="regex"),
    "attendees": _list(_object(["email"], email=_text(format="email"), optional={"type": "boolean"}), maxItems=50),
    "filter": {"$ref": "#/$defs/Filter"},
    "block": {
        "oneOf": [
            _object(["type", "text"], type={"const": "text"}, text=_text()),
            _object(["type", "url"], type={"const": "image"}, url=_text()),
        ]
    },
    "parent": {"allOf": [{"$ref": "#/$defs/Parent"}], "description": "Where it belongs"},
    "properties": {"type": "object", "additionalProperties": True},
    "arguments": {"type": "object"}, "value": {}, "anything": True,
    "env": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    "First Name": _text(), "größe": {"type": "number", "multipleOf": 0.5}, "x-request": _text(),
}  # fmt: skip
_DEFS: Schema = {
    "Filter": _object(
        ["field"],
        field=_text(),
        op=_text(enum=["=", "<", ">"]),
        value={"type": ["string", "number"]},
        all=_list({"$ref": "#/$defs/Filter"}),
    ),
    "Parent": {"anyOf": [_object(["page_id"], page_id=_text(format="uuid")), _object(["workspace"], workspace={"const": True})]},
}  # fmt: skip

# What nobody means, and some programs write.
ODD: dict[str, Any] = {
    **{f"null {keyword}": {keyword: None} for keyword in ("enum", "anyOf", "allOf", "oneOf", "$ref", "type", "not", "items")},
    **{f"null {keyword}": _text(**{keyword: None}) for keyword in ("format", "pattern", "minLength", "maxLength")},
    "untyped": {"type": None, "enum": ["a", "b"], "const": None},
    "null items": {"type": "array", "items": None, "prefixItems": None, "minItems": None, "maxItems": None},
    "null bounds": _whole(minimum=None, maximum=None, multipleOf=None),
    "null object": {"type": "object", "properties": None, "required": None, "additionalProperties": None},
    "draft 4": _whole(minimum=0, exclusiveMinimum=True),
    "tuple of draft 4": {"type": "array", "items": [_text(), _whole()]},
    "capitals": {"type": "STRING", "enum": ["A"]},
    "only null": {"type": "null"},
    "nothing": {"enum": []}, "none of none": {"anyOf": []}, "one of none": {"oneOf": []}, "no type": {"type": []}, "never": False,
    "bounds crossed": _whole(minimum=5, maximum=3), "no multiple": _whole(minimum=1, maximum=3, multipleOf=7),
    "text bounds": {"type": "number", "minimum": "3"},
    "lengths crossed": _text(minLength=5, maxLength=3), "long": _text(minLength=5000), "empty": _text(maxLength=0),
    "pattern too short": _text(pattern="^a$", minLength=5), "pattern and format": _text(pattern="^a$", format="date"),
    "greedy": _text(pattern="a.{400}b.{400}", maxLength=1000), "looks": _text(pattern="^(?=.*x)y"), "broken": _text(pattern="("),
    "other words": {"type": "object", "patternProperties": {"^x": {}}, "not": {}, "if": {}, "then": {}},
    "unique": _list(_text(), uniqueItems=True), "constants": {"enum": [{}, [1], "x"]},
    "huge": {"oneOf": [{"const": 10**30}, {"const": 10**31}]},
    "root": {"$ref": "#"}, "nowhere": {"$ref": "#/$defs/none"},
    "elsewhere": {"$ref": "https://example.com/schema.json"}, "no text": {"$ref": 5},
    "itself": {"$ref": "#/properties/itself"}, "filter[name]": _text(), "a:b": _text(), "": _text(), '"quoted"': _text(),
    "deep": _list(_list({"anyOf": [_list({"$ref": "#"}), {"type": "null"}]})),
}  # fmt: skip
_SERVERS = ("fs", "github", "slack", "postgres", "browser", "search", "notion", "calendar", "shell")


def parameters(rng: random.Random, odd: float = 0.0) -> Schema:
    """Of one tool; `odd`: how likely one of them is what nobody means."""
    names = rng.sample(list(_PLAIN), rng.choice((0, 1, 2, 3, 4, 6, 8, 12, 20)))
    given = {name: _PLAIN[name] for name in names}
    given |= {name: ODD[name] for name in rng.sample(list(ODD), rng.choice((1, 2)) if rng.random() < odd else 0)}
    if rng.random() < 0.15:
        given = {"request": _object(sorted(given)[:1], {"additionalProperties": False}, **given)}
    made = {"type": "object", "properties": given, "$defs": _DEFS}
    made |= rng.choice(({}, {"additionalProperties": False}, {"$schema": "http://json-schema.org/draft-07/schema#"}))
    return made | rng.choice(({}, {"required": [name for name in given if rng.random() < 0.5]}))


def tool_list(rng: random.Random, most: int = 128, odd: float = 0.1) -> list[Schema]:
    """One to `most` tools, a few more often than many; a sixth of the lists have strict ones."""
    count = max(1, round(most ** rng.random()))
    strict = rng.random() < 1 / 6
    names = [f"{rng.choice(_SERVERS)}_{place}" for place in range(count)]
    functions = [{"name": name, "description": "Does it.", "parameters": parameters(rng, odd)} for name in names]
    for function in functions:
        if strict and rng.random() < 0.3:
            function["strict"] = True
    return [{"type": "function", "function": function} for function in functions]
