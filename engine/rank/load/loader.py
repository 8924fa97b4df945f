"""Fills a shard from safetensors in blocks of rows, converted to the parameter's dtype. A rank
holds at most its shard and one block."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.geometry import Geometry
from engine.quantisation import UNQUANTISED, Quantisation
from engine.rank.load.slices import Piece, allocate
from engine.rank.load.tensor_files import Headers, TensorHeader, by_file, checked_headers, headers, opened
from engine.rank.load.tensor_table import HEAD, TensorTable
from engine.rank.shard import Shard
from engine.weight_formats import StoredTensor

_BLOCK_BYTES = 16 << 20  # copied at once


def with_head(geometry: Geometry, tensors: TensorTable, folder: Path) -> Geometry:
    """`geometry`, untied if the folder's head differs from the embedding, whatever config.json says."""
    by_name, _ = headers(folder, tensors, geometry)
    head = by_name.get(HEAD)
    table = by_name.get(tensors.published_name("embed_tokens.weight", geometry))
    if head is None or table is None:
        return geometry
    shape = geometry.vocab, geometry.hidden  # another is refused by `load`
    tied = head.shape == table.shape == shape and head.dtype == table.dtype and _are_equal(head, table)
    return replace(geometry, tied=tied)


def _are_equal(one: TensorHeader, two: TensorHeader) -> bool:
    step = max(1, _BLOCK_BYTES // (4 * one.shape[1]))
    with opened(one.path) as first, opened(two.path) as second:
        left = first.get_slice(one.name)
        right = second.get_slice(two.name)
        return all(torch.equal(left[row : row + step], right[row : row + step]) for row in range(0, one.shape[0], step))


def load(model: Shard, tensors: TensorTable, folder: Path, weights: Quantisation = UNQUANTISED) -> None:
    """Copy this rank's slices of the checkpoint into the parameters. The geometry is from `with_head`.

    CheckpointError names the file or all wrong tensors before anything is copied; later a tensor with NaN or infinity.
    """
    needed, parameters = allocate(model, tensors, weights)
    by_name = checked_headers(folder, needed, tensors, model.geometry, weights)
    scales = _scales({name: header for name, header in by_name.items() if not needed[name].targets}, needed)
    for name, header, file in by_file(by_name):
        piece = needed[name]
        if piece.targets and piece.weights.reader is not None:
            _pack(file, header, piece, parameters, [scales[each].to(model.device) for each in piece.scales])
        elif piece.targets:
            _copy(file, header, piece, piece.targets[0].of(parameters))
    model.loaded()


def _rows(file: Any, header: TensorHeader, piece: Piece) -> Any:
    if header.shape == piece.shape:
        return file.get_slice(header.name)
    return file.get_tensor(header.name).reshape(piece.shape)


def _scales(by_name: Headers, needed: dict[str, Piece]) -> dict[str, Tensor]:
    scales = {}
    for name, header, file in by_file(by_name):
        scale = file.get_tensor(header.name).reshape(needed[name].shape)
        _check_finite(scale.sum(dtype=torch.float32), header, 0, len(scale))
        scales[name] = scale
    return scales


def _copy(file: Any, header: TensorHeader, piece: Piece, parameter: Tensor) -> None:
    """A sum detects NaN and infinity without a block of memory."""
    source = _rows(file, header, piece)
    target = piece.targets[0]
    for cut in target.cuts if target.kept else ():
        rows = cut.rows(target.shape)
        step = max(1, _BLOCK_BYTES * len(target.cuts) * len(rows) // (4 * target.kept))
        for first in range(rows.start, rows.stop, step):
            stop = min(first + step, rows.stop)
            block = cut.target(parameter, first, stop).copy_(source[cut.index(first, stop)])
            _check_finite(block.sum(dtype=torch.float32), header, first, stop)


def _pack(file: Any, header: TensorHeader, piece: Piece, parameters: dict[str, Tensor], scales: list[Tensor]) -> None:
    """Pack blocks of whole rows on the device, so that a row's scale does not depend on the cut."""
    source = file.get_slice(header.name)
    rows = piece.targets[0].cuts[0].rows(piece.shape)
    device = piece.targets[0].of(parameters).device
    unit = piece.weights.row_block
    step = unit * max(1, _BLOCK_BYTES * piece.shape[0] // (4 * unit * math.prod(piece.shape)))
    for first in range(rows.start // unit * unit, rows.stop, step):
        stop = min(first + step, -(-rows.stop // unit) * unit, piece.shape[0])
        block = source[first:stop].to(device)
        _check_finite(block.sum(dtype=torch.float32), header, first, stop)
        parts = zip(piece.weights.saved[1:], scales, strict=True)
        piece.put(parameters, first, block, *(_of_rows(tensor, scale, first, stop) for tensor, scale in parts))


def _of_rows(tensor: StoredTensor, scale: Tensor, first: int, stop: int) -> Tensor:
    unit = tensor.block[0]
    if unit:
        return scale[first // unit : -(-stop // unit)]
    return scale


def _check_finite(total: Tensor, header: TensorHeader, first: int, stop: int) -> None:
    if not total.isfinite():
        raise CheckpointError(f"{header.path}: {header.name} has NaN or infinity in rows {first} to {stop - 1}")
