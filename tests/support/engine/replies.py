"""Replies in Gemma 4's notation as token ids over a made-up vocabulary, with what they say; and a parser's parts added up."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.front.parts import Arguments, Content, Part, Reasoning, ToolCallStart
from engine.front.reply import Markers, ReplyParser
from engine.front.tools import Tools
from engine.pieces import Pieces
from tests.support.engine.schemas import tools_of

BEGIN_THOUGHT, END_THOUGHT, BEGIN_CALL, END_CALL, QUOTE, TURN, END_TURN = range(7)
MARKERS = Markers(BEGIN_THOUGHT, END_THOUGHT, BEGIN_CALL, END_CALL, QUOTE, frozenset({0, 1, 2, 3, TURN, END_TURN}))
NAMES = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>", "<turn|>")
SPECIAL = frozenset(range(len(NAMES)))
IDS = {name: number for number, name in enumerate(NAMES)}

Segment = str | int  # text, or the id of a marker

TOOLS = tools_of({name: {"type": "object"} for name in ("get_weather", "f", "g", "run-it", "Ünit.x")})


@dataclass(frozen=True)
class Tokens:
    """Token ids and the vocabulary that they are from."""

    ids: list[int]
    pieces: Pieces


def tokens(segments: Iterable[Segment], rng: random.Random | None = None) -> Tokens:
    """The segments as tokens. With `rng` text is cut anywhere, some of it into single bytes; otherwise a segment is a token."""
    table = list(NAMES)
    ids = []
    for segment in segments:
        if isinstance(segment, int):
            ids.append(segment)
            continue
        for piece in [segment] if rng is None else cut(segment, rng):
            ids.append(len(table))
            table.append(piece)
    return Tokens(ids, Pieces(tuple(table), SPECIAL))


def cut(text: str, rng: random.Random) -> list[str | bytes]:
    """`text` in pieces of one to eight characters; of those that are not ASCII some as single bytes."""
    pieces = []
    place = 0
    while place < len(text):
        size = rng.choice((1, 1, 2, 3, 5, 8))
        piece = text[place : place + size]
        place += size
        if not piece.isascii() and rng.random() < 0.5:
            pieces += [bytes([byte]) for byte in piece.encode()]
        else:
            pieces.append(piece)
    return pieces


def segments(text: str) -> list[Segment]:
    """`text` with its markers' names as markers."""
    found = [""]
    while text:
        name = next((name for name in NAMES if text.startswith(name)), None)
        if name is not None:
            found += [IDS[name], ""]
            text = text[len(name) :]
        else:
            found[-1] = str(found[-1]) + text[0]
            text = text[1:]
    return [segment for segment in found if segment != ""]


