"""The formats that matrices may be stored in, by name: the tensors of each, in a checkpoint and on a rank. No torch.

Each has an entry here, and a class that ranks import, of the kind of `engine.rank.weight.Weight`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from engine.checkpoint import quantisation
from engine.errors import CheckpointError


class StoredTensor(NamedTuple):
    """One of the tensors that a matrix [..., m, n] is stored as.

    name    of the rank's parameter
    suffix  behind the matrix's name in a checkpoint
    block   rows and columns of the matrix that an element stands for; 0: all of them
    dtype   on the rank; None: the model's
    saved   dtypes that it may have in safetensors
    draw    makes a random one of normal values of its shape, and n; None: it is drawn as the matrix is
    """

    name: str
    suffix: str = ""
    block: tuple[int, int] = (1, 1)
    dtype: str | None = None
    saved: tuple[str, ...] = ("BF16", "F16", "F32")
    draw: Callable[[Any, int], Any] | None = None

    def shape(self, matrix: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, for a matrix of shape `matrix`."""
        sizes = zip(matrix[-2:], self.block, strict=False)
        return (*matrix[:-2], *(-(-size // unit) if unit else 1 for size, unit in sizes))


class WeightFormat(NamedTuple):
    """weight: `module:class` of a matrix on a rank;  quantisation: of the checkpoints that it reads, as `quantisation` names it."""

    weight: str
    tensors: tuple[StoredTensor, ...]
    quantisation: str | None


PLAIN = WeightFormat("engine.rank.weight:Weight", (StoredTensor("weight"),), None)
FORMATS = {"plain": PLAIN}


def weight_format(folder: Path, setting: str = "auto") -> WeightFormat:
    """The format of that name, or the one that reads the folder's checkpoint. CheckpointError where it does not, or none does."""
    scheme = quantisation(folder)
    for name, weights in FORMATS.items():
        if setting in ("auto", name) and weights.quantisation == scheme:
            return weights
    kind = f"quantised ({scheme})" if scheme else "not quantised"
    loaded = "bf16, fp16 and fp32 weights" if setting in ("auto", "plain") else f"{setting} weights"
    raise CheckpointError(f"{folder}: this checkpoint is {kind}; Quartet loads {loaded}")
