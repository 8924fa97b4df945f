"""Tensor-parallel products and the sums of their parts; the only file that knows how ranks exchange rows.

    Exchange       one rank, or each sum is a collective
    InboxExchange  up to some thousand rows: parts go to the ranks' inboxes, of few rows from the product's own kernel
    OwnRows        more rows: each rank norms its own, and parts and rows travel in pieces while products run
    AdaptedExchange  wraps one of these, for rows with adapters
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.rank.parallel import Parallel
from engine.rank.weight import Weight
from kernels.activation import geglu
from kernels.fused_allreduce_norm import AllReduceInbox, InboxPart, Norms, fused_allreduce_norm
from kernels.linear import GEGLU, NONE, Epilogue
from kernels.lora import LowRank
from kernels.packed import Activations, PackedRows
from kernels.sequence_parallel import GatheredRows, Pieces, SequenceParallel

Peers = AllReduceInbox | SequenceParallel | None
Part = Tensor | InboxPart | Pieces
Rows = Activations | GatheredRows
_WORDS = 512  # made at once: more than a forward has products, unless they are in pieces


class Exchange:
    """On one rank, a row-parallel product may give fp32 parts (`kernels.linear.linear_parts`)."""

    adapters: Tensor | None = None  # int32 [T], the adapter of each row; None: no row has one
    packs_rows = True  # whether norms may pack the rows that its products read

    def __init__(self, parallel: Parallel, eps: float) -> None:
        self.parallel = parallel
        self._eps = eps

    def product(self, weight: Weight, x: Activations, epilogue: Epilogue = NONE) -> Tensor:
        return weight.product(x, epilogue)

    def column_parallel(self, weight: Weight, x: Rows) -> Tensor:
        assert isinstance(x, Activations)
        return weight.product(x)

    def gated(self, weight: Weight, x: Rows, down: Weight) -> Activations | Pieces:
        """`Weight.gated`; `down` is row-parallel."""
        assert isinstance(x, Activations)
        return weight.gated(x, down)

    def row_parallel(self, weight: Weight, x: Activations | Pieces, added: LowRank | None = None) -> Part:
        """x [T, n] -> this rank's part of x W^T [T, m], with what adapters add."""
        assert isinstance(x, Activations)
        if self.parallel.size == 1:
            return weight.parts(x, added)
        return weight.product(x, added=added)

    def sum_norm(
        self, part: Part, residual: Tensor | None, norms: Norms, scalar: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Rows]:
        """Part of a sum -> (h, x) of `fused_allreduce_norm`; x is h without a next norm."""
        assert isinstance(part, Tensor)
        return self.norm(self.parallel.all_reduce(part), residual, norms, scalar, scale)

    def norm(
        self, whole: Tensor, residual: Tensor | None, norms: Norms, scalar: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Activations]:
        return _h_and_x(*fused_allreduce_norm(whole, residual, norms, self._eps, scalar, scale))

    def all_rows(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        return x

    def of_rows(self, rows: Tensor) -> "Exchange":  # noqa: ARG002 (for those that know rows)
        return self


class InboxExchange(Exchange):
    def __init__(self, parallel: Parallel, eps: float, inbox: AllReduceInbox) -> None:
        super().__init__(parallel, eps)
        self._inbox = inbox.begin()

    def row_parallel(self, weight: Weight, x: Activations | Pieces, added: LowRank | None = None) -> Part:
        assert isinstance(x, Activations)
        sent = weight.send(x, self._inbox, added)
        if sent is None:
            return weight.product(x, added=added)
        return sent

    def sum_norm(
        self, part: Part, residual: Tensor | None, norms: Norms, scalar: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Rows]:
        assert isinstance(part, Tensor | InboxPart)
        return _h_and_x(*fused_allreduce_norm(part, residual, norms, self._eps, scalar, scale, self._inbox))


class OwnRows(Exchange):
    """Sequence parallelism: a product of gathered rows computes each piece when it has arrived."""

    def __init__(self, parallel: Parallel, eps: float, sequence: SequenceParallel) -> None:
        super().__init__(parallel, eps)
        self._sequence = sequence

    def column_parallel(self, weight: Weight, x: Rows) -> Tensor:
        if isinstance(x, Activations):
            return weight.product(x)
        out = x.rows.new_empty(len(x.rows), weight.shape[0])
        for to, piece in zip(self._sequence.cut(out), x.pieces(), strict=True):
            weight.product(piece, out=to)
        return out

    def gated(self, weight: Weight, x: Rows, down: Weight) -> Tensor | Pieces:  # noqa: ARG002 (its product packs pieces)
        if isinstance(x, Activations):
            return weight.product(x, GEGLU)
        return (weight.product(piece, GEGLU) for piece in x.pieces())

    def row_parallel(self, weight: Weight, x: Activations | Pieces, added: LowRank | None = None) -> Part:
        assert not isinstance(x, PackedRows)
        assert added is None, "adapters add to each piece"
        return (weight.product(piece) for piece in self._sequence.cut(x))

    def sum_norm(
        self, part: Part, residual: Tensor | None, norms: Norms, scalar: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Rows]:
        if isinstance(part, Tensor):  # an embedding
            return super().sum_norm(part, residual, norms, scalar, scale)
        assert not isinstance(part, InboxPart)
        assert residual is not None
        return self._sequence.norm(part, residual, norms, self._eps, scalar)

    def all_rows(self, x: Rows) -> Tensor:
        if isinstance(x, GatheredRows):
            return x.whole()
        return super().all_rows(x)

    def cut(self, x: Tensor) -> Pieces:
        return self._sequence.cut(x)

    def of_rows(self, rows: Tensor) -> Exchange:  # noqa: ARG002 (it takes any)
        return Exchange(self.parallel, self._eps)


class AdaptedExchange(Exchange):
    """Adds what adapters add before ranks exchange parts, and reads plain rows."""

    packs_rows = False

    def __init__(self, inner: Exchange, adapters: Tensor) -> None:
        self._inner = inner
        self.parallel = inner.parallel
        self.adapters = adapters
        self._words = words(adapters.device)

    def _added(self, weight: Weight, x: Activations, rows: Tensor | None = None) -> LowRank | None:
        """rows: the adapter of each row of x, if not the step's."""
        if weight.adapters is None:
            return None
        assert isinstance(x, Tensor)
        added: LowRank = weight.adapters.added(x, self.adapters if rows is None else rows, next(self._words))
        return added

    def product(self, weight: Weight, x: Activations, epilogue: Epilogue = NONE) -> Tensor:
        return weight.product(x, epilogue, added=self._added(weight, x))

    def column_parallel(self, weight: Weight, x: Rows) -> Tensor:
        if isinstance(x, Activations):
            return weight.product(x, added=self._added(weight, x))
        out = self._inner.column_parallel(weight, x)
        added = self._added(weight, x.rows)  # gathered rows are complete once their product is
        if added is not None:
            added.add(out)
        return out

    def gated(self, weight: Weight, x: Rows, down: Weight) -> Activations | Pieces:
        if weight.adapters is None and down.adapters is None:
            return self._inner.gated(weight, x, down)
        if isinstance(x, Activations):
            return weight.product(x, GEGLU, added=self._added(weight, x))
        return geglu(self.column_parallel(weight, x))

    def row_parallel(self, weight: Weight, x: Activations | Pieces, added: LowRank | None = None) -> Part:
        if weight.adapters is None:
            return self._inner.row_parallel(weight, x)
        assert isinstance(x, Tensor)
        assert added is None
        assert self.adapters is not None
        if not isinstance(self._inner, OwnRows):
            return self._inner.row_parallel(weight, x, self._added(weight, x))
        pairs = zip(self._inner.cut(x), self._inner.cut(self.adapters), strict=True)
        return (weight.product(piece, added=self._added(weight, piece, rows)) for piece, rows in pairs)

    def sum_norm(
        self, part: Part, residual: Tensor | None, norms: Norms, scalar: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Rows]:
        return self._inner.sum_norm(part, residual, norms, scalar, scale)

    def norm(
        self, whole: Tensor, residual: Tensor | None, norms: Norms, scalar: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Activations]:
        return self._inner.norm(whole, residual, norms, scalar, scale)

    def all_rows(self, x: Rows) -> Tensor:
        return self._inner.all_rows(x)

    def of_rows(self, rows: Tensor) -> Exchange:
        assert self.adapters is not None
        return AdaptedExchange(self._inner.of_rows(rows), self.adapters[rows])


def words(device: torch.device) -> Iterator[Tensor]:
    """Endless int32 [1], each 0 and used once."""
    while True:
        yield from torch.zeros(_WORDS, dtype=torch.int32, device=device).split(1)


def exchange_over(peers: Peers, parallel: Parallel, eps: float, adapters: Tensor | None = None) -> Exchange:
    if adapters is not None:
        return AdaptedExchange(exchange_over(peers, parallel, eps), adapters)
    if isinstance(peers, AllReduceInbox):
        return InboxExchange(parallel, eps, peers)
    if peers is not None:
        return OwnRows(parallel, eps, peers)
    return Exchange(parallel, eps)


def _h_and_x(h: Tensor, x: Activations | None) -> tuple[Tensor, Activations]:
    return h, h if x is None else x
