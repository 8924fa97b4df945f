"""A reply as blocks in the order of generation: thoughts, texts, calls. The APIs of agents stream each of them from begin to end.

    parts     Reasoning Reasoning   Content Content Content   ToolCallStart Arguments Arguments
    blocks    |-- reasoning ----|   |------ text ---------|   |------------ call -------------|
"""

import abc
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from engine.front.generation import Delta
from engine.front.parts import Arguments, Content, Part, Reasoning, ToolCallStart

encode = msgspec.json.encode


@dataclass(slots=True)
class ReplyBlock:
    """A run of parts of one kind. `pieces`: its text, of a call its arguments; `id` and `name` are a call's."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All that has come of it."""
        return "".join(self.pieces)


class BlockFormat(abc.ABC):
    """A format of answers with one choice, whose stream opens a block, adds to it and closes it before the next."""

    def __init__(self) -> None:
        self.blocks: list[ReplyBlock] = []
        self.finish: str | None = None
        self.stop: str | int | None = None

    @abc.abstractmethod
    def opened(self, block: ReplyBlock) -> bytes:
        """The events by which a block begins."""

    @abc.abstractmethod
    def grown(self, block: ReplyBlock, text: str) -> bytes:
        """The event of more of it."""

    @abc.abstractmethod
    def closed(self, block: ReplyBlock) -> bytes:
        """The events of its end."""

    def events(self, index: int, delta: Delta) -> bytes:  # noqa: ARG002 - there is one choice
        """What a delta adds to the stream."""
        found = [event for part in delta.parts for event in self._events(part)]
        if delta.finish is not None:
            self._end(delta)
            found += [self.closed(self.blocks[-1])] if self.blocks else []
        return b"".join(found)

    def add(self, index: int, delta: Delta) -> None:  # noqa: ARG002 - there is one choice
        """One more of a whole answer."""
        for part in delta.parts:
            self._take(part)
        self._end(delta)

    def _end(self, delta: Delta) -> None:
        self.finish, self.stop = delta.finish, delta.stop

    def _events(self, part: Part) -> Iterable[bytes]:
        before = self.blocks[-1] if self.blocks else None
        block = self._take(part)
        if block is not before:
            if before is not None:
                yield self.closed(before)
            yield self.opened(block)
        if not isinstance(part, ToolCallStart):
            yield self.grown(block, part.text)

    def _take(self, part: Part) -> ReplyBlock:
        """The block that it goes into."""
        match part:
            case Content(text):
                block = self._last("text")
            case Reasoning(text):
                block = self._last("reasoning")
            case Arguments(text=text):
                block, text = self.blocks[-1], part.text
            case ToolCallStart(_, number, name):
                return self._open(ReplyBlock(len(self.blocks), "call", number, name))
        block.pieces.append(text)
        return block

    def _last(self, kind: Literal["reasoning", "text"]) -> ReplyBlock:
        if self.blocks and self.blocks[-1].kind == kind:
            return self.blocks[-1]
        return self._open(ReplyBlock(len(self.blocks), kind))

    def _open(self, block: ReplyBlock) -> ReplyBlock:
        self.blocks.append(block)
        return block


def event(kind: str, **fields: object) -> bytes:
    """A server-sent event of that name, whose data says it once more."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
