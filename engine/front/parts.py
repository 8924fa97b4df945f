"""The typed parts of a reply."""

from collections.abc import Iterable
from itertools import groupby

import msgspec

from engine.protocol import FrozenStruct


class Content(FrozenStruct):
    text: str


class Reasoning(FrozenStruct):
    text: str


class ToolCallStart(FrozenStruct):
    """`index`: among the reply's calls; `id`: unique."""

    index: int
    id: str
    name: str


class Arguments(FrozenStruct):
    """More JSON of call `index`, complete only with the call."""

    index: int
    text: str


Part = Content | Reasoning | ToolCallStart | Arguments


def joined(parts: Iterable[Part]) -> list[Part]:
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
