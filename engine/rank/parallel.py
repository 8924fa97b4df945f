"""The tensor-parallel group: rank, size and collectives, by kind of device.

    cpu    `MappedCollectives`: inherited shared memory, for messages of any size; no sockets, no torch.distributed
    cuda   `CudaGroup`: sums of few rows over symmetric memory, larger ones and gathers by NCCL; rendezvous in a file

An all-reduce is also the barrier at boot.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, distributed

from engine.channel import map_shared
from engine.errors import ConfigError
from kernels.allreduce import SLOT_BYTES, MappedCollectives
from kernels.choose import ArgmaxInbox
from kernels.fused_allreduce_norm import AllReduceInbox, Norms, fused_allreduce_norm
from kernels.sequence_parallel import SequenceParallel

SYMMETRIC_BYTES = 512 << 10  # from about here on NCCL is the faster one


class Parallel(Protocol):
    """All ranks call the same collectives in the same order with equal shapes."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum: the same bits on every rank. May reuse `x`."""

    def all_gather(self, x: Tensor) -> Tensor:
        """`[..., n]` of every rank -> `[..., n * size]`, in rank order."""

    def exchange_rows(self, x: Tensor) -> Tensor:
        """`[rows, n]`, rows a multiple of size -> `[size, rows / size, n]`: every rank's rows r with r mod size = this rank."""

    def peer_memory(self, size: int) -> Sequence[Tensor] | None:
        """uint8 [size] of each rank, writable by all; None for one rank or a CPU. A collective
        call, at boot."""


class Inboxes(NamedTuple):
    allreduce: AllReduceInbox
    argmax: ArgmaxInbox
    sequence: SequenceParallel | None = None


def make_inboxes(
    parallel: Parallel, rows: int, width: int, dtype: torch.dtype, prompt_rows: range = range(0), *, shares_rows: bool = True
) -> Inboxes | None:
    """Inboxes for steps of up to `rows` rows and fused norms of up to `width` elements, and sequence-parallel norms for
    `prompt_rows` rows. None without `Parallel.peer_memory`. A collective call.

    Without `shares_rows`, or with two ranks, every rank has the whole residual.
    """
    rank = parallel.rank
    size = parallel.size
    if prompt_rows:
        sequence_bytes = SequenceParallel.bytes(size, prompt_rows[-1], width, dtype)
    else:
        sequence_bytes = 0
    sizes = [sequence_bytes, AllReduceInbox.bytes(size, rows, width, dtype), ArgmaxInbox.bytes(size, rows)]
    memories = parallel.peer_memory(sum(sizes))
    if memories is None:
        return None
    of_sequence, of_sums, of_choices = zip(*(memory.split(sizes) for memory in memories), strict=True)
    allreduce = AllReduceInbox(of_sums, rank, rows, width, dtype)
    if size == 2 or not shares_rows:
        allreduce.sharded_rows = rows + 1
    argmax = ArgmaxInbox(of_choices, rank, rows, allreduce.errors)
    sequence = SequenceParallel(of_sequence, rank, prompt_rows, width, dtype, allreduce.errors) if prompt_rows else None
    if allreduce.inbox.is_cuda:
        torch.cuda.synchronize()
        distributed.barrier()
    return Inboxes(allreduce, argmax, sequence)


def inboxes_of(inboxes: Inboxes | None, rows: int) -> tuple[AllReduceInbox, ArgmaxInbox] | tuple[None, None]:
    if inboxes is not None and rows <= inboxes.allreduce.rows:
        return (inboxes.allreduce, inboxes.argmax)
    return (None, None)


class Single:
    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def exchange_rows(self, x: Tensor) -> Tensor:
        return x[None]

    def peer_memory(self, _size: int) -> None:
        ...


