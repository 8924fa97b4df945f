"""The one-shot collectives over mapped memory: order, bits, pieces, buffers, and what happens when a peer is gone."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from engine.channel import create_shared, map_shared
from kernels.allreduce import SLOT_BYTES, MappedCollectives, shared_bytes
from tests.support.dtypes import both_dtypes

pytestmark = pytest.mark.cpu

T = TypeVar("T")
SHAPES = ((1, 96), (7, 33), (0, 96), (3, SLOT_BYTES // 4 + 5), (2, SLOT_BYTES // 8))  # one row, odd, none, two and a bit, exactly


def ranks(size: int, body: Callable[[MappedCollectives], T], make: type[MappedCollectives] = MappedCollectives) -> list[T]:
    """`body` on each of `size` ranks, threads over one mapped memory; results in rank order."""
    memory = map_shared(create_shared("reduce", shared_bytes(size)))
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(lambda rank=rank: body(make(memory, rank, size, 20.0))) for rank in range(size)]
    return [future.result() for future in futures]


def inputs(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [(torch.randn(shape, generator=generator) * 10.0**rank).to(dtype) for rank in range(size)]


def in_order(parts: list[Tensor], order: list[int]) -> Tensor:
    """The sum as the formula says it: fp32, one after the other, one cast."""
    total = parts[order[0]].float()
    for index in order[1:]:
        total = total + parts[index].float()
    return total.to(parts[0].dtype)


@both_dtypes
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sum_is_in_rank_order_on_every_rank(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every rank ends with the bits of the sum in rank order, at any size and length."""
    parts = inputs(size, shape, dtype)
    for found in ranks(size, lambda group: group.all_reduce(parts[group.rank].clone())):
        assert found.dtype == dtype
        assert torch.equal(found, in_order(parts, list(range(size))))


def test_another_order_has_other_bits() -> None:
    """Planted fault: the sum in reverse order differs, so the test above does tell orders apart."""
    parts = inputs(4, (7, 333), torch.float32)
    found = ranks(4, lambda group: group.all_reduce(parts[group.rank].clone()))[0]
    assert not torch.equal(found, in_order(parts, [3, 2, 1, 0]))


@pytest.mark.parametrize("shape", [*SHAPES, (5,), (2, 3, 4)])
def test_gather_is_concatenation(shape: tuple[int, ...]) -> None:
    """all_gather is torch.cat along the last axis in rank order; in another order it is not."""
    parts = inputs(4, shape, torch.float32)
    for found in ranks(4, lambda group: group.all_gather(parts[group.rank])):
        assert torch.equal(found, torch.cat(parts, dim=-1))
        assert not found.numel() or not torch.equal(found, torch.cat(parts[::-1], dim=-1))


def test_input_need_not_be_contiguous() -> None:
    """A strided input sums like its copy."""
    parts = [part.t() for part in inputs(2, (5, 9), torch.float32)]
    for found in ranks(2, lambda group: group.all_reduce(parts[group.rank])):
        assert torch.equal(found, in_order([part.contiguous() for part in inputs(2, (5, 9), torch.float32)], [0, 1]).t())


class SlowReader(MappedCollectives):
    """Rank 1 dawdles between having waited and reading, where a writer too early would overtake it."""

    def _wait(self) -> None:
        super()._wait()
        if self.rank == 1:
            time.sleep(0.003)


class OneBuffer(SlowReader):
    """Planted fault: both halves are the same memory."""

    def __init__(self, memory: memoryview, rank: int, size: int, timeout_s: float) -> None:
        super().__init__(memory, rank, size, timeout_s)
        self._slots = self._slots[:1].expand(2, -1, -1)


def wrong_rounds(make: type[MappedCollectives], rounds: int = 60) -> int:
    """Rounds in which some rank got anything but that round's sum."""

    def body(group: MappedCollectives) -> int:
        found = [group.all_reduce(torch.full((64,), float(number * 10 + group.rank))) for number in range(rounds)]
        return sum(bool((value != number * 30 + 3).any()) for number, value in enumerate(found))

    return sum(ranks(3, body, make))


def test_one_wait_a_round_is_enough_with_two_halves() -> None:
    """A reader that dawdles reads its own round: nobody writes a half before all have read it. With one half it does not."""
    assert wrong_rounds(SlowReader) == 0
    assert wrong_rounds(OneBuffer) > 30


def test_ranks_in_step_over_many_rounds() -> None:
    """Hundreds of rounds of changing lengths, sums and gathers in turn, all right."""

    def body(group: MappedCollectives) -> bool:
        good = True
        for number in range(500):
            x = torch.full((1 + number % 50,), float(number + group.rank))
            good &= bool((group.all_reduce(x.clone()) == 4 * number + 6).all())
            good &= group.all_gather(x[:1]).tolist() == [number, number + 1, number + 2, number + 3]
        return good

    assert ranks(4, body) == [True] * 4


def test_a_peer_that_does_not_come_is_named() -> None:
    """A wait has an end: TimeoutError names the absent rank within its bound, and later bounds hold at once."""
    memory = map_shared(create_shared("reduce", shared_bytes(3)))
    groups = [MappedCollectives(memory, rank, 3, 60.0) for rank in range(2)]
    for group in groups:
        group.timeout_s = 0.2
    started = time.monotonic()
    errors = []

    def come(group: MappedCollectives) -> None:
        try:
            group.all_reduce(torch.zeros(4))
        except TimeoutError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=come, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert all("rank 2 did not come" in error for error in errors)
    assert 0.2 <= time.monotonic() - started < 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float16])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """Sums are of fp32 and bf16 only: fp32 accumulation would silently narrow the rest."""
    with pytest.raises(AssertionError, match=str(dtype)):
        ranks(1, lambda group: group.all_reduce(torch.zeros(3, dtype=dtype)))
