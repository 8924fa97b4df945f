"""What company costs on a real rank, in its CPU time: `python -m tests.bench.fairness_cpu [--record MACHINE]`.

As the last part of `tests.bench.fairness`, without processes and without the wall clock: one rank in this process runs every plan
of the real scheduler, and the clock moves by what a step takes of this thread's CPU time. What is seen is the policy, the step
times that the rank measured at boot, and little of what else the machine does.

    TTFT p99 of short prompts that come at random, and TPOT of streams that run all the time: quiet, and while two long prompts are
    always on their way; the target of a step is 1.5 times the quiet TPOT without one
    estimate    a mixed step's time as the policy expects it, in parts of what it took: the mean, and the 90th percentile
"""

import argparse
import random
import time
from dataclasses import dataclass, field
from statistics import mean, quantiles

from engine.config import EngineConfig, engine_config
from engine.core.loop import scheduler_config
from engine.core.scheduler import Scheduler
from engine.core.step_budget import StepEstimate
from engine.lifeline import StepTimes
from engine.plan import StepPlan, StepResult, decode_result, encode_plan
from engine.rank import step_times
from engine.rank.builder import Rank, build
from engine.rank.runner import Runner
from engine.rank.step_times import measure
from tests.bench.record import Row, append
from tests.nano.random_models import model_folder
from tests.support.engine.paced_steps import Pace, p99
from tests.support.engine.ranks import single

PAGES = (4000, 4000)


@dataclass
class TimedRank:
    """Runs plans on a rank; steps of prompt tokens beside decode rows: how they were, and what they took."""

    runner: Runner
    mixed: list[tuple[StepPlan, int, float]] = field(default_factory=list)  # plan, context of its decode rows, milliseconds

    def run(self, plan: StepPlan) -> tuple[StepResult, float]:
        """A plan's result, and the milliseconds of CPU time that its step took."""
        context = int(self.runner.slots.lengths[plan.decodes.tolist()].sum()) if plan.rows else 0
        began = time.thread_time()
        result = self.runner.launch(encode_plan(plan)).end()
        spent = 1e3 * (time.thread_time() - began)
        if plan.rows and plan.chunks:
            self.mixed.append((plan, context, spent))
        return decode_result(result), spent


@dataclass(frozen=True)
class Latencies:
    """Milliseconds of CPU time: the 99th percentile of first tokens, and the mean of streams' tokens; prompt tokens a second."""

    ttft_p99: float
    tpot: float
    prefill_rate: float
    shorts: int


def latencies(config: EngineConfig, rank: TimedRank, times: StepTimes | None, args: argparse.Namespace, *, longs: int) -> Latencies:
    """Streams and short prompts, with so many long ones beside them."""
    rng, until = random.Random(7), 1000 * args.seconds
    pace = Pace(Scheduler(scheduler_config(config, PAGES, times)), rank.run)
    streams: list[int] = []
    beside: list[int] = []
    shorts, at = [], 0.0
    while (at := at + rng.expovariate(1 / (1000 * args.every))) < until:
        shorts.append(pace.arrive(at, args.short, 4))

    def refill(pace: Pace) -> None:
        while sum(pace.clocks[each].tokens < 256 for each in streams) < args.streams:
            streams.append(pace.arrive(pace.now, 32, 256))
        while sum(pace.clocks[each].tokens < 2 for each in beside) < longs:
            beside.append(pace.arrive(pace.now, args.long, 2))

    pace.run(until, refill)
    waited = [(pace.clocks[each].first or pace.now) - pace.clocks[each].came for each in shorts]
    steps = sum(max(0, pace.clocks[each].tokens - 1) for each in streams)
    tpot = sum(pace.clocks[each].last - pace.clocks[each].first for each in streams) / steps
    return Latencies(p99(waited), tpot, 1e3 * pace.prefilled / pace.now, len(shorts))


def estimates(times: StepTimes, rank: TimedRank) -> tuple[float, float]:
    """(mean, 90th percentile) of expected by measured time of the mixed steps so far."""
    found = []
    for plan, context, spent in rank.mixed:
        expected = StepEstimate(times, len(plan.decodes), context)
        for _, start, end, *_ in plan.chunks:
            expected.add(end - start, start)
        found.append(expected.ms / spent)
    return mean(found), quantiles(found, n=10)[8]


def runner_of(rank: Rank) -> TimedRank:
    """A runner with empty pages."""
    return TimedRank(build(rank, PAGES))


def measured(rank: Rank) -> StepTimes:
    """The rank's step times, in its CPU time."""
    step_times.monotonic = time.thread_time  # type: ignore[attr-defined]
    return measure(build(rank, PAGES), rank.config, rank.geometry.vocab)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="random:31b")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--short", type=int, default=100, help="tokens of a short prompt")
    parser.add_argument("--long", type=int, default=1800, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between short prompts, on average")
    parser.add_argument("--seconds", type=float, default=20.0, help="of CPU time, of each load")
    parser.add_argument("--record", metavar="MACHINE", help="append to results.csv under this machine's name")
    args = parser.parse_args()
    plain = engine_config(model=str(model_folder(args.model)), device="cpu", dtype="float32", max_len=2048, prefill_budget=256)
    rank = single(plain)
    times = measured(rank)
    print(times)
    quiet = latencies(plain, runner_of(rank), None, args, longs=0)
    crowded = latencies(plain, runner_of(rank), None, args, longs=2)
    print(f"no target, quiet  {quiet}\nno target, busy   {crowded}", flush=True)
    target = 1.5 * quiet.tpot
    kept = engine_config(**{name: getattr(plain, name) for name in plain.__struct_fields__} | {"tpot_target_ms": target})
    calm, timed = latencies(kept, runner_of(rank), times, args, longs=0), runner_of(rank)
    busy = latencies(kept, timed, times, args, longs=2)
    expected = estimates(times, timed)
    print(f"target {target:.2f} ms, quiet {calm}\ntarget, busy {busy}")
    print(f"TTFT p99 {busy.ttft_p99 / calm.ttft_p99:.2f} x quiet, TPOT {busy.tpot / quiet.tpot:.2f} x quiet without a target")
    print(f"expected by measured time of {len(timed.mixed)} mixed steps: mean {expected[0]:.2f}, 90th percentile {expected[1]:.2f}")
    rows: list[Row] = []
    for name, found in (("quiet", quiet), ("busy", crowded), ("quiet-target", calm), ("busy-target", busy)):
        case = f"{args.model.split(':')[-1]}-cpu-time-{name}"
        rows += [(case, "TTFT p99 of short prompts", found.ttft_p99, "ms"), (case, "TPOT", found.tpot, "ms")]
    if args.record:
        append(rows, args.record, "tests.bench.fairness_cpu")


if __name__ == "__main__":
    main()
