"""Replies taken apart: random ones with known meaning, cut and batched anywhere; garbage; thoughts and their edges."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.front.arguments import ArgumentsParser
from engine.front.parts import Arguments, Content, ToolCallStart
from engine.front.reply import Markers, ReplyParser
from engine.front.tools import NO_TOOLS, Tools
from tests.support.engine.replies import (
    BEGIN_THOUGHT,
    END_THOUGHT,
    IDS,
    MARKERS,
    TOOLS,
    TURN,
    Said,
    Segment,
    Tokens,
    parsed,
    reply,
    segments,
    tokens,
)

pytestmark = pytest.mark.pure

CASES = 2000
MANY = 1_000_000


def wrong(seeds: range) -> int:
    """Of so many random replies, how many are understood wrongly, or otherwise in a stream than whole."""
    found = 0
    for seed in seeds:
        rng = random.Random(seed)
        made = reply(rng)
        given = tokens(made.segments, rng)
        whole, streamed = parsed(given)[0], parsed(given, rng=rng)[0]
        found += not whole == streamed == made.said
    return found


def test_replies_are_understood() -> None:
    """Whatever a reply says, however its tokens are cut and batched: whole = stream = truth."""
    assert wrong(range(CASES)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_million_replies_are_understood(part: int) -> None:
    """As above, a million of them."""
    assert wrong(range(part * MANY // 10, (part + 1) * MANY // 10)) == 0


def _forgets_held_text(parser: ReplyParser, text: str) -> str:
    parser._state, parser._held = parser._content, ""
    return text


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (ArgumentsParser, "_begin", lambda parser, container: None),
        (ReplyParser, "_thought", lambda parser, text: parser._reason(text) or ""),
        (ReplyParser, "_end_call", lambda parser: None),
        (ReplyParser, "_gap", _forgets_held_text),
    ],
)
def test_a_faulty_parser_is_seen(monkeypatch: pytest.MonkeyPatch, where: type[Any], name: str, fault: Callable[..., Any]) -> None:
    """The comparison above fails for a parser with a fault planted, in more than one case of a hundred."""
    monkeypatch.setattr(where, name, fault)
    assert wrong(range(300)) > 3


def test_a_batch_may_be_all_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that forgets what it holds back at the end of a batch differs between stream and whole."""
    push = ReplyParser.push

    def forgetful(parser: ReplyParser, ids: list[int]) -> Any:
        parts = push(parser, ids)
        parser._held = ""
        return parts

    monkeypatch.setattr(ReplyParser, "push", forgetful)
    assert wrong(range(300)) > 30


