"""How one answer becomes bytes in the shape of its API.

    stream    begin, events ..., end          or, after an error,    begin, events ..., failure
    whole     add ..., full
"""

from collections.abc import Mapping
from typing import Protocol

from engine.errors import QuartetError
from engine.front.generation import Choice, Delta
from engine.pieces import Pieces
from engine.protocol import FrozenStruct

JSON = "application/json"


class ServedModel(FrozenStruct):
    name: str
    pieces: Pieces
    fingerprint: str

    def text_of(self, token: int) -> str:
        return self.pieces.bytes_of(token).decode("utf-8", "replace")


class Usage(FrozenStruct):
    """Of all choices together. accepted, rejected: draft tokens that are, or are not, in the
    completion."""

    prompt: int
    completion: int
    cached: int = 0  # prompt tokens that no choice computed
    reasoning: int = 0  # tokens of thoughts, markers included
    media: Mapping[str, int] = {}  # prompt tokens of images, videos and clips, by OpenAI's name of the count
    accepted: int = 0
    rejected: int = 0


class ResponseFormat(Protocol):
    """One answer in progress. `media_type`: of a whole one."""

    id: str
    media_type: str

    def begin(self, usage: Usage) -> bytes:
        """The first bytes, sent once the prompt is accepted."""

    def events(self, index: int, delta: Delta) -> bytes:
        """Includes its choice's begin and end; may be empty."""

    def end(self, usage: Usage) -> bytes:
        """The last events, once every choice has ended."""

    def failure(self, error: QuartetError) -> bytes:
        """The last event after an error."""

    def add(self, index: int, delta: Delta) -> None:
        """Add to a whole answer."""

    def full(self, usage: Usage) -> bytes:
        """The whole answer."""


class OneChoice:
    media_type = JSON

    def __init__(self) -> None:
        self.choice = Choice()

    def add(self, index: int, delta: Delta) -> None:  # noqa: ARG002 - there is one choice
        self.choice.add(delta)
