"""The tensor-parallel group: who this rank is, and three collectives, with one implementation for each kind of device.

    cpu    `MappedCollectives`: memory that the ranks inherit; sums and gathers of any size; no sockets, no torch.distributed
    cuda   `CudaGroup`: sums of few rows over symmetric memory, larger ones and gathers by NCCL; rendezvous in a file
    any    `Distributed`: torch.distributed alone, gloo or NCCL: what the others are held to

A group of one needs none of them. An all-reduce is also the barrier at boot: nobody leaves it before everybody came.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, distributed

from engine.channel import map_shared
from engine.errors import ConfigError
from kernels.allreduce import SLOT_BYTES, MappedCollectives, SymmetricReduce, symmetric_memory
from kernels.choose import ArgmaxInbox
from kernels.fused_allreduce_norm import AllReduceInbox, Norms, fused_allreduce_norm
from kernels.sequence_parallel import SequenceParallel

SYMMETRIC_BYTES = 512 << 10  # from about here on NCCL is the faster one
SHARDED_ROWS = 32  # from here on a fused norm's rows are shared out
SENT_ROWS = 16  # up to here products write their parts to the ranks' inboxes themselves


class Parallel(Protocol):
    """One rank of a group. Every rank calls the same collectives in the same order with equal shapes."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, added in rank order: the same bits on every rank. May reuse `x`."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """`[..., n]` of every rank -> `[..., n * size]`, concatenated in rank order."""
        ...

    def exchange_rows(self, x: Tensor) -> Tensor:
        """`[rows, n]` of every rank, rows a multiple of size -> `[size, rows / size, n]`: of every rank, the rows r with
        r mod size = this rank."""
        ...

    def inboxes(self, rows: int, width: int, dtype: torch.dtype, prompt_rows: range = range(0)) -> "Inboxes | None":
        """Memory that the ranks write into each other's, for steps of up to `rows` rows and fused norms of up to `width` elements a
        row, and for steps of `prompt_rows` rows, whose ranks norm rows of their own; None where there is none (one rank, or ranks
        on a CPU). Every rank calls it once, at boot."""
        ...


@dataclass(frozen=True)
class Inboxes:
    """One rank's end of the memory that ranks write into each other's."""

    allreduce: AllReduceInbox
    argmax: ArgmaxInbox
    sequence: SequenceParallel | None = None


def allocated_inboxes(
    rank: int, rows: int, width: int, dtype: torch.dtype, prompt_rows: range, size: int, allocate: Callable[[int], Sequence[Tensor]]
) -> Inboxes:
    """Makes a rank's inboxes, of `size` ranks, as `Parallel.inboxes` says. allocate: bytes -> uint8 [bytes] of each rank."""
    sequence_bytes = SequenceParallel.bytes(size, prompt_rows[-1], width, dtype) if prompt_rows else 0
    ends = list(accumulate((sequence_bytes, AllReduceInbox.bytes(size, rows, width, dtype), ArgmaxInbox.bytes(size, rows))))
    memories = allocate(ends[-1])
    memory = memories[rank]
    pointers = torch.tensor([memory.data_ptr() for memory in memories], device=memory.device)
    own = memory[ends[0] : ends[1]], pointers + ends[0]
    allreduce = AllReduceInbox(*own, rank, rows, width, dtype, SHARDED_ROWS, SENT_ROWS)
    argmax = ArgmaxInbox(memory[ends[1] :], pointers + ends[1], rank, rows, allreduce.errors)
    shared = [memory[: ends[0]] for memory in memories]
    sequence = SequenceParallel(shared, rank, prompt_rows, width, dtype, allreduce.errors) if prompt_rows else None
    return Inboxes(allreduce, argmax, sequence)


def inboxes_of(inboxes: Inboxes | None, rows: int) -> tuple[AllReduceInbox, ArgmaxInbox] | tuple[None, None]:
    """Both, if there are any and they hold so many rows; without them sums and choices are collectives."""
    return (inboxes.allreduce, inboxes.argmax) if inboxes is not None and rows <= inboxes.allreduce.rows else (None, None)


