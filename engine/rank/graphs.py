"""Captured decode steps: for each bucket of rows a graph of the forward and one of every sampler, of which a step replays one.

    capture   largest bucket first, all in one memory pool: warm up (kernels compile, workspaces appear), then record
    replay    two launches for the host, whatever the model's depth

A graph reads and writes fixed addresses: what its functions take as inputs lies in `engine.rank.step`'s buffers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch

State = TypeVar("State")
Output = TypeVar("Output")
Result = TypeVar("Result")


class DecodeGraphs(Generic[State, Output]):
    """`forward(rows)` and `samplers[name](rows, state)`, by bucket; each gives the same tensors at every replay.

    Every rank must capture the same buckets in the same order: warming up runs the step's sums over ranks.
    """

    def __init__(
        self,
        forward: Callable[[int], State],
        samplers: Mapping[str, Callable[[int, State], Output]],
        buckets: Sequence[int],
        device: torch.device,
    ) -> None:
        self._forwards: dict[int, tuple[torch.cuda.CUDAGraph, State]] = {}
        self._samplers: dict[tuple[int, str], tuple[torch.cuda.CUDAGraph, Output]] = {}
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        for rows in sorted(buckets, reverse=True):
            self._warm(forward, samplers, rows)
            self._forwards[rows] = _, state = self._record(partial(forward, rows))
            for name, sample in samplers.items():
                self._samplers[rows, name] = self._record(partial(sample, rows, state))
        torch.cuda.synchronize(device)

    def _warm(self, forward: Callable[[int], State], samplers: Mapping[str, Callable[[int, State], Output]], rows: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for sample in samplers.values():
                sample(rows, forward(rows))  # a step each: ranks choose over one inbox, so sums must lie between (`kernels.choose`)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _record(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()
        return graph, result

    def forward(self, rows: int) -> State:
        """Replays a bucket's forward; what it gives holds until the next replay of any graph."""
        graph, state = self._forwards[rows]
        graph.replay()
        return state

    def sample(self, rows: int, name: str = "argmax") -> Output:
        """Replays one of a bucket's samplers, behind its forward."""
        graph, output = self._samplers[rows, name]
        graph.replay()
        return output
