"""How long a decode step takes, by batch and context: on the device alone, and through the runner."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from engine.plan import StepPlan, encode_plan, single_rows
from engine.rank.graphs import StageGraphs
from engine.step_shapes import StepSizes
from tests.bench.profiling.bare_rank import READ_RATE, BareRank

WARM_STEPS = 8
_SERIES = 3  # of replays, of which the fastest counts


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step.

    launch_ms  plans through the runner, two out at a time: what the host allows
    graph_ms   replays back to back: what the device takes; None where nothing is captured
    floor_ms   the bytes of the step at the read rate
    """

    batch: int
    context: int
    launch_ms: float
    graph_ms: float | None
    floor_ms: float


def time_step(rank: BareRank, batch: int, context: int, steps: int, step: int) -> StepTime:
    """The mean over `steps` steps of `batch` sequences of `context` tokens: the plan numbered `step` admits them, the first
    WARM_STEPS are not timed."""
    first = encode_plan(rank.admission(batch, context, steps, step))
    rest = [encode_plan(StepPlan(step + at, rows=single_rows(range(batch)))) for at in range(1, steps + 1)]
    rank.run([first, *rest[:WARM_STEPS]])
    plans = rest[WARM_STEPS:]
    with lengths_kept(rank):
        _, seconds = rank.run(plans)
    graphs = rank.runner.graphs
    graph_ms = None
    if graphs is not None:
        forward = "adapted forward" if rank.adapters else "forward"
        graph_ms = replay_ms(rank, partial(replay, graphs, rank.runner.shapes.sequences_of(batch), forward=forward), steps)
    floor_ms = 1e3 * rank.step_bytes(batch, context) / READ_RATE
    return StepTime(batch, context, 1e3 * seconds / len(plans), graph_ms, floor_ms)


def replay_ms(rank: BareRank, step: Callable[[], object], steps: int) -> float:
    """Milliseconds of a `step` that replays graphs of the last plan, of `steps` back to back; lengths are as before behind it."""
    times = []
    for _ in range(_SERIES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with lengths_kept(rank):
            start.record()
            for _ in range(steps):
                step()
            end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / steps)
    return min(times)


def replay(graphs: StageGraphs, rows: int, width: int = 1, forward: str = "forward") -> None:
    """A decode step without its drafts."""
    sizes = StepSizes.decoding(rows, width)
    graphs.replay(forward, sizes)
    graphs.replay("argmax", sizes)


@contextmanager
def lengths_kept(rank: BareRank) -> Iterator[None]:
    """Sequences that advance inside the `with` are set back behind it: they stay on the pages that are held for them."""
    lengths = rank.runner.slots.lengths
    before = lengths.clone()
    yield
    lengths.copy_(before)
