"""Where the time of a decode step goes: torch's profile of it, by the module that starts each kernel.

    eager     the step once, each module's forward in a `record_function`: the module of each kernel (on a CPU: operator)
    captured  the same kernels in the same order, where steps are captured: their times, medians of a few

A stage is what layers of one kind do in one module. Its time goes from the end of the kernel before to the end of its own, so that
stages add up to the step; its floor is what it must read at the read rate. Activations are not counted: at decode they stay in L2.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from engine.geometry import Layer
from engine.rank.models.architecture import Model
from engine.rank.step import StepSizes
from tests.bench.profiling.bare_rank import BareRank
from tests.bench.profiling.decode_times import admit, lengths_kept, replay, replay_ms
from tests.support.launches import without_overlap

REPEATS = 5
_REPLAYS = 64  # for the step's time without a profiler


class Span(NamedTuple):
    """A kernel, an operator or a module's forward, in microseconds."""

    start: float
    end: float
    name: str


@dataclass(frozen=True)
class Stage:
    """name: kind of layer and module;  count: of such modules;  kernels: the first one's;  bytes: what all must read."""

    name: str
    count: int
    kernels: tuple[str, ...]
    us: float
    bytes: int
    floor_us: float


@dataclass(frozen=True)
class StepProfile:
    """step_ms: of a captured step without a profiler; else as profiled."""

    batch: int
    context: int
    read_rate: float
    step_ms: float
    stages: tuple[Stage, ...]


def profile_step(
    rank: BareRank, batch: int, context: int, steps: int, step: int, read_rate: float, trace: Path | None = None
) -> StepProfile:
    """Of `batch` sequences of `context` tokens, whose plans are numbered from `step` on; `steps` as in `time_step`.

    trace: a file beside which torch's own trace of the timed steps is written, with batch and context in its name
    """
    admit(rank, batch, context, steps, step)
    rows, graphs = rank.runner._inputs.bucket(batch), rank.runner.graphs
    with lengths_kept(rank), without_overlap(), recorded(rank.model) as names:
        seen = _profiled(partial(rank.runner.repeat, StepSizes.decoding(rows)), 1)
    spans, scopes = spans_of(seen, names)
    modules = modules_of(spans, scopes)
    step_ms = 1e-3 * (max(span.end for span in spans) - spans[0].start)
    if graphs is not None:
        with lengths_kept(rank):
            seen = _profiled(replayed := partial(replay, graphs, rows), REPEATS)
        spans = medians(spans_of(seen, set())[0], REPEATS)
        step_ms = replay_ms(rank, replayed, min(_REPLAYS, steps))
    if len(spans) != len(modules):
        raise RuntimeError(f"the profiler saw {len(spans)} kernels in a step that starts {len(modules)}")
    if trace is not None and rank.parallel.rank == 0:
        seen.export_chrome_trace(str(trace.with_stem(f"{trace.stem}-b{batch}-c{context}")))
    stages = _stages(rank, modules, spans, _read(rank, set(modules), batch, context), read_rate)
    return StepProfile(batch, context, read_rate, step_ms, tuple(stages))


@contextmanager
def recorded(model: Model) -> Iterator[set[str]]:
    """Inside the `with`, each module's forward is a `record_function` of its name, which the set holds, the head one of "head"."""
    names = {name for name, _ in model.named_modules() if name}
    running: list[record_function] = []

    def enter(name: str) -> None:
        running.append(record_function(name))
        running[-1].__enter__()

    def leave(*_: object) -> None:
        running.pop().__exit__(None, None, None)

    handles = []
    for name in names:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    table = model.head
    logits = table.logits

    def head(hidden: Tensor) -> Tensor:
        with record_function("head"):
            return logits(hidden)

    table.logits = head  # type: ignore[method-assign]
    try:
        yield names | {"head"}
    finally:
        del table.logits
        for handle in handles:
            handle.remove()


def _profiled(run: Callable[[], object], repeats: int) -> profile:
    """A few runs, behind one that is not seen."""
    run()
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu, acc_events=True) as seen:
        for _ in range(repeats):
            run()
            if on_gpu:
                torch.cuda.synchronize()
    return seen


def spans_of(seen: profile, scopes: set[str]) -> tuple[list[Span], list[Span]]:
    """(kernels, scopes) as the GPU ran them, in order; where it ran none, operators that no other one called, and scopes."""
    events = [event for event in seen.events() if event.device_type.name == "CUDA"]
    if not events:
        events = [event for event in seen.events() if event.cpu_parent is None or event.cpu_parent.name in scopes]
    spans = sorted(Span(event.time_range.start, event.time_range.end, event.name) for event in events)
    return [span for span in spans if span.name not in scopes], [span for span in spans if span.name in scopes]


def modules_of(spans: Sequence[Span], scopes: Sequence[Span]) -> list[str]:
    """The innermost scope of each span; outside of all of them "inputs", behind the head "sampling"."""
    head = max((scope.end for scope in scopes if scope.name == "head"), default=0.0)
    modules = []
    for span in spans:
        inside = [scope for scope in scopes if scope.start <= span.start < scope.end]
        outside = "sampling" if span.start >= head else "inputs"
        modules.append(min(inside, key=lambda scope: scope.end - scope.start).name if inside else outside)
    return modules


def medians(spans: Sequence[Span], repeats: int) -> list[Span]:
    """The spans of `repeats` equal runs, in order -> those of one, from its first one's start. RuntimeError where they differ."""
    count, rest = divmod(len(spans), repeats)
    runs = [spans[at * count : (at + 1) * count] for at in range(repeats)]
    if rest or any([span.name for span in run] != [span.name for span in runs[0]] for run in runs):
        raise RuntimeError(f"the profiler saw {len(spans)} kernels in {repeats} runs of one step: some are missing")
    return [
        Span(
            statistics.median(span.start - run[0].start for span, run in zip(same, runs, strict=True)),
            statistics.median(span.end - run[0].start for span, run in zip(same, runs, strict=True)),
            same[0].name,
        )
        for same in zip(*runs, strict=True)
    ]


def _read(rank: BareRank, ran: set[str], batch: int, context: int) -> Counter[str]:
    """Bytes that each module of those that `ran` reads, with those of its submodules that did not."""
    read: Counter[str] = Counter()
    for name, size in rank.module_bytes(batch, context):
        module = name
        while module and module not in ran:
            module = module.rpartition(".")[0]
        read[module] += size
    return read


def _stages(
    rank: BareRank, modules: Sequence[str], spans: Sequence[Span], read: Counter[str], read_rate: float
) -> Iterator[Stage]:
    ends = [spans[0].start, *accumulate((span.end for span in spans), max)]
    names = [_stage_name(module, rank.geometry.layers) for module in modules]
    for name in dict.fromkeys(names):
        own = [at for at, other in enumerate(names) if other == name]
        members = {modules[at] for at in own}
        kernels = tuple(spans[at].name for at in own if modules[at] == modules[own[0]])
        size = sum(read[module] for module in members)
        yield Stage(name, len(members), kernels, sum(ends[at + 1] - ends[at] for at in own), size, 1e6 * size / read_rate)


def _stage_name(module: str, layers: Sequence[Layer]) -> str:
    """blocks.3.attention.qkv -> full attention.qkv."""
    blocks, _, rest = module.partition(".")
    index, _, part = rest.partition(".")
    return f"{layers[int(index)].kind} {part or 'block'}" if blocks == "blocks" else module
