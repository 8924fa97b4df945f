"""The arguments of a tool call, from Gemma 4's notation to JSON, piece by piece.

    {city:<|"|>Paris<|"|>,days:3,at:{lat:48.9}}        ->        {"city":"Paris","days":3,"at":{"lat":48.9}}

JSON goes out once it is certain. Models were also seen to write:

    key:Paris, France<|"|>,            the first marker is missing: the string goes up to the next one
    key:<|"|>say <|"|>hi<|"|>.<|"|>    a marker inside a string stands for "
    key:"a", key:'a', "key":1          JSON's and Python's quotes
    (key=1), ({"key":1}), {{key:1}}    Python's and JSON's calls
    key:<|"|>a<|"|>b:2, [1,,2]         commas too few or too many
    {key}, key:anything else           null, a string

A call cut by the token limit is not closed, and uncertain text is dropped: half a command may be
another command.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from engine.front.notation import (
    DELIMITED,
    KEY_TEXT,
    LOOK_AHEAD,
    MARK,
    QUOTE,
    SPACE,
    SPACE_AND_COMMAS,
    UP_TO_QUOTE,
    Container,
    end_of,
    end_of_bare_string,
    json_inside,
    json_string,
    key_of,
    string_begins_after,
    string_is_over,
    without_quotes,
)
from engine.front.value_schema import ValueSchema, json_kind

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

T = TypeVar("T")
Reading = Generator[None, None, T]


class ArgumentsParser:
    """`push` text after the opening bracket, MARK for quote markers; `take` gives the JSON.
    `in_string`: other markers are text."""

    def __init__(self, schema: ValueSchema, opener: str = "{") -> None:
        self.in_string = self._streams = False  # in a string that goes out as it comes
        self._out = ["{"]
        self._open = [Container([")" if opener == "(" else "}"], "}", schema)]
        self._text, self._at = "", 0  # read from _at on
        self._new = ""
        self._final = self._cut = False  # nothing more comes; and not because the model ended it
        self._reading = self._read()
        next(self._reading)

    @property
    def ended(self) -> bool:
        return not self._open

    @property
    def rest(self) -> str:
        """The text after the closing bracket, once `ended`."""
        return self._text[self._at :].replace(MARK, QUOTE)

    def take(self) -> str:
        made = "".join(self._out)
        self._out.clear()
        return made

    def push(self, text: str) -> None:
        if self._streams and MARK not in text:  # nearly every token of a long string
            self._out.append(json_inside(text))
        else:
            self._resume(text)

    def _resume(self, text: str) -> None:
        self._new = text
        next(self._reading, None)

    def end(self, *, cut: bool = False) -> None:
        """Close what is open, unless `cut` by the token limit."""
        self._final = True
        self._cut = cut
        self._resume("")
        if not cut:
            self._out += [container.json for container in reversed(self._open)]
        self._open.clear()

    # --- the text ---

    def _more(self) -> Reading[bool]:
        """Wait for more text; False at the end."""
        if self._final:
            return False
        yield
        self._text = self._text[self._at :] + self._new
        self._at = 0
        return True

    def _char(self, skipped: re.Pattern[str]) -> Reading[str]:
        while True:
            self._at = end_of(skipped, self._text, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not (yield from self._more()):
                return ""

    def _look(self, decide: Callable[[str], T | None]) -> Reading[T | None]:
        """What `decide` returns for the text ahead, once not None; None if never."""
        while True:
            ahead = self._text[self._at : self._at + LOOK_AHEAD]
            decided = decide(ahead)
            if decided is not None or len(ahead) == LOOK_AHEAD or not (yield from self._more()):
                return decided

    def _next_mark(self) -> Reading[int]:
        mark = self._text.find(MARK, self._at)
        if mark < 0 and not self._final:
            pieces = [self._text[self._at :]]
            while MARK not in pieces[-1] and not self._final:
                yield
                pieces.append(self._new)
            self._text = "".join(pieces)
            self._at = 0
            mark = self._text.find(MARK)
        return mark

    # --- objects and arrays ---

    def _read(self) -> Reading[None]:
        while self._open:
            container = self._open[-1]
            char = yield from self._char(SPACE_AND_COMMAS)
            if not char:
                return
            if char == container.closers[-1]:
                self._at += 1
                container.closers.pop()
                if not container.closers:
                    self._out.append(container.json)
                    self._open.pop()
            elif container.is_array:
                yield from self._value(char, container.schema.element(container.begun))
            elif char == "{":
                self._at += 1
                container.closers.append("}")
            else:
                yield from self._member(container)

    def _member(self, container: Container) -> Reading[None]:
        closer = container.closers[-1]
        key = yield from self._look(lambda ahead: key_of(ahead, closer))
        if key is None and self._cut:
            self._at = len(self._text)
            return
        if key is None:  # it has no end, or none in sight
            end = end_of(KEY_TEXT[closer], self._text, self._at)
            key = self._text[self._at : min(end, self._at + LOOK_AHEAD)]
        self._at += len(key)
        container.quoted_keys |= key.startswith(MARK)
        name = without_quotes(key)
        self._begin(container)
        self._out += (json_string(name), ":")
        char = ","
        if self._text[self._at : self._at + 1] in (":", "="):
            self._at += 1
            char = yield from self._char(SPACE)
        if char and char not in (",", closer):
            yield from self._value(char, container.schema.member(name))
        elif char or not self._cut:
            self._out.append("null")

    def _begin(self, container: Container) -> None:
        if container.begun:
            self._out.append(",")
        container.begun += 1

    # --- values ---

    def _value(self, char: str, schema: ValueSchema) -> Reading[None]:
        if char in "{[":
            self._at += 1
            self._put(char)
            closer = "}" if char == "{" else "]"
            self._open.append(Container([closer], closer, schema))
        elif char in (MARK, '"', "'"):
            self._at += 1
            yield from self._string(char, schema)
        else:
            yield from self._bare(schema)

    def _put(self, value: str) -> None:
        if self._open[-1].is_array:
            self._begin(self._open[-1])
        self._out.append(value)

    def _string(self, quote: str, schema: ValueSchema) -> Reading[None]:
        """A string after its first quote. It streams unless the schema forbids strings, or escapes
        must be read."""
        streams = quote == MARK and schema.allows("string")
        if streams:
            self._put('"')
        out = self._out if streams else list[str]()
        over: bool | None = False
        while not over:
            self.in_string = True
            self._streams = streams
            end = end_of(UP_TO_QUOTE[quote], self._text, self._at)
            closes = self._text[end : end + 1] == quote
            text = self._text[self._at : end if closes or not self._final else None]
            self._at += len(text) + closes
            out.append(json_inside(text) if streams else text)
            if closes:
                self.in_string = self._streams = False
                over = yield from self._look(lambda ahead: string_is_over(ahead, self._open))
                over = self._final if over is None else over
                if not over:
                    out.append('\\"' if streams else quote)
            elif not (yield from self._more()):
                break
        self.in_string = self._streams = False
        if streams and (over or not self._cut):
            self._out.append('"')
        elif over or not self._cut:
            self._put(_quoted("".join(out), quote, schema))

    def _bare(self, schema: ValueSchema) -> Reading[None]:
        container = self._open[-1]
        delimited = yield from self._look(DELIMITED[container.closers[-1]].match)
        literal = _literal(delimited[1], schema) if delimited else None
        if delimited and literal:
            self._put(literal)
            self._at += delimited.end()
            return
        mark = yield from self._next_mark()
        stop = len(self._text) if mark < 0 else mark
        begins = mark < 0 or string_begins_after(self._text[max(self._at, stop - LOOK_AHEAD) : stop], container)
        end = end_of_bare_string(self._text, self._at, stop, container) if begins else None
        text = self._text[self._at : stop if end is None else end]
        self._at += len(text) + (end is None and mark >= 0)
        if end is None and mark >= 0:
            self._put(_quoted(text, MARK, schema))
        elif end is not None or not self._cut:
            self._put(_literal(text, schema) or json_string(text.strip()))


def _quoted(text: str, quote: str, schema: ValueSchema) -> str:
    """A string as JSON; its value, if allowed, where the schema forbids strings."""
    inside = f'"{json_inside(text, quote)}"'
    if not schema.allows("string"):
        content: str = json.loads(inside)
        kind = json_kind(content)
        if kind and schema.allows(kind):
            return content
    return inside


def _literal(text: str, schema: ValueSchema) -> str | None:
    """A number or word in JSON; None if it is, or should be, a string."""
    word = text.strip()
    if not schema.allows("string"):
        word = _PYTHON_WORDS.get(word, word)
    kind = json_kind(word)
    allowed = kind == "null" or schema.allows(kind or "") or not schema.allows("string")
    if kind and allowed:
        return word
    return None
