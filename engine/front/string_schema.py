r"""A JSON Schema's constraints of a string as regular expressions: length, pattern, format.

Patterns are searched for unless anchored, with ECMA-262's ASCII \d, \w and \s. FORMATS allow
nothing that usual readers refuse; other formats are ignored. SchemaError names look-arounds and
back-references.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

KEYWORDS = ("minLength", "maxLength", "pattern", "format")
MOST = 4096  # characters or elements that a bound may name, and characters of a pattern
_LONGEST_RULE = 1 << 16  # of which many are kept
_FUEL = 50_000  # for one string's expressions: two milliseconds; those that people write take a tenth of it
_ANY = r"(.|\n)*"
_ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|\(\?(?:<?[=!])?|.", re.DOTALL)
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
_REFERS = re.compile(r"\\[1-9bBk]")
_ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": r"\t\n\v\f\r "}
_BYTES = LLTokenizer("byte")
_IN_CLASS = re.compile(r"(\\.)(-(?!\]))?", re.DOTALL)  # an escape; a hyphen after one of _ASCII is no range


class SchemaError(ValueError):
    """The message names the keyword. Without `keywords` the schema can be enforced."""

    def __init__(self, message: str, *keywords: str) -> None:
        super().__init__(message)
        self.keywords = keywords


def expressions(schema: Mapping[str, Any]) -> list[str]:
    """Expressions that all match a whole string of this schema. SchemaError."""
    if "pattern" in schema:
        regexes = [searched(schema["pattern"])]
    else:
        regexes = []
    if "enum" in schema:
        escaped = (re.sub(r"\W", lambda char: f"\\x{{{ord(char[0]):x}}}", text) for text in schema["enum"])
        regexes.append("|".join(escaped))
    if (name := str(schema.get("format"))) in FORMATS:
        regexes += [FORMATS[name], "(.|\\n){1,253}"] if name == "hostname" else [FORMATS[name]]
    if schema.keys() & {"minLength", "maxLength"}:
        regexes.append(rf"(.|\n){repeats(schema, 'minLength', 'maxLength')}")
    if len(regexes) > 1 and not compiles("TEXT\nTEXT: " + " & ".join(map(lark_regex, regexes))):
        weakest = next(keyword for keyword in ("format", "pattern", "minLength", "maxLength") if keyword in schema)
        raise SchemaError("a pattern, a format, lengths or enum that together are too much, or that no text has,", weakest)
    return regexes


def lark_regex(expression: str) -> str:
    escaped = re.sub(r"\\.|/", lambda atom: atom[0].removeprefix("/") or r"\/", expression, flags=re.DOTALL)
    return f"/{escaped}/"


def repeats(schema: Mapping[str, Any], lower: str, upper: str, named: int = 0) -> str:
    """A repetition beyond `named` elements. SchemaError: the keywords are no bounds."""
    least = 0 if schema.get(lower) is None else schema[lower]
    most = schema.get(upper)
    is_wrong = not isinstance(least, int) or not isinstance(most, int | None) or least < 0
    if is_wrong or (most is not None and most < max(least, named)):
        raise SchemaError("lengths that are no numbers, or the wrong way round", lower, upper)
    if max(least, most or 0) > MOST:
        raise SchemaError(f"a length above {MOST}", lower, upper)
    return f"{{{max(least - named, 0)},{'' if most is None else most - named}}}"


def searched(pattern: Any) -> str:
    if not isinstance(pattern, str) or len(pattern) > MOST:
        raise SchemaError(f"the schema keyword 'pattern' with what is no text, or one of more than {MOST} characters,", "pattern")
    expression = "(?:" + "|".join(_anchored(branch, pattern) for branch in _alternatives(pattern)) + ")"
    if not compiles(f"TEXT\nTEXT: {lark_regex(expression)}"):
        raise SchemaError(f"{pattern[:100]!r} of the schema keyword 'pattern'", "pattern")
    return expression


def compiles(rule: str) -> bool:
    """Whether a rule is short enough, accepted by llguidance, and matches some text; takes 1 ms."""
    return len(rule) <= _LONGEST_RULE and _compiles(rule)


@lru_cache(maxsize=1024)
def _compiles(rule: str) -> bool:
    limits = LLParserLimits(initial_lexer_fuel=_FUEL, step_lexer_fuel=_FUEL)
    matcher = LLMatcher(_BYTES, f"%llguidance {{}}\nstart: {rule}\n", log_level=0, limits=limits)
    matcher.compute_bitmask()
    return not matcher.is_error()


def _alternatives(pattern: str) -> list[list[str]]:
    """Split at the outermost bars, then into atoms: characters, escapes, classes, group starts."""
    branches: list[list[str]] = [[]]
    depth = 0
    for atom in _ATOM.findall(pattern):
        if atom in _LOOKS or _REFERS.fullmatch(atom):
            raise SchemaError(f"{atom!r} in the schema keyword 'pattern'", "pattern")
        depth += atom.startswith("(") - (atom == ")")
        if atom == "|" and not depth:
            branches.append([])
        else:
            branches[-1].append(_of_ascii(atom))
    return branches


def _of_ascii(atom: str) -> str:
    if not atom.startswith("["):
        if atom in _ASCII:
            return f"[{_ASCII[atom]}]"
        return atom
    return _IN_CLASS.sub(lambda match: _ASCII[match[1]] + (r"\-" if match[2] else "") if match[1] in _ASCII else match[0], atom)


def _anchored(atoms: list[str], pattern: str) -> str:
    begins = atoms[:1] == ["^"]
    ends = atoms[-1:] == ["$"]
    inside = atoms[begins : len(atoms) - ends]
    if "^" in inside or "$" in inside:
        raise SchemaError(f"an anchor inside of {pattern[:100]!r}, of the schema keyword 'pattern',", "pattern")
    return ("" if begins else _ANY) + f"(?:{''.join(inside)})" + ("" if ends else _ANY)


_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # 0001 to 9999
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAYS = "(?:0[1-9]|1[0-9]|2[0-8])"
_MONTHS = f"(?:0[1-9]|1[0-2])-{_DAYS}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31"
_DATE = f"(?:{_YEAR}-(?:{_MONTHS})|{_LEAP}-02-29)"  # a day that there is
_MINUTES = "[0-9]{1,6}M(?:[0-9]{1,6}S)?"  # of a duration by RFC 3339, appendix A, as what follows
_HOURS = f"T(?:[0-9]{{1,6}}H(?:{_MINUTES})?|{_MINUTES}|[0-9]{{1,6}}S)"
_MONTHS_AND_DAYS = "[0-9]{1,6}M(?:[0-9]{1,6}D)?"
_FROM_YEARS = f"[0-9]{{1,6}}Y(?:{_MONTHS_AND_DAYS})?|{_MONTHS_AND_DAYS}|[0-9]{{1,6}}D"
_GROUP = "[0-9a-fA-F]{1,4}"
_BOTH_ENDS = "|".join(f"(?:{_GROUP}:){{1,{7 - after}}}(?::{_GROUP}){{1,{after}}}" for after in range(1, 7))
_IPV6 = f"(?:(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{1,7}}:|:(?::{_GROUP}){{1,7}}|::|{_BOTH_ENDS})"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_LAST_LABEL = "[A-Za-z](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"  # one of digits makes it an address
_NAME = rf"(?:{_LABEL}\.)*{_LAST_LABEL}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LOCAL = "[A-Za-z0-9_+-]{1,16}"
_PATH = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"  # RFC 3986's pchar
_HOST = rf"(?:{_IPV4}|\[{_IPV6}\]|{_NAME})(?::[1-9][0-9]{{0,3}})?"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:(?:{_FROM_YEARS})(?:{_HOURS})?|{_HOURS}|[0-9]{{1,6}}W)",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": rf"{_LOCAL}(?:\.{_LOCAL}){{0,2}}@(?:{_LABEL}\.)+[A-Za-z]{{2,24}}",
    "hostname": _NAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?:/{_PATH}*)*|{_PATH}+(?:/{_PATH}*)*)(?:\?(?:{_PATH}|[/?])*)?(?:#(?:{_PATH}|[/?])*)?",
}