@dataclass
class Said:
    """What a reply says: `calls` are (name, JSON of the arguments)."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part]) -> "Said":
        """Added up, with what must hold of any stream of parts."""
        said, ids = cls(), set[str]()
        for part in parts:
            match part:
                case Content(text):
                    said.content += text
                case Reasoning(text):
                    said.reasoning += text
                case ToolCallStart(index, number, name):
                    assert index == len(said.calls), "calls come in order"
                    assert number not in ids, "two calls of one id"
                    ids.add(number)
                    said.calls.append((name, ""))
                case Arguments(index, text):
                    assert index == len(said.calls) - 1, "arguments belong to the last call"
                    said.calls[-1] = (said.calls[-1][0], said.calls[-1][1] + text)
            assert isinstance(part, ToolCallStart) or part.text, "a part without text"
        return said


def parsed(
    given: Tokens, *, tools: Tools = TOOLS, cut: bool = False, rng: random.Random | None = None, **options: Any
) -> tuple[Said, ReplyParser]:
    """What the parser makes of these tokens: all at once, or with `rng` in batches of any size."""
    parser = ReplyParser(given.pieces, MARKERS, tools, **options)
    parts = []
    place = 0
    while place < len(given.ids):
        size = len(given.ids) if rng is None else rng.choice((1, 1, 1, 2, 3, 7))
        parts += parser.push(given.ids[place : place + size])
        place += size
    return Said.of([*parts, *parser.end(cut=cut)]), parser


# --- replies with their meaning ---

_NASTY = ('"', "{", "}", "[", "]", ":", ",", "\\", "\n", " ", "'", "<", "|>", '<|"|>', "<tool_call|>", "call:f{", "a", "b", "x1")
_MORE = ("é", "👋🏽", "\u2028", "日本", "\x07", "null", "true", "12", "key:", ", k:")
_NUMBERS = ("0", "-0", "7", "-12", "3.25", "1e5", "-2.5E-3", "12345678901234567890", "0.10")
_WORDS = ("true", "false", "null")
_KEYS = ("a", "key", "ünïcode", "x-1", "$ref", "path/to", "नाम", "ชื่อ", "_")


@dataclass(frozen=True)
class Reply:
    """A reply in the notation, and what it says."""

    segments: list[Segment]
    said: Said


def text_of(rng: random.Random, most: int = 8) -> str:
    """Any text, made of what is awkward."""
    return "".join(rng.choice(_NASTY if rng.random() < 0.7 else _MORE) for _ in range(rng.randint(0, most)))


def prose(rng: random.Random) -> str:
    """Text that begins with a word: no white space around it, so that all of it counts."""
    return "Well" + text_of(rng).rstrip() + "."


def value(rng: random.Random, depth: int = 3) -> tuple[list[Segment], str]:
    """A value in Gemma's notation, and as JSON."""
    kind = rng.random()
    if kind < 0.45 or depth == 0:
        text = text_of(rng)
        return [QUOTE, text, QUOTE], json.dumps(text, ensure_ascii=False)
    if kind < 0.7:
        literal = rng.choice(_NUMBERS if kind < 0.6 else _WORDS)
        return [literal], literal
    inner = [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind < 0.85:
        return _listed("[", "]", [(native, text) for native, text in inner])
    return members(inner, rng)


def members(inner: Sequence[tuple[list[Segment], str]], rng: random.Random) -> tuple[list[Segment], str]:
    """An object of these values."""
    keys = [rng.choice(_KEYS) + str(place) for place in range(len(inner))]
    named = [
        ([f"{key}:", *native], f"{json.dumps(key, ensure_ascii=False)}:{text}")
        for key, (native, text) in zip(keys, inner, strict=True)
    ]
    return _listed("{", "}", named)


def _listed(opener: str, closer: str, inner: Sequence[tuple[list[Segment], str]]) -> tuple[list[Segment], str]:
    native = [opener]
    for place, (each, _) in enumerate(inner):
        native += [",", *each] if place else each
    return [*native, closer], opener + ",".join(text for _, text in inner) + closer


def reply(rng: random.Random) -> Reply:
    """Thoughts, text and calls in any order that the notation has."""
    made, said = list[Segment](), Said()
    if rng.random() < 0.2:
        said.content = prose(rng)
        made.append(said.content)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        thought = text_of(rng).strip("\n")
        said.reasoning += ("\n" if said.reasoning and thought else "") + thought
        made += [BEGIN_THOUGHT, "thought\n" + thought + "\n", END_THOUGHT]
    if rng.random() < 0.5:
        text = prose(rng)
        said.content += text
        made.append(text)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        name = rng.choice(("get_weather", "f", "run-it", "Ünit.x", "unknown:tool"))
        native, arguments = members([value(rng) for _ in range(rng.randint(0, 4))], rng)
        said.calls.append((name, arguments))
        made += [BEGIN_CALL, f"call:{name}", *native, END_CALL]
        made += [rng.choice(("\n", " ", "\n\n"))] if rng.random() < 0.1 else []
    if rng.random() < 0.1:
        made = made[:-1] if isinstance(made[-1] if made else 0, str) and not str(made[-1]).strip() else made
        text = prose(rng)
        said.content += text
        made.append(text)
    return Reply(made, said)