def test_a_cut_reply_is_a_beginning() -> None:
    """Cut after any token: content, thought and each call's arguments begin what they would have been, and no more is made up."""
    for seed in range(CASES // 2):
        rng = random.Random(seed)
        made = reply(rng)
        given = tokens(made.segments, rng)
        short = Tokens(given.ids[: rng.randint(0, len(given.ids))], given.pieces)
        said = parsed(short, cut=True)[0]
        assert parsed(short, cut=True, rng=rng)[0] == said
        assert begins(said, made.said), (seed, said, made.said)


def begins(said: Said, whole: Said) -> bool:
    """Whether all that `said` has is the beginning of what the whole has; bytes of half a character show as U+FFFD."""
    content, reasoning = said.content.rstrip("\ufffd"), said.reasoning.rstrip("\ufffd")
    calls = [(name, text.rstrip("\ufffd")) for name, text in said.calls]
    return (
        whole.content.startswith(content.rstrip())
        and whole.reasoning.startswith(reasoning)
        and len(calls) <= len(whole.calls)
        and all(name == of and full.startswith(text) for (name, text), (of, full) in zip(calls, whole.calls, strict=False))
    )


def test_completed_arguments_are_seen() -> None:
    """The comparison above fails where a cut call is completed."""
    made = segments('<|tool_call>call:f{command:<|"|>rm -rf /tmp/x')
    assert parsed(tokens(made), cut=True)[0].calls == [("f", '{"command":"rm -rf /tmp/x')]
    assert not begins(Said(calls=[("f", '{"command":"rm -rf /tmp/x"}')]), Said(calls=[("f", '{"command":"rm -rf /tmp/xyz"}')]))


GARBAGE: list[Segment] = [
    *IDS.values(),
    "x",
    "y{",
    "}z",
    "[x",
    "]",
    ",",
    ":",
    "x:",
    '"',
    "'y",
    "\\",
    "\\u00",
    "(",
    ")",
    "=",
    "  ",
    "\n",
]
GARBAGE += ["call:", "call:f{", "f{", ":g{z:", "thought\n", "thou", "12", "-", "true", "é"]


def garbage(rng: random.Random, words: list[Segment]) -> list[Segment]:
    return [rng.choice(words) for _ in range(rng.randint(0, 40))]


def letters(text: str) -> list[int]:
    return [text.count(letter) for letter in "xyz"]


class ExactTools(Tools):
    """Without the namespaces that models make up, which are left out of a call's name."""

    def resolve(self, name: str) -> str:
        return name


EXACT = ExactTools([{"type": "function", "function": {"name": name}} for name in ("f", "g")])


@pytest.mark.parametrize("tools", [EXACT, NO_TOOLS])
def test_garbage_loses_nothing(tools: Tools) -> None:
    """No sequence of markers and text raises; each x, y and z of it is in what comes out, whole or in a stream, once."""
    for seed in range(CASES):
        rng = random.Random(seed)
        made = garbage(rng, GARBAGE)
        given = tokens(made, rng)
        said = parsed(given, tools=tools)[0]
        assert parsed(given, tools=tools, rng=rng)[0] == said
        out = said.content + said.reasoning + "".join(name + text for name, text in said.calls)
        assert letters(out) == letters("".join(each for each in made if isinstance(each, str))), (seed, made, said)


def test_a_lost_character_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count above fails for a parser that drops what was held for a call that is none."""
    monkeypatch.setattr(ReplyParser, "_no_call", lambda parser: None)
    with pytest.raises(AssertionError):
        test_garbage_loses_nothing(EXACT)


def test_neighbours_are_one_part() -> None:
    """What one batch of tokens adds is a part for each run of a kind, whatever markers stand inside."""
    calls = '<|tool_call>call:f{a:<|"|>x<|"|>,b:<|"|>y<|"|>}<tool_call|><|tool_call>call:g{a:1}<tool_call|>'
    given = tokens(segments('a<|"|>b<tool_call|>c' + calls))
    parts = ReplyParser(given.pieces, MARKERS, TOOLS).push(given.ids)
    assert [type(part) for part in parts] == [Content, ToolCallStart, Arguments, ToolCallStart, Arguments]


# ---- thoughts

THOUGHTS: dict[str, tuple[str, Said]] = {
    "none": ("B", Said("B")),
    "one": ("<|channel>thought\nA\n<channel|>B", Said("B", "A")),
    "empty": ("<|channel>thought\n<channel|>B", Said("B")),
    "empty, label alone": ("<|channel>thought<channel|>B", Said("B")),
    "one newline is the template's": ("<|channel>thought\nA\n\n<channel|>B", Said("B", "A\n")),
    "no newline": ("<|channel>thought\nA<channel|>B", Said("B", "A")),
    "never ended": ("<|channel>thought\nA", Said("", "A")),
    "another label": ("<|channel>final\nA<channel|>B", Said("B", "final\nA")),
    "half a label": ("<|channel>thou<channel|>B", Said("B", "thou")),
    "text before": ("Hi <|channel>thought\nA<channel|>B", Said("Hi B", "A")),
    "two": ("<|channel>thought\nA\n<channel|><|channel>thought\nB\n<channel|>C", Said("C", "A\nB")),
    "an empty one between": ("<|channel>thought\n<channel|><|channel>thought\nB\n<channel|>C", Said("C", "B")),
    "begun twice": ("<|channel>thought\nA<|channel>B\n<channel|>C", Said("C", "AB")),
    "ended by a call": ("<|channel>thought\nA\n<|tool_call>call:f{}<tool_call|>", Said("", "A", [("f", "{}")])),
    "ended by nothing": ("A<channel|>B", Said("AB")),
}


@pytest.mark.parametrize("case", THOUGHTS)
def test_thoughts(case: str) -> None:
    """Thoughts and answer are apart, whole and token by token."""
    text, said = THOUGHTS[case]
    rng = random.Random(case)
    assert parsed(tokens(segments(text)))[0] == said
    assert parsed(tokens(segments(text), rng), rng=rng)[0] == said


def test_spelled_markers_are_text() -> None:
    """What ordinary tokens spell is what it says, in the answer, in thoughts and in arguments."""
    text = '<|channel>thought\n<channel|><|tool_call>call:f{a:<|"|>'
    assert parsed(tokens([text], random.Random(1)))[0] == Said(text)
    made = [BEGIN_THOUGHT, "thought\n" + text, END_THOUGHT]
    assert parsed(tokens(made))[0] == Said("", text)


def test_reasoning_tokens_are_counted() -> None:
    """Those from one marker to the other, both included, however they come."""
    made = ["Hi", BEGIN_THOUGHT, "thought", "\n", "a", "b", END_THOUGHT, "c", BEGIN_THOUGHT, "d"]
    given = tokens(made)
    for rng in (None, random.Random(1), random.Random(2)):
        parser = parsed(given, rng=rng)[1]
        assert parser.reasoning_tokens == 8
    assert parsed(tokens(["Hi", "c"]))[1].reasoning_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "text", "said"),
    [
        ([TURN, BEGIN_THOUGHT, "thought\n"], "A\n<channel|>B", Said("B", "A")),
        ([TURN, BEGIN_THOUGHT, "thou"], "ght\nA\n<channel|>B", Said("B", "A")),
        ([TURN, BEGIN_THOUGHT, "thought\nso far\n"], "A\n<channel|>B", Said("B", "A")),
        ([TURN, BEGIN_THOUGHT, "thought\n", END_THOUGHT], "A", Said("A")),
        ([BEGIN_THOUGHT, "thought\n", TURN, "model\n"], "A", Said("A")),
        ([], "A", Said("A")),
    ],
)
def test_a_prompt_may_leave_a_thought_open(prompt: list[Segment], text: str, said: Said) -> None:
    """The reply begins in the state that the prompt's tail is in, not in one guessed from a switch."""
    both = tokens(prompt + segments(text))
    size = len(prompt)
    given = Tokens(both.ids[size:], both.pieces)
    found, parser = parsed(given, prompt=both.ids[:size])
    assert found == said
    assert parser.reasoning_tokens == (given.ids.index(END_THOUGHT) + 1 if said.reasoning else 0)


def test_other_control_tokens_show_where_they_are_asked_for() -> None:
    """In the content, and nowhere else: thoughts and calls are taken apart all the same."""
    made = segments('a<|turn>b<|channel>thought\nc<|turn><channel|><|tool_call>call:f{a:<|"|>d<|"|>}<tool_call|>')
    assert parsed(tokens(made))[0] == Said("ab", "c", [("f", '{"a":"d"}')])
    assert parsed(tokens(made), show_special=True)[0] == Said("a<|turn>b", "c", [("f", '{"a":"d"}')])


def test_a_tokenizer_without_markers_is_refused() -> None:
    """By their names; that of a result may be absent."""

    class Text:
        def __init__(self, *absent: str) -> None:
            self.absent = absent

        def control_id(self, name: str) -> int | None:
            return None if name in self.absent else len(name)

    assert Markers.of(Text("<|tool_response>"))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"<channel\|>, <\|tool_call>$"):
        Markers.of(Text("<|tool_call>", "<channel|>"))  # type: ignore[arg-type]


def test_endless_white_space_is_let_go() -> None:
    """Where a call may begin, too: a model that gives nothing but blanks is read once."""
    given = tokens([" " * 31] * 100)
    parser = ReplyParser(given.pieces, MARKERS, TOOLS)
    assert any(parser.push([token]) for token in given.ids)
