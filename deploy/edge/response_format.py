"""What an answer is to whoever sends it: bytes, whole or event by event, in the shape of one API.

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
    """What an answer says of the model: its name, its vocabulary as output, and what OpenAI calls the system's fingerprint."""

    name: str
    pieces: Pieces
    fingerprint: str

    def text_of(self, token: int) -> str:
        """What a token shows as."""
        return self.pieces.bytes_of(token).decode("utf-8", "replace")


class Usage(FrozenStruct):
    """Token counts of a request, all choices together.

    `cached` of the prompt's were not computed for any of them; `reasoning` of the completion's were thoughts, markers included;
    `media` of the prompt's stand for images, videos and clips, by OpenAI's name of the count.
    `accepted` of the completion's were drafts, and `rejected` drafts were not among them.
    """

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0
    media: Mapping[str, int] = {}
    accepted: int = 0
    rejected: int = 0


class ResponseFormat(Protocol):
    """One answer in the making; `id` is its name for the client. `media_type`: of a whole one."""

    id: str
    media_type: str

    def begin(self, usage: Usage) -> bytes:
        """Of a stream, before anything else: the prompt has been accepted, and nothing is generated yet."""

    def events(self, index: int, delta: Delta) -> bytes:
        """What a delta adds to the stream, the beginning and the end of its choice included; may be empty."""

    def end(self, usage: Usage) -> bytes:
        """A stream's last events: every choice has come to its end."""

    def failure(self, error: QuartetError) -> bytes:
        """A stream's last event instead."""

    def add(self, index: int, delta: Delta) -> None:
        """Add a delta to a whole answer."""

    def full(self, usage: Usage) -> bytes:
        """The whole answer."""


class OneChoice:
    """A format of answers with one choice, which is summed up."""

    media_type = JSON

    def __init__(self) -> None:
        self.choice = Choice()

    def add(self, index: int, delta: Delta) -> None:  # noqa: ARG002 - there is one choice
        """Add a delta to a whole answer."""
        self.choice.add(delta)
