"""What logs and spans cost: CPU a request and a token, each on and off. `python -m tests.bench.logs`.

The real ASGI app with an engine that has its tokens ready, each as a chunk of its own; the log goes through Ray Serve's own JSON
handler to a file, spans to a collector in another process. CPU time of the whole process (the thread of the spans too, not the
collector), the best of several rounds; of the figures that are differences, the two sides take turns.
"""

import asyncio
import logging
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from deploy.edge.edge_settings import LogSettings, TracingSettings
from deploy.edge.observe import logs
from deploy.edge.observe.spans import Tracer, tracer
from deploy.edge.routes import create_app
from deploy.edge.service import Service
from deploy.edge.service_settings import ServiceSettings
from deploy.models.resolve import resolve
from engine.front.grammar_check import GrammarCheck, vocabulary_of
from engine.front.text import TextProcessor
from tests.support.edge.collector import Collector
from tests.support.edge.ready_engine import ReadyEngine, request

ROUNDS = 7
REQUESTS = 100
SHORT, LONG = 1, 401  # tokens of an answer


def figure(app: ASGIApp, tokens: int, requests: int, made: Tracer | None) -> float:
    """CPU microseconds a request of this process, spans delivered."""

    async def all_of_them() -> None:
        for _ in range(requests):
            chunks = await request(app, tokens)
            assert chunks >= tokens, (chunks, tokens)

    began = time.process_time_ns()
    asyncio.run(all_of_them())
    if made is not None:
        made.close(10)
    return (time.process_time_ns() - began) / requests / 1e3


@contextmanager
def collecting() -> Iterator[str]:
    """A collector in a process of its own; its endpoint."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_collect, args=(theirs,))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join(10)


def _collect(pipe: Any) -> None:
    with Collector() as collector:
        pipe.send(collector.endpoint)
        pipe.recv()


def measured(endpoint: str, service: Service) -> dict[str, float]:
    """The best of each setup at both lengths, in turns: `logs spans tokens` -> CPU microseconds a request."""
    best: dict[str, float] = {}
    setups = [(log, span, tokens) for log in (False, True) for span in (False, True) for tokens in (SHORT, LONG)]
    for _ in range(ROUNDS):
        random.shuffle(setups)
        for log, span, tokens in setups:
            service.settings = replace(service.settings, logs=LogSettings(format="json", access=log))
            made = tracer(TracingSettings(endpoint=endpoint), {}) if span else None
            service.tracer = made
            took = figure(create_app(service), tokens, REQUESTS, made)
            name = f"{log:d}{span:d}{tokens}"
            best[name] = min(best.get(name, took), took)
    return best


def main() -> None:
    """Print the figures."""
    text = TextProcessor.load(resolve("nano:31b"))
    service = Service(ServiceSettings("nano", 1024, 4096), text, ReadyEngine(), GrammarCheck(lambda: vocabulary_of(text)))
    with tempfile.TemporaryDirectory() as folder, collecting() as endpoint:
        config = LoggingConfig(encoding="JSON", logs_dir=folder)
        configure_component_logger(component_name="a", component_id="b", logging_config=config, max_bytes=1 << 28, backup_count=1)
        serve = logging.getLogger("ray.serve")
        serve.handlers = serve.handlers[-1:]
        logs.install(LogSettings())
        best = measured(endpoint, service)
    off, tokens = best[f"00{SHORT}"], LONG - SHORT
    print(f"a request of one token, both off    {off:8.1f} us")
    for name, setup in (("logs", "10"), ("spans", "01"), ("both", "11")):
        print(f"{name:6} on: a request more          {best[f'{setup}{SHORT}'] - off:8.1f} us")
    for name, setup in (("both off", "00"), ("both on", "11")):
        print(f"a token of a stream, {name:15}{(best[f'{setup}{LONG}'] - best[f'{setup}{SHORT}']) / tokens:8.2f} us")


if __name__ == "__main__":
    main()
