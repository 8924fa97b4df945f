"""Gemma 4's audio encoders: the conformer tower of E2B and E4B, and the 12B's projection of raw samples.

    frames [f, 128] --two convolutions, each halves them--> x [ceil(f / 4), hidden]
    each layer   x = x + ff(x) / 2;  x = x + norm( attention( norm(x) ) );  x = x + convolution(x);  x = norm( x + ff'(x) / 2 )
    soft token   = W norm( W' x + b )          norm without weight; the 12B's: W norm(640 samples)

Clips are a ragged batch: a row sees at most `reach` rows, itself and earlier ones of its clip.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.audio_geometry import EPS, AudioGeometry
from engine.memory import ENCODER_ROWS
from engine.rank.models.architecture import Launches, MediaEncoder
from engine.rank.models.clipped import ClippedProduct
from engine.rank.shard import Shard
from engine.rank.upload import uploaded
from kernels.norm import rms_norm


class Before(NamedTuple):
    """Rows int64 [T, n] that each row sees, nearest first; none: bool, where there is no such row."""

    rows: Tensor
    none: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], count: int, device: torch.device) -> "Before":
        counts = torch.tensor(lengths)
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)
        rows = torch.arange(sum(lengths))[:, None] - torch.arange(count)
        none = rows < first[:, None]
        return cls(uploaded(rows.maximum(first[:, None]), device), uploaded(none, device))  # of its own clip: 0 x NaN is NaN


class Subsample(nn.Module):
    def __init__(self, shard: Shard, geometry: AudioGeometry) -> None:
        super().__init__()
        first, second = geometry.channels
        self.convolutions = nn.ParameterList([shard.parameter(first, 1, 3, 3), shard.parameter(second, first, 3, 3)])
        self.norms = nn.ParameterList([shard.parameter(first), shard.parameter(second)])
        self.out = shard.matrix(geometry.hidden, geometry.features // 4 * second)

    def forward(self, clips: Sequence[Tensor]) -> Tensor:
        """clips [f, 128] each -> [T, hidden]."""
        return functional.linear(torch.cat([self._convolved(clip) for clip in clips]), self.out.weight)

    def _convolved(self, clip: Tensor) -> Tensor:
        x = clip[None, None]
        for weight, norm in zip(self.convolutions, self.norms, strict=True):
            x = functional.conv2d(x, weight, stride=2, padding=1).movedim(1, 3)
            x = functional.relu(functional.layer_norm(x, norm.shape, norm, eps=EPS)).movedim(3, 1)
        return x[0].permute(1, 2, 0).flatten(1)


class FeedForward(nn.Module):
    """norm( W silu( W' norm(x) ) )"""

    def __init__(self, shard: Shard, width: int) -> None:
        super().__init__()
        self.pre = shard.parameter(width)
        self.post = shard.parameter(width)
        self.up = ClippedProduct(shard, 4 * width, width)
        self.down = ClippedProduct(shard, width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(self.down(functional.silu(self.up(rms_norm(x, self.pre, EPS)))), self.post, EPS)


class AudioAttention(nn.Module):
    """softmax( cap tanh( q (k + r) / cap ) ) v in fp32; r depends on the distance of two rows."""

    def __init__(self, shard: Shard, geometry: AudioGeometry) -> None:
        super().__init__()
        width = geometry.hidden
        self._shape = (-1, geometry.heads, width // geometry.heads)
        self._cap = geometry.cap
        self.q, self.k, self.v, self.o = (ClippedProduct(shard, width, width) for _ in range(4))
        self.relative = shard.matrix(width, width)
        self.scale = shard.parameter(width // geometry.heads)

    def forward(self, x: Tensor, distances: Tensor, before: Before) -> Tensor:
        q, k, v = (product(x).float().view(self._shape) for product in (self.q, self.k, self.v))
        q = q * (q.shape[2] ** -0.5 / math.log(2)) * functional.softplus(self.scale)
        relative = functional.linear(distances, self.relative.weight).float().view(self._shape)
        near = k[before.rows] * math.log2(1 + math.e) + relative
        logits = self._cap * torch.tanh(torch.einsum("thd,tnhd->thn", q, near) / self._cap)
        shares = logits.masked_fill(before.none[:, None], -torch.inf).softmax(-1)
        return self.o(torch.einsum("thn,tnhd->thd", shares, v[before.rows]).flatten(1).to(x.dtype))


class Convolution(nn.Module):
    """W silu( norm( depthwise( glu( W' norm(x) ) ) ) ), over a row and earlier ones."""

    def __init__(self, shard: Shard, geometry: AudioGeometry) -> None:
        super().__init__()
        width = geometry.hidden
        self.pre = shard.parameter(width)
        self.norm = shard.parameter(width)
        self.start = ClippedProduct(shard, 2 * width, width)
        self.end = ClippedProduct(shard, width, width)
        self.depthwise = shard.parameter(width, 1, geometry.kernel)

    def forward(self, x: Tensor, before: Before) -> Tensor:
        x = functional.glu(self.start(rms_norm(x, self.pre, EPS)))
        count = self.depthwise.shape[2]
        near = x[before.rows[:, :count]].masked_fill(before.none[:, :count, None], 0)
        x = torch.einsum("tnc,cn->tc", near, self.depthwise[:, 0].flip(1))
        return self.end(functional.silu(rms_norm(x, self.norm, EPS)))


class AudioBlock(nn.Module):
    def __init__(self, shard: Shard, geometry: AudioGeometry) -> None:
        super().__init__()
        width = geometry.hidden
        self.first = FeedForward(shard, width)
        self.second = FeedForward(shard, width)
        self.attention = AudioAttention(shard, geometry)
        self.convolution = Convolution(shard, geometry)
        self.pre_attention, self.post_attention, self.norm = (shard.parameter(width) for _ in range(3))

    def forward(self, x: Tensor, distances: Tensor, before: Before) -> Tensor:
        x = x + 0.5 * self.first(x)
        attended = self.attention(rms_norm(x, self.pre_attention, EPS), distances, before)
        x = x + rms_norm(attended, self.post_attention, EPS)
        x = x + self.convolution(x, before)
        return rms_norm(x + 0.5 * self.second(x), self.norm, EPS)


class AudioEncoder(MediaEncoder):
    """Clips are fp32 [rows, features]. Without a tower it projects the rows."""

    geometry: AudioGeometry

    def inputs(self, data: Tensor) -> list[Tensor]:
        return [data]

    def rows(self, one: Tensor) -> int:
        return self.geometry.tokens(len(one))

    def largest(self) -> list[Tensor]:
        clip = torch.zeros((3000, self.geometry.features), device=self.device)
        return [clip] * (ENCODER_ROWS // self.rows(clip))

    def encoded(self, clips: Sequence[Tensor]) -> Launches:
        yield
        return torch.cat(list(clips)).to(self.dtype)


class AudioTower(AudioEncoder):
    def __init__(self, geometry: AudioGeometry, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, dtype, device)
        self.subsample = Subsample(self, geometry)
        self.blocks = nn.ModuleList(AudioBlock(self, geometry) for _ in geometry.layers)
        self.last, self.bias = self.parameter(geometry.output, geometry.hidden), self.parameter(geometry.output)
        half = geometry.hidden // 2
        rates = torch.exp(torch.arange(half) * -(math.log(10_000) / max(half - 1, 1)))
        angles = torch.arange(geometry.reach)[:, None] * rates  # of a row's distance to one before it
        self._distances = torch.cat([angles.sin(), angles.cos()], 1).to(device, dtype)

    def encoded(self, clips: Sequence[Tensor]) -> Launches:
        before = Before.of([self.geometry.tokens(len(clip)) for clip in clips], self.geometry.reach, self.device)
        x = self.subsample([clip.to(self.dtype) for clip in clips])
        for block in self.blocks:
            yield
            x = block(x, self._distances, before)
        return functional.linear(x, self.last, self.bias)
