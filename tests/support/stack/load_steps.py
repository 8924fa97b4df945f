"""Steps of load on a real stack that scales from and to zero: what users saw, and how many replicas there were meanwhile.

    phases ----> the load ------> HAProxy ----> 0 .. 2 replicas of nano:e2b at TP=1, deploy/scaling's policy
    watch  <---- the discovery endpoint's list of groups, four times a second

`python -m tests.support.stack.load_steps OUT.png` runs the longer sequence and draws it.
"""

import argparse
import asyncio
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.scaling import POLICY
from tests.support.load.generator import Ledger, Lengths, Level, LoadRun, Prompts, Scale, connected
from tests.support.load.request import Endpoint
from tests.support.stack.serve_process import Stack, free_port, is_free, wait

MODEL = "nano-e2b"
SLOTS = 4
WATCH_S = 0.25
AUTOSCALING: dict[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 2,
    "metrics_interval_s": 1,
    "look_back_period_s": 4,
    "upscale_delay_s": 1,
    "downscale_delay_s": 5,
    "downscale_to_zero_delay_s": 6,
    "policy": {"policy_function": POLICY, "policy_kwargs": {"waiting_tokens": 512}},
}


@dataclass(frozen=True)
class Phase:
    """`clients` that send their next request when their last has ended, for `seconds`; one each where those are 0; or nobody.

    `tokens`: of each answer.
    """

    name: str
    clients: int = 0
    seconds: float = 0.0
    tokens: int = 64

    @property
    def level(self) -> Level | None:
        """As the load generator takes it."""
        if not self.clients:
            return None
        if not self.seconds:
            return Level(concurrency=self.clients, requests=self.clients)
        return Level(concurrency=self.clients, seconds=self.seconds)


@dataclass
class ScalingTrace:
    """What happened: each phase with its beginning and ledger; (moment, replicas) as they were seen. Seconds on perf_counter."""

    phases: list[tuple[Phase, float, Ledger]] = field(default_factory=list)
    seen: list[tuple[float, int]] = field(default_factory=list)

    def replicas(self, since: float, until: float) -> list[int]:
        """As seen between two moments, repetitions left out."""
        counts = [count for at, count in self.seen if since <= at < until]
        return [count for index, count in enumerate(counts) if index == 0 or count != counts[index - 1]]

    def records(self) -> Iterator[Any]:
        """Every request's."""
        for _, _, ledger in self.phases:
            yield from ledger.records


@contextmanager
def autoscaled_stack(folder: Path, **deployment: Any) -> Iterator[tuple[Stack, str]]:
    """A stack with its first replica, and the URL of its list of groups."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/targets"
    metrics = {"discovery": {"port": port}}
    args = {"model": "nano:e2b", "served_model_name": MODEL, "tp": 1, "max_seqs": SLOTS, "max_queue": 64, "metrics": metrics}
    options = {"autoscaling_config": AUTOSCALING, "graceful_shutdown_wait_loop_s": 0.5, **deployment}
    stack = Stack(folder, args=args, deployment=options)
    try:
        stack.start()
        wait(lambda: not is_free(port) and count(url) == 1, 30, stack.said)  # the first replica starts the endpoint
        yield stack, url
    finally:
        stack.end()
        stack.clean_up()


def count(url: str) -> int:
    """Groups that live."""
    with urllib.request.urlopen(url, timeout=2) as reply:
        return len(json.load(reply))


def run(stack: Stack, url: str, phases: list[Phase]) -> ScalingTrace:
    """Each phase after the other; one without clients lasts until there is no replica, `seconds` at most if given."""
    trace = ScalingTrace()

    over = threading.Event()

    def watch() -> None:
        trace.seen.append((time.perf_counter(), count(url)))
        while not over.wait(WATCH_S):
            trace.seen.append((time.perf_counter(), count(url)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number, phase in enumerate(phases):
            began = time.perf_counter()
            ledger = Ledger()
            if phase.level is None:
                wait_for_zero(url, phase.seconds)
            else:
                ledger = asyncio.run(send(stack.url, phase.level, phase.tokens, number))
            trace.phases.append((phase, began, ledger))
    finally:
        over.set()
        watcher.join()
    trace.seen.append((time.perf_counter(), count(url)))
    return trace


def wait_for_zero(url: str, bound_s: float) -> None:
    """Until there is no replica, or `bound_s` has passed."""
    end = time.monotonic() + bound_s
    while count(url) and time.monotonic() < end:
        time.sleep(WATCH_S)


async def send(url: str, level: Level, tokens: int, seed: int) -> Ledger:
    """Requests for answers of so many tokens."""
    target = Endpoint(url, MODEL, timeout_s=300)
    prompts = Prompts(Lengths(16, 48), Lengths(tokens, tokens), Scale(), seed)
    async with connected(target) as client:
        return await LoadRun(client, target, prompts).run(level)


def draw(trace: ScalingTrace, path: Path) -> None:
    """Replicas and each request's TTFT over time."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    zero = trace.seen[0][0]
    figure, (above, below) = plt.subplots(2, 1, figsize=(11, 6), sharex=True, layout="constrained")
    above.step([at - zero for at, _ in trace.seen], [count for _, count in trace.seen], where="post", color="tab:blue")
    above.set(ylabel="replicas", ylim=(-0.1, max(count for _, count in trace.seen) + 0.6), yticks=range(4))
    records = [record for record in trace.records() if record.ttft is not None]
    below.scatter([record.sent - zero for record in records], [record.ttft for record in records], s=9, color="tab:orange")
    below.set(ylabel="TTFT, s", xlabel="s", yscale="log")
    for number, (phase, began, _) in enumerate(trace.phases):
        for axes in (above, below):
            axes.axvline(began - zero, color="gray", linewidth=0.6)
        above.text(began - zero + 0.5, above.get_ylim()[1] - 0.1 - 0.2 * (number % 2), phase.name, fontsize="small", va="top")
    sent, finished = sum(ledger.sent for _, _, ledger in trace.phases), sum(len(ledger.finished) for _, _, ledger in trace.phases)
    figure.suptitle(f"Autoscaling on two CPU cores: {sent} requests sent, {finished} finished")
    figure.savefig(path, dpi=110)
    plt.close(figure)


PHASES = [
    Phase("to zero", 0, 60),
    Phase("one request", 1),
    Phase("8 clients", 8, 30),
    Phase("8 clients, plateau", 8, 30),
    Phase("1 client", 1, 30),
    Phase("nobody", 0, 60),
    Phase("one request", 1),
]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.stack.load_steps", description=__doc__)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, autoscaled_stack(Path(folder)) as (stack, url):
        trace = run(stack, url, PHASES)
    draw(trace, args.picture)
    for phase, began, ledger in trace.phases:
        print(f"{began - trace.seen[0][0]:6.1f} s  {phase.name}: {ledger.balance()}")
    print("replicas", trace.replicas(0, time.perf_counter()))


if __name__ == "__main__":
    main()
