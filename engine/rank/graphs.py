"""Captured decode steps: for each bucket of rows a graph of the forward and one of the sampler, replayed back to back.

    capture   largest bucket first, all in one memory pool: warm up (kernels compile, workspaces appear), then record
    replay    two launches for the host, whatever the model's depth

A graph reads and writes fixed addresses: what its functions take as inputs lies in `engine.rank.step`'s buffers.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

State = TypeVar("State")
Output = TypeVar("Output")


class DecodeGraphs(Generic[State, Output]):
    """`forward(rows)` and `sample(rows, state)`, by bucket; each gives the same tensors at every replay.

    Every rank must capture the same buckets in the same order: warming up runs the step's sums over ranks.
    """

    def __init__(
        self, forward: Callable[[int], State], sample: Callable[[int, State], Output], buckets: Sequence[int], device: torch.device
    ) -> None:
        self._steps: dict[int, tuple[torch.cuda.CUDAGraph, State, torch.cuda.CUDAGraph, Output]] = {}
        self._stream = torch.cuda.Stream(device)
        pool = torch.cuda.graph_pool_handle()
        for rows in sorted(buckets, reverse=True):
            self._warm(forward, sample, rows)
            first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(first, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                state = forward(rows)
            with torch.cuda.graph(second, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                output = sample(rows, state)
            self._steps[rows] = (first, state, second, output)
        torch.cuda.synchronize(device)

    def _warm(self, forward: Callable[[int], State], sample: Callable[[int, State], Output], rows: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            sample(rows, forward(rows))
        torch.cuda.current_stream().wait_stream(self._stream)

    def forward(self, rows: int) -> State:
        """Replays a bucket's forward; what it gives holds until the next replay of any graph."""
        first, state, _, _ = self._steps[rows]
        first.replay()
        return state

    def sample(self, rows: int) -> Output:
        """Replays a bucket's sampler, behind its forward."""
        _, _, second, output = self._steps[rows]
        second.replay()
        return output
