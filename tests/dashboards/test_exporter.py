"""The exporter: each event moves the metrics that its row promises, and a scrape shows them."""

import re
import socket
import urllib.request
from itertools import pairwise

import pytest

from dashboards.exporter import Exporter
from dashboards.metrics import METRICS, TPOT_BUCKETS, TTFT_BUCKETS
from engine.errors import ConfigError
from engine.events import EngineFailed, EngineLoad, Event, FirstToken, PoolUse, RequestFinished, RequestStarted, Tokens

pytestmark = pytest.mark.pure

ABOUT = {"model": "m", "build": "b", "attention": "reference", "tp": "4"}
EVENTS: list[Event] = [
    RequestStarted(1, 11),
    FirstToken(1, 11, 0.012),
    Tokens(1, 1, None),
    Tokens(1, 3, 0.006),
    RequestFinished(1, "stop", 11, 4, 0.012, 0.002, 0.02),
    RequestFinished(2, "client_gone", 5, 0, None, None, 0.5),
    EngineLoad(9, 2, 3, 40, 1, 100, 50, (PoolUse("sliding", 70, 7), PoolUse("full", 90, 9))),
]
EXPECTED = {
    "quartet_time_to_first_token_seconds_count": 1,
    "quartet_time_to_first_token_seconds_sum": 0.012,
    "quartet_time_per_output_token_seconds_count": 1,
    "quartet_time_per_output_token_seconds_sum": 0.002,
    "quartet_inter_token_seconds_count": 1,
    "quartet_prompt_tokens_total": 11,
    "quartet_generation_tokens_total": 4,
    "quartet_requests_received_total": 1,
    'quartet_requests_total{outcome="stop"}': 1,
    'quartet_requests_total{outcome="client_gone"}': 1,
    'quartet_requests_total{outcome="dead"}': 0,
    "quartet_requests_running": 3,
    "quartet_requests_waiting": 2,
    "quartet_preemptions": 1,
    'quartet_kv_pages{group="full"}': 90,
    'quartet_kv_pages_used{group="sliding"}': 7,
    "quartet_engine_up": 1,
}


def values(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)}


def test_events_become_figures() -> None:
    """Every figure of the table above, and a second round of events moves the counters on."""
    exporter = Exporter(ABOUT)
    for event in EVENTS:
        exporter(event)
    found = values(exporter.text())
    assert {name: found[name] for name in EXPECTED} == pytest.approx(EXPECTED)
    for event in EVENTS:
        exporter(event)
    assert values(exporter.text())["quartet_generation_tokens_total"] == 8


def test_every_row_of_the_table_is_exposed_with_its_help() -> None:
    """And nothing else is."""
    text = Exporter(ABOUT).text()
    exposed = set(re.findall(r"^# HELP (\w+?)(?:_total)? ", text, re.MULTILINE))
    assert {name for name in exposed if not name.endswith("_created")} == {metric.name for metric in METRICS}


def test_buckets_resolve_what_gemma_does() -> None:
    """Between 2 and 40 ms per token no bucket is wider than half its lower end; every histogram ascends."""
    inside = [bound for bound in TPOT_BUCKETS if 0.002 <= bound <= 0.04]
    assert inside[0] == 0.002
    assert inside[-1] == 0.04
    assert all(upper / lower <= 1.5 for lower, upper in pairwise(inside))
    for buckets in (TTFT_BUCKETS, *(metric.buckets for metric in METRICS)):
        assert list(buckets) == sorted(set(buckets))


def test_a_scrape_over_loopback_and_the_engines_end() -> None:
    """The port is ours alone, shows engine_up 0 after the end, and is free again after close."""
    exporter = Exporter(ABOUT)
    exporter(EngineFailed("rank 1 was killed"))
    url = exporter.serve("127.0.0.1", 0)
    with urllib.request.urlopen(url, timeout=5) as reply:
        assert values(reply.read().decode())["quartet_engine_up"] == 0
    port = int(url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(ConfigError, match=f"metrics: cannot listen on 127.0.0.1:{port}"):
        Exporter(ABOUT).serve("127.0.0.1", port)
    exporter.close()
    exporter.close()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
