"""From a stream of token ids to typed deltas: what a step added, and the whole of it."""

import asyncio
from collections.abc import Iterable

import pytest

from engine.front.generation import Choice, Delta, Generation, Job, merged
from engine.front.parts import Content
from engine.front.text import TextProcessor
from engine.protocol import SamplingParams
from tests.conftest import Nano
from tests.support.engine.fakes import FakeEngineClient

pytestmark = pytest.mark.pure

WORDS = "Ünïcode, 你好 👋🏽 and <b>plain</b> words"


@pytest.fixture(scope="module")
def text(nano: Nano) -> TextProcessor:
    return TextProcessor.load(nano("31b"))


def deltas_of(text: TextProcessor, tokens: list[int], *, choices: int = 1, stops: tuple[str, ...] = ()) -> list[tuple[int, Delta]]:
    """What `choices` generations give when the engine answers each with `tokens`."""

    def answer(prompt: list[int], params: SamplingParams) -> Iterable[int]:
        return tokens

    async def main() -> list[tuple[int, Delta]]:
        job = Job([1], (SamplingParams(max_tokens=1000),) * choices, clip=False, stops=stops)
        engine = FakeEngineClient(answer)
        generations = [Generation(engine, text, job, params) for params in job.params]
        return [pair async for pair in merged(generations)]

    return asyncio.run(main())


def test_the_parts_of_all_deltas_are_the_text(text: TextProcessor) -> None:
    """A token a delta: a part where it gave text, none where a character is not complete yet; and a cut one differs."""
    tokens = text.encode(WORDS, add_bos=False)
    found = [delta for _, delta in deltas_of(text, tokens)]
    parts = [part for delta in found for part in delta.parts]
    assert all(isinstance(part, Content) and part.text for part in parts)
    assert any(not delta.parts for delta in found[:-1]), "no character took several tokens: the text is too plain for this test"
    assert "".join(part.text for part in parts if isinstance(part, Content)) == text.decode(tokens) == WORDS
    assert "".join(part.text for part in parts[:-1]) != WORDS


def test_a_choice_adds_its_deltas_up(text: TextProcessor) -> None:
    """Tokens, text and finish of each of three choices; a delta more or less would show."""
    tokens = text.encode(WORDS, add_bos=False)
    choices = [Choice() for _ in range(3)]
    for index, delta in deltas_of(text, tokens, choices=3):
        choices[index].add(delta)
    assert [(choice.content, choice.tokens, choice.finish) for choice in choices] == [(WORDS, tokens, "stop")] * 3
    choices[0].add(Delta((Content("!"),), [], [], "stop"))
    assert choices[0].content != WORDS


def test_a_stop_string_cuts_the_parts(text: TextProcessor) -> None:
    """The text before the stop string, whatever tokens it began in, and the end is a stop."""
    found = [delta for _, delta in deltas_of(text, text.encode(WORDS, add_bos=False), stops=(" and",))]
    assert "".join(part.text for delta in found for part in delta.parts) == WORDS.partition(" and")[0]
    assert [delta.finish for delta in found][-1] == "stop"
