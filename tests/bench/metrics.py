"""What metrics cost: CPU a token, and a scrape's time and size at 256 running requests. `python -m tests.bench.metrics`.

No engine: a seeded history of events goes through a real exporter. Times are CPU time of the thread, the best of several rounds.
"""

import gzip
import random
import time
from collections.abc import Callable
from itertools import chain
from typing import get_args

from dashboards.exporter import Exporter
from dashboards.metrics import OUTCOMES
from deploy.scaling import Demand
from engine.events import (
    EngineLoad,
    Outcome,
    ProcessFigures,
    RequestFinished,
    ScrapeGauges,
    Tokens,
    to_each,
)
from tests.support.engine import load_figures as figures
from tests.support.engine.load_figures import pool
from tests.support.monitoring.exporter_fixture import begun, exporter_after, scraped

RUNNING = 256
STEPS = 200
ROUNDS = 5


def load(step: int) -> EngineLoad:
    """The core's report of a step with every slot decoding."""
    pools = [pool("sliding", 2000, 5000), pool("full", 8000, 9000)]
    computed = {"prefill_tokens": 1000 * step, "decode_tokens": RUNNING * step}
    return EngineLoad(figures.load(step, pools, waiting=10, running=RUNNING, waiting_tokens=1000, **computed), 0.012)


def busy(*, aliases: bool) -> Exporter:
    """An exporter with a past: every bucket it has was likely filled, every outcome seen."""
    rng = random.Random(1)
    lives = (begun(request, rng.randint(10, 30000), rng.random(), 1 + rng.random()) for request in range(RUNNING))
    exporter = exporter_after(*chain.from_iterable(lives), slots=RUNNING, page_tokens=32, aliases=aliases)
    processes = tuple(ProcessFigures(name, True, 0, 0.011) for name in ("0", "1", "2", "3", "core"))
    exporter.read_gauges = lambda: ScrapeGauges(RUNNING, processes)
    for step in range(STEPS):
        exporter(load(step))
        exporter(Tokens(RUNNING, [rng.lognormvariate(-4, 0.5) for _ in range(RUNNING)]))
    for request in range(RUNNING):
        outcome: Outcome = get_args(Outcome)[request % len(OUTCOMES)]
        exporter(RequestFinished(request, outcome, 100, 200, 1.2, rng.lognormvariate(-4, 0.5), 5.0, 0.5))
    return exporter


def cpu_us(work: Callable[[], object], repeats: int) -> float:
    """CPU microseconds of one call, the best round."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        for _ in range(repeats):
            work()
        best = min(best, (time.thread_time_ns() - began) / repeats / 1e3)
    return best


def main() -> None:
    """Print the figures."""
    sink = to_each(busy(aliases=True), Demand(RUNNING, 1.0))  # as a replica has them
    steps = iter(range(STEPS, 1 << 30))
    print(f"token event, made and folded        {cpu_us(lambda: sink(Tokens(1, [0.011])), 20000):8.2f} us")
    print(f"report event, a step                {cpu_us(lambda: sink(load(next(steps))), 20000):8.2f} us")
    for aliases in (True, False):
        text = scraped(shown := busy(aliases=aliases))
        size, packed = len(text), len(gzip.compress(text.encode()))
        series = sum(not line.startswith("#") for line in text.splitlines())
        took = cpu_us(lambda shown=shown: scraped(shown), 10) / 1e3
        name = f"scrape, aliases {'on' if aliases else 'off'}"
        print(f"{name:36}{took:8.2f} ms, {size} bytes, {packed} packed, {series} series")


if __name__ == "__main__":
    main()
