"""A tensor-parallel group whose ranks are threads of this process: for tests of whatever takes a `Parallel`."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ThreadParallel:
    """One rank; `boards` and `barrier` are the group's. Sums are added in rank order, on every rank alike."""

    def __init__(self, rank: int, size: int, boards: tuple[list[Tensor | None], ...], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._boards, self._barrier = boards, barrier
        self.reduces = self._exchanges = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.reduces += 1
        parts = self._exchange(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def exchange_rows(self, x: Tensor) -> Tensor:
        return torch.stack([part[self.rank :: self.size] for part in self._exchange(x)])

    def peer_memory(self, _size: int) -> None:
        """None."""

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._exchanges += 1
        board = self._boards[self._exchanges % 2]  # the one before may still be read
        board[self.rank] = x.clone()
        self._barrier.wait(60)
        parts = [part for part in board if part is not None]
        assert len({part.shape for part in parts}) == 1, [part.shape for part in parts]
        return parts


class SkippedReduce(ThreadParallel):
    """A planted fault: its all-reduce number `skipped` (from 0) yields this rank's own part."""

    skipped = -1

    def all_reduce(self, x: Tensor) -> Tensor:
        skipped = self.reduces == self.skipped
        own = x.clone()
        total = super().all_reduce(x)
        return own if skipped else total


def run_ranks(size: int, body: Callable[[ThreadParallel], T], make: type[ThreadParallel] = ThreadParallel) -> list[T]:
    """`body(parallel)` on each of `size` ranks at once; results in rank order. The first error ends all and is raised."""
    boards = [None] * size, [None] * size
    barrier = threading.Barrier(size)

    def rank(index: int) -> T:
        torch.set_num_threads(1)
        try:
            return body(make(index, size, boards, barrier))
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, index) for index in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
