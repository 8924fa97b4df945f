"""A rank's adapters: in host memory as this rank needs them, and some in slots of the device.

    folder --read--> host: A and B of each changed stack, padded, scale multiplied into B --place--> a slot

`read` and `place` may run in two threads while steps run: only rows whose results are dropped read a slot that is overwritten.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.adapters import read_adapter
from engine.errors import CheckpointError
from engine.rank.adapter_stacks import AdapterStack, Place, add_stacks, columns_of, rows_of
from engine.rank.load.adapter_tensors import AdapterMatrix, AdapterTensors, adapter_pieces, map_adapter, map_adapters
from engine.rank.load.slices import Piece
from engine.rank.load.tensor_files import opened
from engine.rank.load.tensor_table import TensorTable
from engine.rank.shard import Shard

STAGING_BYTES = 8 << 20  # of pinned memory, through which adapters reach a GPU


class HostStack(NamedTuple):
    """a [experts, parts * r, n], b [experts, m, r] for one matrix."""

    a: Tensor
    b: Tensor


class AdapterStore:
    """ranks: the largest LoRA rank of each matrix, by name; slots: adapters on the device at once."""

    def __init__(self, model: Shard, tensors: TensorTable, ranks: Mapping[str, int], slots: int) -> None:
        self._tensors = tensors
        self._geometry = model.geometry
        self._known = adapter_pieces(tensors, model.geometry, model.parallel.rank, model.parallel.size)
        self._ranks = ranks
        self._places, self._stacks = add_stacks(model, self._known, ranks, slots)
        self._host: dict[int, dict[str, HostStack]] = {}
        self._device = model.device
        self._staging: Tensor | None = None
        if model.device.type == "cuda":
            self._stream = torch.cuda.Stream(model.device)
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)

    def read(self, adapter: int, name: str, folder: str) -> None:
        """Read an adapter to host memory. CheckpointError: a tensor has no place, is not finite, or has too large a rank; or the
        adapter changes nothing."""
        mapped = map_adapter(read_adapter(name, Path(folder)), self._tensors, self._geometry)
        self._check_ranks(mapped)
        self._host[adapter] = self._read(mapped)

    def place(self, adapter: int, slot: int) -> None:
        """Returns when the copy is done."""
        host = self._host[adapter]
        with self._copying():
            for path, stack in self._stacks.items():
                a = stack.a.unflatten(0, (stack.experts, -1))[:, slot]
                b = stack.b.unflatten(0, (stack.experts, -1))[:, slot]
                if path not in host:
                    b.zero_()
                    continue
                for expert in range(stack.experts):
                    self._copy(a[expert], host[path].a[expert])
                    self._copy(b[expert], host[path].b[expert])

    def drop(self, adapter: int) -> None:
        self._host.pop(adapter, None)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        if self._staging is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Copies a piece at a time, since steps need the bus too."""
        if self._staging is None:
            target.copy_(source)
            return
        width = source.shape[1]
        staging = self._staging.view(source.dtype)
        count = max(1, len(staging) // width)
        for first in range(0, len(source), count):
            rows = source[first : first + count]
            piece = staging[: rows.numel()].view(rows.shape)
            piece.copy_(rows)
            target[first : first + count].copy_(piece, non_blocking=True)
            self._stream.synchronize()

    def _check_ranks(self, mapped: AdapterTensors) -> None:
        for matrix in mapped.matrices:
            room = min(self._ranks.get(name, 0) for name in matrix.names)
            if matrix.rank > room:
                raise CheckpointError(f"adapters.{mapped.config.name}: {matrix.module} has rank {matrix.rank}; max_rank is {room}")

    def _read(self, adapter: AdapterTensors) -> dict[str, HostStack]:
        config = adapter.config
        host: dict[str, HostStack] = {}
        acting = 0
        with opened(config.file) as file:
            for matrix in adapter.matrices:
                a = _tensor(file, matrix.a, config.name)
                b = _tensor(file, matrix.b, config.name) * matrix.scale
                acting += _acts(a, b, matrix)
                for name, own_a, own_b in _halves(matrix, a, b):
                    place = self._places[name]
                    _put(_room(host, place.owner, self._stacks[place.owner]), place, self._known[name], own_a, own_b)
        if not acting:
            raise CheckpointError(f"adapters.{config.name}: 0 of {len(adapter.matrices)} matrices act: it changes nothing")
        return host


def load_adapters(
    model: Shard, tensors: TensorTable, folders: Mapping[str, str], *, slots: int = 0, max_rank: int = 0
) -> AdapterStore | None:
    """Give the model `slots` adapters of `max_rank` or, without `slots`, what the folders need; read them and fill slots in
    order. Returns the store if adapters may be loaded later."""
    mapped = map_adapters(folders, tensors, model.geometry)
    if slots:
        ranks = dict.fromkeys(adapter_pieces(tensors, model.geometry), max_rank)
    else:
        ranks = _ranks_of(mapped)
    if not ranks:
        return None
    store = AdapterStore(model, tensors, ranks, slots or len(folders))
    for adapter, (name, folder) in enumerate(folders.items() if model.device.type != "meta" else ()):
        store.read(adapter, name, folder)
        if adapter < (slots or len(folders)):
            store.place(adapter, adapter)
        if not slots:
            store.drop(adapter)
    if slots:
        return store
    return None


def _ranks_of(mapped: list[AdapterTensors]) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for adapter in mapped:
        for matrix in adapter.matrices:
            ranks |= {name: max(matrix.rank, ranks.get(name, 0)) for name in matrix.names}
    return ranks


def _room(host: dict[str, HostStack], path: str, stack: AdapterStack) -> HostStack:
    if path not in host:
        a = torch.zeros((stack.experts, *stack.a.shape[1:]), dtype=stack.a.dtype)
        b = torch.zeros((stack.experts, *stack.b.shape[1:]), dtype=stack.b.dtype)
        host[path] = HostStack(a, b)
    return host[path]


def _tensor(file: Any, name: str, adapter: str) -> Tensor:
    tensor: Tensor = file.get_tensor(name).float()
    if not tensor.isfinite().all():
        raise CheckpointError(f"adapters.{adapter}: {name} has NaN or infinity")
    return tensor


def _acts(a: Tensor, b: Tensor, matrix: AdapterMatrix) -> bool:
    experts = max(1, matrix.experts)
    inner = a.view(experts, matrix.rank, -1) @ torch.linspace(0.5, 1.5, a.shape[1])
    return bool((b.view(len(b), matrix.rank, experts) * inner.t()).any())


def _halves(matrix: AdapterMatrix, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    for expert in range(max(1, matrix.experts)):
        inner = a[expert * matrix.rank : (expert + 1) * matrix.rank]
        outer = b.view(len(b), matrix.rank, -1)[:, :, expert]
        for base, rows in zip(matrix.bases, outer.chunk(len(matrix.bases)), strict=True):
            yield matrix.name_of(base, expert), inner, rows


def _put(host: HostStack, place: Place, piece: Piece, a: Tensor, b: Tensor) -> None:
    (cut,) = piece.targets[0].cuts
    first, count = columns_of(piece)
    start, stop = rows_of(piece)
    rank = host.b.shape[2]
    own = slice(place.part * rank, place.part * rank + len(a))
    host.a[place.expert, own] = a[:, first : first + count].to(host.a)
    kept = b[cut.start : cut.stop] if cut.dim == 0 else b
    host.b[place.expert, start:stop, : len(a)] = kept.to(host.b)
