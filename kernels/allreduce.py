"""Sum and gather over the ranks of one node: each rank writes its slot and reads all slots.

    mapped memory     flag 0 | flag 1 | ... (a 64-byte line each) | even: slot 0, slot 1, ... | odd: slot 0, slot 1, ...

Round r: write slot i of half r % 2, set flag i = r, wait until every flag >= r, read that half. It overwrites round r - 2, which
all flags of r - 1 prove read.
"""

import os
import threading
import time
from functools import reduce

import torch
from torch import Tensor

SLOT_BYTES = 256 << 10
_LINE = 64
_YIELDS = 100
_SLEEP_S = 50e-6


def shared_bytes(ranks: int) -> int:
    return ranks * (_LINE + 2 * SLOT_BYTES)


class MappedCollectives:
    """Takes fp32 and bf16. All ranks make the same calls with equal shapes and dtypes. TimeoutError names a rank missing for
    `timeout_s`.
    """

    def __init__(self, memory: memoryview, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._round = 0
        self._flags = memory[: size * _LINE].cast("Q")
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=size * _LINE, count=2 * size * SLOT_BYTES)
        self._slots = slots.view(2, size, SLOT_BYTES)
        self._lock = threading.Lock()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum in rank order, in fp32: the same bits on every rank; may write into `x`."""
        assert x.dtype in (torch.float32, torch.bfloat16), x.dtype
        x = x.contiguous()
        for piece in _pieces(x):
            piece.copy_(reduce(torch.add, self._exchange(piece).float()))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """`[..., n]` of every rank -> `[..., n * size]`, in rank order."""
        x = x.contiguous()
        gathered = torch.empty((self.size, x.numel()), dtype=x.dtype)
        first = 0
        for piece in _pieces(x):
            gathered[:, first : first + piece.numel()] = self._exchange(piece)
            first += piece.numel()
        return gathered.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def exchange_rows(self, x: Tensor) -> Tensor:
        """`[rows, n]` of every rank -> `[size, rows / size, n]`: rows r with r mod size = rank."""
        return self.all_gather(x).unflatten(1, (self.size, -1))[self.rank :: self.size].transpose(0, 1).contiguous()

    def peer_memory(self, _size: int) -> None:
        ...

    def _exchange(self, piece: Tensor) -> Tensor:
        """[size, numel]: every rank's piece, a view valid until the next exchange."""
        self._round += 1
        half = self._slots[self._round % 2].view(piece.dtype)[:, : piece.numel()]
        half[self.rank] = piece
        self._memory_barrier()
        self._flags[self.rank * _LINE // 8] = self._round
        self._wait()
        self._memory_barrier()
        return half

    def _wait(self) -> None:
        deadline = 0.0
        polls = 0
        for rank in range(self.size):
            while self._flags[rank * _LINE // 8] < self._round:
                polls += 1
                if polls <= _YIELDS:
                    os.sched_yield()
                    continue
                deadline = deadline or time.monotonic() + self.timeout_s
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not come to exchange {self._round} within {self.timeout_s} s")
                time.sleep(_SLEEP_S)

    def _memory_barrier(self) -> None:
        """Orders data accesses around the flag's, also on Arm."""
        for _ in range(2):
            with self._lock:
                pass


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    return x.view(-1).split(SLOT_BYTES // x.element_size()) if x.numel() else ()
