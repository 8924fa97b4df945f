"""What a reply is made of, as typed parts: text of the answer, text of a thought, a tool call, more of a call's arguments."""

from collections.abc import Iterable
from itertools import groupby

import msgspec

from engine.protocol import FrozenStruct


class Content(FrozenStruct):
    """Text of the answer itself."""

    text: str


class Reasoning(FrozenStruct):
    """Text of a thought, which comes before the answer."""

    text: str


class ToolCallStart(FrozenStruct):
    """A call begins; its arguments follow. `index`: its place among the reply's calls; `id`: no other call has it."""

    index: int
    id: str
    name: str


class Arguments(FrozenStruct):
    """More of the arguments of call `index`: JSON text, which is only complete once the call is."""

    index: int
    text: str


Part = Content | Reasoning | ToolCallStart | Arguments


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same parts; neighbours of one kind are one part. Between the arguments of two calls a ToolCallStart stands."""
    made = []
    for _, group in groupby(parts, type):
        run = list(group)
        first = run[0]
        if isinstance(first, ToolCallStart):
            made += run
        else:
            text = "".join(part.text for part in run if not isinstance(part, ToolCallStart))
            made.append(msgspec.structs.replace(first, text=text))
    return made
