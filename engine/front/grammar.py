"""A reply as one grammar: with thinking a thought first, then an answer or tool calls.

The model also chooses forced tokens: else llguidance tokenizes all that follows at each token,
under the interpreter's lock (6 ms for 10 kB).
"""

import enum
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.errors import InvalidRequest
from engine.front.answer_schema import check_patterns, json_rule
from engine.front.call_grammar import CallGrammar
from engine.front.reply import Markers
from engine.front.string_schema import lark_regex
from engine.front.value_schema import Schema

_MAX_CHOICES = 1024
_MAX_GBNF = 16 << 10
_MAX_GBNF_RULES = 512
_HEAD = '%llguidance {"no_forcing": true}\n'
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\])+/?|(?:#|//).*')  # what has no end goes to the end: in one pass
_NESTED_JSON = re.compile(r"%json\s*")
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|\??start[ \t]*:(?!:))", re.MULTILINE)


# Whether a thought comes before the answer; `begun`: the prompt has begun it.
Thought = enum.Enum("Thought", "none optional forced begun")


def json_answer(schema: Schema) -> str:
    return f"answer: {json_rule(schema)}"


class Structure(NamedTuple):
    """JSON between two texts; `begin` starts with `trigger`."""

    trigger: str
    begin: str
    schema: Schema
    end: str


def tagged_answer(structures: Sequence[Structure]) -> str:
    rules = ["answer: (" + " | ".join(f"tag_{index}" for index in range(len(structures))) + ")* FREE", r"FREE: /(.|\n)*/"]
    for index, structure in enumerate(structures):
        texts = structure.begin.removeprefix(structure.trigger), structure.end
        begin, end = (f" {json.dumps(text)}" if text else "" for text in texts)
        rules.append(f"trigger_{index}[lazy]: FREE {json.dumps(structure.trigger)}")
        rules.append(f"tag_{index}: trigger_{index}{begin} {json_rule(structure.schema)}{end}")
    return "\n".join(rules)


def regex_answer(pattern: str) -> str:
    return f"answer: ANSWER\nANSWER: {lark_regex(pattern)}"


def choice_answer(choices: Sequence[str]) -> str:
    if not choices or len(choices) > _MAX_CHOICES or "" in choices:
        raise InvalidRequest(f"must be 1 to {_MAX_CHOICES} texts that are not empty")
    return "answer: " + " | ".join(json.dumps(choice) for choice in choices)


def lark_answer(grammar: str) -> str:
    """A client's grammar: Lark with rule `start`, or GBNF with rule `root`."""
    rules = (grammar if _LARK.search(grammar) else _from_gbnf(grammar)).replace("%llguidance {}", "", 1)
    if "&" in _QUOTED.sub("", rules):
        raise InvalidRequest("& between terminals may take for ever: write ~(~A | ~B) for A & B")
    for nested in _NESTED_JSON.finditer(rules):
        with suppress(ValueError):  # llguidance says why
            check_patterns(json.JSONDecoder(parse_int=float).raw_decode(rules, nested.end())[0])
    return f"answer: %lark {{\n{rules}\n}}"


def _from_gbnf(grammar: str) -> str:
    """Translate to Lark. Quadratic in the rules' number, hence bounded."""
    if len(grammar) > _MAX_GBNF or grammar.count("::=") > _MAX_GBNF_RULES:
        most = f"{_MAX_GBNF} characters or {_MAX_GBNF_RULES} rules"
        raise InvalidRequest(f"GBNF of more than {most}: write it in Lark, with a rule start")
    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise InvalidRequest("it is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - what is wrong with a grammar comes as bare Exception, IndexError, ValueError, too
        raise InvalidRequest(f"neither Lark with a rule start nor GBNF: {error}"[:300]) from None


def calls_answer(calls: CallGrammar, most: int | None, answer: str | None = None) -> str:
    some_calls = f"call{{1,{'' if most is None else most}}}"
    if answer is None:
        return f"answer: {some_calls}\n{calls.text}"
    return f"answer: form | {some_calls}\nform:{answer.removeprefix('answer:')}\n{calls.text}"


def begun_call(calls: CallGrammar) -> str:
    return f"{_HEAD}start: called\n{calls.text}"


def grammar(markers: Markers | None, answer: str, thought: Thought) -> str:
    """Without markers, as in completions, there are no thoughts."""
    if markers is None:
        return f"{_HEAD}start: answer\n{answer}\n"
    inside = f"thought <[{markers.end_thought}]>"
    before = f'<[{markers.begin_thought}]> "thought\\n" {inside}'
    starts = {
        Thought.none: "answer",
        Thought.optional: f"({before})? answer",
        Thought.forced: f"{before} answer",
        Thought.begun: f"{inside} answer",
    }
    return f"{_HEAD}start: {starts[thought]}\nthought: /(.|\\n)*/\n{answer}\n"
