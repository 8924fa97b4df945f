"""From a stream of token ids to typed deltas: what a step added, and the whole of it."""

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from engine.errors import GenerationFailed, SlowReader
from engine.front.generation import Choice, Delta, DeltaReader, Generation, Job
from engine.front.parts import Content
from engine.front.reply import Markers
from engine.front.stream import Clock, Stream
from engine.front.text import TextProcessor
from engine.front.tools import Tools
from engine.protocol import AbortReason, FinishReason, Logprobs, Output, SamplingParams
from tests.conftest import Nano
from tests.support.engine.fakes import FakeEngineClient

pytestmark = pytest.mark.pure

WORDS = "Ünïcode, 你好 👋🏽 and <b>plain</b> words"


@pytest.fixture(scope="module")
def text(nano: Nano) -> TextProcessor:
    return TextProcessor.load(nano("31b"))


def job_of(params: SamplingParams, choices: int = 1, **options: Any) -> Job:
    """Of a prompt of one token."""
    return Job((array("i", [1]),), (params,) * choices, clip=False, **options)


def content_of(deltas: Iterable[Delta]) -> str:
    return "".join(part.text for delta in deltas for part in delta.parts if isinstance(part, Content))


def deltas_of(text: TextProcessor, tokens: list[int], *, choices: int = 1, most: int = 1000, **job: Any) -> list[tuple[int, Delta]]:
    """What `choices` generations give when the engine answers each with `tokens`, of which `most` may come."""

    def answer(prompt: list[int], params: SamplingParams) -> Iterable[int]:
        return tokens

    async def main() -> list[tuple[int, Delta]]:
        made = job_of(SamplingParams(max_tokens=most, stop_ids=text.eos_ids), choices, **job)
        engine = FakeEngineClient(answer)
        generations = [Generation(engine, text, made, choice) for choice in range(choices)]
        reader, found = DeltaReader(generations, list), list[tuple[int, Delta]]()
        while not reader.has_ended:
            found += await reader.next()
        return found

    return asyncio.run(main())


def test_the_parts_of_all_deltas_are_the_text(text: TextProcessor) -> None:
    """A token a delta: a part where it gave text, none where a character is not complete yet; and a cut one differs."""
    tokens = text.encode(WORDS, add_bos=False)
    found = [delta for _, delta in deltas_of(text, tokens)]
    parts = [part for delta in found for part in delta.parts]
    assert all(isinstance(part, Content) and part.text for part in parts)
    assert any(not delta.parts for delta in found[:-1]), "no character took several tokens: the text is too plain for this test"
    assert content_of(found) == text.decode(tokens) == WORDS
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


def readers_of(
    text: TextProcessor,
    made: list[object],
    *,
    choices: int = 1,
    count: int = 1,
    put: Callable[[list[Delta]], list[Delta] | None] | None = None,
) -> tuple[list[Stream], list[DeltaReader[list[Delta]]]]:
    """`count` readers of streams that nobody feeds yet; `made` notes what each converts."""
    job, engine = job_of(SamplingParams(max_tokens=9), choices), UnfedEngine()
    readers = []
    for reader in range(count):

        def convert(pairs: Iterator[tuple[int, Delta]], reader: int = reader) -> list[Delta]:
            found = [delta for _, delta in pairs]
            made.append(reader)
            return found

        readers.append(DeltaReader([Generation(engine, text, job, choice) for choice in range(choices)], convert, put))
    return engine.streams, readers


