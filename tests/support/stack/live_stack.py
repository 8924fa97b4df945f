"""The whole stack under a known load, and a real Prometheus that finds it by itself: what the live proof and the pictures stand on.

    quartet serve (two replicas) <-- steady load, then load under which one replica is killed; the client keeps its own ledger
         `-- discovery --http_sd--> Prometheus: groups, discovery, Ray's own exporter

`python -m tests.support.stack.live_stack FOLDER` plays a longer run and draws the boards into FOLDER: that is `make pictures`.
"""

import argparse
import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.load.generator import Ledger, Lengths, Level, LoadRun, Prompts, Scale, calibrate, connected
from tests.support.load.request import Endpoint, RequestResult
from tests.support.monitoring.pictures import draw_all
from tests.support.monitoring.prometheus import Api, Prometheus, jobs, wait_scraped
from tests.support.monitoring.tables import JOB, RULES
from tests.support.stack.serve_process import Stack, listeners, wait

MODEL = "nano-31b"
REPLICAS, SLOTS, CLIENTS = 2, 4, 10  # more clients than slots: there is a queue
PROMPT, OUTPUT = Lengths(30, 150), Lengths(20, 60)
TTFT_S, TPOT_S = 0.5, 0.05
# As it runs: every group is one rank, and Serve's own autoscaling stands still, so that Ray has all of its figures.
ARGS = {
    "adapters": {},  # the check of one at boot counts as requests
    "tp": 1,
    "max_seqs": SLOTS,
    "metrics": {"ttft_objective_s": TTFT_S, "tpot_objective_s": TPOT_S, "discovery": {"port": 0}},
}
_AVERAGES = {"metrics_interval_s": 1, "look_back_period_s": 5}  # or Serve's counts are 20 s old
REPLICA_OPTIONS = {"autoscaling_config": {"min_replicas": REPLICAS, "max_replicas": REPLICAS, **_AVERAGES}}
KILL_AFTER_S = 6.0
BACK_S = 40.0
LEAD_S = 2.0  # the steady load's rates look back to so long before it, so that its first requests are an increase


class BackgroundLoad:
    """A closed load in a thread of its own: CLIENTS requests are open at any time, for so many seconds, or until `stop`."""

    def __init__(self, url: str, scale: Scale, seconds: float | None, seed: int) -> None:
        self._target = Endpoint(url, MODEL, timeout_s=60)
        self._level = Level(concurrency=CLIENTS, seconds=seconds)
        self._prompts = Prompts(PROMPT, OUTPUT, scale, seed)
        self._load: LoadRun | None = None
        self.began = time.time()
        self._clock = self.began - time.perf_counter()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    async def _run(self) -> None:
        async with connected(self._target) as client:
            self._load = LoadRun(client, self._target, self._prompts)
            await self._load.run(self._level)

    @property
    def so_far(self) -> int:
        """Requests sent until now."""
        return self._load.ledger.sent if self._load else 0

    def stop(self) -> None:
        """Send nothing more."""
        assert self._load is not None
        self._load.over = True

    def join(self) -> "Phase":
        """Wait for the answers."""
        self._thread.join(120)
        assert self._load is not None
        assert not self._thread.is_alive(), "the load does not end"
        return Phase(self._load.ledger, self.began, time.time(), self._clock)


@dataclass(frozen=True)
class Phase:
    """A load that is over: unix times, and `clock`, which turns the ledger's times into unix ones."""

    ledger: Ledger
    began: float
    ended: float
    clock: float

    @property
    def finished(self) -> list[RequestResult]:
        """Requests that got their whole answer."""
        return self.ledger.finished

    def around(self, begin: float, end: float) -> int:
        """Requests of which the beginning or the end lies between two unix times."""
        return sum(begin <= when + self.clock <= end for record in self.ledger.records for when in (record.sent, record.done))


def measure(url: str, seed: int) -> Scale:
    """Two first requests, which also tell what a word costs."""

    async def ask() -> Scale:
        target = Endpoint(url, MODEL, timeout_s=60)
        async with connected(target) as client:
            return await calibrate(client, target, seed)

    return asyncio.run(ask())


CALIBRATION = 2


@dataclass(frozen=True)
class KilledReplica:
    """What was seen of a replica that was killed under load; unix times, and seconds since the kill.

    stale      its series no longer answer
    unlisted   it is no target any more
    retired    its last counts are among the retired ones
    sums       (seconds since the kill, requests received by all that live or have lived, requests sent so far by the client)
    before     requests received, as the last answer before the kill had it
    """

    replica: str
    killed: float
    stale: float
    unlisted: float
    retired: float
    before: float
    sums: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True)
class LiveRun:
    """All of it. `steady`: a load that nothing disturbs; `failover`: one under which a replica is killed and has a successor."""

    api: Api
    replicas: tuple[str, ...]
    steady: Phase
    failover: Phase
    death: KilledReplica
    settled: float
    doubled: Api | None = None
    dropped: Api | None = None
    renamed: Api | None = None


