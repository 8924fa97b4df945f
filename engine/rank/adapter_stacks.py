"""LoRA adapters on a rank: A and B of all adapters for each matrix, padded to one rank.

    a [adapters, parts * r, n]   b [adapters, m, r]      scale is multiplied into B in fp32, before the cast
    a matrix of experts          index: expert * adapters + adapter

A column-parallel matrix has its rows of B; a row-parallel one its columns of A. On layers without
V, what is added to K is added to V too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.rank.load.adapter_tensors import AdapterMatrix, AdapterTensors, adapter_pieces, map_adapters
from engine.rank.load.slices import Piece
from engine.rank.load.tensor_files import opened
from engine.rank.load.tensor_table import TensorTable
from engine.rank.shard import Shard
from kernels.experts import ExpertAdapters
from kernels.launch import next_power_of_2
from kernels.lora import LowRank, add_lora

_LEAST_RANK = 16  # kernels take powers of 2 from here on


class AdapterStack(nn.Module):
    """A and B of all adapters for one matrix. ends: of each part's outputs; experts: number of
    stacked matrices."""

    def __init__(self, ends: tuple[int, ...], a: Tensor, b: Tensor, experts: int) -> None:
        super().__init__()
        self.ends, self.experts = ends, experts
        self.a = nn.Parameter(a, requires_grad=False)
        self.b = nn.Parameter(b, requires_grad=False)

    def added(self, x: Tensor, index: Tensor, done: Tensor) -> LowRank:
        """index: int32 [T]; done: a word of this product alone, 0."""
        return LowRank(x, index, self.a, self.b, self.ends, done)

    def add(self, out: Tensor, x: Tensor, index: Tensor) -> None:
        """Add the adapters' products of x [T, n] to out [T, m]. index: int32 [T]."""
        add_lora(out, x, index, self.a, self.b, self.ends)

    def of_experts(self) -> ExpertAdapters:
        return ExpertAdapters(self.a, self.b, self.ends, len(self.a) // self.experts)


class _Place(NamedTuple):
    """Where a matrix's product is: module `owner`, part, expert."""

    owner: str
    part: int
    expert: int


@dataclass
class _Owner:
    """A matrix that adapters change."""

    ends: tuple[int, ...]  # of its parts
    columns: int  # of x on this rank
    dtype: torch.dtype
    experts: int = 1
    rank: int = 0  # the largest


def load_adapters(model: Shard, tensors: TensorTable, folders: Mapping[str, str]) -> None:
    """Empty on the meta device. CheckpointError names an adapter with a tensor that has no place,
    is not finite or changes nothing."""
    mapped = map_adapters(folders, tensors, model.geometry)
    if not mapped:
        return
    parallel = model.parallel
    known = adapter_pieces(tensors, model.geometry, parallel.rank, parallel.size)
    ranks: dict[str, int] = {}
    for adapter in mapped:
        for matrix in adapter.matrices:
            ranks |= {name: max(matrix.rank, ranks.get(name, 0)) for name in matrix.names}
    places, stacks = add_stacks(model, known, ranks, len(mapped))
    if model.device.type == "meta":
        return
    for index, adapter in enumerate(mapped):
        _fill(adapter, index, known, places, stacks)


def add_stacks(
    model: Shard, known: dict[str, Piece], ranks: Mapping[str, int], adapters: int
) -> tuple[dict[str, _Place], dict[str, AdapterStack]]:
    """ranks: the largest of each changed matrix, by name. Returns each matrix's place, and the
    stacks by path."""
    places, owners = _owners(known, model.dtype)
    for name, rank in ranks.items():
        owner = owners[places[name].owner]
        owner.rank = max(owner.rank, next_power_of_2(max(rank, _LEAST_RANK)))
    stacks = {path: _stack(owner, adapters, model.device) for path, owner in owners.items() if owner.rank}
    for path, stack in stacks.items():
        model.get_submodule(path).adapters = stack
    return places, stacks


def has_adapters(model: Shard) -> bool:
    return any(isinstance(module, AdapterStack) for module in model.modules())


def _owners(known: dict[str, Piece], dtype: torch.dtype) -> tuple[dict[str, _Place], dict[str, _Owner]]:
    """Places by matrix name, and owners by path."""
    parts: dict[str, list[str]] = {}
    for name, piece in known.items():
        if not piece.targets[0].expert:
            parts.setdefault(_path(piece), []).append(name)
    places: dict[str, _Place] = {}
    owners: dict[str, _Owner] = {}
    orders: dict[str, list[int]] = {}
    for path, names in parts.items():
        names.sort(key=lambda name: _rows(known[name])[0])
        orders[path] = [_rows(known[name])[0] for name in names]
        last = known[names[-1]]
        router = last.kind == "unpacked"
        owners[path] = _Owner(tuple(_rows(known[name])[1] for name in names), _columns(last)[1], torch.float32 if router else dtype)
    for name, piece in known.items():
        path = _path(piece)
        expert = piece.targets[0].expert or 0
        places[name] = _Place(path, orders[path].index(_rows(piece)[0]), expert)
        owners[path].experts = max(owners[path].experts, expert + 1)
    return places, owners


def _path(piece: Piece) -> str:
    return piece.weight or piece.targets[0].parameter.rpartition(".")[0]


def _rows(piece: Piece) -> tuple[int, int]:
    """The outputs [start, stop) of this rank's product that the matrix makes."""
    (cut,) = piece.targets[0].cuts
    if cut.dim == 0:
        return cut.at, cut.at + cut.stop - cut.start
    return 0, piece.shape[0]


def _columns(piece: Piece) -> tuple[int, int]:
    (cut,) = piece.targets[0].cuts
    if cut.dim == 0:
        return 0, piece.shape[1]
    return cut.start, cut.stop - cut.start


def _stack(owner: _Owner, adapters: int, device: torch.device) -> AdapterStack:
    count = adapters * owner.experts
    a = torch.zeros((count, len(owner.ends) * owner.rank, owner.columns), dtype=owner.dtype, device=device)
    if owner.experts == 1:  # an output's columns of all adapters lie together
        b = torch.zeros((owner.ends[-1], count, owner.rank), dtype=owner.dtype, device=device).transpose(0, 1)
    else:
        b = torch.zeros((count, owner.ends[-1], owner.rank), dtype=owner.dtype, device=device)
    return AdapterStack(owner.ends, a, b, owner.experts)


def _fill(
    adapter: AdapterTensors, index: int, known: dict[str, Piece], places: dict[str, _Place], stacks: dict[str, AdapterStack]
) -> None:
    config = adapter.config
    acting = 0
    with opened(config.file) as file:
        for matrix in adapter.matrices:
            a = _read(file, matrix.a, config.name)
            b = _read(file, matrix.b, config.name) * matrix.scale
            acting += _acts(a, b, matrix)
            for name, own_a, own_b in _halves(matrix, a, b):
                place = places[name]
                _put(stacks[place.owner], place, index, known[name], own_a, own_b)
    if not acting:
        raise CheckpointError(f"adapters.{config.name}: 0 of {len(adapter.matrices)} matrices act: it changes nothing")


def _read(file: Any, name: str, adapter: str) -> Tensor:
    tensor: Tensor = file.get_tensor(name).float()
    if not tensor.isfinite().all():
        raise CheckpointError(f"adapters.{adapter}: {name} has NaN or infinity")
    return tensor


def _acts(a: Tensor, b: Tensor, matrix: AdapterMatrix) -> bool:
    """Whether B A differs from zero, by the product with one asymmetric row."""
    experts = max(1, matrix.experts)
    inner = a.view(experts, matrix.rank, -1) @ torch.linspace(0.5, 1.5, a.shape[1])
    return bool((b.view(len(b), matrix.rank, experts) * inner.t()).any())


def _halves(matrix: AdapterMatrix, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    for expert in range(max(1, matrix.experts)):
        inner = a[expert * matrix.rank : (expert + 1) * matrix.rank]
        outer = b.view(len(b), matrix.rank, -1)[:, :, expert]
        for base, rows in zip(matrix.bases, outer.chunk(len(matrix.bases)), strict=True):
            yield matrix.name_of(base, expert), inner, rows


def _put(stack: AdapterStack, place: _Place, index: int, piece: Piece, a: Tensor, b: Tensor) -> None:
    (cut,) = piece.targets[0].cuts
    at = place.expert * (len(stack.a) // stack.experts) + index
    first, count = _columns(piece)
    start, stop = _rows(piece)
    rank = stack.b.shape[2]
    own = slice(place.part * rank, place.part * rank + len(a))
    stack.a[at, own] = a[:, first : first + count].to(stack.a)
    kept = b[cut.start : cut.stop] if cut.dim == 0 else b
    stack.b[at, start:stop, : len(a)] = kept.to(stack.b)
