"""Random replies in every API: a stream adds up to the whole answer, however tokens are batched, cut or failing where it may."""

import json
import math
import random
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from deploy.edge.answers.blocks import event
from deploy.edge.answers.response_format import ResponseFormat, ServedModel, Usage
from deploy.edge.anthropic.message_format import MessageFormat
from deploy.edge.native.generate_api import GenerateFormat, GenerateTextRequest
from deploy.edge.openai import forms
from deploy.edge.openai.forms import ChatFormat, TextFormat
from deploy.edge.openai.response_request import RESPONSES_READER
from deploy.edge.openai.response_stream import ResponseObject
from deploy.edge.openai.schemas import CHAT_READER, COMPLETION_READER
from engine.errors import GenerationFailed
from engine.front.generation import Delta, Generation, Job, ReplyBlock
from engine.front.parts import Arguments, ToolCallStart
from engine.front.reply import Markers
from engine.front.stream import Clock, Stream
from engine.front.text import Detokenizer, TextProcessor
from engine.front.tools import NO_TOOLS
from engine.pieces import Pieces
from engine.protocol import FinishReason, Logprobs, Output, SamplingParams
from tests.conftest import Nano
from tests.support.edge.summed import sse, sum_chat, sum_message, sum_response, text_of
from tests.support.engine.replies import NAMES, TOOLS, reply

pytestmark = pytest.mark.pure

CASES = 400
Events = list[dict[str, Any]]
USAGE = Usage(prompt=7, completion=9, cached=3, reasoning=2)
CHAT = CHAT_READER.read(b'{"messages":[],"stream":true,"stream_options":{"include_usage":true}}')
COMPLETION = COMPLETION_READER.read(b'{"prompt":"x","stream":true,"stream_options":{"include_usage":true}}')
RESPONSE = RESPONSES_READER.read(b'{"model":"m","input":"x","include":["reasoning.encrypted_content"]}')


