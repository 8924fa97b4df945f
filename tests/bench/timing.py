"""Kernels timed by CUDA graph replay, and compiled ahead, in parallel."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import get_context

import torch
from triton.errors import TritonError

from tests.support.launches import Node, precompile

READ_RATE = 4.56e12    # bytes a second: the best that reading alone reached on an H200
REPLAYS = 5
FAILURES = (RuntimeError, TritonError)


@dataclass(frozen=True)
class _Job:
    """A node that can be sent to another process: its function by name."""

    module: str
    node: Node
    target: tuple[int, int]


def precompile_all(nodes: Iterable[Node], target: tuple[int, int]) -> int:
    """Compiles each node once into Triton's cache, on all cores, in fresh processes: CUDA may be in use. Their number. One that
    does not compile is left to its launch."""
    unique = {node.variant: node for node in nodes}
    jobs = [_Job(node.function.fn.__module__, replace(node, function=None), target) for node in unique.values()]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 1), get_context("spawn")) as pool:
        list(pool.map(_precompile, jobs))
    return len(jobs)


def _precompile(job: _Job) -> None:
    function = getattr(import_module(job.module), job.node.kernel)
    with suppress(*FAILURES):
        precompile(replace(job.node, function=function), job.target)


def launch_us(launches: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Microseconds a launch, of all in one graph: the median of a few replays. On the CPU, of one plain run."""
    if device.type != "cuda":
        began = time.perf_counter()
        for launch in launches:
            launch()
        return 1e6 * (time.perf_counter() - began) / len(launches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return 1e6 * statistics.median(_replay(graph) for _ in range(REPLAYS + 1)) / len(launches)


def microseconds(launch: Callable[[], object], device: torch.device) -> float:
    """Of one launch, in a graph of ten; once before, so that nothing compiles in the graph."""
    launch()
    return launch_us([launch] * 10, device)


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3
