"""Gemma 4's assistants: drafters of four layers that read their target's K and V.

    x = W_pre [ E_target[id] * sqrt(backbone) ; hidden ]      hidden: the target's final-normed row, or `W_post y` of the last pass
    y = norm( 4 layers(x) )                                   queries only; K and V are the target's, up to the row's position
    next id = argmax( y E^T )
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.quantisation import Quantisation
from engine.rank.batch import RopeTensors, frequencies_of
from engine.rank.load.loader import load
from engine.rank.load.tensor_files import headers, opened
from engine.rank.load.tensor_table import TensorTable
from engine.rank.models.assistant_geometry import AssistantGeometry
from engine.rank.models.assistant_weights import ORDER
from engine.rank.models.gemma4 import Block, LayerStep, pre_norms
from engine.rank.models.layers import VocabTable
from engine.rank.parallel import Parallel
from engine.rank.sampler import Sampler
from engine.rank.shard import Shard
from kernels.choose import ArgmaxInbox, choose_best
from kernels.clusters import best_of_clusters
from kernels.linear import FP32
from kernels.sampling_batch import SamplingBatch


class DenseHead(nn.Module):
    """The drafter's own table, cut along the vocabulary.

    forward: final rows [R, hidden] -> int32 [R, 2] (`kernels.choose`), the same on every rank, written after the rows' inputs.
    """

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.table = VocabTable(shard, shard.geometry.vocab, shard.geometry.hidden)

    def forward(self, rows: Tensor, sampler: Sampler, batch: SamplingBatch, inbox: ArgmaxInbox | None) -> Tensor:
        return sampler.sample(self.table.logits(rows), batch, inbox)[0]


class OrderedHead(nn.Module):
    """Rows are grouped by cluster; only the best clusters are read. Not cut over ranks. order: int64 [vocab], the rows' ids."""

    def __init__(self, shard: Shard, geometry: AssistantGeometry) -> None:
        super().__init__()
        self._top_k = geometry.centroid_top_k
        self.weight = shard.parameter(geometry.vocab, geometry.hidden)
        self.centroids = shard.matrix(geometry.centroids, geometry.hidden)
        self.order = torch.arange(geometry.vocab, device=shard.device)

    def sort(self, order: Tensor) -> None:
        """Reorders rows from id order. CheckpointError if it is no permutation."""
        order = order.long()
        if not torch.equal(order.sort().values, torch.arange(len(self.weight))):
            raise CheckpointError(f"{ORDER} is no permutation of the vocabulary")
        self.order = order.to(self.weight.device)
        self.weight.copy_(self.weight[self.order])

    def forward(self, rows: Tensor, _sampler: Sampler, batch: SamplingBatch, _inbox: ArgmaxInbox | None) -> Tensor:
        scores = self.centroids.product(rows, FP32)
        clusters = scores.topk(self._top_k).indices
        chosen = rows.new_empty((len(rows), 2), dtype=torch.int32)
        choose_best(best_of_clusters(rows, self.weight, self.order, clusters, scores.shape[1]), batch, chosen, None)
        return chosen


class Assistant(Shard):
    def __init__(self, geometry: AssistantGeometry, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, parallel, dtype, device)
        self.pre = self.matrix(geometry.hidden, 2 * geometry.backbone)
        self.blocks = nn.ModuleList(Block(self, layer) for layer in geometry.layers)
        self.norm = self.parameter(geometry.hidden)
        self.post = self.matrix(geometry.backbone, geometry.hidden)
        self.head: DenseHead | OrderedHead = OrderedHead(self, geometry) if geometry.centroids else DenseHead(self)
        self.frequencies: RopeTensors = frequencies_of(geometry.layers, device)

    def forward(self, embedded: Tensor, hidden: Tensor, step: LayerStep) -> Tensor:
        """embedded and hidden [R, backbone] -> final rows [R, hidden]."""
        first_norm, *next_norms = pre_norms(self.blocks, self.norm)
        projected = self.pre.product(torch.cat([embedded, hidden], 1))
        h, x = step.exchange.norm(projected, None, first_norm.after(None))
        for block, next_norm in zip(self.blocks, next_norms, strict=True):
            h, x = block(h, x, next_norm, step)
        assert isinstance(x, Tensor)
        return x


def load_assistant(model: Assistant, tensors: TensorTable, folder: Path, weights: Quantisation) -> None:
    """CheckpointError as `load`, and if the clusters do not hold each id once."""
    load(model, tensors, folder, weights)
    if isinstance(model.head, OrderedHead):
        header = headers(folder, tensors, model.geometry)[0].get(ORDER)
        if header is None:
            raise CheckpointError(f"{folder}: {ORDER} is missing")
        with opened(header.path) as file:
            model.head.sort(file.get_tensor(ORDER))