class UnfedEngine(FakeEngineClient):
    """Whose streams the test feeds."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []

    def generate(self, prompt: Sequence[int], params: SamplingParams, **_: Any) -> Stream:
        """A stream that stays empty."""
        self.streams.append(Stream(len(self.streams), lambda *_: None, Clock(0.0)))
        return self.streams[-1]


def test_one_message_is_converted_for_all_before_any_reader_goes_on(text: TextProcessor) -> None:
    """Two readers wait: what comes for both in one turn of the loop is converted for both first. Planted: a reader that is busy
    elsewhere converts only when it comes back, and then all at once."""

    async def main(*, busy: bool) -> tuple[list[object], list[list[int]]]:
        seen = []
        streams, readers = readers_of(text, seen, count=2)

        async def read(number: int) -> list[int]:
            if busy:
                await asyncio.sleep(0.01)
            found = await readers[number].next()
            seen.append(f"reader {number} goes on")
            return [token for delta in found for token in delta.tokens]

        tasks = [asyncio.create_task(read(number)) for number in range(2)]
        await asyncio.sleep(0)
        for tokens in ([300], [301]) if busy else ([300],):
            for stream in streams:
                stream.push(Output(id=stream.id, tokens=tokens))
        return seen, await asyncio.gather(*tasks)

    assert asyncio.run(main(busy=False)) == ([0, 1, "reader 0 goes on", "reader 1 goes on"], [[300], [300]])
    assert asyncio.run(main(busy=True)) == ([0, "reader 0 goes on", 1, "reader 1 goes on"], [[300, 301], [300, 301]])


def test_what_is_put_wakes_no_reader(text: TextProcessor) -> None:
    """A reader with `put` is woken by what that leaves, by its error and by the end alone; nothing is lost, none comes twice, and a
    reader that has gone gets nothing more. Planted: a `put` that leaves everything wakes it for each."""

    async def main(put: Callable[[list[Delta]], list[Delta] | None], outputs: Sequence[Output], *, gone: bool = False) -> list[int]:
        (stream,), (reader,) = readers_of(text, [], put=put)
        woken = []

        async def read() -> None:
            while not reader.has_ended:
                woken.extend(token for delta in await reader.next() for token in delta.tokens)

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        for output in outputs:
            stream.push(output)
            stream.push(Output(id=0, tokens=[400]))  # piles up until the first is put
            if gone:
                task.cancel()
            await asyncio.sleep(0.001)
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 5)
        if not task.cancelled() and (error := task.exception()):
            raise error
        return woken

    put_tokens = []

    def put(deltas: list[Delta]) -> list[Delta] | None:
        put_tokens.extend(token for delta in deltas for token in delta.tokens)
        return deltas if any(delta.finish for delta in deltas) else None

    def failing(_: list[Delta]) -> None:
        raise OSError("planted")

    more, last = Output(id=0, tokens=[300]), Output(id=0, tokens=[301], finish=FinishReason.length)
    assert asyncio.run(main(put, [more, last])) == [301]
    assert put_tokens == [300, 400, 301]
    put_tokens.clear()
    assert asyncio.run(main(put, [more], gone=True)) == put_tokens == []
    with pytest.raises(OSError, match="planted"):
        asyncio.run(main(failing, [more]))
    assert asyncio.run(main(lambda deltas: deltas, [more, last])) == [300, 400, 301]


@pytest.mark.parametrize("stops", [(), ("never",)])
def test_what_has_piled_up_comes_in_pieces(text: TextProcessor, stops: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slow reader's answer no delta has more than 4096 logprobs, alternatives counted, and none is lost; the end is the last
    one's. Planted: without the bound one delta has them all."""
    count, alternatives = 2000, 20
    tokens, top = [300 + at % 50 for at in range(count)], [(300 + at, -float(at)) for at in range(alternatives)]

    async def taken() -> list[Delta]:
        engine = UnfedEngine()
        generation = Generation(engine, text, job_of(SamplingParams(max_tokens=count), stops=stops), 0)
        engine.streams[0].push(Output(id=0, tokens=tokens[:-1], logprobs=[Logprobs(-float(at), top) for at in range(count - 1)]))
        engine.streams[0].push(Output(id=0, tokens=tokens[-1:], logprobs=[Logprobs(-1.0, top)], finish=FinishReason.length))
        return list(generation.take())

    found = asyncio.run(taken())
    assert max(len(delta.logprobs) * (1 + alternatives) for delta in found) <= 4096
    assert [token for delta in found for token in delta.tokens] == tokens
    assert [entry.chosen for delta in found for entry in delta.logprobs][:-1] == [-float(at) for at in range(count - 1)]
    assert content_of(found) == text.decode(tokens)
    assert [delta.finish for delta in found] == [None] * (len(found) - 1) + ["length"]
    monkeypatch.setattr("engine.front.generation._MOST_LOGPROBS", 1 << 40)
    assert len(asyncio.run(taken())) == 1 < len(found)


def test_an_error_comes_behind_what_was_there_before_it(text: TextProcessor) -> None:
    """The second of two choices fails in the step in which the first has a token: the token is given, then the error is raised."""

    async def main() -> list[int]:
        streams, (reader,) = readers_of(text, [], choices=2)
        streams[0].push(Output(id=0, tokens=[300]))
        streams[1].fail(GenerationFailed("planted"))
        found = [token for delta in await reader.next() for token in delta.tokens]
        assert not reader.has_ended
        for _ in range(2):
            with pytest.raises(GenerationFailed, match="planted"):
                await reader.next()
        return found

    assert asyncio.run(main()) == [300]


