"""`quartet bench`: its times against a server with known delays, and its ledger against requests that go wrong."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.cli.main import main
from deploy.load import request
from deploy.load.generator import Ledger, Lengths, Level, Prompts, Scale
from deploy.load.request import RequestResult
from deploy.load.summary import summary
from engine.events import RequestFinished
from tests.support.edge.http_edge import Edge, until
from tests.support.edge.timed_endpoint import Fault, TimedEndpoint

pytestmark = [pytest.mark.pure, pytest.mark.alone]

SLACK_S = 0.1  # what a busy machine may add between the server's clock and the client's
Captured = pytest.CaptureFixture[str]


def bench(server: TimedEndpoint, capsys: Captured, *more: str, code: int = 0) -> dict[str, Any]:
    """The one level of a run against `server`, as JSON."""
    assert main(["bench", "--url", server.url, "--json", *more]) == code
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    return level


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
        request._take({"choices": [choice]}, second, record)
    return record


def test_thoughts_and_calls_are_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token may be of a thought, and a call's pieces have gaps as text has. Planted: text alone counts."""
    record = read_at_seconds(EVENTS)
    assert (record.first, record.gaps, record.last) == (1, [1, 1, 1], 5)
    monkeypatch.setattr(request, "_SAID", ("content",))
    record = read_at_seconds(EVENTS)
    assert (record.first, record.gaps, record.last) == (4, [], 5)


def finished(number: int, first: float, gaps: list[float]) -> RequestResult:
    """A request sent at 10 s whose tokens came so."""
    last = 10.0 + first + sum(gaps)
    tokens = len(gaps) + 1
    record = RequestResult(number, tokens, 10.0, "finished", first=10.0 + first, last=last, done=last, gaps=gaps)
    record.prompt_tokens, record.output_tokens = 7, tokens
    return record