class Single:
    """A group of one."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def exchange_rows(self, x: Tensor) -> Tensor:
        return x[None]

    def inboxes(self, rows: int, width: int, dtype: torch.dtype, prompt_rows: range = range(0)) -> None:
        """Makes none: there are no other ranks."""


class FirstOfGroup:
    """Rank 0 of a group whose other ranks do not exist, on the meta device."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], self.size * x.shape[-1]))

    def exchange_rows(self, x: Tensor) -> Tensor:
        return x.new_empty((self.size, len(x) // self.size, *x.shape[1:]))

    def inboxes(self, rows: int, width: int, dtype: torch.dtype, prompt_rows: range = range(0)) -> Inboxes | None:
        """Make inboxes as `Parallel.inboxes`, of no memory."""
        if self.size == 1:
            return None
        memory = partial(torch.empty, dtype=torch.uint8, device="meta")
        return allocated_inboxes(0, rows, width, dtype, prompt_rows, self.size, lambda size: [memory(size)] * self.size)


class Distributed:
    """torch.distributed's default group. Its sums are equal on all ranks, but not in rank order, and not row by row alike."""

    def __init__(
        self, backend: str, rank: int, size: int, store: str, timeout_s: float, device: torch.device | None = None
    ) -> None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # the ranks share a node: nothing of theirs belongs on a network
        distributed.init_process_group(
            backend,
            store=distributed.FileStore(store, size),  # type: ignore[attr-defined]  # torch forgets to export it
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        distributed.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        distributed.all_gather(list(gathered.unbind(0)), x.contiguous())
        return gathered.movedim(0, -2).flatten(-2).contiguous()  # of one column, flatten leaves a transposed view

    def exchange_rows(self, x: Tensor) -> Tensor:
        sent = x.unflatten(0, (-1, self.size)).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent)
        return received

    def inboxes(self, rows: int, width: int, dtype: torch.dtype, prompt_rows: range = range(0)) -> "Inboxes | None":  # noqa: ARG002
        """Makes none, of any size."""
        return None


class CudaGroup(Distributed):
    """NCCL, and symmetric memory where a sum's message fits it."""

    def __init__(self, rank: int, size: int, store: str, timeout_s: float) -> None:
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(self._device)
        super().__init__("nccl", rank, size, store, timeout_s, self._device)
        world = distributed.group.WORLD
        assert world is not None
        self._world, self._small = world, SymmetricReduce(world, self._device, SYMMETRIC_BYTES)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._small.all_reduce(x) if self._small.fits(x) else super().all_reduce(x)

    def inboxes(self, rows: int, width: int, dtype: torch.dtype, prompt_rows: range = range(0)) -> Inboxes:
        """As `Parallel.inboxes`: symmetric memory, empty on every rank before anybody can write."""
        allocate = partial(symmetric_memory, self._world, device=self._device)
        inboxes = allocated_inboxes(self.rank, rows, width, dtype, prompt_rows, self.size, allocate)
        torch.cuda.synchronize(self._device)
        distributed.barrier()
        return inboxes


def connect(rank: int, size: int, device: torch.device, reduce: int, store: str, timeout_s: float) -> Parallel:
    """This rank's group on `device`: the one place where an implementation is chosen.

    reduce     descriptor of `shared_bytes(size)` zeroed bytes that the ranks share (cpu)
    store      path of the rendezvous file (cuda)
    timeout_s  bound of one wait for the other ranks; `MappedCollectives.timeout_s` may be lowered once all are up
    """
    if size == 1:
        return Single()
    if device.type == "cpu":
        return MappedCollectives(map_shared(reduce), rank, size, timeout_s)
    return CudaGroup(rank, size, store, timeout_s)


def self_check(parallel: Parallel, device: torch.device, dtype: torch.dtype) -> None:
    """Sums and gathers of known values, short ones and ones that take the way of large messages; also a barrier.

    Raises ConfigError, which names rank and message, when one comes out wrong. The values are small integers: exact in bf16.
    """
    rank, size = parallel.rank, parallel.size
    for length in (64, max(SYMMETRIC_BYTES, SLOT_BYTES) // dtype.itemsize + 64):
        pattern = torch.arange(length, device=device).remainder(7).to(dtype)
        _expect(parallel, parallel.all_reduce(pattern * (rank + 1)), pattern * (size * (size + 1) // 2), "sum")
        _expect(parallel, parallel.all_gather(pattern + rank), torch.cat([pattern + other for other in range(size)]), "gather")
    rows = torch.arange(2 * size, device=device, dtype=dtype)[:, None].expand(-1, 64)
    own = torch.stack([10 * rows[rank::size] + other for other in range(size)])
    _expect(parallel, parallel.exchange_rows(10 * rows + rank), own, "exchange")


def check_own_rows(parallel: Parallel, sequence: SequenceParallel, dtype: torch.dtype) -> None:
    """Parts of known values, of which each rank norms rows of its own: all ranks get what an all-reduce and a norm give.

    Raises ConfigError as `self_check` does.
    """
    rows, n = 16 * parallel.size, sequence.width
    part = torch.arange(rows * n, device=sequence.device).remainder(5 + parallel.rank).to(dtype).view(rows, n)
    norms, residual = Norms(*torch.ones_like(part[:2])), torch.ones_like(part)
    sequence.begin(rows)
    for _ in range(2):  # as a forward has sums
        x = sequence.norm(sequence.cut(part), residual, norms, 1e-6, None)[1].whole()
    _, expected = fused_allreduce_norm(parallel.all_reduce(part), residual, norms, 1e-6)
    assert expected is not None
    close = torch.isclose(x, expected, 0.02, 0.02)
    _expect(parallel, close, torch.ones_like(close), "norm by rows")


def _expect(parallel: Parallel, actual: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(actual, expected):
        wrong = int((actual != expected).sum()) if actual.shape == expected.shape else expected.numel()
        raise ConfigError(
            f"rank {parallel.rank} of {parallel.size}: the {what} of {expected.numel()} known {expected.dtype} values over the "
            f"ranks came out wrong in {wrong}; the ranks cannot compute together on this machine"
        )