@pytest.mark.parametrize(
    ("error", "reason"), [(SlowReader("behind"), AbortReason.slow_reader), (GenerationFailed("NaN"), AbortReason.sibling_failed)]
)
def test_siblings_are_aborted_with_the_true_reason(text: TextProcessor, error: Exception, reason: AbortReason) -> None:
    """One choice's failure ends the others: as failures of its siblings, but where the reader was too slow it was so for all."""

    async def main() -> list[AbortReason]:
        engine = FakeEngineClient(step_s=5)
        made = job_of(SamplingParams(max_tokens=9), 3)
        generations = [Generation(engine, text, made, choice) for choice in range(3)]
        reader = DeltaReader(generations, list)
        engine._open[2][0].fail(error)
        with pytest.raises(type(error)):
            await reader.next()
        reasons = [why for _, why in engine.aborted]
        generations[1].stream.abort(AbortReason.client_gone)
        await asyncio.sleep(0)
        return reasons

    assert asyncio.run(main()) == [reason] * 2


# ---- chat: thoughts, calls, and stop strings beside them

TOOLS = Tools([{"type": "function", "function": {"name": "get_weather"}}])
THOUGHT = "<|channel>thought\nObservation: none\n<channel|>"
CALL = '<|tool_call>call:get_weather{city:<|"|>Observation: Paris<|"|>}<tool_call|>'


def chat(text: TextProcessor, reply: str, **job: Any) -> tuple[Choice, list[Delta]]:
    """The choice and its deltas of a reply in a conversation with a tool."""
    choice, tokens = Choice(), text.encode(reply, add_bos=False)
    found = [delta for _, delta in deltas_of(text, tokens, markers=Markers.of(text), tools=TOOLS, **job)]
    for delta in found:
        choice.add(delta)
    return choice, found


def seen(choice: Choice) -> tuple[str, str, list[tuple[str, str]], str | None]:
    return choice.reasoning, choice.content, [(call.name, call.text) for call in choice.calls], choice.finish


PARIS = ("get_weather", '{"city":"Observation: Paris"}')


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (f"{THOUGHT}Hi<turn|>", ("Observation: none", "Hi", [], "stop")),
        (f"{CALL}<|tool_response>", ("", "", [PARIS], "tool_calls")),
        (f"{CALL}{CALL}", ("", "", [PARIS] * 2, "tool_calls")),
        (f"{THOUGHT}Hi{CALL}<|tool_response>", ("Observation: none", "Hi", [PARIS], "tool_calls")),
    ],
)
def test_a_chat_reply_has_parts(text: TextProcessor, reply: str, expected: tuple[Any, ...]) -> None:
    """Thought, content and calls are apart, and an end after calls is `tool_calls`."""
    choice, found = chat(text, reply)
    assert seen(choice) == expected
    assert [delta.finish for delta in found[:-1]] == [None] * (len(found) - 1)


def test_a_cut_call_is_not_completed(text: TextProcessor) -> None:
    """At every limit of tokens: the arguments so far, and `length`, also where a whole call came before the cut."""
    size = len(text.encode(CALL, add_bos=False))
    for most in range(1, 2 * size):
        choice, _ = chat(text, CALL + CALL, most=most)
        assert choice.finish == "length"
        assert all(PARIS[1].startswith(call.text) for call in choice.calls)
        assert len(choice.calls[-1].text) < len(PARIS[1]) if most < size - 1 and choice.calls else True


def test_without_chat_it_is_text(text: TextProcessor) -> None:
    """A raw completion is not taken apart."""
    tokens = text.encode(THOUGHT + "Hi", add_bos=False)
    assert content_of(delta for _, delta in deltas_of(text, tokens)) == "thought\nObservation: none\nHi"


def test_stop_strings_match_the_content_alone(text: TextProcessor) -> None:
    """An agent's "Observation:" ends neither its thought nor a call's arguments; in the content it ends the answer."""
    stops = ("Observation:",)
    expected = ("Observation: none", "Hi ", [("get_weather", '{"city":"Observation: Paris"}')], "tool_calls")
    assert seen(chat(text, f"{THOUGHT}Hi {CALL}<|tool_response>", stops=stops)[0]) == expected
    assert seen(chat(text, f"{THOUGHT}Hi Observation: there", stops=stops)[0]) == ("Observation: none", "Hi ", [], "stop")
    assert seen(chat(text, f"Hi Obser{THOUGHT}vation: there", stops=stops)[0])[1] == "Hi Observation: there"


def test_tokens_behind_a_stop_string_do_not_count(text: TextProcessor) -> None:
    """With a stop string the tokens of the deltas are those up to it, whatever part they are of."""
    reply = f"{THOUGHT}Hi Observation: there"
    whole, cut = chat(text, reply)[0], chat(text, reply, stops=("Hi",))[0]
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert len(text.encode(THOUGHT, add_bos=False)) < len(cut.tokens) < len(whole.tokens)
