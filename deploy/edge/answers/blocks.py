"""Formats that stream a reply block by block."""

import abc
from collections.abc import Iterable

import msgspec

from deploy.edge.answers.response_format import OneChoice
from engine.front.generation import Delta, ReplyBlock
from engine.front.parts import ToolCallStart

encode = msgspec.json.encode


class BlockFormat(OneChoice, abc.ABC):
    """A stream has one open block at a time."""

    @abc.abstractmethod
    def opened(self, block: ReplyBlock) -> bytes:
        ...

    @abc.abstractmethod
    def grown(self, block: ReplyBlock, text: str) -> bytes:
        ...

    @abc.abstractmethod
    def closed(self, block: ReplyBlock) -> bytes:
        ...

    def events(self, index: int, delta: Delta) -> bytes:  # noqa: ARG002 - there is one choice
        return b"".join(self._events(delta))

    def _events(self, delta: Delta) -> Iterable[bytes]:
        blocks = self.choice.blocks
        for part in delta.parts:
            count = len(blocks)
            block = self.choice.take(part)
            if len(blocks) > count:
                yield from map(self.closed, blocks[count - 1 : count])
                yield self.opened(block)
            if not isinstance(part, ToolCallStart):
                yield self.grown(block, block.pieces[-1])
        if delta.finish is not None:
            self.choice.finish = delta.finish
            self.choice.stop = delta.stop
            yield from map(self.closed, blocks[-1:])


def event(kind: str, **fields: object) -> bytes:
    """A server-sent event named `kind`, whose data repeats the name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
