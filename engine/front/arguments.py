"""The arguments of a tool call, from Gemma 4's notation to JSON, piece by piece.

    {city:<|"|>Paris<|"|>,days:3,at:{lat:48.9}}        ->        {"city":"Paris","days":3,"at":{"lat":48.9}}

Strings stand between quote markers, which are token ids: `quote()` reports one, and a `<|"|>` spelled in ordinary tokens is text.
Reader functions consume the rest; what they cannot decide yet waits for more text. JSON goes out once it is certain.

    reader          takes                                                then
    _key            a key and its colon, or the closing bracket          _value_start
    _value_start    a bracket, a quote, or nothing                       _key or _value_start inside, _string, _bare
    _bare           a number or a word, up to a comma or bracket         _key, or _value_start in an array; _bare_string
    _bare_string    nothing before the next marker: its own may be missing
    _string         text, up to the quote                                _closing
    _closing        nothing: does what follows let the quote end it?     _key, or _value_start in an array; _string again

Deviations from the notation that models write are understood:

    key:Paris, France<|"|>,            the first marker is missing: the string goes up to the next one
    key:<|"|>say <|"|>hi<|"|>.<|"|>    a marker inside a string stands for ": one ends it only where the notation can go on
    key:"a", key:'a', "key":1          JSON's and Python's quotes
    (key=1), ({"key":1}), {{key:1}}    Python's and JSON's calls
    key:<|"|>a<|"|>b:2, [1,,2]         commas too few or too many
    {key}                              a key without a value: null
    key:anything else                  a string

So whatever the model wrote, the arguments of a call that it ended are a JSON object, the same however the text came in pieces.
What a limit of tokens cut is not closed: the beginning of a command may be another command.
"""

import json
import re
from collections.abc import Callable

from engine.front.notation import (
    HALF_LITERAL,
    PLAIN_TEXT,
    QUOTE,
    SPACE,
    SPACE_AND_COMMAS,
    VALUE_END,
    Container,
    end_of,
    end_of_bare_string,
    end_of_key,
    json_inside,
    json_string,
    string_begins_behind,
    string_is_over,
    without_quotes,
)
from engine.front.value_schema import ValueSchema, json_kind, literal_kind

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_AHEAD = 256  # characters of look-ahead; longer keys are cut, and a longer look-ahead counts as no match


