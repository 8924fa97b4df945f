"""Gemma 4's assistants: drafters of four layers that read their target's K and V (`engine.rank.models.assistant_geometry`).

    x = W_pre [ E_target[id] * sqrt(backbone) ; hidden ]      hidden: the target's final-normed row, or the pass before's `W_post y`
    y = norm( 4 layers(x) )                                   queries alone; K and V are the target's, up to the row's position
    next id = argmax( y E^T ),  hidden = W_post y

A pass gives one draft a row; the target's embedding gives the rows of ids.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.geometry import Geometry
from engine.rank.attention.base import AttentionBackend
from engine.rank.batch import ForwardBatch, RopeKey
from engine.rank.kv import KVCache
from engine.rank.load.loader import load
from engine.rank.load.tensor_files import headers, opened
from engine.rank.models.assistant_geometry import AssistantGeometry
from engine.rank.models.assistant_weights import ORDER, TENSORS
from engine.rank.models.gemma4 import Block, LayerStep, frequencies_of
from engine.rank.models.layers import AllReduceNorm, Shard, VocabTable
from engine.rank.models.module import Module
from engine.rank.parallel import Parallel


class Head(Protocol):
    """The drafter's head: final rows [R, hidden] -> the best ids int32 [R], the same on every rank."""

    def __call__(self, rows: Tensor) -> Tensor: ...


class DenseHead(Module):
    """The drafter's own table, cut along the vocabulary."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self._parallel = shard.parallel
        self.table = VocabTable(shard, shard.geometry.vocab, shard.geometry.hidden)

    def forward(self, rows: Tensor) -> Tensor:
        """Of equal logits the lowest id."""
        logits = self.table.logits(rows)
        best = logits.max(dim=1)
        ids = best.indices + self._parallel.rank * logits.shape[1]
        gathered = self._parallel.all_gather(torch.stack([best.values, ids.float()], dim=1)).view(len(rows), -1, 2)
        winner = gathered[:, :, 0].argmax(dim=1, keepdim=True)  # ranks hold ascending ids; an id is exact below 2^24
        return gathered[:, :, 1].gather(1, winner).flatten().int()


class OrderedHead(Module):
    """A table whose rows lie by cluster, each with a centroid; of the best clusters alone rows are read. Every rank has all of it.

    order: int64 [vocab], the id of each row
    """

    def __init__(self, shard: Shard, geometry: AssistantGeometry) -> None:
        super().__init__()
        self._clusters, self._top_k = geometry.centroids, geometry.centroid_top_k
        self.weight = shard.parameter(geometry.vocab, geometry.hidden)
        self.centroids = shard.matrix(geometry.centroids, geometry.hidden)
        self.order = torch.arange(geometry.vocab, device=shard.device)

    def sort(self, order: Tensor) -> None:
        """Put the rows, which are in the ids' order, in this one. CheckpointError: it is no permutation."""
        if not torch.equal(order.sort().values, torch.arange(len(self.weight), device=order.device)):
            raise CheckpointError(f"{ORDER} is no permutation of the vocabulary")
        self.order = order.to(self.weight.device)
        self.weight.copy_(self.weight[self.order])

    def forward(self, rows: Tensor) -> Tensor:
        """Of equal logits that of the best cluster."""
        clusters = self.centroids.fp32(rows).topk(self._top_k).indices
        table = self.weight.view(self._clusters, -1, rows.shape[1])[clusters].flatten(1, 2)
        best = torch.bmm(table, rows[:, :, None]).squeeze(2).argmax(dim=1, keepdim=True)
        ids = self.order.view(self._clusters, -1)[clusters].flatten(1)
        return ids.gather(1, best).flatten().int()


class Assistant(Shard):
    """One rank's shard of a drafter."""

    def __init__(self, geometry: Geometry, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        assert isinstance(geometry, AssistantGeometry), geometry
        super().__init__(geometry, parallel, dtype, device)
        self.pre = self.matrix(geometry.hidden, 2 * geometry.backbone)
        self.blocks = nn.ModuleList(Block(self, layer) for layer in geometry.layers)
        self.norm = self.parameter(geometry.hidden)
        self.post = self.matrix(geometry.backbone, geometry.hidden)
        self.head: Head
        self.head = OrderedHead(self, geometry) if geometry.centroids else DenseHead(self)
        self.frequencies: dict[RopeKey, Tensor] = frequencies_of(geometry, device)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        batch: ForwardBatch,
        cache: KVCache,
        attention: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """embedded and hidden [R, backbone] of decode rows -> (hidden of the next pass [R, backbone], final rows [R, hidden]).

        A row sees keys up to its position; its rotary embedding is of `batch.rope`.
        """
        norm = AllReduceNorm(self.parallel, None, self.geometry.eps)
        step = LayerStep(batch, cache, attention, attention.prepare(batch), norm, None)
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        first = [block.norms["pre_attention"] for block in blocks]
        h, x = norm(self.pre(torch.cat([embedded, hidden], dim=1)), None, None, first[0], summed=True)
        for block, next_norm in zip(blocks, [*first[1:], self.norm], strict=True):
            h, x = block(h, x, next_norm, step)
        return self.post(x), x

    def drafts(
        self, count: int, ids: Tensor, hidden: Tensor, embed: Callable[[Tensor], Tensor], batch: ForwardBatch,
        cache: KVCache, attention: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        """int32 [R, count]: the drafts behind ids int32 [R], whose rows the target's final `hidden` [R, backbone] gave.

        embed: the target's scaled rows of ids
        """
        drafted = []
        for _ in range(count):
            hidden, rows = self(embed(ids), hidden, batch, cache, attention)
            ids = self.head(rows)
            drafted.append(ids)
        return torch.stack(drafted, dim=1)


def load_assistant(model: Assistant, folder: Path, progress: bool = False) -> None:
    """Fill a drafter from the checkpoint in `folder`; CheckpointError as `load`, and for clusters that do not hold each id once."""
    load(model, TENSORS, folder, progress)
    if isinstance(model.head, OrderedHead):
        header = headers(folder, TENSORS, model.geometry)[0].get(ORDER)
        if header is None:
            raise CheckpointError(f"{folder}: {ORDER} is missing")
        with opened(header.path) as file:
            model.head.sort(file.get_tensor(ORDER))
