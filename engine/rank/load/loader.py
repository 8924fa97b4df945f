"""Fills a rank's shard from a checkpoint's safetensors: each tensor in blocks of rows straight into its parameter, converted to the
parameter's dtype on the way. No rank ever holds more than its own shard and one block."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor

from engine.geometry import Geometry
from engine.rank.load.slices import Piece, parameters_of, pieces
from engine.rank.load.tensor_files import opened, places
from engine.rank.models.gemma4 import Gemma4

_BLOCK_BYTES = 16 << 20  # copied at once


def load(model: Gemma4, folder: Path, geometry: Geometry, rank: int, size: int, progress: bool = False) -> None:
    """Copy this rank's slices of the checkpoint in `folder` into the model's parameters, whose dtype decides.

    progress: show a bar on stderr, or one line at the end where that is no terminal.
    Raises CheckpointError, which names the file, or every tensor that is missing, unexpected, mis-shaped or of no float dtype,
    before anything is copied.
    """
    needed = pieces(geometry, rank, size)
    files = places(folder, needed, geometry)
    parameters = parameters_of(model, needed)
    total = sum(piece.kept * parameters[piece.parameter].element_size() for piece in needed.values())
    with _shown(total, len(needed), progress) as advance:
        for path in sorted(set(files.values())):
            with opened(path) as file:
                for piece in (needed[name] for name, file_path in files.items() if file_path == path):
                    _copy(file.get_slice(piece.name), piece, parameters[piece.parameter], advance)


def _copy(source: Any, piece: Piece, parameter: Tensor, advance: Callable[[int], None]) -> None:
    """Blocks of rows of each cut; `source` is a slice of the file that is read where it is indexed."""
    for cut in piece.cuts if piece.kept else ():
        rows = cut.rows(piece.shape)
        step = max(1, _BLOCK_BYTES * len(piece.cuts) * len(rows) // (4 * piece.kept))
        for first in range(rows.start, rows.stop, step):
            stop = min(first + step, rows.stop)
            target = cut.target(parameter, first, stop)
            target.copy_(source[cut.index(first, stop)])
            advance(target.numel() * target.element_size())


@contextmanager
def _shown(total: int, tensors: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """What to call with each number of bytes copied."""
    if progress and sys.stderr.isatty():
        columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total)
            yield lambda size: bar.advance(task, size)
        return
    began = time.monotonic()
    yield lambda _: None
    if progress:
        sys.stderr.write(f"loaded {tensors} tensors, {total / 1e9:.2f} GB a rank, in {time.monotonic() - began:.1f} s\n")
