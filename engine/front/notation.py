"""Lexical rules of Gemma 4's notation of call arguments, and JSON strings. MARK stands for the
quote marker, a token id: a `<|"|>` in ordinary tokens is text."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.front.value_schema import ValueSchema

QUOTE = '<|"|>'  # the marker on both sides of a string
MARK = "\ud800"  # half a character, which no text has
SPACE = re.compile(r"\s*")
SPACE_AND_COMMAS = re.compile(r"[\s,]*")
DELIMITED = {closer: re.compile(rf"([^,\{closer}]*)(?=[,\{closer}])") for closer in "})]"}
UP_TO_QUOTE = {MARK: re.compile(f"[^{MARK}]*")} | {
    quote: re.compile(rf"(?:[^{quote}\\]|\\.)*", re.DOTALL) for quote in "\"'"
}

# Combining marks (vowel signs, accents), which \w leaves out and many scripts need in words; ranges include letters in between.
_MARKS = (
    "\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0711-\u07f3\u0816-\u0963\u0971-\u0df3\u0e31-\u0e4e"
    "\u0eb1-\u0ecd\u0f18-\u0f39\u0f3e-\u0fc6\u102b-\u109d\u1712-\u17d3\u17dd\u1885-\u193b\u1a17-\u1dff\u20d0-\u20f0\u302a-\u302f\u3099-\u309a"
    "\ua66f-\uabed\ufb1e\ufe00-\ufe0f\ufe20-\ufe2f"
)
KEY_CHARACTER = rf"[\w$./@{_MARKS}-]"  # of a key without quotes
KEY_CHARACTER_OF_GRAMMARS = rf"[\p{{L}}\p{{N}}_$.\/@{_MARKS}-]"  # the same in llguidance's words

_PLAIN_QUOTED = r"""\"[^"]{1,128}"|'[^']{1,128}'"""
_KEY = f"(?:{KEY_CHARACTER}{{1,128}}|{_PLAIN_QUOTED})"
KEY_TEXT = {closer: re.compile(rf"""(?:"[^"]*"|'[^']*'|{MARK}[^{MARK}]*{MARK})?[^:=,{closer}]*""") for closer in "})"}
_NEXT_KEY = re.compile(rf",\s*{_KEY}\s*[:=]")
_WORDS = rf"""[^\s"':=,{MARK}][^"':=,{MARK}]{{0,127}}"""
_OTHER_KEY = re.compile(rf"(?:,\s*)?(?P<key>{_PLAIN_QUOTED}|{MARK}[^{MARK}]{{1,128}}{MARK}|{_WORDS}?)\s*[:=]")
_OTHER_KEY_BEGUN = re.compile(rf"""(?:,\s*)?(?:"[^"]{{0,128}}"?|'[^']{{0,128}}'?|{MARK}[^{MARK}]{{0,128}}{MARK}?|{_WORDS})?\s*""")
_BEFORE_STRING = {
    "}": re.compile(rf"(?:[,{{(]\s*{_KEY}\s*[:=]|\[)\s*\Z"),
    "]": re.compile(rf"(?:[,{{(]\s*{_KEY}\s*[:=]|[\[,])\s*\Z"),
}
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # halves of a character
_ESCAPE = re.compile(rf'({_HIGH}{_LOW}|(?!{_HIGH}|{_LOW})\\u[0-9a-fA-F]{{4}}|\\["\\/bfnrt])')
_BRACKETS = re.compile(r"[][{}(),]")
LOOK_AHEAD = 256  # characters that are looked at before they are read: longer keys are cut


@dataclass(slots=True)
class Container:
    """An open object or array. `closers`: the model's closing brackets, two if doubled; `json`:
    JSON's."""

    closers: list[str]
    json: str
    schema: ValueSchema
    begun: int = 0  # members or elements so far
    quoted_keys: bool = False  # by markers

    @property
    def is_array(self) -> bool:
        return self.json == "]"


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The end of a match at `at`, else `at`."""
    match = pattern.match(text, at)
    if match:
        return match.end()
    return at


def key_of(text: str, closer: str) -> str | None:
    """None before its end has come."""
    key = text[: end_of(KEY_TEXT[closer], text, 0)]
    half_quoted = text[:1] in ('"', "'", MARK) and text.find(text[0], 1) < 0
    if len(key) < len(text) and not half_quoted:
        return key
    return None


def end_of_bare_string(text: str, at: int, stop: int, container: Container) -> int | None:
    depth = 0
    for match in _BRACKETS.finditer(text, at, stop):
        char = match[0]
        start = match.start()
        if depth == 0 and char == container.closers[-1]:
            return start
        if depth == 0 and char == "," and (container.is_array or _NEXT_KEY.match(text, start)):
            return start
        depth += (char in "([{") - (char in ")]}" and depth > 0)
    return None


def string_begins_after(text: str, container: Container) -> bool:
    """Whether a quote marker after `text` begins a string rather than ends this value."""
    return _BEFORE_STRING[container.json].search(text[-LOOK_AHEAD:]) is not None


def string_is_over(text: str, containers: Sequence[Container]) -> bool | None:
    """Whether closing brackets, then a comma with a key or element, follow a quote. None: too
    little text."""
    at = 0
    for container in reversed(containers):
        for closer in reversed(container.closers):
            at = end_of(SPACE, text, at)
            if text[at : at + 1] == closer:
                at += 1
            elif at == len(text):
                return None
            else:
                return text[at] == "," if container.is_array else _key_follows(text, at, container)
    at = end_of(SPACE, text, at)
    return text.startswith("call:", at) or (None if "call:".startswith(text[at:]) else False)


def _key_follows(text: str, at: int, container: Container) -> bool | None:
    """After a comma, any plain key; otherwise only an expected one."""
    if _NEXT_KEY.match(text, at):
        return True
    other = _OTHER_KEY.match(text, at)
    if other is not None:
        return (container.quoted_keys and other["key"][0] == MARK) or container.schema.declares(without_quotes(other["key"]))
    if end_of(_OTHER_KEY_BEGUN, text, at) == len(text):
        return None
    return False


def without_quotes(key: str) -> str:
    key = key.strip()
    if key[:1] == MARK or (len(key) > 1 and key[0] == key[-1] and key[0] in "\"'"):
        return key.strip(key[0])
    return key


def json_string(text: str) -> str:
    return json.dumps(text.replace(MARK, '"'), ensure_ascii=False)


def json_inside(text: str, quote: str = MARK) -> str:
    """The inside of a JSON string; text between plain quotes keeps the model's escapes."""
    if quote == MARK:
        return json_string(text)[1:-1]
    parts = _ESCAPE.split(text.replace("\\'", "'"))
    return "".join(part if index % 2 else json_inside(part) for index, part in enumerate(parts))
