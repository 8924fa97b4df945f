"""Gemma 4's vision encoders: the towers of 26B, 31B, E2B and E4B, and the 12B's embedder without layers.

    tower     h = W (2 p - 1) + X[x] + Y[y]                                     p: a patch of 16 x 16 pixels in [0, 1], at (x, y)
              h = h + norm( attention( norm(h) ) );  h = h + norm( mlp( norm(h) ) )     bidirectional in a picture
              c = mean(h of 3 x 3 patches) * sqrt(hidden), perhaps standardised
    embedder  c = LN( LN( W LN(p) + b ) + X[x] + Y[y] )                         p: 48 x 48 pixels
    row = W_out norm(c)

A step's pictures are one ragged batch; a cell's patches are consecutive rows. Products round as in transformers; norms, rotary
embedding and gate are fp32 with one cast.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.geometry import Layer
from engine.memory import ENCODER_ROWS
from engine.rank.graphs import StageGraphs
from engine.rank.models.architecture import Launches, MediaEncoder
from engine.rank.models.captured_layers import SIZES, CapturedLayers, Rows
from engine.rank.models.clipped import ClippedProduct
from engine.rank.models.gemma4_weights import BLOCK_NORMS
from engine.rank.shard import Shard
from engine.rank.upload import uploaded
from engine.vision_geometry import CELL, PATCH, SIDE, VisionGeometry
from kernels.activation import geglu
from kernels.axial_rope import axial_tables, head_norm, norm_axial_rope
from kernels.fused_allreduce_norm import Norms, fused_allreduce_norm
from kernels.norm import rms_norm
from kernels.packed import PackedRows
from kernels.qkv import inverse_frequencies
from kernels.ragged_attention import ragged_attention


class VisionEncoder(MediaEncoder):
    """Encodes pictures and frames uint8 [height, width, 3], sides multiples of 48. `encoded` gives
    [cells, hidden]."""

    geometry: VisionGeometry

    def inputs(self, data: Tensor) -> list[Tensor]:
        if data.dim() == 3:
            return [data]
        return list(data)

    def rows(self, one: Tensor) -> int:
        return one.shape[0] * one.shape[1] // SIDE**2

    def largest(self) -> list[Tensor]:
        return [torch.zeros((32 * SIDE, 32 * SIDE, 3), dtype=torch.uint8, device=self.device)] * (ENCODER_ROWS // 32**2)


class VisionBlock(nn.Module):
    def __init__(self, shard: Shard, layer: Layer) -> None:
        super().__init__()
        hidden = shard.geometry.hidden
        self._eps = shard.geometry.eps
        self._head_dim = layer.head_dim
        heads = shard.geometry.heads * layer.head_dim
        self.q, self.k, self.v = (ClippedProduct(shard, heads, hidden) for _ in range(3))
        self.o = ClippedProduct(shard, hidden, heads)
        self.gate, self.up = (ClippedProduct(shard, layer.intermediate, hidden) for _ in range(2))
        self.down = ClippedProduct(shard, hidden, layer.intermediate)
        self.q_norm = shard.parameter(layer.head_dim)
        self.k_norm = shard.parameter(layer.head_dim)
        self.norms = shard.norms(BLOCK_NORMS.values())

    def forward(self, h: Tensor, x: Tensor, next_norm: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor]:
        norms = self.norms
        h, x = self._sum(self._attend(x, rows), h, Norms(norms["post_attention"], norms["pre_mlp"]))
        return self._sum(self.down(geglu(self.gate(x), self.up(x))), h, Norms(norms["post_mlp"], next_norm))

    def _sum(self, part: Tensor, residual: Tensor, norms: Norms) -> tuple[Tensor, Tensor]:
        h, x = fused_allreduce_norm(part, residual, norms, self._eps)
        assert not isinstance(x, PackedRows)
        return h, h if x is None else x

    def _attend(self, x: Tensor, rows: Rows) -> Tensor:
        q, k, v = (product(x).view(len(x), -1, self._head_dim) for product in (self.q, self.k, self.v))
        q, k = (norm_axial_rope(y, w, rows.cos, rows.sin, self._eps) for y, w in ((q, self.q_norm), (k, self.k_norm)))
        attended = ragged_attention(q, k, head_norm(v, self._eps), rows.starts, rows.longest)
        return self.o(attended.flatten(1))  # type: ignore[no-any-return]


class Tower(VisionEncoder):
    def __init__(self, geometry: VisionGeometry, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, dtype, device)
        self.patches = self.matrix(geometry.hidden, 3 * PATCH**2)
        self.positions = self.parameter(2, geometry.positions, geometry.hidden)
        blocks = [VisionBlock(self, layer) for layer in geometry.layers]
        self.blocks = nn.ModuleList(blocks)
        self._pre_norms = [*(block.norms["pre_attention"] for block in blocks), None]  # of each layer's input; none after the last
        if geometry.standardize:
            self.std_bias, self.std_scale = self.parameter(geometry.hidden), self.parameter(geometry.hidden)
        layer = geometry.layers[0]
        self._frequencies = inverse_frequencies(layer.rope.theta, layer.rope.pairs, layer.head_dim // 2).to(device)
        self._captured: CapturedLayers | None = None

    def warm(self, *, graphs: bool) -> None:
        super().warm(graphs=graphs)
        if graphs:
            self.capture(StageGraphs(self.device))

    def capture(self, graphs: StageGraphs) -> None:
        shape = (2, SIZES[-1])
        states = torch.zeros((*shape, self.geometry.hidden), dtype=self.dtype, device=self.device)
        angles = torch.zeros((*shape, self.geometry.layers[0].head_dim // 2), dtype=torch.float32, device=self.device)
        self._captured = CapturedLayers(self._layers, len(self.blocks), states, angles, graphs)

    def encoded(self, pictures: Sequence[Tensor]) -> Launches:
        x, y, rows = self._rows(pictures)
        patches = (2 * (_patches(pictures, CELL) - 0.5)).to(self.dtype)
        h = functional.linear(patches, self.patches.weight) + (self.positions[0][x] + self.positions[1][y])
        normed = rms_norm(h, self._pre_norms[0], self.geometry.eps)
        if self._captured is not None and self._captured.fit(rows):
            h = yield from self._captured.pieces(h, normed, rows)
        else:
            for layer in range(len(self.blocks)):
                yield
                h, normed = self._layers(range(layer, layer + 1), h, normed, rows)
        means = (h.float() / CELL**2).view(-1, CELL**2, h.shape[1]).sum(1).to(self.dtype)
        pooled = means.float() * self.geometry.hidden**0.5
        if self.geometry.standardize:
            pooled = (pooled - self.std_bias.float()) * self.std_scale.float()
        return pooled.to(self.dtype)

    def _layers(self, layers: range, h: Tensor, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        for layer in layers:
            h, x = self.blocks[layer](h, x, self._pre_norms[layer + 1], rows)
        return h, x

    def _rows(self, pictures: Sequence[Tensor]) -> tuple[Tensor, Tensor, Rows]:
        counts = [picture.numel() // (3 * PATCH**2) for picture in pictures]
        host = _positions(pictures, CELL)
        starts = np.cumsum([0, *counts])
        packed = uploaded(torch.from_numpy(np.concatenate([host.ravel(), starts])), self.device)
        x, y = packed[: host.size].view(2, -1)
        return x, y, Rows(*axial_tables(x, y, self._frequencies), packed[host.size :].int(), max(counts))


class Affine(nn.Module):
    def __init__(self, shard: Shard, *shape: int) -> None:
        super().__init__()
        self.weight = shard.parameter(*shape)
        self.bias = shard.parameter(shape[0])

    def norm(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class VisionEmbedder(VisionEncoder):
    def __init__(self, geometry: VisionGeometry, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, dtype, device)
        hidden = geometry.hidden
        cell = 3 * SIDE**2
        self.patch_norm, self.dense, self.dense_norm = Affine(self, cell), Affine(self, hidden, cell), Affine(self, hidden)
        self.positions, self.position_norm = self.parameter(geometry.positions, 2, hidden), Affine(self, hidden)

    def encoded(self, pictures: Sequence[Tensor]) -> Launches:
        yield
        x, y = uploaded(torch.from_numpy(_positions(pictures, 1)), self.device)
        h = self.dense_norm.norm(self.dense(self.patch_norm.norm(_patches(pictures, 1).to(self.dtype))))
        return self.position_norm.norm(h + (self.positions[x, 0] + self.positions[y, 1]))


def _patches(pictures: Sequence[Tensor], cell: int) -> Tensor:
    """uint8 [height, width, 3] each -> fp32 [patches, pixels], 0 to 1; a cell's patches are consecutive."""
    side = SIDE // cell
    cut = [picture.view(len(picture) // SIDE, cell, side, -1, cell, side, 3) for picture in pictures]
    patches = [one.permute(0, 3, 1, 4, 2, 5, 6).reshape(-1, 3 * side**2) for one in cut]
    return torch.cat(patches) * (1 / 255)


def _positions(pictures: Sequence[Tensor], cell: int) -> np.ndarray:
    return np.concatenate(
        [patch_positions(len(picture) // SIDE, picture.shape[1] // SIDE, cell) for picture in pictures], axis=1
    )


@lru_cache(maxsize=1024)
def patch_positions(rows: int, columns: int, cell: int) -> np.ndarray:
    """int64 [2, patches]: x and y of each patch of rows x columns cells of cell x cell patches."""
    cell_y, cell_x, y, x = np.indices((rows, columns, cell, cell)).reshape(4, -1)
    return np.stack([cell * cell_x + x, cell * cell_y + y])
