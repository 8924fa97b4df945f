"""The load generator: its times against a server with known delays, and its ledger against requests that go wrong."""

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.bench import load
from tests.support.edge.http_edge import Edge
from tests.support.edge.timed_endpoint import Fault, TimedEndpoint
from tests.support.load import request
from tests.support.load.generator import Ledger, Lengths, Level, Prompts
from tests.support.load.request import Endpoint, RequestResult

pytestmark = [pytest.mark.pure, pytest.mark.alone]

SLACK_S = 0.25  # what a busy machine may add between the server's clock and the client's


def loaded(
    url: str, level: Level, prompt: int = 40, output: int = 1, timeout_s: float = 60, ids: int | None = None
) -> Ledger:
    """The ledger of one level against `url`."""
    target = Endpoint(url, load.first_model(url), timeout_s)
    prompts_of = partial(Prompts, Lengths(prompt, prompt), Lengths(output, output), ids=ids)
    (ledger,) = asyncio.run(load.loaded(target, [level], prompts_of))
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


def test_times_are_the_servers() -> None:
    """Delays of 0.3 to 1.2 s and gaps of 0.1 s come back as TTFT, TPOT and E2E percentiles, in the best of three tries; a longer
    delay is a longer time."""
    assert any(off() < SLACK_S for _ in range(3))
    with TimedEndpoint(lambda number: 0.7) as slow:
        assert min(load.times_ms(loaded(slow.url, Level(2, requests=2)))["time to first token"]) > 650


def off() -> float:
    """By how many seconds the client's percentiles differ from the server's own."""
    with TimedEndpoint(lambda number: 0.3 * (1 + number % 4), gap_s=0.1) as server:
        ledger = loaded(server.url, Level(8, requests=8), output=4)
        firsts = [seen.written[0] - seen.came for seen in server.requests]
        tpots = [(seen.written[-1] - seen.written[0]) / 3 for seen in server.requests]
        whole = [seen.written[-1] - seen.came for seen in server.requests]
        starts = [" ".join(seen.body["messages"][0]["content"].split()[:4]) for seen in server.requests]
    times = load.times_ms(ledger)
    assert len(times["between events"]) == 8 * 3
    assert {record.prompt_tokens for record in ledger.records} == {40}
    assert len(set(starts)) == 8, "no two prompts begin alike"
    truths = {"time to first token": firsts, "time per output token": tpots, "whole request": whole}
    return max(
        float(np.abs(np.percentile(times[name], load.SHARES) / 1000 - np.percentile(truth, load.SHARES)).max())
        for name, truth in truths.items()
    )


ENDS: dict[Fault, str] = {
    "drop": "cut", "no_done": "cut", "no_finish": "cut", "busy": "refused", "bug": "failed", "error_event": "failed",
    "garbage": "failed", "hang": "timeout",
}  # fmt: skip


def test_every_fault_is_counted_by_its_name() -> None:
    """Each of eight faults is the one request that did not finish, under its own name, and nothing is lost."""
    faults = dict(enumerate(ENDS))
    with TimedEndpoint(faults=faults) as server:
        ledger = loaded(server.url, Level(1, requests=len(ENDS) + 2), output=3, timeout_s=3)
    assert [record.end for record in ledger.records] == [*ENDS.values(), "finished", "finished"]
    assert ledger.balance()["conserved"]


@pytest.mark.parametrize(("plant", "named"), [(0, "missing"), (2, "twice")])
def test_a_dropped_response_breaks_the_conservation(
    plant: int, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the ledger loses what came of request 3, or adds it twice. The report names it, and the command ends with 1."""
    add = Ledger.add

    def faulty(self: Ledger, record: RequestResult) -> None:
        for _ in range(plant if record.number == 3 else 1):
            add(self, record)

    with TimedEndpoint() as server:
        assert load.main(["--url", server.url, "--requests", "6", "--output", "2", "2"]) == 0
        assert "8 clients" in (said := capsys.readouterr().out)
        assert "'sent': 6, 'finished': 6, 'conserved': True" in said
        monkeypatch.setattr(Ledger, "add", faulty)
        assert load.main(["--url", server.url, "--requests", "6", "--output", "2", "2"]) == 1
    assert f"'{named}': [3]" in capsys.readouterr().out


def test_a_closed_load_keeps_to_its_number_and_its_time() -> None:
    """Three clients are three open requests; after `seconds` none is sent, and what is open still ends."""
    with TimedEndpoint(lambda number: 0.02) as server:
        assert len(loaded(server.url, Level(3, requests=12)).finished) == 12
        assert server.most_open == 3
    with TimedEndpoint(lambda number: 0.2) as server:
        ledger = loaded(server.url, Level(2, seconds=0.5))
    assert 2 <= ledger.sent == len(ledger.finished) <= 6


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
    assert sum(record.prompt_tokens for record in ledger.records) == sum(event.prompt_tokens for event in ends)
    assert ids is None or {event.prompt_tokens for event in ends} == {60}
    truth = np.percentile([event.ttft_s for event in ends], 50)
    assert truth <= np.percentile([record.ttft for record in ledger.finished if record.ttft], 50) < truth + 4 * SLACK_S
