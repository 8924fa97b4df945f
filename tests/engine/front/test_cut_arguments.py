"""Arguments whose JSON was cut, in Gemma 4's notation as far as they go."""

import json
import random
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.front.cut_arguments import MAX_PIECES, CutReader
from engine.front.notation import QUOTE
from tests.support.engine.replies import members, value

pytestmark = pytest.mark.pure


def refuse(word: str) -> None:
    raise ValueError(word)


def parse(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def notation(text: str) -> str | None:
    cut = CutReader(parse).read(text)
    return None if cut is None else QUOTE.join(cut)


CUT = {
    "{": "",
    '{"ci': "ci",
    '{"city"': "city",
    '{"city":': "city:",
    '{"city":"': f"city:{QUOTE}",
    '{"city": "Par': f"city:{QUOTE}Par",
    '{"b":"B","a":{"c":[1,"d"': f"b:{QUOTE}B{QUOTE},a:{{c:[1,{QUOTE}d{QUOTE}",
    '{"a":[true,': "a:[true,",
    '{"a":{"b":1},': "a:{b:1},",
    '{"a":tr': "a:tr",
    '{"a":-1.5e': "a:-1.5e",
    '{"a":1}': "a:1}",
    '{"a":"x\\n\\"y\\\\': f'a:{QUOTE}x\n"y\\',
    '{"a":"x\\': f"a:{QUOTE}x",
    '{"a":"x\\u00e': f"a:{QUOTE}x",
    '{"a":"x\\\\u00e': f"a:{QUOTE}x\\u00e",
}


@pytest.mark.parametrize("text", CUT)
def test_what_is_there_is_written_and_no_more(text: str) -> None:
    """Wherever it ends: in a key, behind it, in a string, a word, an escape, an array; half an escape is left out."""
    assert notation(text) == CUT[text]


@pytest.mark.parametrize(
    "text",
    ["", " ", "1", "[", '"a', '["a', "{]", '{"a" 1', '{"a":1 2', '{"a":x', '{"a":NaN,', "{a:1",
     "{,", '{"a",', '{"a":"\\x', '{"a":}', '{"a":1}}', '{"a":"\\u12x4', "{'a':'b", '{"a":"b"c"', '{"a":"\n', '{"a":' * 10_000],
    ids=range(22),
)  # fmt: skip
def test_what_begins_no_object_is_none(text: str) -> None:
    """Other JSON, text that no end makes an object of, and brackets beyond Python's stack."""
    assert notation(text) is None


def test_what_all_calls_hold_is_bounded() -> None:
    """A long string is one piece, of short ones a conversation may have so many; a call costs 32. One more call is refused."""
    assert CutReader(parse).read('{"a":"' + "x" * 1_000_000) is not None
    for text, pieces in (('{"a":1', 32 + 4), ('{"a":[' + "1," * 1000, 32 + 4 + 2000)):
        reader = CutReader(parse)
        for _ in range(MAX_PIECES // pieces):
            assert reader.read(text) is not None
        with pytest.raises(InvalidRequest, match="cut"):
            reader.read(text)


def random_object(rng: random.Random) -> tuple[list[Any], str]:
    return members([value(rng) for _ in range(rng.randint(0, 4))], rng)


def test_every_beginning_of_an_object_is_read() -> None:
    """Cut after any character, its notation is a beginning of the whole one's, and never much shorter than what was there."""
    for seed in range(60):
        native, text = random_object(random.Random(seed))
        whole = notation(text)
        assert whole == "".join(QUOTE if isinstance(each, int) else each for each in native)[1:]
        begun = [notation(text[:end]) for end in range(1, len(text))]
        assert all(each is not None and whole.startswith(each) for each in begun), text
        assert sorted(begun, key=lambda each: len(each or "")) == begun
