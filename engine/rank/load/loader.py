"""Fills a rank's shard from a checkpoint's safetensors: each tensor in blocks of rows straight into its parameter, converted to the
parameter's dtype on the way. No rank ever holds more than its own shard and one block."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.geometry import Geometry
from engine.rank.load.slices import Piece, allocate
from engine.rank.load.tensor_files import TensorHeader, by_file, checked_headers, headers, opened
from engine.rank.load.tensor_table import HEAD, TensorTable
from engine.rank.shard import Shard
from engine.weight_formats import PLAIN, WeightFormat

_BLOCK_BYTES = 16 << 20  # copied at once


def with_head(geometry: Geometry, tensors: TensorTable, folder: Path) -> Geometry:
    """Returns `geometry`, whose head is tied unless the folder has one that differs from the embedding, whatever config.json
    says."""
    by_name, _ = headers(folder, tensors, geometry)
    head, table = by_name.get(HEAD), by_name.get(tensors.published_name("embed_tokens.weight", geometry))
    if head is None or table is None:
        return geometry
    shape = geometry.vocab, geometry.hidden  # another is refused by `load`
    tied = head.shape == table.shape == shape and head.dtype == table.dtype and _are_equal(head, table)
    return replace(geometry, tied=tied)


def _are_equal(one: TensorHeader, two: TensorHeader) -> bool:
    """Whether two tensors of one shape and dtype hold the same values; compared in blocks of rows."""
    step = max(1, _BLOCK_BYTES // (4 * one.shape[1]))
    with opened(one.path) as first, opened(two.path) as second:
        left, right = first.get_slice(one.name), second.get_slice(two.name)
        return all(torch.equal(left[row : row + step], right[row : row + step]) for row in range(0, one.shape[0], step))


def load(model: Shard, tensors: TensorTable, folder: Path, weights: WeightFormat = PLAIN) -> None:
    """Copy this rank's slices of the checkpoint in `folder` into the model's parameters, whose dtype decides.

    Its geometry is `with_head`. Raises CheckpointError, which names the file, or every tensor that is missing, unexpected,
    mis-shaped or of a wrong dtype, before anything is copied; and on the way one of which this rank's slice has NaN or infinity.
    """
    needed, parameters = allocate(model, tensors, weights)
    by_name = checked_headers(folder, needed, tensors, model.geometry)
    for name, header, file in by_file(by_name):
        _copy(file, header, needed[name], parameters[needed[name].parameter])


def _copy(file: Any, header: TensorHeader, piece: Piece, parameter: Tensor) -> None:
    """Copy blocks of rows of each cut. A sum shows NaN and infinity, without memory of the block's size."""
    source = file.get_slice(header.name)  # read where it is indexed
    for cut in piece.cuts if piece.kept else ():
        rows = cut.rows(piece.shape)
        step = max(1, _BLOCK_BYTES * len(piece.cuts) * len(rows) // (4 * piece.kept))
        for first in range(rows.start, rows.stop, step):
            stop = min(first + step, rows.stop)
            block = cut.target(parameter, first, stop).copy_(source[cut.index(first, stop)])
            if not block.sum(dtype=torch.float32).isfinite():
                raise CheckpointError(f"{header.path}: {header.name} has NaN or infinity in rows {first} to {stop - 1}")
