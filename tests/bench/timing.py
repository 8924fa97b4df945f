"""Kernels timed by CUDA graph replay, each launch on other memory than the one before; beside them what the bytes allow.

A case makes its tensors on any device: on meta its launches are listed and compiled ahead, in parallel; on the CPU, under Triton's
interpreter, they prove that the case runs and is right. A GPU times them.
"""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import ceil
from multiprocessing import get_context
from typing import Any

import torch
from triton.errors import TritonError

from tests.support.launches import Node, precompile, record, variants

READ_RATE = 4.56e12    # bytes a second: the best that reading alone reached on an H200
COLD_BYTES = 256 << 20  # launches in turn touch at least so many bytes: several times the L2 cache
REPLAYS = 5
FAILURES = (RuntimeError, TritonError)


@dataclass(frozen=True)
class Made:
    """A case's tensors on a device: `launch(i)` runs it on copy i % `copies`; `error()` compares the last launch's result."""

    launch: Callable[[int], None]
    copies: int
    error: Callable[[], float]


class Case(ABC):
    """One kernel at one shape, number of rows and tile."""

    kernel: str
    name: str
    rows: int
    tile: str

    @property
    @abstractmethod
    def bytes(self) -> int:
        """What one launch must read and write."""

    @property
    @abstractmethod
    def predicted_us(self) -> float:
        """What the case should take, by the model its class states."""

    @abstractmethod
    def make(self, device: torch.device) -> Made:
        """Tensors on `device`."""

    def nodes(self, target: tuple[int, int]) -> list[Node]:
        """The launches of one run on a GPU of compute capability `target`."""
        with record(target) as nodes:
            self.make(torch.device("meta")).launch(0)
        return nodes


@dataclass(frozen=True)
class _Job:
    """A node that can be sent to another process: its function by name."""

    module: str
    node: Node
    target: tuple[int, int]


def precompile_all(nodes: Iterable[Node], target: tuple[int, int], workers: int) -> int:
    """Compiles each node once into Triton's cache, `workers` at a time; their number. Workers are forks: before CUDA is used.
    One that does not compile is left to its launch, whose row says why."""
    unique = {node.variant: node for node in nodes}
    jobs = [_Job(node.function.fn.__module__, replace(node, function=None), target) for node in unique.values()]
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        list(pool.map(_precompile, jobs))
    return len(jobs)


def _precompile(job: _Job) -> None:
    function = getattr(import_module(job.module), job.node.kernel)
    with suppress(*FAILURES):
        precompile(replace(job.node, function=function), job.target)


def try_case(case: Case, device: torch.device) -> dict[str, Any]:
    """The row of a case, or of its failure: a candidate that does not compile or fit must not end a sweep."""
    try:
        return time_case(case, device)
    except FAILURES as error:
        return {"kernel": case.kernel, "case": case.name, "rows": case.rows, "tile": case.tile, "failed": str(error)[:200]}


def time_case(case: Case, device: torch.device) -> dict[str, Any]:
    """One row of the bench: microseconds a launch, bytes, rates, registers and spills where a kernel of ours ran, and the error."""
    known = len(variants())
    made = case.make(device)
    made.launch(0)
    error = made.error()
    count = max(made.copies, min(64, ceil(1e-3 * READ_RATE / case.bytes))) if device.type == "cuda" else 1
    us = launch_us([partial(made.launch, i) for i in range(count)], device)
    compiled = variants()[known:]
    return {
        "kernel": case.kernel,
        "case": case.name,
        "rows": case.rows,
        "tile": case.tile,
        "us": round(us, 2),
        "bytes": case.bytes,
        "tb_per_s": round(case.bytes / us / 1e6, 3),
        "floor_us": round(1e6 * case.bytes / READ_RATE, 2),
        "predicted_us": round(case.predicted_us, 2),
        "registers": compiled[-1].n_regs if compiled else None,
        "spills": compiled[-1].n_spills if compiled else None,
        "error": float(f"{error:.2g}"),
    }


def seconds(launches: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Seconds of all `launches` in one graph: the median of a few replays. On the CPU, of one plain run."""
    if device.type != "cuda":
        began = time.perf_counter()
        for launch in launches:
            launch()
        return time.perf_counter() - began
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return statistics.median(_replay(graph) for _ in range(REPLAYS + 1))


def launch_us(launches: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Microseconds a launch of those that `seconds` times."""
    return 1e6 * seconds(launches, device) / len(launches)


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
