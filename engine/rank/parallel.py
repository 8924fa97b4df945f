"""The tensor-parallel group as a model sees it: who this rank is, and two collectives."""

from typing import Protocol

from torch import Tensor


class Parallel(Protocol):
    """One rank of a group. Every rank calls the same collectives in the same order with equal shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, added in rank order: the same bits on every rank. May reuse `x`."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """`[..., n]` of every rank -> `[..., n * size]`, concatenated in rank order."""
        ...


class Single:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x
