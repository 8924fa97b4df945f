"""Reads multipart/form-data as a type; the file becomes base64."""

import base64
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from deploy.edge.bodies.body_reader import unsupported
from deploy.edge.bodies.raw_json import decode, invalid
from engine.errors import InvalidRequest

MEDIA_TYPE = "multipart/form-data"
_FIELDS = 32
_TEXT_BYTES = 64 << 10
_BOUNDARY = re.compile(rb"^--[^\r\n]{1,70}(?=\r\n)", re.MULTILINE)
_NAME = re.compile(
    rb'\r\ncontent-disposition:(?:[^"\r\n]|"[^"\r\n]*"){0,999}?;\s*name=(?:"([^"\r\n]{1,64})"|([^\s";]{1,64}))', re.IGNORECASE
)

R = TypeVar("R", bound=Struct)


class FormReader(Generic[R]):
    """`absent` keys, with "[]" or without, are refused."""

    def __init__(self, kind: type[R], absent: Collection[str]) -> None:
        self.kind = kind
        self._absent = absent
        self._known = kind.__struct_encode_fields__
        self._decoder = msgspec.json.Decoder(kind, strict=False)

    def read(self, body: bytes) -> R:
        """InvalidRequest names the first wrong key."""
        values = {}
        for name, value in _fields(body).items():
            if name.removesuffix("[]") in self._absent:
                raise unsupported(name)
            if name not in self._known:
                continue  # nothing reads it, and no message or log line has a name that a client has made up
            values[name] = base64.b64encode(value).decode() if name == "file" else _text(name, value)
        return decode(msgspec.json.encode(values), "", self._decoder)


def _fields(body: bytes) -> dict[str, bytes]:
    """InvalidRequest: not a form, cut, or too many fields."""
    boundary = _BOUNDARY.search(body[:_TEXT_BYTES])  # a search keeps the interpreter's lock
    if boundary is None:
        raise InvalidRequest(f"the body is no {MEDIA_TYPE}")
    *parts, end = body[boundary.end() :].split(b"\r\n" + boundary[0], _FIELDS)
    if not end.startswith(b"--"):
        raise InvalidRequest(f"the form is cut, or has more than {_FIELDS} fields")
    fields = {}
    for part in parts:
        head, _, content = part.partition(b"\r\n\r\n")
        if (name := _NAME.search(head[:_TEXT_BYTES])) is None:
            raise InvalidRequest("a field of the form has no name")
        fields[(name[1] or name[2]).decode(errors="replace")] = content
    return fields


def _text(name: str, value: bytes) -> str:
    with suppress(UnicodeDecodeError):
        if len(value) <= _TEXT_BYTES:
            return value.decode()
    raise invalid(name, f"it is no text of at most {_TEXT_BYTES} bytes; a recording is the field file")
