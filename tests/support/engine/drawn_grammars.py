"""Random grammars of every kind but JSON schemas, each with a judge of its own of what is written under it.

`python -m tests.support.engine.drawn_grammars FOLDER FIRST END` walks those of the seeds [FIRST, END) with a checkpoint's tokens
in a thread as large as the core's. It prints how many were of each kind, and which were refused.
"""

import json
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

from engine.front.grammar import Structure, Thought, choice_answer, grammar, lark_answer, regex_answer, tagged_answer
from engine.front.text import TextProcessor
from engine.matcher import COMPILE_STACK_BYTES, compile_stack
from tests.support.engine.schemas import members
from tests.support.engine.walker import Walker

TEXTS = ("a", "bc", "x y", '"', "é", "\\", "0", "]", "{}", "नमस्ते", "%", "#", "/")
CLASSES = ("[a-c]", "[0-9]", "[^a-z]", r"[\w.-]", "[é-ü]")


class Drawn(NamedTuple):
    """A grammar: its kind, the form of its answer, and whether a text is one of its answers."""

    kind: str
    answer: str
    judge: Callable[[str], bool]


class Expression(NamedTuple):
    """The same texts in Lark, in GBNF and as a regular expression."""

    lark: str
    gbnf: str
    regex: str


def expression(rng: random.Random, depth: int, named: list[tuple[str, Expression]]) -> Expression:
    """Of literals, classes, repetitions, alternatives and, by name, rules that were drawn before."""
    kind = rng.choice(("text", "class", *(("sequence", "either", "some", "rule") if depth else ())))
    match kind:
        case "text":
            text = rng.choice(TEXTS)
            quoted = json.dumps(text, ensure_ascii=False)
            return Expression(quoted, quoted, re.escape(text))
        case "class":
            chosen = rng.choice(CLASSES)
            return Expression(f"/{chosen}/", chosen.replace(r"\w", "a-zA-Z0-9_"), chosen)
        case "rule" if named:
            name, body = rng.choice(named)
            return Expression(name, name, f"(?:{body.regex})")
        case "some":
            return _repeated(expression(rng, depth - 1, named), rng.choice(("?", "{0,3}", "{1,2}")))
    parts = [expression(rng, depth - 1, named) for _ in range(rng.randint(1, 3))]
    separators = ("|", " | ") if kind == "either" else ("", " ")
    joined = (separators[1].join(part[form] for part in parts) for form in range(2))
    return Expression(*(f"({one})" for one in joined), f"(?:{separators[0].join(part.regex for part in parts)})")


def _repeated(of: Expression, times: str) -> Expression:
    return Expression(f"({of.lark}){times}", f"({of.gbnf}){times}", f"(?:{of.regex}){times}")


def drawn(seed: int) -> Drawn:
    """A random grammar."""
    rng = random.Random(seed)
    return rng.choice((_lark, _gbnf, _nested, _regex, _choice, _tags))(rng)


def _rules(rng: random.Random) -> list[tuple[str, Expression]]:
    named = list[tuple[str, Expression]]()
    for index in range(rng.randint(1, 5)):
        named.append((f"rule{index}", expression(rng, rng.randint(1, 3), named)))
    return named


def _lark(rng: random.Random) -> Drawn:
    named = _rules(rng)
    rules = "\n".join(f"{name}: {body.lark}" for name, body in named)
    return Drawn("Lark", lark_answer(f"start: {named[-1][0]}\n{rules}"), _matches(named[-1][1].regex))


def _gbnf(rng: random.Random) -> Drawn:
    named = _rules(rng)
    rules = "\n".join(f"{name} ::= {body.gbnf}" for name, body in named)
    return Drawn("GBNF", lark_answer(f"root ::= {named[-1][0]}\n{rules}\n"), _matches(_ascii_words(named[-1][1].regex)))


def _ascii_words(regex: str) -> str:
    return regex.replace(r"\w", "a-zA-Z0-9_")


def _nested(rng: random.Random) -> Drawn:
    """A rule that contains itself, between brackets."""
    inner = expression(rng, 1, [])
    inner = Expression('"ab"', "", "ab") if "\\]" in inner.regex or "[" in inner.regex else inner
    rules = f'start: "[" start "]" | core\ncore: {inner.lark}'

    def judge(text: str) -> bool:
        depth = len(text) - len(text.lstrip("["))
        return text[len(text) - depth :] == "]" * depth and _matches(inner.regex)(text[depth : len(text) - depth])

    return Drawn("nested Lark", lark_answer(rules), judge)


def _regex(rng: random.Random) -> Drawn:
    pattern = expression(rng, 3, []).regex
    return Drawn("regex", regex_answer(pattern), _matches(pattern))


def _choice(rng: random.Random) -> Drawn:
    choices = ["".join(rng.choices(TEXTS, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 40))]
    return Drawn("choice", choice_answer(choices), choices.__contains__)


def _tags(rng: random.Random) -> Drawn:
    """JSON between a begin and an end, wherever a letter comes that is common."""
    trigger = rng.choice("eaio")
    ends = [rng.choice((";", "</f>")) for _ in range(rng.randint(1, 3))]
    wanted = [Structure(trigger, f"{trigger}{index}:", members(rng, 1), end) for index, end in enumerate(ends)]

    def judge(text: str) -> bool:
        at = text.find(trigger)
        while at >= 0:
            one = next((one for one in wanted if text.startswith(one.begin, at)), None)
            if one is None:
                return False
            said, end = json.JSONDecoder().raw_decode(text, at + len(one.begin))
            jsonschema.validate(said, one.schema)
            if not text.startswith(one.end, end):
                return False
            at = text.find(trigger, end + len(one.end))
        return True

    return Drawn("structural tag", tagged_answer(wanted), judge)


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def walked(walker: Walker, seed: int) -> str:
    """Its kind, once an answer of random tokens was judged right; or why the check refuses it, before anything is generated.
    AssertionError: an answer is none of the grammar's, or a walk does not end."""
    one = drawn(seed)
    rules = grammar(walker.markers, one.answer, Thought.none)
    if (complaint := walker.vocabulary.complaint(rules)) is not None:
        return f"refused: {complaint}"
    tokens = walker.walk(rules, random.Random(seed))
    text = walker.text.decode(tokens, skip_special_tokens=False)
    assert one.judge(text), f"seed {seed}, {one.kind}: {text!r} is no answer of\n{one.answer}"
    return one.kind


def main() -> None:
    """Walk them in a thread of the core's size."""
    folder, first, end = sys.argv[1:]
    found = Counter[str]()
    failed: list[Any] = []

    def walk() -> None:
        try:
            walker = Walker(TextProcessor.load(Path(folder)))
            found.update(walked(walker, seed) for seed in range(int(first), int(end)))
        except BaseException as error:
            failed.append(error)
            raise

    with compile_stack(COMPILE_STACK_BYTES):
        thread = threading.Thread(target=walk)
        thread.start()
    thread.join()
    print(json.dumps(found))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
