"""The form that a request demands of its answer, in OpenAI's, vLLM's and SGLang's spellings, as rules of engine.front.grammar.

    response_format                                 {"type": "json_object" | "json_schema" | "structural_tag" | "text"}
    structured_outputs                              {"json" | "json_object" | "regex" | "choice" | "grammar" | ...: ...}
    guided_json  guided_json_object  guided_regex  guided_choice  guided_grammar
    json_schema  regex  ebnf  structural_tag        SGLang's: a schema or tag as JSON in a string, too

Only one of them at a time. What of a form cannot be kept is refused, never left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw, Struct, UnsetType

from deploy.edge.raw_json import ANYTHING, Json, decode, not_null, size
from engine.errors import InvalidRequest
from engine.front.grammar import (
    MAX_SCHEMA_BYTES,
    Structure,
    choice_answer,
    json_answer,
    lark_answer,
    regex_answer,
    tagged_answer,
)

_MAX_BYTES = MAX_SCHEMA_BYTES + 1024  # of one key: a schema and what stands around it
_MAX_TAGS = 64


class _JsonSchema(Struct, frozen=True):
    schema: Raw | UnsetType = msgspec.UNSET
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(Struct, frozen=True):
    """`structures` and `triggers` are a structural tag's."""

    type: str
    json_schema: _JsonSchema | None = None
    structures: Raw | UnsetType = msgspec.UNSET
    triggers: Raw | UnsetType = msgspec.UNSET


class _Structure(Struct, frozen=True):
    begin: str
    end: str = ""
    schema: dict[str, Any] | bool = True


class _StructuralTag(Struct, frozen=True):
    """vLLM's and SGLang's, of the kind that has triggers."""

    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


_FORMATS = msgspec.json.Decoder(_ResponseFormat)


@dataclass(frozen=True)
class AnswerForm:
    """`rules`: as engine.front.grammar makes them; `param`: the request's key."""

    rules: str
    param: str


def answer_form(keys: Mapping[str, Json]) -> AnswerForm | None:
    """Of a request's KEYS as raw JSON; None: it demands none. InvalidRequest names the key that is wrong."""
    given = {name: raw for name, value in keys.items() if (raw := not_null(value)) is not None}
    for name, raw in given.items():
        if size(raw) > _MAX_BYTES:
            raise InvalidRequest(f"{name}: larger than {_MAX_BYTES} bytes", param=name)
    read = {name: rules for name, raw in given.items() if (rules := _read(name, raw)) is not None}
    if len(read) > 1:
        raise InvalidRequest(f"{', '.join(read)}: only one of them", param=next(iter(read)))
    return next((AnswerForm(rules, name) for name, rules in read.items()), None)


def _read(name: str, raw: Raw) -> str | None:
    try:
        return KEYS[name](raw, name)
    except RecursionError:
        raise InvalidRequest(f"{name}: it is nested too deeply", param=name) from None
    except InvalidRequest as error:
        said = str(error)
        raise InvalidRequest(said if said.startswith(name) else f"{name}: {said}", param=name, code=error.code) from None


def _response_format(raw: Raw, key: str) -> str | None:
    form: _ResponseFormat = decode(raw, key, _FORMATS)
    match form.type:
        case "text":
            return None
        case "json_object":
            return json_answer()
        case "json_schema":
            schema = not_null(form.json_schema.schema) if form.json_schema is not None else None
            if schema is None:
                raise InvalidRequest(f"{key}.json_schema.schema: is required")
            return _schema(_value(schema, key), key)
        case "structural_tag":
            return _tag(_value(raw, key), key)
    raise InvalidRequest(f"{key}.type: {form.type[:100]!r} is not one of text, json_object, json_schema, structural_tag")


def _structured_outputs(raw: Raw, key: str) -> str | None:
    """vLLM's: one form, and options, of which those that would change the answer are refused."""
    value = _value(raw, key)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{key}: must be an object")
    for option in ("disable_additional_properties", "whitespace_pattern"):
        if value.get(option):
            raise InvalidRequest(f"{key}.{option} is not supported here", code="unsupported_parameter")
    forms = {name: each for name, each in value.items() if name in _FORMS and each is not None and each is not False}
    if len(forms) > 1:
        raise InvalidRequest(f"{key}: only one of {', '.join(forms)}")
    if not forms and value:
        raise InvalidRequest(f"{key}: must have one of {', '.join(_FORMS)}")
    return next((_FORMS[name](each, f"{key}.{name}") for name, each in forms.items()), None)


def _value(raw: Raw, key: str) -> Any:
    return decode(raw, key, ANYTHING)


def _nested(value: Any, key: str) -> Any:
    """JSON, which may come in a string."""
    if not isinstance(value, str):
        return value
    try:
        return ANYTHING.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{key}: no JSON: {error}") from None


def _schema(value: Any, key: str) -> str:
    schema = _nested(value, key)
    if schema is not True and not isinstance(schema, dict):
        raise InvalidRequest(f"{key}: must be a JSON Schema, an object")
    return json_answer({} if schema is True else schema)


def _any_object(value: Any, key: str) -> str | None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{key}: must be true or false")
    return json_answer() if value else None


def _text(make: Callable[[str], str]) -> Callable[[Any, str], str]:
    def read(value: Any, key: str) -> str:
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{key}: must be a text that is not empty")
        return make(value)

    return read


def _choice(value: Any, key: str) -> str:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRequest(f"{key}: must be a list of strings")
    return choice_answer(value)


def _tag(value: Any, key: str) -> str:
    """Each structure belongs to the trigger that it begins with."""
    try:
        tag = msgspec.convert(_nested(value, key), _StructuralTag)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{key}: only structures with triggers are supported: {error}") from None
    if not 1 <= len(tag.structures) <= _MAX_TAGS:
        raise InvalidRequest(f"{key}.structures: 1 to {_MAX_TAGS}")
    return tagged_answer([_structure(each, tag.triggers, f"{key}.structures[{at}]") for at, each in enumerate(tag.structures)])


def _structure(structure: _Structure, triggers: Sequence[str], where: str) -> Structure:
    trigger = max((each for each in triggers if each and structure.begin.startswith(each)), key=len, default=None)
    if trigger is None:
        raise InvalidRequest(f"{where}.begin: begins with none of the triggers")
    if structure.schema is False:
        raise InvalidRequest(f"{where}.schema: must be a JSON Schema, an object")
    return Structure(trigger, structure.begin, {} if structure.schema is True else structure.schema, structure.end)


_FORMS: Mapping[str, Callable[[Any, str], str | None]] = {
    "json": _schema,
    "json_object": _any_object,
    "regex": _text(regex_answer),
    "choice": _choice,
    "grammar": _text(lark_answer),
    "structural_tag": _tag,
}


def _of(form: str) -> Callable[[Raw, str], str | None]:
    return lambda raw, key: _FORMS[form](_value(raw, key), key)


KEYS: Mapping[str, Callable[[Raw, str], str | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _of("json"),
    "guided_json_object": _of("json_object"),
    "guided_regex": _of("regex"),
    "guided_choice": _of("choice"),
    "guided_grammar": _of("grammar"),
    "json_schema": _of("json"),
    "regex": _of("regex"),
    "ebnf": _of("grammar"),
    "structural_tag": _of("structural_tag"),
}
