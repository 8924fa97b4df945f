"""The end of a row-parallel product: parts added over ranks, norm, residual and next norm as one step."""

from torch import Tensor

from engine.rank.parallel import Parallel
from kernels.fused_allreduce_norm import AllReduceInbox, InboxPart, Norms, fused_allreduce_norm
from kernels.sequence_parallel import GatheredRows, Pieces, SequenceParallel

Peers = AllReduceInbox | SequenceParallel | None  # for up to some thousand rows; for more; sums over ranks are collectives
Part = Tensor | InboxPart | Pieces
Rows = Tensor | GatheredRows


def whole(x: Rows) -> Tensor:
    """All rows, once the device has them."""
    return x.whole() if isinstance(x, GatheredRows) else x


class AllReduceNorm:
    """Adds a layer's parts to the residual (`kernels.fused_allreduce_norm`): over `peers`, or behind an all-reduce."""

    def __init__(self, parallel: Parallel, peers: Peers, eps: float) -> None:
        self.parallel, self._eps = parallel, eps
        self.peers = peers.begin() if isinstance(peers, AllReduceInbox) else peers

    def of_few_rows(self) -> "AllReduceNorm":
        """The same for some of a step's rows: where ranks norm rows of their own, sums of these are all-reduces."""
        few = isinstance(self.peers, SequenceParallel)
        return AllReduceNorm(self.parallel, None, self._eps) if few else self

    def add(
        self, part: Part, residual: Tensor, post: Tensor, next_norm: Tensor | None, scalar: Tensor | None = None
    ) -> tuple[Tensor, Rows]:
        """A part of a row-parallel product -> (h, x), as a call does."""
        if isinstance(part, Tensor | InboxPart):
            return self(part, residual, post, next_norm, scalar)
        assert isinstance(self.peers, SequenceParallel)
        return self.peers.norm(part, residual, Norms(post, next_norm), self._eps, scalar)

    def __call__(
        self,
        part: Tensor | InboxPart,
        residual: Tensor | None,
        post: Tensor | None,
        next_norm: Tensor | None,
        scalar: Tensor | None = None,
        *,
        halves: tuple[Tensor, Tensor] | None = None,
        scale: float = 1.0,
        summed: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """This rank's part [T, n], or [T, 2 n] with norms for both `halves` -> (h, x); x is h where there is no `next_norm`.
        summed: the part is the whole sum, on every rank."""
        norms = Norms(post, next_norm, halves)
        peers = self.peers if isinstance(self.peers, AllReduceInbox) and not summed else None
        if not (summed or peers or isinstance(part, InboxPart)):
            part = self.parallel.all_reduce(part)
        h, normed = fused_allreduce_norm(part, residual, norms, self._eps, scalar, scale, peers)
        return h, h if normed is None else normed
