"""What a rank keeps of each tensor of a checkpoint, and where it goes. No torch at import: shapes are asked for without it."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import CheckpointError
from engine.geometry import Geometry, Layer, shard_kv_heads, shard_vocab
from engine.rank.load.tensor_table import Kind, Part, TensorTable
from engine.weight_formats import PLAIN, StoredTensor, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

    from engine.rank.shard import Shard

_WEIGHTS = ("matrix", "embedding", "ple_table")
_EVEN = {"q": 0, "gate": 0, "up": 0, "columns": 1, "depth": 2}  # parts that are even shares of a dimension


@dataclass(frozen=True)
class Cut:
    """Indices [start, stop) of a tensor's dimension `dim`, and the index `at` of the parameter where they begin."""

    dim: int
    start: int
    stop: int
    at: int = 0

    def rows(self, shape: tuple[int, ...]) -> range:
        """Returns the rows of the tensor that this cut takes something of."""
        return range(self.start, self.stop) if self.dim == 0 else range(shape[0])

    def index(self, first: int, stop: int) -> tuple[slice, ...]:
        """Returns the index of rows [first, stop), cut."""
        inner = () if self.dim == 0 else (*(slice(None),) * (self.dim - 1), slice(self.start, self.stop))
        return (slice(first, stop), *inner)

    def target(self, parameter: "Tensor", first: int, stop: int) -> "Tensor":
        """Returns the view of `parameter` that the tensor's rows [first, stop) go to."""
        if self.dim == 0:
            return parameter[self.at + first - self.start : self.at + stop - self.start]
        return parameter[first:stop].narrow(self.dim, self.at, self.stop - self.start)


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor of a given model and what one rank keeps of it. fan_in: columns of its matrix."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    cuts: tuple[Cut, ...]
    kind: Kind
    fan_in: int
    tensor: StoredTensor
    weights: WeightFormat

    @property
    def weight(self) -> str | None:
        """The path of the `Weight` that it is a tensor of."""
        return self.parameter.rpartition(".")[0] if self.kind in _WEIGHTS else None

    @property
    def kept(self) -> int:
        """Elements that the rank keeps."""
        return sum(math.prod(self.shape) // self.shape[cut.dim] * (cut.stop - cut.start) for cut in self.cuts)


def pieces(
    tensors: TensorTable, geometry: Geometry, rank: int = 0, size: int = 1, weights: WeightFormat = PLAIN
) -> dict[str, Piece]:
    """Returns every tensor that the checkpoint must hold, by its published name, as `rank` of `size` cuts it. CheckpointError: it
    would cut a block of the format's."""
    by_name = {}
    for rule in tensors.rules:
        held = weights if rule.kind == "matrix" else PLAIN
        for layer in geometry.layers if "{i}" in rule.name else geometry.layers[:1]:
            axes = {"one": 1, **vars(geometry), **vars(layer), **tensors.sizes(geometry, layer)}
            names = rule.shape.split()
            if all(axes[axis] for axis in (*names, rule.present)):
                shape = tuple(axes[axis] for axis in names)
                cuts = _cuts(rule.part, shape, geometry, layer, rank, size)
                for tensor in held.tensors:
                    name = tensors.published_name(rule.name.format(i=layer.index), geometry) + tensor.suffix
                    parameter = rule.parameter.format(i=layer.index) + (f".{tensor.name}" if rule.kind in _WEIGHTS else "")
                    kept = tuple(_of_blocks(cut, tensor, shape, name) for cut in cuts)
                    by_name[name] = Piece(name, tensor.shape(shape), parameter, kept, rule.kind, shape[-1], tensor, held)
    return by_name


def elements(tensors: TensorTable, geometry: Geometry) -> int:
    """Counts the elements of the whole model's matrices and vectors, whatever they are stored as."""
    return sum(math.prod(piece.shape) for piece in pieces(tensors, geometry).values())


def _of_blocks(cut: Cut, tensor: StoredTensor, shape: tuple[int, ...], name: str) -> Cut:
    """Turns a matrix's cut into that of a tensor with an element for each block."""
    axis = cut.dim - len(shape)  # -2: rows, -1: columns
    unit = tensor.block[axis] if axis >= -2 else 1
    if unit == 0:
        return Cut(cut.dim, 0, 1)
    if cut.start % unit or cut.at % unit or (cut.stop % unit and cut.stop < shape[cut.dim]):
        raise CheckpointError(f"{name}: blocks of {unit} cannot be cut at {cut.start} and {cut.stop} of {shape[cut.dim]}")
    return Cut(cut.dim, cut.start // unit, -(-cut.stop // unit), cut.at // unit)


def _cuts(part: Part, shape: tuple[int, ...], geometry: Geometry, layer: Layer, rank: int, size: int) -> tuple[Cut, ...]:
    """Returns what `rank` keeps: even shares, its KV heads behind its query heads, its up rows behind its gate rows."""
    if part == "whole":
        return (Cut(0, 0, shape[0]),)
    if part == "vocab":
        rows = shard_vocab(shape[0], size, rank)
        return (Cut(0, rows.start, rows.stop),)
    if part in ("k", "v"):
        heads = shard_kv_heads(geometry.heads, layer.kv_heads, size, rank)
        before = geometry.heads // size + (len(heads) if part == "v" else 0)
        return (Cut(0, *(layer.head_dim * head for head in (heads.start, heads.stop, before))),)
    if part == "gate_up":
        half, share = shape[1] // 2, shape[1] // 2 // size
        starts = (rank * share, half + rank * share)
        return tuple(Cut(1, start, start + share, index * share) for index, start in enumerate(starts))
    dim = _EVEN[part]
    share = shape[dim] // size
    return (Cut(dim, rank * share, (rank + 1) * share, share if part == "up" else 0),)


def allocate(model: "Shard", tensors: TensorTable, weights: WeightFormat = PLAIN) -> "tuple[dict[str, Piece], dict[str, Tensor]]":
    """Give the model's weights their tensors; returns the pieces that fill them, and its parameters by name. Every element of each
    is filled by exactly one piece, but for what lies behind a vocabulary's end, which is zero."""
    needed = pieces(tensors, model.geometry, model.parallel.rank, model.parallel.size, weights)
    for path, held in {piece.weight: piece.weights for piece in needed.values() if piece.weight}.items():
        parent, _, name = path.rpartition(".")
        module = model.get_submodule(parent)
        setattr(module, name, getattr(module, name).stored_as(held))
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    filled = dict.fromkeys(parameters, 0)
    for piece in needed.values():
        filled[piece.parameter] += piece.kept
        if piece.kind in ("embedding", "ple_table"):
            rest = parameters[piece.parameter][piece.kept // piece.shape[1] :]
            filled[piece.parameter] += rest.zero_().numel()
    wrong = [name for name, parameter in parameters.items() if filled[name] != parameter.numel()]
    assert not wrong, f"the table does not fill {wrong}"
    return needed, parameters
