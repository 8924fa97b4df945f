"""The load generator: its figures against the engine's, and its ledger against requests that go wrong."""

import asyncio
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest

from engine.events import RequestStarted
from tests.bench import load
from tests.support.edge.http_edge import Edge
from tests.support.load import request
from tests.support.load.generator import Ledger, Lengths, Level, Prompts
from tests.support.load.request import End, Endpoint, RequestResult

pytestmark = [pytest.mark.pure, pytest.mark.alone]

SLACK_S = 0.25  # what a busy machine may add between the server's clock and the client's


def loaded(url: str, level: Level, prompt: int, output: int, ids: int | None) -> Ledger:
    """The ledger of one level against `url`."""
    prompts_of = partial(Prompts, Lengths(prompt, prompt), Lengths(output, output), ids=ids)
    (ledger,) = asyncio.run(load.loaded(Endpoint(url, load.first_model(url)), [level], prompts_of))
    return ledger


EVENTS: list[dict[str, Any]] = [
    {"delta": {"role": "assistant", "content": ""}},
    {"delta": {"reasoning_content": "a", "reasoning": "a"}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}},
    {"delta": {"content": "b"}},
    {"delta": {}, "finish_reason": "stop"},
]


def read_at_seconds(events: list[dict[str, Any]]) -> RequestResult:
    """A request sent at 0 s whose events came a second apart."""
    record = RequestResult(0, 4, 0.0)
    for second, choice in enumerate(events):
        request.take({"choices": [choice]}, second, record)
    return record


def test_thoughts_and_calls_are_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token may be of a thought, and a call's pieces have gaps as text has. Planted: text alone counts."""
    record = read_at_seconds(EVENTS)
    assert (record.first, record.gaps, record.last) == (1, [1, 1, 1], 5)
    monkeypatch.setattr(request, "_SAID", ("content",))
    record = read_at_seconds(EVENTS)
    assert (record.first, record.gaps, record.last) == (4, [], 5)


WHOLE = 'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
ENDS: list[tuple[str | int | Exception, End]] = [
    (WHOLE, "finished"),
    (WHOLE.replace("[DONE]", "{}"), "cut"),
    (WHOLE.replace("stop", ""), "cut"),
    (WHOLE.replace("choices", "error"), "failed"),
    (WHOLE.replace("}]}", ""), "failed"),
    (429, "refused"),
    (500, "failed"),
    (httpx.ReadError("dropped"), "cut"),
    (httpx.ConnectError("nobody"), "unreachable"),
    (TimeoutError(), "timeout"),
]


@pytest.mark.parametrize(("reply", "end"), ENDS)
def test_every_end_is_counted_by_its_name(reply: str | int | Exception, end: End) -> None:
    """Whatever comes of a request, its record has that end, and the ledger balances."""
    ledger = Ledger(1)

    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(reply) if isinstance(reply, int) else httpx.Response(200, text=reply)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            ledger.add(record := RequestResult(0, 4, 0.0))
            await request.ask(client, Endpoint("http://here", "m"), record, "Hello")

    asyncio.run(main())
    assert ledger.records[0].end == end
    assert ledger.balance()["conserved"]


@pytest.mark.parametrize(("plant", "named"), [(0, "missing"), (2, "twice")])
def test_a_dropped_response_breaks_the_conservation(
    edge: Edge, plant: int, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the ledger loses what came of request 3, or adds it twice. The report names it, and the command ends with 1."""
    add, command = Ledger.add, ["--url", edge.url, "--requests", "6", "--output", "2", "2"]
    edge.core.forever = True

    def faulty(self: Ledger, record: RequestResult) -> None:
        for _ in range(plant if record.number == 3 else 1):
            add(self, record)

    assert load.main(command) == 0
    assert "8 clients" in (said := capsys.readouterr().out)
    assert "'sent': 6, 'finished': 6, 'conserved': True" in said
    monkeypatch.setattr(Ledger, "add", faulty)
    assert load.main(command) == 1
    assert f"'{named}': [3]" in capsys.readouterr().out


@pytest.mark.parametrize("ids", [None, 1000])
def test_against_the_real_edge(edge: Edge, ids: int | None) -> None:
    """The real HTTP edge: what the client counts as finished and generated is what the engine's events say, of chats and of
    completions of token ids."""
    edge.core.forever = True
    edge.core.steps = [[300], [301]]
    ledger = loaded(edge.url, Level(4, requests=12), prompt=60, output=9, ids=ids)
    ends = edge.ends[2:]
    assert len(ledger.finished) == len(ends) == 12
    assert sum(record.output_tokens for record in ledger.records) == sum(event.output_tokens for event in ends) == 12 * 9
    prompts = [event.prompt_tokens for event in edge.events if isinstance(event, RequestStarted)][2:]
    assert sum(record.prompt_tokens for record in ledger.records) == sum(prompts)
    assert ids is None or set(prompts) == {60}
    truth = np.percentile([event.ttft_s for event in ends], 50)
    assert truth <= np.percentile([record.ttft for record in ledger.finished if record.ttft], 50) < truth + 4 * SLACK_S