def fault_twice(scrapes: Sequence[dict[str, Any]], listed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Planted: one group is scraped as two."""
    again = {"job_name": f"{JOB}-again", "static_configs": [listed]}
    return [*scrapes, again]


def fault_dropped(scrapes: Sequence[dict[str, Any]], listed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Planted: one group is left out of the list."""
    rule = {"source_labels": ["replica"], "regex": listed["labels"]["replica"], "action": "drop"}
    return [{**scrape, "relabel_configs": [rule]} if scrape["job_name"] == JOB else scrape for scrape in scrapes]


RENAMED = "quartet_generation_tokens_total"


def fault_renamed(scrapes: Sequence[dict[str, Any]], listed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Planted: one metric has another name."""
    rule = {"source_labels": ["__name__"], "regex": RENAMED, "target_label": "__name__", "replacement": "quartet_generated_total"}
    return [{**scrape, "metric_relabel_configs": [rule]} for scrape in scrapes]


@contextmanager
def live_run(folder: Path, steady_s: float, failover_s: float | None, seed: int, *, faults: bool = False) -> Iterator[LiveRun]:
    """Boot, load, kill one replica, load on; all is over when it is yielded, but Prometheus still answers. failover_s None: until
    the killed one's successor has answered requests."""
    with ExitStack() as stack:
        served = Stack(folder, args=ARGS, deployment=REPLICA_OPTIONS)
        stack.callback(served.clean_up)
        print(f"\nready after {served.start():.1f} s")
        wait(lambda: "discovery" in httpx.get(f"{served.url}/health/ready").json(), 20, served.said)
        listing = httpx.get(f"{served.url}/health/ready").json()["discovery"]
        wait(lambda: len(httpx.get(listing).json()) == REPLICAS, 20, served.said)
        groups = httpx.get(listing).json()
        scrapes = list(jobs(listing))
        prometheus = stack.enter_context(Prometheus(scrapes, RULES))
        wrong = [fault(scrapes, groups[0]) for fault in (fault_twice, fault_dropped, fault_renamed)] if faults else []
        apis = [stack.enter_context(Prometheus(each, RULES)).api for each in wrong]
        wait_scraped(prometheus.api, REPLICAS + 3)
        scale = measure(served.url, seed)
        steady = _steady(served, scale, steady_s, seed)
        failover, death = _failover(served, prometheus.api, scale, failover_s, seed + 1, CALIBRATION + steady.ledger.sent)
        time.sleep(3)  # two scrapes of what has ended, and an evaluation of the rules
        settled = time.time()
        served.end()
        names = tuple(group["labels"]["replica"] for group in groups)
        yield LiveRun(prometheus.api, names, steady, failover, death, settled, *apis)


def _steady(served: Stack, scale: Scale, seconds: float, seed: int) -> Phase:
    time.sleep(LEAD_S + 1.5)  # what came before it has been scraped
    phase = BackgroundLoad(served.url, scale, seconds, seed).join()
    time.sleep(2.5)  # two more scrapes
    return phase


RECEIVED = "sum(quartet_deployment_requests_received_total)"
ANSWERING = 'sum by (replica) (quartet_requests_total{outcome="length"}) > 0'


def _failover(
    served: Stack, api: Api, scale: Scale, seconds: float | None, seed: int, earlier: int
) -> tuple[Phase, KilledReplica]:
    """A load of `seconds`; soon after its begin a replica is killed. It goes on until the successor has answered requests, too."""
    load = BackgroundLoad(served.url, scale, seconds, seed)
    time.sleep(KILL_AFTER_S)
    before = api.ask(RECEIVED)[0].last
    pid = served.find("ServeReplica")[0]
    replica = _replica_of(api, pid)
    os.kill(pid, signal.SIGKILL)
    death = _watch(api, load, earlier, replica, before, time.time())
    if seconds is None:
        wait(lambda: len(api.ask(ANSWERING)) == REPLICAS, 40, served.said)
        load.stop()
    return load.join(), death


def _replica_of(api: Api, pid: int) -> str:
    """Which of the targets the process `pid` is: it listens there."""
    ports = {port for _, port, _ in listeners([pid])}
    targets = [target["labels"] for target in api.targets() if int(target["labels"]["instance"].rpartition(":")[2]) in ports]
    assert len(targets) == 1, (pid, ports, targets)
    return str(targets[0]["replica"])


def _watch(api: Api, load: BackgroundLoad, earlier: int, replica: str, before: float, killed: float) -> KilledReplica:
    """Ask every quarter of a second until there are two living groups and one that is retired."""
    over = {
        "stale": lambda: not api.ask(f'{{replica="{replica}",job="{JOB}",__name__=~"quartet_.*"}}'),
        "unlisted": lambda: not api.ask(f'up{{replica="{replica}"}}'),
        "retired": lambda: api.ask("sum(quartet_retired_requests_received_total)")[0].last > 0,
    }
    seen = {}
    sums = []
    while (since := time.time() - killed) < BACK_S:
        sums.append((since, api.ask(RECEIVED)[0].last, earlier + load.so_far))
        seen |= {what: since for what, happened in over.items() if what not in seen and happened()}
        if len(seen) == len(over) and len(api.ask("quartet_engine_up")) == REPLICAS:
            return KilledReplica(replica, killed, **seen, before=before, sums=tuple(sums))
        time.sleep(0.25)
    raise AssertionError(f"after {BACK_S} s there is only {seen}")


def main() -> None:
    """The command: a longer run, drawn."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.stack.live_stack", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two loads")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, live_run(Path(folder), args.seconds, args.seconds, seed=8) as seen:
        for path in draw_all(seen.api, seen.settled - seen.steady.began, args.folder, "10s", seen.settled):
            print(path)


if __name__ == "__main__":
    main()
