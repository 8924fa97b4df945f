"""Products over ranks and the sums of their parts: the one file that knows how ranks exchange rows.

    column-parallel   by a `Weight` of this rank's rows: the result stays local
    row-parallel      by a `Weight` of this rank's columns: the result is this rank's part of a sum over ranks
    sum_norm          adds the parts. Gemma norms every such sum, so sum, norm, residual and next norm are one step

A forward has one `Exchange`:

    Exchange       one rank, or each sum is a collective
    InboxExchange  up to some thousand rows: parts go to the ranks' inboxes, of few rows from the product's own kernel
    OwnRows        more rows: each rank norms rows of its own, and parts and rows travel in pieces while products run
"""

from torch import Tensor

from engine.rank.parallel import Parallel
from engine.rank.weight import Weight
from kernels.fused_allreduce_norm import AllReduceInbox, InboxPart, Norms, fused_allreduce_norm
from kernels.linear import GEGLU
from kernels.packed import Activations, PackedRows
from kernels.sequence_parallel import GatheredRows, Pieces, SequenceParallel

Peers = AllReduceInbox | SequenceParallel | None
Part = Tensor | InboxPart | Pieces
Rows = Activations | GatheredRows


class Exchange:
    """Each sum over ranks is a collective. Where there is one rank, a row-parallel product of few rows may come in fp32 parts
    [parts, T, m] (`kernels.linear.linear_parts`)."""

    def __init__(self, parallel: Parallel, eps: float) -> None:
        self.parallel = parallel
        self._eps = eps

    def column_parallel(self, weight: Weight, x: Rows) -> Tensor:
        """x [T, n] -> x W^T [T, m]."""
        assert isinstance(x, Activations)
        return weight.product(x)

    def gated(self, weight: Weight, x: Rows, down: Weight) -> Activations | Pieces:
        """x [T, n] -> gelu_tanh(x G^T) * x U^T [T, m] for a row-parallel product with `down`; W = [G; U]."""
        assert isinstance(x, Activations)
        return weight.gated(x, down)

    def row_parallel(self, weight: Weight, x: Activations | Pieces) -> Part:
        """x [T, n] -> this rank's part of x W^T [T, m]."""
        assert isinstance(x, Activations)
        return weight.parts(x) if self.parallel.size == 1 else weight.product(x)

    def sum_norm(
        self, part: Part, residual: Tensor | None, norms: Norms, scalar: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Rows]:
        """This rank's part of a sum -> (h, x) of `kernels.fused_allreduce_norm`; x is h where there is no next norm."""
        assert isinstance(part, Tensor)
        return self.norm(self.parallel.all_reduce(part), residual, norms, scalar, scale)

    def norm(
        self, whole: Tensor, residual: Tensor | None, norms: Norms, scalar: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Activations]:
        """`sum_norm` of a tensor that every rank has whole."""
        return _h_and_x(*fused_allreduce_norm(whole, residual, norms, self._eps, scalar, scale))

    def all_rows(self, x: Rows) -> Tensor:
        """x [T, n], all rows on every rank."""
        assert isinstance(x, Tensor)
        return x

    def of_few_rows(self) -> "Exchange":
        """The exchange for some of the step's rows."""
        return self


class InboxExchange(Exchange):
    """Ranks write their parts into each other's inboxes."""

    def __init__(self, parallel: Parallel, eps: float, inbox: AllReduceInbox) -> None:
        super().__init__(parallel, eps)
        self._inbox = inbox.begin()

    def row_parallel(self, weight: Weight, x: Activations | Pieces) -> Part:
        assert isinstance(x, Activations)
        sent = weight.send(x, self._inbox)
        return weight.product(x) if sent is None else sent

    def sum_norm(
        self, part: Part, residual: Tensor | None, norms: Norms, scalar: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Rows]:
        assert isinstance(part, Tensor | InboxPart)
        return _h_and_x(*fused_allreduce_norm(part, residual, norms, self._eps, scalar, scale, self._inbox))


class OwnRows(Exchange):
    """Each rank norms rows of its own: sequence parallelism. A product of gathered rows computes each piece once it has come."""

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

    def row_parallel(self, weight: Weight, x: Activations | Pieces) -> Part:
        assert not isinstance(x, PackedRows)
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
        return x.whole() if isinstance(x, GatheredRows) else super().all_rows(x)

    def of_few_rows(self) -> Exchange:
        return Exchange(self.parallel, self._eps)


def exchange_over(peers: Peers, parallel: Parallel, eps: float) -> Exchange:
    """The exchange of a forward whose ranks have these inboxes or sequence-parallel norms."""
    if isinstance(peers, AllReduceInbox):
        return InboxExchange(parallel, eps, peers)
    if peers is not None:
        return OwnRows(parallel, eps, peers)
    return Exchange(parallel, eps)


def _h_and_x(h: Tensor, x: Activations | None) -> tuple[Tensor, Activations]:
    return h, h if x is None else x
