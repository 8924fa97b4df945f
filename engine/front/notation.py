"""Lexical rules of Gemma 4's notation of a tool call's arguments: where a key, a value or a string ends; and JSON strings.

Functions read a text from position `at`, and no further than they must.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.front.value_schema import ValueSchema

QUOTE = '<|"|>'  # the marker on both sides of a string
SPACE = re.compile(r"\s*")
SPACE_AND_COMMAS = re.compile(r"[\s,]*")
HALF_LITERAL = re.compile(r"-?(?:[0-9][0-9.eE+-]*)?|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?")
VALUE_END = {closer: re.compile(rf"[,\{closer}]") for closer in "})]"}

# Combining marks (vowel signs, accents), which \w leaves out and many scripts need in words; ranges include letters in between.
_MARKS = (
    "\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0711-\u07f3\u0816-\u0963\u0971-\u0df3\u0e31-\u0e4e"
    "\u0eb1-\u0ecd\u0f18-\u0f39\u0f3e-\u0fc6\u102b-\u109d\u1712-\u17d3\u17dd\u1885-\u193b\u1a17-\u1dff\u20d0-\u20f0\u302a-\u302f\u3099-\u309a"
    "\ua66f-\uabed\ufb1e\ufe00-\ufe0f\ufe20-\ufe2f"
)
KEY_CHARACTER = rf"[\w$./@{_MARKS}-]"  # of a key without quotes
KEY_CHARACTER_OF_GRAMMARS = rf"[\p{{L}}\p{{N}}_$.\/@{_MARKS}-]"  # the same in llguidance's words

_KEY = rf"""(?:{KEY_CHARACTER}{{1,128}}|"[^"]{{1,128}}"|'[^']{{1,128}}')"""
_KEY_TEXT = {closer: re.compile(rf"""(?:"[^"]*"|'[^']*')?[^:=,{closer}]*""") for closer in "})"}
_NEXT_KEY = re.compile(rf",\s*{_KEY}\s*[:=]")
_NEXT_KEY_OF_ANY_FORM = re.compile(r"""(?:,\s*)?(?P<key>"[^"]{1,128}"|'[^']{1,128}'|[^\s"':=,][^"':=,]{0,127}?)\s*[:=]""")
_NEXT_KEY_BEGUN = re.compile(r"""(?:,\s*)?(?:"[^"]{0,128}"?|'[^']{0,128}'?|[^\s"':=,][^"':=,]{0,127})?\s*""")
_BEFORE_MEMBER = re.compile(rf".*(?:[,{{(]\s*{_KEY}\s*[:=]|\[)\s*", re.DOTALL)
_BEFORE_ELEMENT = re.compile(r".*,\s*", re.DOTALL)
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # halves of a character
_HALF_ESCAPE = rf"(?:{_HIGH})?\\(?:u[0-9a-fA-F]{{0,3}})?\Z|{_HIGH}\Z"
# Between JSON's or Python's quotes, without half an escape at the end of what has come.
PLAIN_TEXT = {quote: re.compile(rf"(?:[^{quote}\\]|(?!{_HALF_ESCAPE})\\.)*", re.DOTALL) for quote in "\"'"}
_ESCAPE = re.compile(rf'({_HIGH}{_LOW}|(?!{_HIGH}|{_LOW})\\u[0-9a-fA-F]{{4}}|\\["\\/bfnrt])')
_BRACKETS = re.compile(r"[][{}(),]")


@dataclass(slots=True)
class Container:
    """An open object or array. `closer` ends it in the model's text, `json` in JSON ("" if its brackets are superfluous)."""

    closer: str
    json: str
    schema: ValueSchema
    empty: bool = True
    quoted_keys: bool = False
    begun: int = 0  # members or elements so far

    @property
    def is_array(self) -> bool:
        """Whether its values have no keys."""
        return self.closer == "]"


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a match at `at` ends; `at` itself if there is none."""
    found = pattern.match(text, at)
    return found.end() if found else at


def end_of_key(text: str, closer: str) -> tuple[int, bool]:
    """(where the key ends, whether that is certain: its separator or the closing bracket has come)."""
    end = end_of(_KEY_TEXT[closer], text, 0)
    half_quoted = text[0] in "\"'" and text.find(text[0], 1) < 0
    return end, end < len(text) and not half_quoted


def end_of_bare_string(text: str, at: int, container: Container) -> int | None:
    """The place of the comma before the next key or element, or of the closing bracket; None: neither has come."""
    depth = 0
    for found in _BRACKETS.finditer(text, at):
        char, place = found[0], found.start()
        if depth == 0 and char == container.closer:
            return place
        if depth == 0 and char == "," and (container.is_array or _NEXT_KEY.match(text, place)):
            return place
        depth += (char in "([{") - (char in ")]}" and depth > 0)
    return None


def string_begins_behind(text: str, container: Container) -> bool:
    """Whether a quote marker after `text`, a value without quotes, begins a new string rather than ends this value."""
    return bool(_BEFORE_MEMBER.fullmatch(text) or (container.is_array and _BEFORE_ELEMENT.fullmatch(text)))


def string_is_over(text: str, containers: Sequence[Container]) -> bool | None:
    """Whether a quote ends its string: valid notation follows, closing brackets and then a comma with a key or an element.

    None: too little text to tell.
    """
    at, depth = 0, len(containers)
    while True:
        at = end_of(SPACE, text, at)
        if not depth or text[at : at + 1] != containers[depth - 1].closer:
            break
        at, depth = at + 1, depth - 1
    if at == len(text):
        return None
    if not depth:
        return text.startswith("call:", at) or (None if "call:".startswith(text[at:]) else False)
    if containers[depth - 1].is_array:
        return text[at] == ","
    return _key_follows(text, at, containers[depth - 1].schema)


def _key_follows(text: str, at: int, schema: ValueSchema) -> bool | None:
    """After a comma, any plain key; without one, or for keys with spaces, only a key of the schema."""
    if _NEXT_KEY.match(text, at):
        return True
    other = _NEXT_KEY_OF_ANY_FORM.match(text, at)
    if other is not None:
        return schema.declares(without_quotes(other["key"]))
    return None if end_of(_NEXT_KEY_BEGUN, text, at) == len(text) else False


def without_quotes(key: str) -> str:
    """A key without JSON's or Python's quotes."""
    return key[1:-1] if len(key) > 1 and key[0] == key[-1] and key[0] in "\"'" else key


def json_string(text: str) -> str:
    """Text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def json_inside(text: str, quote: str = "") -> str:
    """The inside of that string; text between plain quotes keeps the model's own escapes."""
    if not quote:
        return json_string(text)[1:-1]
    parts = _ESCAPE.split(text.replace("\\'", "'"))
    return "".join(part if place % 2 else json_inside(part) for place, part in enumerate(parts))
