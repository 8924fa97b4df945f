"""Models of quantised folders in fp32, and the same without the rounding of activations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.geometry import read_geometry
from engine.quantisation import Quantisation
from engine.rank.fp8 import Fp8Weight
from engine.rank.int8 import Int8Weight
from engine.rank.load.loader import load
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Parallel, Single
from engine.rank.weight import Weight
from engine.weight_formats import WeightFormat
from tests.nano import nano_shapes, random_models, random_weights
from tests.nano.model_shapes import ModelShape
from tests.support.engine.paged import caches, run_steps, script
from tests.support.engine.threads import run_ranks

LENGTH = 40
PAGES = 40


class _Unrounded(Weight):
    packs_rows = False
    product = Weight.product
    gated = Weight.gated
    parts = Weight.parts
    send = Weight.send

    values: Tensor
    scale: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.values.float() * self.scale

    @property
    def matrix(self) -> Tensor:
        return self.weight


class UnroundedFp8(_Unrounded, Fp8Weight):  # type: ignore[misc]
    """Products of plain rows with the values that an `Fp8Weight` holds."""


class UnroundedInt8(_Unrounded, Int8Weight):  # type: ignore[misc]
    """Products of plain rows with the values that an `Int8Weight` holds."""


_UNROUNDED = {"engine.rank.fp8:Fp8Weight": UnroundedFp8, "engine.rank.int8:Int8Weight": UnroundedInt8}


def unrounded(quantisation: Quantisation) -> Quantisation:
    """The same formats, whose products of eight bits round no activations."""
    return replace(quantisation, groups=tuple((targets, _unrounded(weights)) for targets, weights in quantisation.groups))


def _unrounded(weights: WeightFormat) -> WeightFormat:
    kind = _UNROUNDED.get(weights.weight)
    name = weights.weight if kind is None else f"{__name__}:{kind.__name__}"
    return weights._replace(weight=name, eight_bits=weights.eight_bits and _unrounded(weights.eight_bits))


def shape_of(member: str) -> ModelShape:
    """A nano member's shape with widths that four ranks can cut in every format."""
    shape = replace(nano_shapes.SHAPES[member], hidden=128, mlp=256, vision=None, audio=None)
    return replace(shape, moe_mlp=256 if shape.experts else 0, ple=64 if shape.ple else 0)


def write_base(to: Path, member: str) -> Path:
    """A random member of `shape_of`. Rows, columns and blocks of its matrices have sizes of their own: scales of others show."""
    shape = shape_of(member)
    to.mkdir()
    random_models.write(shape, to, partial(_uneven, shape=shape), "bfloat16")
    return to


def _uneven(tensor: nano_shapes.Tensor, shape: ModelShape) -> random_weights.Array:
    drawn = random_weights.draw(tensor, shape, seed=0)
    if tensor.kind != "matrix" or drawn.ndim < 2:
        return drawn
    rows = 2.0 ** (torch.arange(drawn.shape[-2]) * 7 % 5 - 2)
    columns = 2.0 ** (torch.arange(drawn.shape[-1]) // 16 * 3 % 5 - 2)
    uneven = torch.tensor(drawn) * rows[:, None] * columns
    return (uneven / uneven.std() * drawn.std()).float().numpy()


def model(folder: Path, parallel: Parallel, weights: Quantisation, dtype: torch.dtype = torch.float32) -> Gemma4:
    """The folder's model on the CPU."""
    made = Gemma4(read_geometry(folder), parallel, dtype, torch.device("cpu"))
    load(made, TENSORS, folder, weights)
    return made


def logits(
    folder: Path,
    weights: Quantisation,
    tp: int = 1,
    change: Callable[[Gemma4], None] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[LENGTH, vocab] of a few ids, prefilled whole."""

    def of_rank(parallel: Parallel) -> Tensor:
        made = model(folder, parallel, weights, dtype)
        if change is not None:
            change(made)
        geometry = made.geometry
        ids = torch.randint(3, geometry.vocab, (LENGTH,), generator=torch.Generator().manual_seed(1))
        steps = script(geometry, ((LENGTH, 0),), PAGES, 1, whole=True)
        return torch.stack(list(run_steps(made, caches(geometry, parallel.size, 1, LENGTH, PAGES), steps, [ids]).values()))

    return of_rank(Single()) if tp == 1 else run_ranks(tp, of_rank)[0]
