"""The form that a request demands of its answer, as rules of engine.front.grammar.

Only one of response_format, structured_outputs, guided_*, and SGLang's json_schema, regex, ebnf,
structural_tag may be given. A form that cannot be enforced is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from deploy.edge.bodies.raw_json import ANYTHING, Json, not_null, read_small
from deploy.edge.requests.ask import AnswerForm, LazyForm
from engine.errors import InvalidRequest
from engine.front.grammar import Structure, choice_answer, json_answer, lark_answer, regex_answer, tagged_answer
from engine.protocol import FrozenStruct, JsonObject

_MAX_BYTES = (64 << 10) + 1024  # of one key: a schema and what stands around it
_MAX_TAGS = 64
RulesReader = Callable[[Any], str | None]  # from what a key holds; InvalidRequest says what is wrong with it


class _Structure(FrozenStruct):
    begin: str
    end: str = ""
    schema: JsonObject | bool = True


class _StructuralTag(FrozenStruct):
    """The kind of vLLM and SGLang that has triggers."""

    structures: list[_Structure]
    triggers: list[str]


def form_of(values: Mapping[str, Json]) -> LazyForm | None:
    given = {key: raw for key, value in values.items() if (raw := not_null(value)) is not None}
    if given:
        return partial(_only_form, given)
    return None


def _only_form(given: Mapping[str, Raw]) -> AnswerForm | None:
    forms = [AnswerForm(rules, key) for key, raw in given.items() if (rules := _rules(raw, key)) is not None]
    if len(forms) > 1:
        raise InvalidRequest(f"{', '.join(form.key for form in forms)}: only one of them", param=forms[0].key)
    if forms:
        return forms[0]
    return None


def _rules(raw: Raw, key: str) -> str | None:
    """None if it demands nothing. InvalidRequest names the key."""
    value = read_small(raw, key, ANYTHING, _MAX_BYTES)
    try:
        return KEYS.get(key, _response_format)(value)
    except RecursionError:
        raise InvalidRequest(f"{key}: it is nested too deeply", param=key) from None
    except InvalidRequest as error:
        raise InvalidRequest(f"{key}: {error}", param=key, code=error.code) from None


def _response_format(value: Any) -> str | None:
    """Some APIs, and llama.cpp with `json_object`, put the schema one level higher than
    `json_schema`."""
    match value:
        case {"type": "text"}:
            return None
        case (
            {"type": "json_schema", "json_schema": {"schema": schema}} | {"type": "json_schema" | "json_object", "schema": schema}
        ) if schema is not None:
            return _schema(schema)
        case {"type": "json_object"}:
            return json_answer({"type": "object"})
        case {"type": "json_schema"}:
            raise InvalidRequest("json_schema needs a schema")
        case {"type": "structural_tag"}:
            return _tag(value)
        case {"type": str(kind)}:
            raise InvalidRequest(f"type {kind[:100]!r} is not one of text, json_object, json_schema, structural_tag")
    raise InvalidRequest("must be an object with a type")


def _structured_outputs(value: Any) -> str | None:
    """An option that would change the answer is refused."""
    if not isinstance(value, dict):
        raise InvalidRequest("must be an object")
    if value.get("whitespace_pattern"):
        raise InvalidRequest("whitespace_pattern is not supported here", code="unsupported_parameter")
    forms = {name: form for name, form in value.items() if name in _FORMS and form is not None and form is not False}
    if len(forms) > 1:
        raise InvalidRequest(f"only one of {', '.join(forms)}")
    if not forms and value:
        raise InvalidRequest(f"must have one of {', '.join(_FORMS)}")
    return next((_FORMS[name](form) for name, form in forms.items()), None)


def _nested(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return ANYTHING.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"no JSON: {error}") from None


def _schema(value: Any) -> str:
    schema = _nested(value)
    if schema is not True and not isinstance(schema, dict):
        raise InvalidRequest("must be a JSON Schema, an object")
    return json_answer({} if schema is True else schema)


def _any_object(value: Any) -> str:
    if value is not True:
        raise InvalidRequest("must be true or false")
    return json_answer({"type": "object"})


def _text(make: Callable[[str], str], value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest("must be a text that is not empty")
    return make(value)


def _choice(value: Any) -> str:
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise InvalidRequest("must be a list of strings")
    return choice_answer(value)


def _tag(value: Any) -> str:
    try:
        tag = msgspec.convert(_nested(value), _StructuralTag)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"only structures with triggers are supported: {error}") from None
    if not 1 <= len(tag.structures) <= _MAX_TAGS:
        raise InvalidRequest(f"structures: 1 to {_MAX_TAGS}")
    structures = enumerate(tag.structures)
    return tagged_answer([_structure(structure, tag.triggers, f"structures[{index}]") for index, structure in structures])


def _structure(structure: _Structure, triggers: Sequence[str], where: str) -> Structure:
    trigger = max((text for text in triggers if text and structure.begin.startswith(text)), key=len, default=None)
    if trigger is None:
        raise InvalidRequest(f"{where}.begin: begins with none of the triggers")
    if structure.schema is False:
        raise InvalidRequest(f"{where}.schema: must be a JSON Schema, an object")
    return Structure(trigger, structure.begin, {} if structure.schema is True else structure.schema, structure.end)


_FORMS: Mapping[str, RulesReader] = {
    "json": _schema,
    "json_object": _any_object,
    "regex": partial(_text, regex_answer),
    "choice": _choice,
    "grammar": partial(_text, lark_answer),
    "structural_tag": _tag,
}


KEYS: Mapping[str, RulesReader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _FORMS["regex"],
    "guided_choice": _choice,
    "guided_grammar": _FORMS["grammar"],
    "json_schema": _schema,
    "regex": _FORMS["regex"],
    "ebnf": _FORMS["grammar"],
    "structural_tag": _tag,
}