class OneStream:
    """An engine with one request, whose outputs the test pushes."""

    dead: str | None = None
    open = 1

    def __init__(self) -> None:
        self.stream = Stream(1, lambda request, reason: None, Clock(0.0))

    def generate(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Stream:
        return self.stream


class Case:
    """A random reply: its tokens, and how it ends."""

    def __init__(self, text: TextProcessor, seed: int, *, is_chat: bool) -> None:
        rng = random.Random(seed)
        said = "".join(NAMES[each] if isinstance(each, int) else each for each in reply(rng).segments)
        tokens = text.encode(said, add_bos=False)
        self.text, self.is_cut, self.fails_at = text, rng.random() < 0.3, rng.randrange(4)
        self.tokens = tokens[: rng.randint(1, len(tokens) or 1)] if self.is_cut else [*tokens, rng.choice(text.eos_ids)]
        stops = rng.choice(((), (), ("Well",), ("}", "e")))
        self.job = Job(
            (array("i", [2]),),
            (SamplingParams(max_tokens=10_000, stop_ids=text.eos_ids),),
            clip=False,
            stops=stops,
            markers=Markers.of(text) if is_chat else None,
            tools=TOOLS if is_chat and rng.random() < 0.9 else NO_TOOLS,
            one_call=rng.random() < 0.2,
        )

    def deltas(self, rng: random.Random) -> list[Delta]:
        """As they come when its tokens are batched like this."""
        engine = OneStream()
        generation, found, place = Generation(engine, self.text, self.job, 0), list[Delta](), 0
        end = FinishReason.length if self.is_cut else FinishReason.stop
        while not generation.has_ended:
            size = rng.choice((1, 1, 2, 5, 1000))
            batch, place = self.tokens[place : place + size], place + size
            engine.stream.push(Output(id=1, tokens=batch, finish=end if place >= len(self.tokens) else None))
            found += generation.take()
        return found


def streamed(form: ResponseFormat, deltas: list[Delta]) -> list[dict[str, Any]]:
    return sse(form.begin(USAGE) + b"".join(form.events(0, delta) for delta in deltas) + form.end(USAGE))


def whole(form: ResponseFormat, deltas: list[Delta]) -> dict[str, Any]:
    for delta in deltas:
        form.add(0, delta)
    return json.loads(form.full(USAGE))


def anonymous(value: Any) -> Any:
    """Without ids and times, which differ from answer to answer."""
    if isinstance(value, dict):
        return {key: anonymous(each) for key, each in value.items() if key not in ("id", "call_id", "created", "created_at")}
    return [anonymous(each) for each in value] if isinstance(value, list) else value


def same_chat(events: Events, answer: dict[str, Any]) -> bool:
    found, choice = sum_chat(events), answer["choices"][0]
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return (
        (found["content"] or (None if calls else "")) == message["content"]
        and found["reasoning"] == found["reasoning_content"] == message.get("reasoning", "")
        and [call[1:] for call in found["calls"]] == calls
        and len({call[0] for call in found["calls"]}) == len(calls)
        and found["finish"] == choice["finish_reason"]
        and events[-1]["usage"] == answer["usage"]
    )


def same_text(events: Events, answer: dict[str, Any]) -> bool:
    choices = [event["choices"][0] for event in events if event["choices"]]
    (whole_choice,) = answer["choices"]
    return "".join(choice["text"] for choice in choices) == whole_choice["text"] and all(
        choices[-1][key] == whole_choice[key] for key in ("finish_reason", "stop_reason")
    )


def same_message(events: Events, answer: dict[str, Any]) -> bool:
    return bool(anonymous(sum_message(events)) == anonymous(answer))


def same_response(events: Events, answer: dict[str, Any]) -> bool:
    said = [text_of(item) for item in answer["output"]]
    return sum_response(events) == said and anonymous(events[-1]["response"]) == anonymous(answer)


def same_growing(events: Events, answer: dict[str, Any]) -> bool:
    return bool(anonymous(events[-1]) == anonymous({key: value for key, value in answer.items() if key != "output_ids"}))


# The format of an API's answers, a request, and whether the events of a stream are a whole answer.
APIS: dict[str, tuple[Callable[[ServedModel, Any], ResponseFormat], Any, Callable[[Events, dict[str, Any]], bool]]] = {
    "chat": (ChatFormat, CHAT, same_chat),
    "completions": (TextFormat, COMPLETION, same_text),
    "messages": (MessageFormat, None, same_message),
    "responses": (ResponseObject, RESPONSE, same_response),
    "generate": (GenerateFormat, GenerateTextRequest(), same_growing),
}
RAW = ("completions", "generate")


@pytest.fixture(scope="module")
def text(nano: Nano) -> TextProcessor:
    return TextProcessor.load(nano("31b"))


def wrong(text: TextProcessor, api: str) -> list[int]:
    """Seeds of replies whose stream is not the whole answer, or breaks a rule of its events."""
    model, found, (form, request, is_same) = ServedModel("m", text.pieces, "fp_0"), [], APIS[api]
    for seed in range(CASES):
        case, rng = Case(text, seed, is_chat=api not in RAW), random.Random(-seed)
        try:
            same = is_same(streamed(form(model, request), case.deltas(rng)), whole(form(model, request), case.deltas(rng)))
        except (AssertionError, LookupError):
            same = False
        if not same:
            found.append(seed)
    return found


@pytest.mark.parametrize("api", APIS)
def test_a_stream_adds_up_to_the_whole_answer(text: TextProcessor, api: str) -> None:
    """Thoughts, text and calls in any order, stop strings, single calls, cuts by max_tokens."""
    assert wrong(text, api) == []


def _first_part_only(form: ChatFormat, index: int, delta: Delta, chunk: Any = ChatFormat._chunk) -> bytes:
    return chunk(form, index, Delta(delta.parts[:1], delta.tokens, delta.logprobs))


def _unsigned(form: MessageFormat, block: ReplyBlock) -> bytes:
    return event("content_block_stop", index=block.index)


def _completed(form: ResponseObject, usage: Usage) -> bytes:
    return form._event("response.completed", response={})


FAULTS: dict[str, tuple[str, type[Any], str, Any]] = {
    "all but the first part lost": ("chat", ChatFormat, "_chunk", _first_part_only),
    "only the last text": ("completions", TextFormat, "_chunk", lambda form, index, delta: b""),
    "thoughts are not signed": ("messages", MessageFormat, "closed", _unsigned),
    "blocks are not closed": ("messages", MessageFormat, "closed", lambda form, block: b""),
    "items are not done": ("responses", ResponseObject, "closed", lambda form, block: b""),
    "all items have one id": ("responses", ResponseObject, "_item_id", lambda form, block: "one"),
    "a cut response is complete": ("responses", ResponseObject, "end", _completed),
    "events without text": ("generate", GenerateFormat, "events", lambda form, index, delta: b'data: {"text":""}\n\n'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_format_is_seen(text: TextProcessor, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """In at least one of ten replies."""
    api, where, name, planted = FAULTS[fault]
    monkeypatch.setattr(where, name, planted)
    assert len(wrong(text, api)) > CASES // 10


@pytest.mark.parametrize("form", [ChatFormat, TextFormat])
def test_a_probability_of_zero_is_a_number(text: TextProcessor, form: type[ChatFormat | TextFormat]) -> None:
    """JSON has no infinity, and clients read floats: -9999 stands for it, in a stream and in a whole answer."""
    model = ServedModel("m", text.pieces, "fp_0")
    delta = Delta((), [300], [Logprobs(-math.inf, [(301, -0.5), (300, -math.inf)])], "stop")
    for answer in (streamed(form(model, COMPLETION), [delta]), whole(form(model, COMPLETION), [delta])):
        assert json.dumps(answer).count("-9999.0") == 2


@pytest.mark.parametrize(("form", "logprobs", "made"), [(ChatFormat, True, 0), (TextFormat, False, 0), (TextFormat, True, 2)])
def test_only_offsets_need_the_tokens_text(
    text: TextProcessor, monkeypatch: pytest.MonkeyPatch, form: type[ChatFormat | TextFormat], logprobs: bool, made: int
) -> None:
    """Completions with logprobs make a detokenizer, one a choice; other answers none."""
    makes = []
    monkeypatch.setattr(forms, "Detokenizer", lambda pieces, **options: makes.append(pieces) or Detokenizer(pieces, **options))
    model = ServedModel("m", text.pieces, "fp_0")
    deltas = [Delta((), [300], [Logprobs(-0.5, [])] if logprobs else [], finish) for finish in (None, None, "stop")]
    streamed(form(model, COMPLETION), deltas)
    whole(form(model, COMPLETION), deltas)
    assert len(makes) == made


@pytest.mark.parametrize("seed", range(20))
def test_a_failure_is_the_last_event(text: TextProcessor, seed: int) -> None:
    """In each API's own shape, with what had come in that of the responses, and no end of another kind."""
    model, case = ServedModel("m", text.pieces, "fp_0"), Case(text, seed, is_chat=True)
    deltas = case.deltas(random.Random(seed))[:-1][: case.fails_at]
    error = GenerationFailed("the logits are not finite")
    chat, message, response = (
        sse(form.begin(USAGE) + b"".join(form.events(0, delta) for delta in deltas) + form.failure(error))
        for form in (make(model, request) for make, request, _ in (APIS["chat"], APIS["messages"], APIS["responses"]))
    )
    assert list(chat[-1]) == ["error"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chat[:-1])
    assert (message[-1]["type"], message[-1]["error"]["type"]) == ("error", "api_error")
    assert not {"message_delta", "message_stop"} & {event["type"] for event in message}
    failed = response[-1]["response"]
    assert (response[-1]["type"], failed["status"], failed["error"]["code"]) == ("response.failed", "failed", "server_error")
    assert sum_response(response) == [text_of(item) for item in failed["output"]]


def test_many_calls_of_one_delta_cost_as_much_each() -> None:
    """Text that waited for a quote marker may hold thousands of calls, which end in one delta, on the event loop."""
    form = ChatFormat(ServedModel("m", Pieces(NAMES, frozenset()), "f"), CHAT)
    parts = [part for index in range(4000) for part in (ToolCallStart(index, "call_" + "a" * 24, "f"), Arguments(index, "{}"))]
    began = time.process_time()
    form.events(0, Delta(parts, [], [], "tool_calls"))
    assert time.process_time() - began < 1