class ArgumentsParser:
    """One call's arguments after their opening bracket. Feed it text and quote markers; `take` gives the JSON."""

    def __init__(self, schema: ValueSchema, opener: str = "{") -> None:
        self._out = ["{"]
        self._open = [Container(")" if opener == "(" else "}", "}", schema)]
        self._text, self._at = "", 0  # read from _at on
        self._waiting: list[str] = []  # text that is not read before the next marker
        self._schema = schema  # of the value that is being read
        self._quote = ""  # of the open string: " or ', "" for the marker
        self._collected: list[str] | None = None  # a string where the schema allows none
        self._final = False  # nothing more comes: decide what is ambiguous
        self._read: Callable[[], bool] = self._key  # returns True if it consumed something, False if it needs more text

    @property
    def ended(self) -> bool:
        """The arguments are over."""
        return not self._open

    @property
    def in_string(self) -> bool:
        """Markers other than the quote are text now."""
        return self._read in (self._string, self._quoted_key)

    def take(self) -> str:
        """The JSON made since the last call."""
        made, self._out = "".join(self._out), []
        return made

    def push(self, text: str) -> None:
        """More text. Once `ended`, text after the closing bracket is `rest`."""
        self._waiting.append(text)
        if self._read not in (self._bare_string, self._quoted_key):
            self._run()

    @property
    def rest(self) -> str:
        """What has not been read."""
        return self._text[self._at :]

    def quote(self) -> None:
        """A quote marker has come."""
        self._gather()
        match self._read:
            case self._string:
                self._read = self._closing
            case self._closing:
                self._marker_after_quote()
            case self._bare | self._bare_string:
                self._marker_after_bare()
            case self._value_start:
                self._begin_string("")
            case self._quoted_key:
                self._begin_member(self._take_rest())
                self._read = self._colon
            case self._key if not self.rest.strip(" \t\r\n,"):
                self._open[-1].quoted_keys = True
                self._take_rest()
                self._read = self._quoted_key
            case _:
                self._text += '"'

    def end(self) -> None:
        """The model has ended the call, or its turn: what is open is closed."""
        self._finish()
        if self.ended:
            return
        if self._read == self._string:
            self._put_text(json_inside(self._take_rest(), self._quote))
        if self._read in (self._string, self._closing):
            self._end_string()
        elif self._read in (self._bare, self._bare_string):
            self._put_bare(self._take_rest())
        elif self._read == self._quoted_key or (self._read == self._key and self.rest.strip()):
            self._begin_member(self._take_rest())
            self._read = self._colon
        self._put_null_if_absent()
        self._out += [container.json for container in reversed(self._open)]
        self._open.clear()

    def cut(self) -> None:
        """Nothing more comes: put out all that came, and close nothing."""
        self._gather()
        while self._read == self._closing:
            self._end_string()
            self._run()
        if self.ended:
            return
        text = self._take_rest()
        if self._read == self._string:
            self._put_text(json_inside(text, self._quote))
            self._out += ['"', *self._collected] if self._collected else []
        elif self._read in (self._bare, self._bare_string):
            self._begin_value()
            half_literal = self._read == self._bare and HALF_LITERAL.fullmatch(text) and self._literal("0")
            self._out.append(text if half_literal else '"' + json_inside(text))
        elif text:
            self._begin_element()
            self._out.append('"' + json_inside(text))
        self._open.clear()

    # --- the text ---

    def _run(self) -> None:
        self._gather()
        while self._at < len(self._text) and self._open and self._read():
            pass

    def _finish(self) -> None:
        """Read on as if nothing more came."""
        self._final = True
        self._run()

    def _gather(self) -> None:
        self._text = self._text[self._at :] + "".join(self._waiting)
        self._at = 0
        self._waiting.clear()

    def _take_rest(self) -> str:
        rest, self._text, self._at = self.rest, "", 0
        return rest

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Whether text is left after what is skipped."""
        self._at = end_of(pattern, self._text, self._at)
        return self._at < len(self._text)

    @property
    def _ahead(self) -> str:
        """What may be looked at before it is read: no more, so that nothing depends on how much has come."""
        return self._text[self._at : self._at + _AHEAD]

    def _may_wait(self) -> bool:
        return not self._final and len(self._text) - self._at < _AHEAD

    # --- keys ---

    def _key(self) -> bool:
        if not self._skip(SPACE_AND_COMMAS):
            return False
        container, char = self._open[-1], self._text[self._at]
        if char == container.closer:
            return self._close()
        if char == "{":
            self._at += 1
            self._open.append(Container("}", "", container.schema, container.empty))
            return True
        ahead = self._ahead
        end, certain = end_of_key(ahead, container.closer)
        if not certain and self._may_wait():
            return False
        self._begin_member(ahead[:end])
        self._at += end
        self._read = self._colon
        return True

    def _quoted_key(self) -> bool:
        return False

    def _begin_member(self, key: str) -> None:
        name = without_quotes(key.strip())
        self._begin_element()
        self._out += (json_string(name), ":")
        self._schema = self._open[-1].schema.member(name)

    def _colon(self) -> bool:
        if not self._skip(SPACE):
            return False
        if self._text[self._at] in ":=":
            self._at += 1
            self._read = self._value_start
        else:
            self._put_null_if_absent()
        return True

    def _put_null_if_absent(self) -> None:
        """A key without a value is null."""
        if self._read == self._colon or (self._read == self._value_start and not self._open[-1].is_array):
            self._put("null")

    def _begin_element(self) -> None:
        if not self._open[-1].empty:
            self._out.append(",")
        self._open[-1].empty = False
        self._open[-1].begun += 1

    # --- values ---

    def _value_start(self) -> bool:
        container = self._open[-1]
        if not self._skip(SPACE_AND_COMMAS if container.is_array else SPACE):
            return False
        char = self._text[self._at]
        if char in (container.closer, ","):
            return self._close() if container.is_array else self._put("null")
        if char in "{[":
            self._at += 1
            return self._begin_container(char)
        if char in "\"'":
            self._at += 1
            return self._begin_string(char)
        self._read = self._bare
        return True

    def _begin_container(self, opener: str) -> bool:
        self._begin_value()
        self._out.append(opener)
        if opener == "{":
            self._open.append(Container("}", "}", self._schema))
            self._read = self._key
        else:
            self._open.append(Container("]", "]", self._schema))
            self._schema = self._schema.element(0)
        return True

    def _close(self) -> bool:
        self._at += 1
        closed = self._open.pop()
        self._out.append(closed.json)
        if self._open:
            self._open[-1].empty &= closed.empty and not closed.json
            self._after_value()
        return True

    def _begin_value(self) -> None:
        if self._open[-1].is_array:
            self._begin_element()

    def _put(self, value: str) -> bool:
        self._begin_value()
        self._out.append(value)
        self._after_value()
        return True

    def _after_value(self) -> None:
        if self._open[-1].is_array:
            self._schema = self._open[-1].schema.element(self._open[-1].begun)
            self._read = self._value_start
        else:
            self._read = self._key

    # --- values without quotes ---

    def _bare(self) -> bool:
        ahead = self._ahead
        end = VALUE_END[self._open[-1].closer].search(ahead)
        if end is None and self._may_wait():
            return False
        literal = self._literal(ahead[: end.start()]) if end else None
        if end is None or literal is None:
            self._read = self._bare_string
            return self._final
        self._at += end.start()
        return self._put(literal)

    def _bare_string(self) -> bool:
        """A string whose first marker may be missing: only the next marker tells whether a comma or bracket ends it."""
        end = end_of_bare_string(self._text, self._at, self._open[-1])
        if end is None:
            return False
        self._put_bare(self._text[self._at : end])
        self._at = end
        return True

    def _put_bare(self, text: str) -> None:
        self._put(self._literal(text) or json_string(text.strip()))

    def _literal(self, text: str) -> str | None:
        """A number or a word in JSON; None: it is a string, also if the schema wants one."""
        word = text.strip() if self._schema.allows("string") else _PYTHON_WORDS.get(text.strip(), text.strip())
        kind = literal_kind(word)
        wanted = kind == "null" or self._schema.allows(kind or "") or not self._schema.allows("string")
        return word if kind and wanted else None

    def _marker_after_bare(self) -> None:
        """The marker ends a string whose first marker is missing; or, if other values came in between, begins one."""
        if string_begins_behind(self.rest, self._open[-1]):
            self._finish()
            self._final = False
        if self.ended:
            self._text += QUOTE
        elif self._read in (self._bare, self._bare_string):
            self._begin_string("")
            self._put_text(json_inside(self._take_rest()))
            self._end_string()
        else:
            self.quote()

    # --- strings ---

    def _begin_string(self, quote: str) -> bool:
        self._begin_value()
        self._quote = quote
        self._collected = None if self._schema.allows("string") else []
        if self._collected is None:
            self._out.append('"')
        self._read = self._string
        return True

    def _string(self) -> bool:
        if not self._quote:
            self._put_text(json_inside(self._take_rest()))
            return True
        end = end_of(PLAIN_TEXT[self._quote], self._text, self._at)
        self._put_text(json_inside(self._text[self._at : end], self._quote))
        self._at = end
        if self._text[end : end + 1] != self._quote:
            return False
        self._at += 1
        self._read = self._closing
        return True

    def _put_text(self, text: str) -> None:
        (self._out if self._collected is None else self._collected).append(text)

    def _closing(self) -> bool:
        """A quote has come: it ends the string if valid notation follows."""
        over = string_is_over(self._ahead, self._open)
        if over is None and not self._may_wait():
            over = self._final
        if over:
            self._end_string()
        elif over is False:
            self._put_text(json_inside(self._quote or '"'))
            self._read = self._string
        return over is not None

    def _marker_after_quote(self) -> None:
        """A marker in the look-ahead: after a comma it may begin the next key; otherwise it may be the string's end instead."""
        ahead = self.rest.strip()
        if ahead == "," and self._open[-1].quoted_keys:
            self._end_string()
            self.quote()
        else:
            self._put_text(json_inside((self._quote or '"') + self._take_rest()))

    def _end_string(self) -> None:
        if self._collected is None:
            self._out.append('"')
        else:
            escaped = "".join(self._collected)
            text = json.loads(f'"{escaped}"')
            kind = json_kind(text)
            self._out.append(text if kind and self._schema.allows(kind) else f'"{escaped}"')
        self._after_value()
