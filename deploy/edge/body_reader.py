"""Reads JSON as a type's keys, and refuses keys that other servers know and that have no function here.

Such a key is refused unless it asks for what is done anyway: one that changes the answer elsewhere is never left out silently.
A key that nobody knows is ignored, as clients expect.
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from deploy.edge.raw_json import ANYTHING, Json, decode
from engine.errors import InvalidRequest

AbsentKeys = Mapping[str, tuple[Any, ...]]  # to the values that ask for nothing, beside null

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
        """What it says. InvalidRequest names the first key that is wrong."""
        request = decode(body, "", self._decoder)
        for name, neutral in self._absent.items():
            if not _is_neutral(getattr(request, name), name, neutral):
                raise unsupported(name, " or ".join(msgspec.json.encode(value).decode() for value in neutral))
        return request


def unsupported(name: str, allowed: str = "") -> InvalidRequest:
    """What a known key without its function is answered with."""
    message = f"{name} is not supported here{allowed and f': only {allowed}'}"
    return InvalidRequest(message, param=name.partition(".")[0], code="unsupported_parameter")


def _is_neutral(raw: Json, name: str, neutral: tuple[Any, ...]) -> bool:
    """Whether it is absent, null or one of `neutral`, none of which is long; true and 1 are not the same."""
    if isinstance(raw, UnsetType):
        return True
    value = decode(raw, name, ANYTHING) if len(memoryview(raw)) <= _NEUTRAL_BYTES else ...
    return value is None or any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
