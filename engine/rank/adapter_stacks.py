"""LoRA adapters on a rank: A and B of all adapters for each matrix, padded to one LoRA rank.

    a [adapters, parts * r, n]   b [adapters, m, r]      scale is multiplied into B in fp32
    a matrix of experts          index: expert * adapters + adapter

Column-parallel matrices cut rows of B, row-parallel ones columns of A. On layers without V, what is added to K is also added to
V.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.rank.load.slices import Piece
from engine.rank.shard import Shard
from kernels.experts import ExpertAdapters
from kernels.launch import next_power_of_2
from kernels.lora import LowRank, add_lora

_LEAST_RANK = 16  # kernels take powers of 2 from here on


class AdapterStack(nn.Module):
    """ends: of each part's outputs; experts: stacked matrices."""

    def __init__(self, ends: tuple[int, ...], a: Tensor, b: Tensor, experts: int) -> None:
        super().__init__()
        self.ends = ends
        self.experts = experts
        self.a = nn.Parameter(a, requires_grad=False)
        self.b = nn.Parameter(b, requires_grad=False)

    def added(self, x: Tensor, index: Tensor, begun: Tensor) -> LowRank:
        """index: int32 [T]; begun: a word of this product alone, 0."""
        return LowRank(x, index, self.a, self.b, self.ends, begun)

    def add(self, out: Tensor, x: Tensor, index: Tensor) -> None:
        """Add the adapters' products of x [T, n] to out [T, m]. index: int32 [T]."""
        add_lora(out, x, index, self.a, self.b, self.ends)

    def of_experts(self) -> ExpertAdapters:
        return ExpertAdapters(self.a, self.b, self.ends, len(self.a) // self.experts)


class Place(NamedTuple):
    """Part `part` of the stack of module `owner`; `expert`: of a matrix of experts."""

    owner: str
    part: int
    expert: int


@dataclass
class _Owner:
    ends: tuple[int, ...]  # of its parts
    columns: int  # of x on this rank
    dtype: torch.dtype
    experts: int = 1
    rank: int = 0  # the largest


def add_stacks(
    model: Shard, known: dict[str, Piece], ranks: Mapping[str, int], adapters: int
) -> tuple[dict[str, Place], dict[str, AdapterStack]]:
    """ranks: the largest LoRA rank of each changed matrix. Returns each matrix's place, and stacks by path."""
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


def _owners(known: dict[str, Piece], dtype: torch.dtype) -> tuple[dict[str, Place], dict[str, _Owner]]:
    parts: dict[str, list[str]] = {}
    for name, piece in known.items():
        if not piece.targets[0].expert:
            parts.setdefault(_path(piece), []).append(name)
    places: dict[str, Place] = {}
    owners: dict[str, _Owner] = {}
    orders: dict[str, list[int]] = {}
    for path, names in parts.items():
        names.sort(key=lambda name: rows_of(known[name])[0])
        orders[path] = [rows_of(known[name])[0] for name in names]
        last = known[names[-1]]
        router = last.kind == "unpacked"
        owners[path] = _Owner(
            tuple(rows_of(known[name])[1] for name in names), columns_of(last)[1], torch.float32 if router else dtype
        )
    for name, piece in known.items():
        path = _path(piece)
        expert = piece.targets[0].expert or 0
        places[name] = Place(path, orders[path].index(rows_of(piece)[0]), expert)
        owners[path].experts = max(owners[path].experts, expert + 1)
    return places, owners


def _path(piece: Piece) -> str:
    return piece.weight or piece.targets[0].parameter.rpartition(".")[0]


def rows_of(piece: Piece) -> tuple[int, int]:
    """Outputs [start, stop) of this rank's product that the matrix computes."""
    (cut,) = piece.targets[0].cuts
    if cut.dim == 0:
        return cut.at, cut.at + cut.stop - cut.start
    return 0, piece.shape[0]


def columns_of(piece: Piece) -> tuple[int, int]:
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
