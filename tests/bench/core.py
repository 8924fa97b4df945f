"""What a step costs the core: `python -m tests.bench.core [--record MACHINE]`.

31B geometry at TP=4, every sequence decoding at 1.1k to 1.5k tokens, page appends and releases included. Each stage is timed by its
thread's CPU time and shown as a mean over steps: schedule; encode the plan and write it to the ring; read a result from the
ring and decode it; commit; gather and encode the TokenBatch. Shown is the least of several blocks of steps: a busy neighbour on
the same core only ever adds.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.channel import RingReader, RingWriter, create_shared, map_shared, ring_bytes
from engine.core.loop import collect_rarely
from engine.core.scheduler import Scheduler
from engine.geometry import kv_groups, parse_config
from engine.plan import ResultRow, StepPlan, StepResult, decode_result, encode_plan
from engine.protocol import SamplingParams, TokenBatch, encode_message
from tests.bench.record import Row, add_record_option, append
from tests.nano.model_shapes import PUBLIC, config
from tests.support.engine.plans import encode_result, result_of
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of

BLOCKS = 10
STAGES = ("schedule", "submit", "result", "commit", "batch")


@dataclass
class Stopwatch:
    """CPU nanoseconds of this thread by stage."""

    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.thread_time_ns()
        yield
        self.spent[name] += time.thread_time_ns() - began


class Rings:
    """Both rings in this process; what the ranks do on their side is not timed."""

    def __init__(self) -> None:
        plans, results = (map_shared(create_shared(name, ring_bytes(1))) for name in ("plans", "results"))
        self.plans, self._plan_reader = RingWriter(plans, 1), RingReader(plans, 1, 0)
        self.results, self._result_writer = RingReader(results, 1, 0), RingWriter(results, 1)
        self._numbers: dict[int, int] = {}

    def result(self) -> StepResult:
        """What the ranks have answered."""
        record = self.results.poll()
        assert record is not None
        return decode_result(record[1])

    def run(self, plan: StepPlan) -> None:
        """Answer a plan as rank 0 would: one token a row, never a stop id."""
        assert self._plan_reader.poll() is not None
        self._numbers |= {admission.slot: admission.number for admission in plan.admissions}
        rows = [ResultRow(slot, self._numbers[slot], (1000,)) for slot in plan.result_slots]
        self._result_writer.write(plan.step, encode_result(result_of(plan.step, rows)))


def scheduler(sequences: int, tokens: int) -> Scheduler:
    """A scheduler with room for so many tokens of each, cut as 31B at TP=4 is."""
    groups = kv_groups(parse_config(config(PUBLIC["31b"], "bfloat16")), 4)
    pages = (sequences * 40 + 400, sequences * (tokens // groups[1].page + 2) + 200)
    return scheduler_of(SchedulerConfig(groups, pages, sequences + 1, 2048, 4096, prefix_cache=True))


def step(core: Scheduler, rings: Rings, watch: Stopwatch) -> int:
    """One plan out, one result in; rows that gave a token."""
    with watch.stage("schedule"):
        plan = core.schedule()
    assert plan is not None
    with watch.stage("submit"):
        rings.plans.write(plan.step, encode_plan(plan))
    rings.run(plan)
    if core.in_flight < 2:
        return 0
    with watch.stage("result"):
        result = rings.result()
    with watch.stage("commit"):
        core.commit(result)
    with watch.stage("batch"):
        outputs = core.requests.drain()
        encode_message(TokenBatch(outputs=outputs, load=core.load()))
    return len(outputs)


def measure(sequences: int, steps: int) -> dict[str, float]:
    """Mean microseconds of each stage and of all, over the best block of `steps` steps in which every sequence decodes."""
    warm = 100 + sequences // 2  # steps before, at most
    core, rings, watch = scheduler(sequences, 1100 + warm + BLOCKS * steps), Rings(), Stopwatch()
    for number in range(sequences):
        prompt = [5 + (number + at) % 1000 for at in range(1100)]
        core.requests.add(request_of(number, prompt, SamplingParams(max_tokens=900, stop_ids=(1, 106))))
    while step(core, rings, watch) < sequences:
        pass
    blocks = []
    for _ in range(BLOCKS):
        watch = Stopwatch()
        for _ in range(steps):
            assert step(core, rings, watch) == sequences
        blocks.append({name: spent / steps / 1e3 for name, spent in watch.spent.items()})
    least = min(blocks, key=lambda block: sum(block.values()))
    return least | {"core": sum(least.values())}


def main() -> None:
    """A line a size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 100, 256])
    parser.add_argument("--steps", type=int, default=64)
    add_record_option(parser)
    args = parser.parse_args()
    collect_rarely()
    found: list[Row] = []
    for sequences in args.sequences:
        figures = measure(sequences, args.steps)
        print(sequences, {name: round(value, 1) for name, value in figures.items()}, flush=True)
        found.append((f"core-b{sequences}", "core, CPU time a step, decoding, 31B", figures["core"], "us"))
    append(found, args.record, "tests.bench.core")


if __name__ == "__main__":
    main()
