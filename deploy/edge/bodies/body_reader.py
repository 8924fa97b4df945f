"""Reads JSON as a type. Refuses keys of other servers unless their value asks for nothing; ignores
unknown keys."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from deploy.edge.bodies.raw_json import ANYTHING, Json, decode
from engine.errors import InvalidRequest

AbsentKeys = Mapping[str, tuple[Any, ...]]  # to the values, in addition to null, that ask for nothing

_NEUTRAL_BYTES = 256  # of a value that is looked at

R = TypeVar("R", bound=Struct)


class BodyReader(Generic[R]):
    """Reads a `kind`; `absent` keys stay raw JSON."""

    def __init__(self, kind: type[R], absent: AbsentKeys) -> None:
        self.kind = kind
        self._absent = absent
        fields = [(name, Json, UNSET) for name in absent]
        made: type[Any] = msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True)
        self._decoder = msgspec.json.Decoder(made)

    def read(self, body: bytes | Raw) -> R:
        """InvalidRequest names the first wrong key."""
        request = decode(body, "", self._decoder)
        for name, neutral in self._absent.items():
            if not _is_neutral(getattr(request, name), name, neutral):
                raise unsupported(name, " or ".join(msgspec.json.encode(value).decode() for value in neutral))
        return request


def unsupported(name: str, allowed: str = "") -> InvalidRequest:
    message = f"{name} is not supported here{allowed and f': only {allowed}'}"
    return InvalidRequest(message, param=name.partition(".")[0], code="unsupported_parameter")


def _is_neutral(raw: Json, name: str, neutral: tuple[Any, ...]) -> bool:
    """True and 1 differ."""
    if isinstance(raw, UnsetType):
        return True
    if len(memoryview(raw)) <= _NEUTRAL_BYTES:
        value = decode(raw, name, ANYTHING)
    else:
        value = ...
    return value is None or any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