class FirstOfGroup(Single):
    """Rank 0 without the other ranks, on the meta device."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], self.size * x.shape[-1]))

    def exchange_rows(self, x: Tensor) -> Tensor:
        return x.new_empty((self.size, len(x) // self.size, *x.shape[1:]))

    def peer_memory(self, size: int) -> Sequence[Tensor] | None:  # type: ignore[override]
        if self.size > 1:
            return [torch.empty(size, dtype=torch.uint8, device="meta")] * self.size
        return None


class CudaGroup:
    """NCCL, and torch's symmetric memory for small sums, in rank order for 2, 4 and 8 ranks. NCCL's sums are equal on all ranks,
    but not in rank order.
    """

    def __init__(self, rank: int, size: int, store: str, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(self._device)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # the ranks share a node: nothing of theirs belongs on a network
        distributed.init_process_group(
            "nccl",
            store=distributed.FileStore(store, size),  # type: ignore[attr-defined]  # torch forgets to export it
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=self._device,
        )
        world = distributed.group.WORLD
        assert world is not None
        self._group = world.group_name
        self._small = self.peer_memory(SYMMETRIC_BYTES)[rank]

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.nbytes > SYMMETRIC_BYTES or x.nbytes % 16 or not x.nbytes:
            x = x.contiguous()
            distributed.all_reduce(x)
            return x
        buffer = self._small.view(x.dtype)[: x.numel()]
        buffer.copy_(x.reshape(-1))
        return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._group).view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        distributed.all_gather(list(gathered.unbind(0)), x.contiguous())
        return gathered.movedim(0, -2).flatten(-2).contiguous()  # of one column, flatten leaves a transposed view

    def exchange_rows(self, x: Tensor) -> Tensor:
        sent = x.unflatten(0, (-1, self.size)).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent)
        return received

    def peer_memory(self, size: int) -> list[Tensor]:
        from torch.distributed import _symmetric_memory as symmetric

        own = symmetric.empty(size, dtype=torch.uint8, device=self._device)
        handle = symmetric.rendezvous(own, self._group)
        return [own if rank == self.rank else handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self.size)]


def connect(rank: int, size: int, device: torch.device, reduce: int, store: str, timeout_s: float) -> Parallel:
    """reduce     descriptor of `shared_bytes(size)` zeroed shared bytes (cpu)
    store      path of the rendezvous file (cuda)
    timeout_s  of one wait for the other ranks
    """
    if size == 1:
        return Single()
    if device.type == "cpu":
        return MappedCollectives(map_shared(reduce), rank, size, timeout_s)
    return CudaGroup(rank, size, store, timeout_s)


def self_check(parallel: Parallel, device: torch.device, dtype: torch.dtype) -> None:
    """Checks exchanges of small integers, exact in bf16, in short and large messages. ConfigError."""
    rank = parallel.rank
    size = parallel.size
    for length in (64, max(SYMMETRIC_BYTES, SLOT_BYTES) // dtype.itemsize + 64):
        pattern = torch.arange(length, device=device).remainder(7).to(dtype)
        _expect(parallel, parallel.all_reduce(pattern * (rank + 1)), pattern * (size * (size + 1) // 2), "sum")
        _expect(parallel, parallel.all_gather(pattern + rank), torch.cat([pattern + other for other in range(size)]), "gather")
    rows = torch.arange(2 * size, device=device, dtype=dtype)[:, None].expand(-1, 64)
    own = torch.stack([10 * rows[rank::size] + other for other in range(size)])
    _expect(parallel, parallel.exchange_rows(10 * rows + rank), own, "exchange")


@torch.inference_mode()
def check_own_rows(parallel: Parallel, sequence: SequenceParallel, dtype: torch.dtype) -> None:
    """Sequence-parallel norms must equal an all-reduce and a norm. ConfigError."""
    rows = 16 * parallel.size
    n = sequence.width
    part = torch.arange(rows * n, device=sequence.device).remainder(5 + parallel.rank).to(dtype).view(rows, n)
    norms = Norms(*torch.ones_like(part[:2]))
    residual = torch.ones_like(part)
    sequence.begin(rows)
    for _ in range(2):  # as a forward has sums
        x = sequence.norm(sequence.cut(part), residual, norms, 1e-6, None)[1].whole()
    _, expected = fused_allreduce_norm(parallel.all_reduce(part), residual, norms, 1e-6)
    assert isinstance(expected, Tensor)
    close = torch.isclose(x, expected, 0.02, 0.02)
    _expect(parallel, close, torch.ones_like(close), "norm by rows")


def _expect(parallel: Parallel, actual: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(actual, expected):
        if actual.shape == expected.shape:
            wrong = int((actual != expected).sum())
        else:
            wrong = expected.numel()
        raise ConfigError(
            f"rank {parallel.rank} of {parallel.size}: the {what} of {expected.numel()} known {expected.dtype} values over the "
            f"ranks came out wrong in {wrong}; the ranks cannot compute together on this machine"
        )
