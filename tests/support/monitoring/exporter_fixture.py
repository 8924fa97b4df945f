"""Exporters for tests: their labels, one request as events, an exporter that has received given events, and its text."""

from typing import Any

from prometheus_client import generate_latest

from dashboards.exporter import Exporter, Facts
from engine.events import Event, FirstToken, RequestFinished, RequestStarted, Scheduled, Tokens
from engine.protocol import PoolLoad
from tests.support.engine.load_figures import pool

MODEL = "google/gemma-4-31B-it"
FACTS = Facts(
    model_name=MODEL,
    build="1",
    attention="reference",
    weights="fp8",
    tp=4,
    slots=0,
    page_tokens=0,
    step_bound_s=0.0,
    ttft_objective_s=1.0,
    tpot_objective_s=0.05,
)


# One request from its submission to its stop: 11 tokens in, 4 out at 2 ms each.
ANSWERED: list[Event] = [
    RequestStarted(1, 11),
    Scheduled(1, 0.004),
    FirstToken(1, 0.012, 0.004),
    Tokens(1, []),
    Tokens(3, [0.002]),
    RequestFinished(1, "stop", 4, 0.012, 0.002, 0.02, 0.004),
]


def pools(sliding: int, full: int) -> list[PoolLoad]:
    """Used pages of a group's two pools."""
    return [pool("sliding", sliding, 70), pool("full", full, 90)]


def exporter_after(*events: Event, **facts: Any) -> Exporter:
    """An exporter that has received `events`; its group is FACTS but for `facts`."""
    exporter = Exporter(FACTS._replace(**facts))
    for event in events:
        exporter(event)
    return exporter


def scraped(exporter: Exporter) -> str:
    """What a scrape gets."""
    return generate_latest(exporter).decode()
