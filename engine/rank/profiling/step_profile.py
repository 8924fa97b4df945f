"""Measures a decode step node by node: captured, eagerly on a GPU where it cannot be captured, or on a CPU by the wall clock."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity

from engine.rank.profiling.bare_rank import BareRank
from engine.rank.profiling.decode_times import admit, lengths_kept, replay, replay_ms
from engine.rank.profiling.scopes import Stretch, align, trace, wall_times
from engine.rank.profiling.step_nodes import StepNode, StepProfile, nodes_of
from kernels.launch import without_overlap

REPEATS = 5
_REPLAYS = 64  # for the step's time without a profiler


@dataclass(frozen=True)
class KernelSpan:
    """A kernel that a GPU ran, in microseconds from the step's first one."""

    name: str
    start: float
    end: float


def profile_step(rank: BareRank, batch: int, context: int, steps: int, step: int, read_rate: float) -> StepProfile:
    """Of `batch` sequences of `context` tokens, whose plans are numbered from `step` on; `steps` as in `time_step`."""
    plans = iter(admit(rank, batch, context, steps, step))
    if next(rank.model.parameters()).is_cuda:
        nodes, step_ms = _on_gpu(rank, batch, context, steps)
    else:
        nodes, step_ms = _on_cpu(rank, batch, context, plans)
    overlapped = rank.runner.graphs is not None
    return StepProfile(batch, context, read_rate, step_ms, overlapped, rank.geometry.layers, tuple(nodes))


def _on_cpu(rank: BareRank, batch: int, context: int, plans: Iterator[bytes]) -> tuple[list[StepNode], float]:
    """The fastest of a few runs of each stretch."""

    def step() -> None:
        rank.run([next(plans)])

    stretches = trace(rank.model, step)
    runs = [wall_times(rank.model, step, time.perf_counter) for _ in range(REPEATS)]
    ends = list(accumulate(1e6 * min(each) for each in zip(*runs, strict=True)))
    nodes = nodes_of(rank, stretches, batch, context)
    starts = [0.0, *ends]
    timed = [replace(node, start_us=starts[at], end_us=ends[at], alone_us=ends[at] - starts[at]) for at, node in nodes.items()]
    return [replace(node, us=node.alone_us) for node in timed], 1e-3 * ends[-1]


def _on_gpu(rank: BareRank, batch: int, context: int, steps: int) -> tuple[list[StepNode], float]:
    """Times of graphs, with overlap and without; of eager steps without overlap where there are no graphs."""
    rows, runner = rank.runner.bucket(batch), rank.runner
    with lengths_kept(rank):
        stretches = trace(rank.model, lambda: runner.repeat(rows))
    nodes = nodes_of(rank, stretches, batch, context)
    if runner.graphs is None:
        with without_overlap(), lengths_kept(rank):
            timed = _timed(nodes, stretches, lambda: runner.repeat(rows))
        return [replace(node, us=node.alone_us) for node in timed], 1e-3 * sum(node.alone_us for node in timed)
    with without_overlap(), lengths_kept(rank):
        apart = runner.graphs_of([rows])
    graphs = runner.graphs
    with lengths_kept(rank):
        alone = _timed(nodes, stretches, lambda: replay(apart, rows))
    with lengths_kept(rank):
        timed = _timed(nodes, stretches, lambda: replay(graphs, rows))
    return _with_shares(timed, alone), replay_ms(rank, graphs, batch, min(_REPLAYS, steps))


def _with_shares(nodes: Sequence[StepNode], alone: Sequence[StepNode]) -> list[StepNode]:
    """The nodes with what each adds to the step, and with the times of those `alone`."""
    ends = accumulate((node.end_us for node in nodes), max, initial=0.0)
    return [
        replace(node, us=max(0.0, node.end_us - before), alone_us=other.alone_us)
        for node, before, other in zip(nodes, ends, alone, strict=False)
    ]


def _timed(nodes: dict[int, StepNode], stretches: Sequence[Stretch], step: Callable[[], object]) -> list[StepNode]:
    """The nodes with the times of their kernels."""
    owners = [at for at, stretch in enumerate(stretches) for _ in stretch.operations]
    operations = [name for stretch in stretches for name in stretch.operations]
    kernels = _kernels(step)
    spans: dict[int, list[KernelSpan]] = {at: [] for at in nodes}
    for kernel, place in zip(kernels, align(operations, [kernel.name for kernel in kernels]), strict=True):
        spans[owners[place]].append(kernel)
    timed: list[StepNode] = []
    for at, node in nodes.items():
        behind = timed[-1].end_us if timed else 0.0  # an operator may run no kernel
        start = min((kernel.start for kernel in spans[at]), default=behind)
        end = max((kernel.end for kernel in spans[at]), default=behind)
        timed.append(replace(node, start_us=start, end_us=end, alone_us=sum(kernel.end - kernel.start for kernel in spans[at])))
    return timed


def _kernels(step: Callable[[], object]) -> list[KernelSpan]:
    """The kernels of `step`, in order, with the medians of a few runs."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as seen:
        for _ in range(REPEATS):
            step()
            torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type.name == "CUDA"]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    return medians([KernelSpan(name, start, end) for start, end, name in spans], REPEATS)


def medians(kernels: Sequence[KernelSpan], repeats: int) -> list[KernelSpan]:
    """The kernels of `repeats` equal runs, in order -> those of one, from its first one's start. RuntimeError where they differ."""
    count, rest = divmod(len(kernels), repeats)
    runs = [kernels[at * count : (at + 1) * count] for at in range(repeats)]
    if rest or any([kernel.name for kernel in run] != [kernel.name for kernel in runs[0]] for run in runs):
        raise RuntimeError(f"the profiler saw {len(kernels)} kernels in {repeats} runs of one step: some are missing")
    return [
        KernelSpan(
            each[0].name,
            statistics.median(kernel.start - run[0].start for kernel, run in zip(each, runs, strict=True)),
            statistics.median(kernel.end - run[0].start for kernel, run in zip(each, runs, strict=True)),
        )
        for each in zip(*runs, strict=True)
    ]
