"""Exporters for tests: their labels, one request as events, and an exporter that has received given events."""

from dataclasses import replace
from typing import Any

from dashboards.exporter import Exporter, Facts
from engine.events import Event, FirstToken, RequestFinished, RequestStarted, Scheduled, Tokens
from engine.protocol import PoolLoad
from tests.support.engine.load_figures import pool

MODEL = "google/gemma-4-31B-it"
FACTS = Facts(MODEL, "1", "reference", tp=4)


# One request from its submission to its stop: 11 tokens in, 4 out at 2 ms each.
ANSWERED: list[Event] = [
    RequestStarted(1, 11),
    Scheduled(1, 0.004),
    FirstToken(1, 11, 0.012, 0.004),
    Tokens(1, []),
    Tokens(3, [0.002]),
    RequestFinished(1, "stop", 11, 4, 0.012, 0.002, 0.02, 0.004),
]


def pools(sliding: int, full: int) -> list[PoolLoad]:
    """Used pages of a group's two pools."""
    return [pool("sliding", sliding, 70), pool("full", full, 90)]


def exporter_after(*events: Event, **facts: Any) -> Exporter:
    """An exporter that has received `events`; its group is FACTS but for `facts`."""
    exporter = Exporter(replace(FACTS, **facts))
    for event in events:
        exporter(event)
    return exporter
