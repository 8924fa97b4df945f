"""A vision tower's layers in CUDA graphs, for few pictures, where launches would dominate."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.memory import CAPTURED_PATCHES
from engine.rank.graphs import StageGraphs
from engine.rank.models.architecture import Launches

PICTURES, LAYERS = 4, 4  # of a batch, at most; of a graph
SIZES = (*range(288, 2593, 288), *range(3168, CAPTURED_PATCHES + 1, 576))  # 2520 patches: a picture of the default budget, or less


class Rows(NamedTuple):
    cos: Tensor  # fp32 [T, head_dim / 2], as sin
    sin: Tensor
    starts: Tensor  # int32 [pictures + 1]
    longest: int  # patches of the largest picture


RunLayers = Callable[[range, Tensor, Tensor, Rows], tuple[Tensor, Tensor]]


class CapturedLayers:
    """`run` computes some of `count` layers and returns h and its normed form x.

    Input buffers: states [2, SIZES[-1], hidden] for h and x; angles fp32 [2, SIZES[-1], head_dim / 2].
    """

    def __init__(self, run: RunLayers, count: int, states: Tensor, angles: Tensor, graphs: StageGraphs) -> None:
        self._graphs = graphs
        self._states = states
        self._parts = [range(first, min(first + LAYERS, count)) for first in range(0, count, LAYERS)]
        self._rows = Rows(angles[0], angles[1], angles.new_zeros(PICTURES + 1, dtype=torch.int32), SIZES[-1])
        for size in reversed(SIZES):
            rows = Rows(angles[0, :size], angles[1, :size], self._rows.starts, size)  # a picture may have any number of them
            h, x = states[:, :size]
            graphs.warm(partial(run, self._parts[0], h, x, rows))
            for part in self._parts:
                h, x = graphs.capture(partial(run, part, h, x, rows), "layers", size, part.start)

    def fit(self, rows: Rows) -> bool:
        return len(rows.cos) <= SIZES[-1] and len(rows.starts) <= PICTURES + 1

    def pieces(self, h: Tensor, x: Tensor, rows: Rows) -> Launches:
        """h [T, hidden] and its normed form x -> h after all layers."""
        count = len(h)
        pictures = len(rows.starts)
        own = self._rows
        size = next(size for size in SIZES if size >= count)
        self._states[0, :count], self._states[1, :count] = h, x
        own.cos[:count], own.sin[:count] = rows.cos, rows.sin
        own.starts[:pictures], own.starts[pictures:] = rows.starts, rows.starts[-1:]
        for part in self._parts:
            yield
            h, _ = self._graphs.replay("layers", size, part.start)
        return h[:count]
