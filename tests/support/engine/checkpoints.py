"""Checkpoints edited as folders that others have saved."""

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint import INDEX

Tensors = dict[str, Tensor]


def rewrite(folder: Path, edit: Callable[[Tensors], Tensors | None]) -> None:
    """Store what `edit` makes of all tensors as one shard, without index."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    save_file(edit(tensors) or tensors, folder / "model.safetensors")
