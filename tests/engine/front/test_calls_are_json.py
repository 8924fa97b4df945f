"""Whatever a model writes as a call: its arguments are a JSON object once it has ended its turn, the same in a stream and whole."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.front.arguments import ArgumentsParser, Reading
from engine.front.reply import ReplyParser
from tests.support.engine.replies import BEGIN_CALL, IDS, QUOTE, Said, Segment, parsed, segments, tokens
from tests.support.engine.schemas import tools_of

pytestmark = pytest.mark.pure

TEXT = {"type": "string"}
SCHEMAS: dict[str, Any] = {
    "f": {"a": TEXT, "n": {"type": "integer"}, "l": {"type": "array", "items": TEXT}, "o": {"properties": {"x y": {}, "b": TEXT}}},
    "g": {},
}
TOOLS = tools_of({name: {"type": "object", "properties": each} for name, each in SCHEMAS.items()})
WORDS: list[Segment] = [*IDS.values(), *[QUOTE] * 4, "a", "x y", "b:", "a:", "n:", "o:{", "l:[", "first name:", '"k":', "'k k':"]
WORDS += [*",:={}[]()\\\"' \n\x00\x1f\x7f\u2028é👋", "12", "-", "1.", "1e", "tr", "true", "null", "None", "True", "\\u", "\\u00"]
WORDS += ["\\ud83d", "\\ude00", "\\'", "9" * 300, " " * 300, "w" * 300, "call:", "call:f{", "f(", "call:g{{", "thought\n", "}}"]


def written(rng: random.Random) -> list[Segment]:
    """A call's beginning, and what should not follow."""
    opener = rng.choice(("{", "{", "{", "("))
    return [BEGIN_CALL, f"call:{rng.choice('fg')}{opener}", *rng.choices(WORDS, k=rng.randint(0, 25))]


def is_object(text: str) -> bool:
    """Whether this is JSON of an object, in which no half of a character stands alone."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return False
    return isinstance(value, dict)


def wrong(seeds: range) -> tuple[int, int]:
    """Of so many replies: (how many have a call that is no JSON object, how many are read otherwise in a stream)."""
    broken = different = 0
    for seed in seeds:
        rng = random.Random(seed)
        given = tokens(written(rng), rng)
        whole, streamed = parsed(given, tools=TOOLS)[0], parsed(given, tools=TOOLS, rng=rng)[0]
        broken += not all(is_object(text) for _, text in whole.calls)
        different += whole != streamed
    return broken, different


@pytest.mark.parametrize("seeds", [range(2500), pytest.param(range(10_000, 110_000), marks=pytest.mark.slow)])
def test_calls_are_json(seeds: range) -> None:
    """Keys and strings that nothing ends, quotes and brackets of any kind, half escapes, long runs, calls in calls."""
    assert wrong(seeds) == (0, 0)


def _one_call_alone(parser: ReplyParser, *, complete: bool) -> None:
    if parser._arguments is not None:
        parser._read(parser._end_arguments(complete=complete))


def _always_cut(parser: ArgumentsParser, *, cut: bool, end: Callable[..., None] = ArgumentsParser.end) -> None:
    end(parser, cut=True)


def _does_not_wait(parser: ArgumentsParser, decide: Callable[[str], Any]) -> Reading[Any]:
    yield from ()
    return decide(parser._text[parser._at :])


@pytest.mark.parametrize(
    ("where", "name", "fault", "seen"),
    [
        (ArgumentsParser, "end", _always_cut, 0),
        (ReplyParser, "_end_open_call", _one_call_alone, 0),
        (ArgumentsParser, "_look", _does_not_wait, 1),
    ],
)
def test_a_faulty_parser_is_seen(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, fault: Callable[..., Any], seen: int
) -> None:
    """Strings left open, a call begun in the rest of another, a decision before the text is there: each is counted above."""
    monkeypatch.setattr(where, name, fault)
    assert any(wrong(range(first, first + 100))[seen] for first in range(0, 10_000, 100))


ENDS: dict[str, str] = {
    'a:<|"|>x y': '{"a":"x y"}',
    'a:<|"|>x<|"|>': '{"a":"x"}',
    'a:<|"|>x<tool_call|>': '{"a":"x"}',
    'a:<|"|>x}<tool_call|>': '{"a":"x}"}',
    'a:<|"|>x<tool_call|><tool_call|>y<tool_call|>': '{"a":"x<tool_call|><tool_call|>y"}',
    "n:1e999}": '{"n":1e999}',
    'a:[<|"|>x': '{"a":["x"]}',
    'n:<|"|>12': '{"n":12}',
    '<|"|>a b': '{"a b":null}',
    '<|"|>a<|"|>:<|"|>x': '{"a":"x"}',
    "first name:<|\"|>x<|\"|>,'k k':1}": '{"first name":"x","k k":1}',
    'a:"x\\': '{"a":"x\\\\"}',
    "a:'x": '{"a":"x"}',
    "a:\"\\ud83d\\ude00\\ud83d\"}": '{"a":"\\ud83d\\ude00\\\\ud83d"}',
    "a:": '{"a":null}',
    "a": '{"a":null}',
}  # fmt: skip


@pytest.mark.parametrize("text", ENDS)
def test_what_the_turn_leaves_open_is_closed(text: str) -> None:
    """A string, a key, an array: as far as the model wrote it, where it ended its turn; cut by a limit it stays open."""
    made = segments("<|tool_call>call:f{" + text)
    assert parsed(tokens(made), tools=TOOLS)[0] == Said(calls=[("f", ENDS[text])])
    rng = random.Random(text)
    assert parsed(tokens(made, rng), tools=TOOLS, rng=rng)[0].calls == [("f", ENDS[text])]
    if not text.endswith("}"):
        assert not is_object(parsed(tokens(made), tools=TOOLS, cut=True)[0].calls[0][1])
