"""What a rank keeps of each checkpoint tensor, and where. No torch at import."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from engine.errors import CheckpointError
from engine.geometry import Geometry, Layer, shard_kv_heads, shard_vocab
from engine.quantisation import UNQUANTISED, Quantisation
from engine.rank.load.tensor_table import Kind, Part, TensorTable
from engine.weight_formats import PLAIN, StoredTensor, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

    from engine.rank.shard import Shard

_WEIGHTS = ("matrix", "embedding", "ple_table")
_EVEN = {"q": 0, "gate": 0, "up": 0, "columns": 1, "depth": 2}  # parts that are even shares of a dimension


@dataclass(frozen=True)
class Cut:
    """Indices [start, stop) of dimension `dim` go to index `at` of the parameter."""

    dim: int
    start: int
    stop: int
    at: int = 0

    def rows(self, shape: tuple[int, ...]) -> range:
        if self.dim == 0:
            return range(self.start, self.stop)
        return range(shape[0])

    def index(self, first: int, stop: int) -> tuple[slice, ...]:
        rows = slice(first, stop)
        if self.dim == 0:
            return (rows,)
        return (rows, *(slice(None),) * (self.dim - 1), slice(self.start, self.stop))

    def target(self, parameter: "Tensor", first: int, stop: int) -> "Tensor":
        if self.dim == 0:
            return parameter[self.at + first - self.start : self.at + stop - self.start]
        return parameter[first:stop].narrow(self.dim, self.at, self.stop - self.start)


@dataclass(frozen=True)
class Target:
    """A rank's tensor, or one expert's part of it, and the cuts of a tensor of `shape` that fill
    it."""

    parameter: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    expert: int | None = None

    @property
    def kept(self) -> int:
        return sum(math.prod(self.shape) // self.shape[cut.dim] * (cut.stop - cut.start) for cut in self.cuts)

    def of(self, parameters: "Mapping[str, Tensor]") -> "Tensor":
        parameter = parameters[self.parameter]
        if self.expert is None:
            return parameter
        return parameter[self.expert]


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor and what one rank keeps of it.

    fan_in: columns of its matrix; weight: path of its `Weight`; scales: tensors without targets that its format's reader also
    takes
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    fan_in: int
    tensor: StoredTensor
    targets: tuple[Target, ...]
    weight: str | None
    weights: WeightFormat
    scales: tuple[str, ...] = ()

    @property
    def unread(self) -> tuple[str, ...]:
        module = self.name.removesuffix(self.tensor.suffix).removesuffix(".weight")
        return tuple(f"{module}.{name}" for name in self.weights.unread)

    def put(self, parameters: "Mapping[str, Tensor]", first: int, rows: "Tensor", *scales: "Tensor") -> None:
        packed = (rows,)
        if self.weights.reader is not None:
            packed = resolve_name(self.weights.reader)(rows, *scales)
        for target, tensor in zip(self.targets, packed, strict=True):
            for cut in target.cuts:
                held = cut.rows(self.shape)
                start = max(first, held.start)
                stop = min(first + len(rows), held.stop)
                if start < stop:
                    cut.target(target.of(parameters), start, stop).copy_(tensor[cut.index(start - first, stop - first)])


def pieces(
    tensors: TensorTable, geometry: Geometry, rank: int = 0, size: int = 1, weights: Quantisation = UNQUANTISED
) -> dict[str, Piece]:
    """Every checkpoint tensor, by published name, as `rank` of `size` cuts it. CheckpointError: a cut divides a block of the
    format."""
    by_name: dict[str, Piece] = {}
    for rule in tensors.rules:
        if rule.fused not in (None, weights.fused):
            continue
        for layer in geometry.layers if "{i}" in rule.name else geometry.layers[:1]:
            axes = {"one": 1, **vars(geometry), **vars(layer), **tensors.sizes(geometry, layer)}
            names = rule.shape.split()
            if all(axes[axis] for axis in (*names, rule.present)):
                shape = tuple(axes[axis] for axis in names)
                cuts = _cuts(rule.part, shape, geometry, layer, rank, size)
                for expert in range(axes["experts"]) if "{e}" in rule.name else (None,):
                    name = tensors.published_name(rule.name.format(i=layer.index, e=expert), geometry)
                    path = rule.parameter.format(i=layer.index)
                    if rule.kind == "matrix":
                        held = weights.format_of(name.removesuffix(".weight"))
                    else:
                        held = PLAIN
                    by_name.update((piece.name, piece) for piece in _stored(name, path, rule.kind, shape, cuts, held, expert))
    return by_name


def _stored(
    name: str, path: str, kind: Kind, shape: tuple[int, ...], cuts: tuple[Cut, ...], held: WeightFormat, expert: int | None
) -> Iterator[Piece]:
    weight = path if kind in _WEIGHTS else None
    targets = [
        Target(
            path if weight is None else f"{path}.{tensor.name}",
            tensor.shape(shape),
            tuple(_of_blocks(cut, tensor, shape, name + tensor.suffix) for cut in cuts),
            expert,
        )
        for tensor in held.tensors
    ]
    if held.reader is None:
        for target, tensor in zip(targets, held.saved, strict=True):
            yield Piece(name + tensor.suffix, tensor.shape(shape), kind, shape[-1], tensor, (target,), weight, held)
        return
    values, *scales = held.saved
    names = tuple(name + tensor.suffix for tensor in scales)
    yield Piece(name + values.suffix, values.shape(shape), kind, shape[-1], values, tuple(targets), weight, held, names)
    for tensor in scales:
        yield Piece(name + tensor.suffix, tensor.shape(shape), kind, shape[-1], tensor, (), weight, held)


def elements(tensors: TensorTable, geometry: Geometry) -> int:
    return sum(math.prod(piece.shape) for piece in pieces(tensors, geometry).values())


def _of_blocks(cut: Cut, tensor: StoredTensor, shape: tuple[int, ...], name: str) -> Cut:
    """A matrix's cut as that of a tensor with one element a block."""
    axis = cut.dim - len(shape)  # -2: rows, -1: columns
    unit = tensor.block[axis] if axis >= -2 else 1
    if unit == 0:
        return Cut(cut.dim, 0, 1)
    if cut.start % unit or cut.at % unit or (cut.stop % unit and cut.stop < shape[cut.dim]):
        raise CheckpointError(f"{name}: blocks of {unit} cannot be cut at {cut.start} and {cut.stop} of {shape[cut.dim]}")
    return Cut(cut.dim, cut.start // unit, -(-cut.stop // unit), cut.at // unit)


def _cuts(part: Part, shape: tuple[int, ...], geometry: Geometry, layer: Layer, rank: int, size: int) -> tuple[Cut, ...]:
    """Even shares; KV heads follow query heads, up rows follow gate rows."""
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
        half = shape[1] // 2
        share = shape[1] // 2 // size
        starts = (rank * share, half + rank * share)
        return tuple(Cut(1, start, start + share, index * share) for index, start in enumerate(starts))
    dim = _EVEN[part]
    share = shape[dim] // size
    return (Cut(dim, rank * share, (rank + 1) * share, share if part == "up" else 0),)


def allocate(
    model: "Shard", tensors: TensorTable, weights: Quantisation = UNQUANTISED
) -> "tuple[dict[str, Piece], dict[str, Tensor]]":
    """The pieces that fill the model's weights, and parameters by name. Rows after the vocabulary's end are zero."""
    needed = pieces(tensors, model.geometry, model.parallel.rank, model.parallel.size, weights)
    for path, held in {piece.weight: piece.weights for piece in needed.values() if piece.weight}.items():
        parent, _, name = path.rpartition(".")
        module = model.get_submodule(parent)
        try:
            setattr(module, name, getattr(module, name).stored_as(held))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    filled = dict.fromkeys(parameters, 0)
    for piece in needed.values():
        for target in piece.targets:
            filled[target.parameter] += target.kept
            if piece.kind in ("embedding", "ple_table"):
                rest = parameters[target.parameter][target.kept // piece.shape[1] :]
                filled[target.parameter] += rest.zero_().numel()
    wrong = [name for name, parameter in parameters.items() if filled[name] != parameter.numel()]
    assert not wrong, f"the table does not fill {wrong}"
    return needed, parameters
