"""Captured stages of steps, by a key: the stage's name, its sizes. A step replays one graph of each stage.

    capture   largest rows first, all in one memory pool: warm up (kernels compile, workspaces appear), then record
    replay    a launch a stage for the host, whatever the model's depth

A graph reads and writes fixed addresses: what its stage takes as inputs lies in `engine.rank.step`'s buffers.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch


class StageGraphs:
    """Graphs of one rank. A stage gives the same tensors at every replay. They hold until a graph is replayed that was captured
    earlier, and may have had their memory: of a step's stages the later one must be captured later.

    Every rank must capture the same stages in the same order: warming up runs the step's sums over ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def warm(self, run: Callable[[], object]) -> None:
        """Run what is about to be captured, on the graphs' stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, run: Callable[[], Any], *key: Hashable) -> Any:
        """Record a stage; what it gives."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        self._graphs[key] = graph, output
        return output

    def replay(self, *key: Hashable) -> Any:
        """Run a captured stage; what it gives."""
        graph, output = self._graphs[key]
        graph.replay()
        return output
