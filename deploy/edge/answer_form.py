"""The form that a request demands of its answer, in every API's spelling, as rules of engine.front.grammar.

    response_format                                 {"type": "json_object" | "json_schema" | "structural_tag" | "text"}
    structured_outputs                              {"json" | "json_object" | "regex" | "choice" | "grammar" | ...: ...}
    guided_json  guided_json_object  guided_regex  guided_choice  guided_grammar
    json_schema  regex  ebnf  structural_tag        SGLang's: a schema or tag as JSON in a string, too

Only one of them at a time. What of a form cannot be kept is refused, never left out.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw, Struct, UnsetType

from deploy.edge.ask import AnswerForm
from deploy.edge.raw_json import ANYTHING, decode, not_null
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

Spelling = Callable[[Raw, str], str | None]  # of a value and its key: rules, None: it demands nothing


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


def form_of(request: Any) -> Callable[[], AnswerForm | None] | None:
    """What reads a request's KEYS; None: it has none of them."""
    given = {name: raw for name in KEYS if (raw := not_null(getattr(request, name))) is not None}
    return partial(_only_form, given) if given else None


def _only_form(given: Mapping[str, Raw]) -> AnswerForm | None:
    forms = [form for name, raw in given.items() if (form := read_form(KEYS[name], raw, name)) is not None]
    if len(forms) > 1:
        raise InvalidRequest(f"{', '.join(form.key for form in forms)}: only one of them", param=forms[0].key)
    return forms[0] if forms else None


def read_form(spelling: Spelling, raw: Raw, key: str) -> AnswerForm | None:
    """None: what stands under `key` demands nothing. InvalidRequest names the key."""
    if len(memoryview(raw)) > _MAX_BYTES:
        raise InvalidRequest(f"{key}: more than {_MAX_BYTES} bytes", param=key)
    try:
        rules = spelling(raw, key)
    except RecursionError:
        raise InvalidRequest(f"{key}: it is nested too deeply", param=key) from None
    except InvalidRequest as error:
        said = str(error)
        raise InvalidRequest(said if said.startswith(key) else f"{key}: {said}", param=key, code=error.code) from None
    return None if rules is None else AnswerForm(rules, key)


def response_format(raw: Raw, key: str) -> str | None:
    """OpenAI's."""
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
            return schema_rules(_value(schema, key), key)
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


def schema_rules(value: Any, key: str) -> str:
    """Of a JSON Schema, which may come as JSON in a string."""
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
    "json": schema_rules,
    "json_object": _any_object,
    "regex": _text(regex_answer),
    "choice": _choice,
    "grammar": _text(lark_answer),
    "structural_tag": _tag,
}


def _of(form: str) -> Spelling:
    return lambda raw, key: _FORMS[form](_value(raw, key), key)


KEYS: Mapping[str, Spelling] = {
    "response_format": response_format,
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
