"""One rank of a group on one GPU, its collectives looped back: everything but the wires can be timed."""

import torch
from torch import Tensor

from engine.rank.parallel import FirstOfGroup, Inboxes
from kernels.choose import ArgmaxInbox
from kernels.fused_allreduce_norm import AllReduceInbox


class Loopback(FirstOfGroup):
    """Rank 0 of `size`, alone: a sum over ranks is `size` times its own part, a gather `size` copies."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size)
        self._device = device

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * self.size

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)

    def exchange_rows(self, x: Tensor) -> Tensor:
        return x[:: self.size].expand(self.size, -1, -1).contiguous()

    def peer_memory(self, _size: int) -> None:
        """None: what it has is `inboxes`'s."""

    def inboxes(self, rows: int, width: int, dtype: torch.dtype) -> Inboxes | None:
        """What goes to peer q arrives in this rank's own inbox, as q's. Fused norms are never sharded: their owner would wait."""
        if self._device.type != "cuda":
            return None
        sizes = [AllReduceInbox.bytes(self.size, rows, width, dtype), ArgmaxInbox.bytes(self.size, rows)]
        memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._device)
        sums, choices = memory.split(sizes)
        of_sums = [sums[peer * rows * width * dtype.itemsize :] for peer in range(self.size)]
        allreduce = AllReduceInbox(of_sums, 0, rows, width, dtype)
        allreduce.sharded_rows = 1 << 30
        of_choices = [choices[peer * rows * 16 :] for peer in range(self.size)]
        return Inboxes(allreduce, ArgmaxInbox(of_choices, 0, rows, allreduce.errors))
