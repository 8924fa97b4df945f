"""JSON of unknown size inside a request, kept as bytes and decoded with a bound. Decoding stops at
the first fault, and counts come before it, so a body costs at most a scan. InvalidRequest names
the key."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, UnsetType
from msgspec.inspect import ListType, LiteralType, StructType, Type, UnionType, type_info

from deploy.edge.bodies.key_types import Natural
from engine.errors import InvalidRequest

ON_LOOP_BYTES = 64 << 10  # of JSON: read in less than a millisecond
TEXT_BYTES = 8 << 20  # of a body that is not mostly media
_SLICE = 1 << 20
_MARKS = (b'"', b",", b"[", b"{", b"\\", b" ")
_MEDIA_MARKS = 1 << 20
_STRINGS = 1 << 18  # keys and strings of a body: a decoder reads some six million a second, and lets nobody in meanwhile
_WHERE = re.compile(r" - at (?:`key` in )?`\$\.?([\w.\[\]]*)`\Z")  # at the end: before it a message may quote the client
_HEAD = re.compile(rb"\s*(.?)\s*(.?)", re.DOTALL)
_NAMES = re.compile(r"[A-Za-z_]\w*")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_TRUNCATED = "data was truncated, or half of a character (a lone surrogate) ends a string"  # msgspec does not tell them apart
_MALFORMED: dict[type, str] = {RecursionError: "it is nested too deeply", UnicodeDecodeError: "it is not UTF-8"}

V = TypeVar("V")
Json = Raw | UnsetType  # a field that stays raw JSON

ANYTHING = msgspec.json.Decoder()
_TEXT = msgspec.json.Decoder(str)
_ID_LIST = msgspec.json.Decoder(list[Natural])


def invalid(path: str, why: str, code: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"{path}: {why}", _first(path), code)


def _first(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


def first_characters(raw: Raw) -> bytes:
    """The first two non-space characters; they show a list's kind."""
    head = _HEAD.match(raw)
    assert head is not None, "the pattern matches anything"
    return head[1] + head[2]


def not_null(raw: Json) -> Raw | None:
    """None if the key is absent or null."""
    if isinstance(raw, UnsetType) or first_characters(raw) == b"nu":
        return None
    return raw


def copied(raw: Json) -> Raw | None:
    """As `not_null`, on one line, without keeping the body in memory."""
    given = not_null(raw)
    if given is None:
        return None
    return Raw(msgspec.json.format(given, indent=-1))


def decode(raw: Raw | bytes, key: str, decoder: msgspec.json.Decoder[V]) -> V:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _complaint(error, key, decoder.type) from None


def token_ids(raw: Json, key: str, most: int) -> list[int]:
    if (given := not_null(raw)) is None:
        return []
    check_commas(given, key, most)
    return decode(given, key, _ID_LIST)


def check_commas(raw: Raw, key: str, most: int) -> None:
    if first_characters(raw)[:1] == b"[" and bytes(raw).count(b",") >= most:
        raise invalid(key, f"more than {most} token ids")


def check_strings(body: bytes) -> None:
    """InvalidRequest: a decoder looks at every key, also repeated ones."""
    if body.count(b'"') - body.count(b'\\"') > 2 * _STRINGS:
        raise InvalidRequest(f"The body holds more than {_STRINGS} keys and strings")


def check_large(body: bytes) -> None:
    """InvalidRequest if a body above TEXT_BYTES has more JSON than media needs."""
    marks = 0
    for start in range(0, len(body), _SLICE):
        marks += sum(body.count(mark, start, start + _SLICE) for mark in _MARKS)
        if marks > _MEDIA_MARKS:
            raise InvalidRequest(f"A body of more than {TEXT_BYTES} bytes may hold few texts besides its images")


def list_decoder(element: Any, most: int) -> msgspec.json.Decoder[list[Any]]:
    """msgspec counts elements only after reading all; each must have a string, which
    `check_strings` counts."""
    return msgspec.json.Decoder(Annotated[list[element], Meta(max_length=most)])


def read_list(raw: Json, key: str, decoder: msgspec.json.Decoder[list[Any]]) -> list[Any]:
    """Absent or null is empty."""
    given = not_null(raw)
    if given is None:
        return []
    return decode(given, key, decoder)


def read_small(raw: Json, key: str, decoder: msgspec.json.Decoder[V], most: int) -> V | None:
    if (given := not_null(raw)) is None:
        return None
    if len(memoryview(given)) > most:
        raise invalid(key, f"more than {most} bytes")
    return decode(given, key, decoder)


def read_text(raw: Json, key: str) -> str | None:
    if isinstance(raw, Raw) and first_characters(raw)[:1] == b'"':
        return decode(raw, key, _TEXT)
    return None


def _complaint(error: Exception, key: str, decoded: Any) -> InvalidRequest:
    if not isinstance(error, msgspec.ValidationError):
        why = _MALFORMED.get(type(error), str(error)).replace("data was truncated", _TRUNCATED)
        return InvalidRequest(f"The body is not JSON: {why}", param=_first(key) or None, code="invalid_json")
    what, path, *_ = (*_WHERE.split(str(error)), "")
    if missing := _MISSING.match(what):
        path = f"{path}.{missing[1]}".lstrip(".")
        what = "is required"
    if what.startswith("Invalid enum value"):
        what += f", not one of {', '.join(map(str, _allowed_values(type_info(decoded), _NAMES.findall(path))))}"
    if path.startswith("[") or not path:
        path = f"{key}{path}"
    else:
        path = f"{key}.{path}".lstrip(".")
    if not path:
        return InvalidRequest(f"The body must be a JSON object: {what}", code="invalid_json")
    return invalid(path[:200], what[:300])


def _allowed_values(kind: Type, path: list[str]) -> Sequence[Any]:
    """Empty if any value is allowed."""
    inside = []
    match kind:
        case LiteralType():
            return kind.values
        case ListType():
            inside = [kind.item_type]
        case UnionType():
            inside = list(kind.types)
        case StructType():
            inside = [field.type for field in kind.fields if [field.encode_name] == path[:1]]
            path = path[1:]
    return [value for one in inside for value in _allowed_values(one, path)]