def test_percentiles_of_known_times() -> None:
    """A hundred requests whose first tokens take 1 to 100 ms: every figure to a nanosecond; an outlier more shows."""
    records = [finished(number, (number + 1) / 1000, [0.004, 0.006]) for number in range(100)]
    found = summary(Level(concurrency=1), Ledger(100, records, [], 2.0))
    expected = {"mean": 50.5, "p50": 50.5, "p90": 90.1, "p95": 95.05, "p99": 99.01, "min": 1.0, "max": 100.0}
    assert {name: 1000 * found["ttft"][name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert found["tpot"]["p99"] == pytest.approx(0.005, abs=1e-9)
    assert (found["itl"]["count"], found["itl"]["min"], found["itl"]["max"]) == (200, 0.004, 0.006)
    assert found["e2e"]["p50"] == pytest.approx(0.0605, abs=1e-9)
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["prompt_tokens_per_s"]) == (50.0, 150.0, 350.0)
    faulty = summary(Level(concurrency=1), Ledger(101, [*records, finished(100, 5.0, [])], [], 2.0))
    assert abs(faulty["ttft"]["max"] - found["ttft"]["max"]) > 1.0
    assert faulty["tpot"]["count"] == 100, "one token has no time per token"


def test_times_are_the_servers(capsys: Captured) -> None:
    """Delays of 100 to 400 ms and gaps of 40 ms come back as TTFT, ITL, TPOT and E2E percentiles; a delay more is a delay more."""
    with TimedEndpoint(lambda number: 0.1 * (1 + number % 4), gap_s=0.04) as server:
        level = bench(server, capsys, "--concurrency", "8", "--requests", "8", "--output", "4")
        firsts = [seen.written[0] - seen.came for seen in server.requests]
        tpots = [(seen.written[-1] - seen.written[0]) / 3 for seen in server.requests]
        whole = [seen.written[-1] - seen.came for seen in server.requests]
        for name, truth in (("ttft", firsts), ("tpot", tpots), ("e2e", whole)):
            for share in (50, 90, 99):
                assert abs(level[name][f"p{share}"] - np.percentile(truth, share)) < SLACK_S, (name, share)
    assert level["ttft"]["min"] >= 0.1
    assert level["itl"]["count"] == 8 * 3
    assert abs(level["itl"]["p50"] - 0.04) < SLACK_S
    assert level["requests"]["conserved"]
    with TimedEndpoint(lambda number: 0.7) as slow:
        assert bench(slow, capsys, "--requests", "2", "--output", "1")["ttft"]["p50"] - level["ttft"]["p99"] > 0.2


def test_lengths_are_as_asked(capsys: Captured) -> None:
    """The server counts the prompt tokens that were asked for, and no two prompts begin alike; a range stays inside itself."""
    with TimedEndpoint() as server:
        level = bench(server, capsys, "--requests", "6", "--prompt", "40", "--output", "3")
        assert (level["prompt_length"]["min"], level["prompt_length"]["max"], level["output_tokens"]) == (40, 40, 18)
        starts = [" ".join(seen.body["messages"][0]["content"].split()[:4]) for seen in server.requests]
        assert len(set(starts)) == 6
        assert all(seen.body["ignore_eos"] and seen.body["stream_options"] == {"include_usage": True} for seen in server.requests)
    with TimedEndpoint() as server:
        level = bench(server, capsys, "--requests", "30", "--prompt", "20:90", "--output", "1:4", "--eos", "--api", "completions")
        assert 20 <= level["prompt_length"]["min"] < 45
        assert 65 < level["prompt_length"]["max"] <= 90
        assert {seen.body["max_tokens"] for seen in server.requests} == {1, 2, 3, 4}
        assert not any("ignore_eos" in seen.body for seen in server.requests)


ENDS: dict[Fault, str] = {
    "drop": "cut", "no_done": "cut", "no_finish": "cut", "busy": "refused", "bug": "failed", "error_event": "failed",
    "garbage": "failed", "hang": "timeout",
}  # fmt: skip


@pytest.mark.parametrize("fault", list(ENDS))
def test_every_fault_is_counted_by_its_name(fault: Fault, capsys: Captured) -> None:
    """One request in five goes wrong: it is the one that did not finish, nothing is lost, and the exit code says so."""
    with TimedEndpoint(faults={2: fault}) as server:
        options = ("--requests", "5", "--concurrency", "2", "--output", "3", "--timeout", "1")
        level = bench(server, capsys, *options, code=1)
    requests = level["requests"]
    assert {name: requests[name] for name in ("sent", "finished", ENDS[fault])} == {"sent": 5, "finished": 4, ENDS[fault]: 1}
    assert requests["conserved"]
    assert len(level["problems"]) == 1
    assert level["output_tokens"] == 12, "an answer that broke off adds no throughput"


def test_a_share_of_failures_may_be_tolerated(capsys: Captured) -> None:
    """One in five is within 0.2, and not within 0.19."""
    for share, code in (("0.2", 0), ("0.19", 1)):
        with TimedEndpoint(faults={0: "busy"}) as server:
            bench(server, capsys, "--requests", "5", "--output", "1", "--tolerate", share, code=code)


@pytest.mark.parametrize(("plant", "named"), [("lost", "missing [3]"), ("twice", "twice [3]")])
def test_a_dropped_response_breaks_the_conservation(
    plant: str, named: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the ledger loses what came of request 3, or adds it twice. The balance does not hold, and the line names it."""
    add = Ledger.add

    def faulty(self: Ledger, record: RequestResult) -> None:
        for _ in range({"lost": 0, "twice": 2}[plant] if record.number == 3 else 1):
            add(self, record)

    monkeypatch.setattr(Ledger, "add", faulty)
    with TimedEndpoint() as server:
        assert main(["bench", "--url", server.url, "--requests", "6", "--output", "2"]) == 1
    assert f"NOT CONSERVED: sent 6, but {5 if plant == 'lost' else 7} finished" in (said := capsys.readouterr().out)
    assert named in said


@pytest.mark.parametrize(("miscount", "code"), [(0, 0), (1, 1)])
def test_the_servers_counters_are_held_against_ours(miscount: int, code: int, capsys: Captured) -> None:
    """They agree to the request and the token, a refused one aside; planted: an exporter that counts one too many is seen."""
    with TimedEndpoint(faults={1: "busy"}) as server:
        server.miscount = miscount
        metrics = ("--metrics", f"{server.url}/metrics", "--tolerate", "0.2")
        level = bench(server, capsys, "--requests", "8", "--output", "3", "--concurrency", "2", *metrics, code=code)
    assert level["requests"]["conserved"]
    assert level["server"]["conserved"] is (miscount == 0)
    assert level["server"]["client"] == {"received": 7, "generated": 21}
    assert level["server"]["server"] == {"received": 7 + miscount, "generated": 21}


def test_whole_replies_have_no_first_token(capsys: Captured) -> None:
    """--no-stream asks for none, and reports whole requests alone."""
    with TimedEndpoint(lambda number: 0.05) as server:
        level = bench(server, capsys, "--no-stream", "--requests", "3", "--output", "5")
        assert not any(seen.body.get("stream") for seen in server.requests)
    assert (level["ttft"], level["tpot"], level["itl"]) == (None, None, None)
    assert level["e2e"]["min"] >= 0.05
    assert level["output_tokens"] == 15


def test_an_open_load_does_not_wait(capsys: Captured) -> None:
    """Arrivals go on while answers take half a second: many are open at once, where a closed load keeps to its number."""
    with TimedEndpoint(lambda number: 0.5) as server:
        assert bench(server, capsys, "--rate", "100", "--requests", "24", "--output", "1")["requests"]["finished"] == 24
        assert server.most_open > 8
    with TimedEndpoint(lambda number: 0.02) as server:
        bench(server, capsys, "--concurrency", "3", "--requests", "12", "--output", "1")
        assert server.most_open == 3


def test_arrivals_are_poisson() -> None:
    """Gaps have the asked mean and, unlike a metronome's, a deviation as large as it."""
    prompts = Prompts(Lengths(1, 1), Lengths(1, 1), Scale(), seed=3)
    gaps = np.array([prompts.wait(4.0) for _ in range(20_000)])
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)


def test_seconds_bound_the_sending(capsys: Captured) -> None:
    """Sending stops after --seconds; what is open then still ends, and is counted."""
    with TimedEndpoint(lambda number: 0.2) as server:
        level = bench(server, capsys, "--seconds", "0.5", "--concurrency", "2", "--output", "1")
    assert 2 <= level["requests"]["sent"] <= 6
    assert level["requests"]["finished"] == level["requests"]["sent"]


def test_an_interrupt_accounts_for_what_is_open(capsys: Captured) -> None:
    """SIGINT ends a run that would never end: what was open is cancelled, and nothing is missing."""
    with TimedEndpoint(faults=dict.fromkeys(range(4), "hang")) as server:

        def interrupt() -> None:
            until(lambda: len(server.requests) == 4, "four requests", 15.0)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        level = bench(server, capsys, "--concurrency", "4", "--requests", "9", "--output", "3", code=1)
        thread.join()
    requests = level["requests"]
    assert (requests["sent"], requests["cancelled"], requests["conserved"]) == (4, 4, True)


def test_several_levels_and_plain_text(capsys: Captured) -> None:
    """A block a level and one table over all; progress goes to stderr, figures to stdout."""
    with TimedEndpoint() as server:
        assert main(["bench", "--url", server.url, "--concurrency", "1", "2", "--requests", "3", "--output", "2"]) == 0
    said = capsys.readouterr()
    assert said.out.count("sent 3 = 3 finished") == 2
    assert "all levels, times in ms" in said.out
    assert "time to first token" in said.out
    assert said.err.splitlines() == ["quartet: concurrency 1", "quartet: concurrency 2"]


def test_a_picture_is_drawn(tmp_path: Path, capsys: Captured) -> None:
    """--plot writes an image of some size, in the format of its name."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "load.png"
    with TimedEndpoint(lambda number: 0.01 * number) as server:
        ask = ["bench", "--url", server.url, "--concurrency", "1", "4", "--requests", "6", "--output", "3", "--plot", str(picture)]
        assert main(ask) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("plot", "why"), [("no/such/folder/load.png", "is no folder"), ("load.xls", "is none of"), (None, "--plot needs matplotlib")]
)
def test_a_picture_that_cannot_be_is_refused_before_the_load(
    plot: str | None, why: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 2, one line, and not one request sent."""
    if plot is None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    else:
        pytest.importorskip("matplotlib")
    with TimedEndpoint() as server:
        assert main(["bench", "--url", server.url, "--plot", str(tmp_path / (plot or "load.png"))]) == 2
        assert not server.seen
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models does not answer"),
        (["--url", "http://127.0.0.1:9", "--model", "m"], "the first request ended as unreachable"),
        (["--prompt", "9:3"], "--prompt: '9:3' is neither a count nor LOW:HIGH"),
        (["--output", "0"], "--output: '0' is neither"),
        (["--url", "ftp://x"], "is no address"),
    ],
)
def test_nothing_to_load_exits_with_2(options: list[str], why: str, capsys: Captured) -> None:
    """Exit code 2 and one line on stderr."""
    assert main(["bench", *options]) == 2
    said = capsys.readouterr()
    assert why in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_against_the_real_edge(edge: Edge, capsys: Captured) -> None:
    """The real HTTP edge: what the client counts as finished and generated is what the engine's events say."""
    edge.core.forever = True
    edge.core.steps = [[300], [301]]
    load = ["--requests", "12", "--concurrency", "4", "--prompt", "60", "--output", "9"]
    assert main(["bench", "--url", f"{edge.url}/v1", *load, "--json"]) == 0
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    ends = [event for event in edge.events if isinstance(event, RequestFinished)][2:]
    assert level["requests"]["finished"] == len(ends) == 12
    assert level["output_tokens"] == sum(event.output_tokens for event in ends) == 12 * 9
    assert level["prompt_tokens"] == sum(event.prompt_tokens for event in ends)
    assert 0.7 * 60 < level["prompt_length"]["mean"] < 1.3 * 60
    truth = np.percentile([event.ttft_s for event in ends], 50)
    assert truth <= level["ttft"]["p50"] < truth + SLACK_S
