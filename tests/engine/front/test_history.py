"""What a reply was read as, sent back as OpenAI's messages, is the very tokens that the model wrote."""

import json
import random
from typing import Any

import pytest

from engine.front.reply import Markers, ReplyParser
from engine.front.template import MAX_CUT, CutCalls
from engine.front.text import TextProcessor
from engine.front.tools import Tools
from tests.nano.random_models import build
from tests.support.engine.replies import NAMES, Segment, members, text_of, value
from tests.support.engine.walker import choice_of

pytestmark = pytest.mark.pure

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Weather?"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextProcessor]:
    """31b, whose template begins a reply with an empty thought where thinking is off, and e2b, whose does not."""
    folder = tmp_path_factory.mktemp("nano")
    return {member: TextProcessor.load(build(member, folder / member)) for member in ("31b", "e2b")}


def ids_of(text: TextProcessor, segments: list[Segment]) -> list[int]:
    """As the model would write them: text between markers in the tokenizer's own cut."""
    return text.encode("".join(NAMES[each] if isinstance(each, int) else each for each in segments), add_bos=False)


def arguments(rng: random.Random, *, ordered: bool = True) -> list[Segment]:
    """Two random members, `ordered`: as templates render them; none spells a marker."""
    while True:
        native, _ = members([value(rng, depth=1) for _ in range(2)], rng)
        keys = [each[:-1] for each in native if isinstance(each, str) and each.endswith(":")]
        spelled = any(name in each for name in NAMES for each in native if isinstance(each, str))
        in_order = keys == sorted(keys, key=str.lower) and sum(each == "{" for each in native) == 1
        if not spelled and (in_order or not ordered):
            return native


def message(
    text: TextProcessor, tools: list[dict[str, Any]], prompt: list[int], reply: list[int], *, cut: bool = False
) -> dict[str, Any]:
    """The reply as a client keeps it; `cut`: max_tokens ended it."""
    markers = Markers.of(text)
    choice = choice_of(ReplyParser(text.pieces, markers, Tools(tools), prompt=prompt), reply, cut=cut)
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}} for call in choice.calls
    ]
    return {
        "role": "assistant",
        "content": choice.content or None,
        "reasoning": choice.reasoning or None,
        "tool_calls": calls,
    }


def again(text: TextProcessor, reply: list[Segment], *, thinking: bool) -> tuple[list[int], list[int]]:
    """(prompt and reply, the next prompt up to where they end)"""
    prompt = text.render_chat([USER], tools=[WEATHER], enable_thinking=thinking)
    ids = ids_of(text, reply)
    turn = message(text, [WEATHER], prompt, ids)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "18C"} for call in turn["tool_calls"]]
    after = text.render_chat([USER, turn, *results], tools=[WEATHER], enable_thinking=thinking)
    return [*prompt, *ids], after[: len(prompt) + len(ids)]


@pytest.mark.parametrize(("member", "thinking"), [("31b", True), ("e2b", False), ("e2b", True)])
def test_history_is_token_identical(texts: dict[str, TextProcessor], member: str, thinking: bool) -> None:
    """Thought, text and parallel calls of a tool loop come back as they went out: a prefix cache finds all of it."""
    for seed in range(100):
        rng = random.Random(seed)
        thought = text_of(rng).replace("<", "").strip("\n")
        reply = [0, f"thought\n{thought}\n", 1] if thinking and thought else []
        reply += rng.choice(([], ["Let me see."]))
        for _ in range(rng.randint(1, 3)):
            reply += [2, "call:get_weather", *arguments(rng), 3]
        before, after = again(texts[member], reply, thinking=thinking)
        assert before == after, (seed, reply)


@pytest.mark.parametrize("number", ["1e5", "0.10", "-0", "-2.5E-3", "12345678901234567890", "1" * 400, "1e999"])
def test_numbers_come_back_as_written(texts: dict[str, TextProcessor], number: str) -> None:
    """Digit for digit; another number would differ."""
    before, after = again(texts["e2b"], [2, f"call:get_weather{{a:{number}}}", 3], thinking=False)
    assert before == after
    assert ids_of(texts["e2b"], [number]) != ids_of(texts["e2b"], [number + "0"])


def test_another_order_is_seen(texts: dict[str, TextProcessor]) -> None:
    """The comparison fails for keys in an order that no template renders."""
    before, after = again(texts["e2b"], [2, "call:get_weather{b:1,a:2}", 3], thinking=False)
    assert before != after


def shown(text: TextProcessor, arguments: str) -> str:
    """The call in the next prompt."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    prompt = text.decode(text.render_chat([USER, turn], tools=[WEATHER]), skip_special_tokens=False)
    return prompt.partition("<|tool_call>")[2].partition("<tool_call|>")[0]


@pytest.mark.parametrize("thinking", [True, False])
def test_a_cut_call_comes_back_closed(texts: dict[str, TextProcessor], *, thinking: bool) -> None:
    """Cut anywhere in its arguments, keys in any order: all that a client was sent is shown, and what is open is closed."""
    text = texts["31b"]
    thought = [0, "thought\nHm.\n", 1] if thinking else []
    prompt = text.render_chat([USER], tools=[WEATHER], enable_thinking=thinking)
    for seed in range(20):
        ids = ids_of(text, [*thought, 2, "call:get_weather", *arguments(random.Random(seed), ordered=False)])
        begun = ids.index(text.control_id("<|tool_call>")) + len(ids_of(text, ["call:get_weather{"])) + 1
        for end in range(begun, len(ids)):
            (call,) = message(text, [WEATHER], prompt, ids[:end], cut=True)["tool_calls"]
            sent = call["function"]["arguments"]
            whole = CutCalls().closed(sent)
            assert whole is not None
            assert whole.startswith(sent), (seed, end)
            assert shown(text, sent) == shown(text, whole) != shown(text, "{}") or json.loads(whole) == {}, (seed, end)


@pytest.mark.parametrize(
    "sent",
    [" ", "1", "[", '"a', '["a', "{]", '{"a" 1', '{"a":1 2', '{"a":x', '{"a":NaN,', "{a:1",
     "{,", '{"a",', '{"a":"\\x', '{"a":}', '{"a":1}}', '{"a":"\\u12x4', "{'a':'b", '{"a":"b"c"', '{"a":"\n', '{"a":' * 10_000],
    ids=range(21),
)  # fmt: skip
def test_what_begins_no_object_is_shown_as_text(texts: dict[str, TextProcessor], sent: str) -> None:
    """Other JSON, text that no end makes an object of, and brackets beyond Python's stack: the turn goes on, with the very text.
    Planted: another text is shown otherwise."""
    expected = f'call:f{{arguments:<|"|>{sent}<|"|>}}' if sent.strip() else "call:f{}"
    assert shown(texts["31b"], sent) == expected
    assert shown(texts["31b"], f"{sent}x") != expected


def test_what_cut_calls_hold_is_bounded() -> None:
    """A long string is one value; of short ones a conversation may have so many, and a call counts for 32. One more is no JSON."""
    assert CutCalls().closed('{"a":"' + "x" * 1_000_000)
    for text, values in (('{"a":1', 32 + 2), ('{"a":[' + "1," * 1000, 32 + 3 + 1000)):
        cut = CutCalls()
        for _ in range(MAX_CUT // values):
            assert cut.closed(text)
        assert cut.closed(text) is None
