"""What a reply must look like, as one grammar: a thought first, where thinking is on, then an answer of some form, or tool calls.

    start: <[100]> "thought\\n" THOUGHT <[101]> answer            answer: %json {...}, a regex, words, Lark, or calls

JSON is compact: models that may write white space between values write it without end.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest
from engine.front.call_grammar import CallGrammar
from engine.front.reply import Markers

_MAX_SCHEMA_BYTES = 64 << 10
_MAX_CHOICES = 1024


class Thought(enum.Enum):
    """Whether a thought comes before the answer."""

    none = enum.auto()
    optional = enum.auto()
    forced = enum.auto()
    begun = enum.auto()  # the prompt has begun it


def json_answer(schema: Mapping[str, Any] | None = None) -> str:
    """JSON by a schema; any object, without one."""
    wanted: Mapping[str, Any] = {"type": "object"} if schema is None else schema
    text = json.dumps(dict(wanted) | {"x-guidance": {"whitespace_flexible": False}})
    if len(text) > _MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"response_format: the schema is larger than {_MAX_SCHEMA_BYTES} bytes", param="response_format")
    return f"answer: %json {text}"


def regex_answer(pattern: str) -> str:
    """Text that matches a regular expression from its first to its last character."""
    return f"answer: ANSWER\nANSWER: /{_without_slashes(pattern)}/"


def choice_answer(choices: Sequence[str]) -> str:
    """One of these texts."""
    if not choices or len(choices) > _MAX_CHOICES or "" in choices:
        raise InvalidRequest(f"choice: 1 to {_MAX_CHOICES} texts that are not empty", param="choice")
    return "answer: " + " | ".join(json.dumps(choice) for choice in choices)


def lark_answer(grammar: str) -> str:
    """A grammar of the client's own, with a rule `start`."""
    return f"answer: %lark {{\n{grammar}\n}}"


def calls_answer(markers: Markers, tools: Mapping[str, Any], *, strict: bool, most: int | None = None) -> str:
    """One call or more of these tools (name -> parameters' schema); `most` of them."""
    calls = CallGrammar(markers, tools, strict=strict)
    return f"answer: call{{1,{'' if most is None else most}}}\n{calls.text}"


def begun_call(markers: Markers, tools: Mapping[str, Any], *, strict: bool) -> str:
    """A whole grammar of what follows the marker that begins a call."""
    return f"%llguidance {{}}\nstart: called\n{CallGrammar(markers, tools, strict=strict).text}"


def grammar(markers: Markers, answer: str, thought: Thought) -> str:
    """The whole of it."""
    inside = rf'THOUGHT <[{markers.end_thought}]>'
    before = f'<[{markers.begin_thought}]> "thought\\n" {inside}'
    starts = {
        Thought.none: "answer",
        Thought.optional: f"({before})? answer",
        Thought.forced: f"{before} answer",
        Thought.begun: f"{inside} answer",
    }
    return f"%llguidance {{}}\nstart: {starts[thought]}\nTHOUGHT: /(.|\\n)*/\n{answer}\n"


def _without_slashes(pattern: str) -> str:
    """A regular expression as Lark takes it between slashes."""
    return pattern.replace("\\/", "/").replace("/", "\\/")
