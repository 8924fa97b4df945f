"""What a rank keeps of each tensor of a checkpoint, and where it goes. No torch at import: shapes are
asked for without it."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.geometry import Geometry, Layer, shard_kv_heads, shard_vocab
from engine.rank.load.tensor_table import Init, Part, TensorTable

if TYPE_CHECKING:
    from torch import Tensor, nn

_EVEN = {"q": 0, "gate": 0, "up": 0, "columns": 1, "depth": 2}  # parts that are even shares of a dimension


@dataclass(frozen=True)
class Cut:
    """Indices [start, stop) of a tensor's dimension `dim`, and the index `at` of the parameter where they begin."""

    dim: int
    start: int
    stop: int
    at: int = 0

    def rows(self, shape: tuple[int, ...]) -> range:
        """Rows of the tensor that this cut takes something of."""
        return range(self.start, self.stop) if self.dim == 0 else range(shape[0])

    def index(self, first: int, stop: int) -> tuple[slice, ...]:
        """Index of rows [first, stop), cut."""
        inner = () if self.dim == 0 else (*(slice(None),) * (self.dim - 1), slice(self.start, self.stop))
        return (slice(first, stop), *inner)

    def target(self, parameter: "Tensor", first: int, stop: int) -> "Tensor":
        """The view of `parameter` that the tensor's rows [first, stop) go to."""
        if self.dim == 0:
            return parameter[self.at + first - self.start : self.at + stop - self.start]
        return parameter[first:stop].narrow(self.dim, self.at, self.stop - self.start)


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor of a given model and what one rank keeps of it."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    cuts: tuple[Cut, ...]
    init: Init

    @property
    def kept(self) -> int:
        """Elements that the rank keeps."""
        return sum(math.prod(self.shape) // self.shape[cut.dim] * (cut.stop - cut.start) for cut in self.cuts)


def pieces(tensors: TensorTable, geometry: Geometry, rank: int = 0, size: int = 1) -> dict[str, Piece]:
    """Every tensor that the checkpoint must hold, by its published name, as `rank` of `size` cuts it."""
    found = {}
    for rule in tensors.rules:
        for layer in geometry.layers if "{i}" in rule.name else geometry.layers[:1]:
            axes = tensors.sizes(geometry, layer)
            if all(axes[axis] for axis in (*rule.shape, rule.present)):
                name = tensors.published_name(rule.name.format(i=layer.index), geometry)
                shape = tuple(axes[axis] for axis in rule.shape)
                cuts = _cuts(rule.part, shape, geometry, layer, rank, size)
                found[name] = Piece(name, shape, rule.parameter.format(i=layer.index), cuts, rule.init)
    return found


def _cuts(part: Part, shape: tuple[int, ...], geometry: Geometry, layer: Layer, rank: int, size: int) -> tuple[Cut, ...]:
    """What `rank` keeps: even shares, its KV heads behind its query heads, its up rows behind its gate rows."""
    if part == "whole":
        return (Cut(0, 0, shape[0]),)
    if part == "vocab":
        rows = shard_vocab(shape[0], size, rank)
        return (Cut(0, rows.start, rows.stop),)
    if part in ("k", "v"):
        return (_kv_cut(part, geometry, layer, rank, size),)
    if part == "gate_up":
        half, share = shape[1] // 2, shape[1] // 2 // size
        starts = (rank * share, half + rank * share)
        return tuple(Cut(1, start, start + share, place * share) for place, start in enumerate(starts))
    dim = _EVEN[part]
    share = shape[dim] // size
    return (Cut(dim, rank * share, (rank + 1) * share, share if part == "up" else 0),)


def _kv_cut(part: Part, geometry: Geometry, layer: Layer, rank: int, size: int) -> Cut:
    heads = shard_kv_heads(geometry.heads, layer.kv_heads, size, rank)
    before = geometry.heads // size + (len(heads) if part == "v" else 0)
    return Cut(0, heads.start * layer.head_dim, heads.stop * layer.head_dim, before * layer.head_dim)


def parameters_of(model: "nn.Module", needed: dict[str, Piece]) -> "dict[str, Tensor]":
    """The model's parameters by name; every element of each is filled by exactly one piece, but for what lies behind a vocabulary's
    end, which is zero."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    filled = dict.fromkeys(parameters, 0)
    for piece in needed.values():
        filled[piece.parameter] += piece.kept
        if piece.init in ("embedding", "ple_table"):
            behind = parameters[piece.parameter][piece.kept // piece.shape[1] :]
            filled[piece.parameter] += behind.zero_().numel()
    wrong = [name for name, parameter in parameters.items() if filled[name] != parameter.numel()]
    assert not wrong, f"the table does not fill {wrong}"
    return parameters
