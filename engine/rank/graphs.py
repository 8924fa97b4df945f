"""CUDA graphs of a step's stages, by stage name and sizes."""

from collections.abc import Callable, Hashable
from typing import Any

import torch


class StageGraphs:
    """Every rank must capture the same stages in the same order: warming up runs collectives.

    The replay of an earlier captured graph may overwrite outputs; so capture the stages of a step in reverse order.
    """

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, run: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, run: Callable[[], Any], *key: Hashable) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        self._graphs[key] = graph, output
        return output

    def replay(self, *key: Hashable) -> Any:
        graph, output = self._graphs[key]
        graph.replay()
        return output
