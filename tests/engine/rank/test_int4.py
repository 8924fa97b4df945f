"""int4 folders: their logits are those of the weights that they stand for, on any number of ranks; planted faults show."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.geometry import read_geometry
from engine.quantisation import read_quantisation
from engine.rank.int4 import Int4Weight
from engine.rank.load.loader import load
from engine.rank.load.random_fill import dummy
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Parallel, Single
from tests.nano import random_models, random_weights
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.int4_folder import Change, write
from tests.support.engine.paged import caches, run_steps, script
from tests.support.engine.threads import run_ranks

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
LENGTH = 70
TOLERANCE = 1e-4  # fp32 logits: another order of additions
FAULT = 100 * TOLERANCE


@cache
def base(to: Path, member: str) -> Path:
    """A nano member whose widths are those that four ranks can cut into runs."""
    shape = replace(SHAPES[member], hidden=128, mlp=256, vision=None, audio=None)
    shape = replace(shape, moe_mlp=256 if shape.experts else 0, ple=64 if shape.ple else 0)
    to.mkdir()
    random_models.write(shape, to, partial(random_weights.draw, shape=shape, seed=0), "bfloat16")
    return to


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("int4")


def model(folder: Path, parallel: Parallel) -> Gemma4:
    made = Gemma4(read_geometry(folder), parallel, torch.float32, CPU)
    load(made, TENSORS, folder, read_quantisation(folder))
    return made


def logits(folder: Path, tp: int = 1) -> Tensor:
    """[LENGTH, vocab] of a few ids, prefilled whole."""

    def of_rank(parallel: Parallel) -> Tensor:
        made = model(folder, parallel)
        geometry = made.geometry
        ids = torch.randint(3, geometry.vocab, (LENGTH,), generator=torch.Generator().manual_seed(1))
        steps = script(geometry, ((LENGTH, 0),), 40, 1, whole=True)
        return torch.stack(list(run_steps(made, caches(geometry, parallel.size, 1, LENGTH, 40), steps, [ids]).values()))

    return of_rank(Single()) if tp == 1 else run_ranks(tp, of_rank)[0]


def distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


@pytest.mark.parametrize(("group", "symmetric"), [(32, True), (128, True), (32, False)])
@pytest.mark.parametrize("member", ["31b", "26b-a4b", "e2b"])
def test_a_folder_is_the_weights_that_it_stands_for(root: Path, tmp_path: Path, member: str, group: int, symmetric: bool) -> None:
    group = 64 if group == 128 and member == "e2b" else group  # of 64 per-layer inputs
    packed, plain = write(base(root / member, member), tmp_path, group, symmetric=symmetric)
    expected, exact = logits(plain), logits(root / member)
    classes = {type(module).__name__ for name, module in model(packed, Single()).named_modules() if name.endswith(("qkv", "down"))}
    assert classes == {"Int4Weight"}
    for tp in (1, 2, 4) if group == 32 else (1, 2):
        error = distance(logits(packed, tp), expected)
        print(f"{member} groups of {group}, TP={tp}: {error:.1e} from the weights in plain")
        assert error < TOLERANCE
    assert distance(expected, exact) > FAULT


def shifted(name: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return stored | {"_scale": stored["_scale"].roll(1, -1)} if "q_proj" in name else stored


def nibbles_swapped(name: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    words = stored["_packed"].view(torch.uint8)
    return stored | {"_packed": (words >> 4 | words << 4).view(torch.int32)} if "o_proj" in name else stored


def zero_points_missing(name: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return stored | {"_zero_point": torch.full_like(stored["_zero_point"], -2004318072)} if "down_proj" in name else stored


def gate_is_up(name: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return stored | {"_packed": stored["_packed"].flip(0)} if "gate_proj" in name else stored


@pytest.mark.parametrize("change", [shifted, nibbles_swapped, zero_points_missing, gate_is_up])
def test_planted_fault_shows(root: Path, tmp_path: Path, change: Change) -> None:
    packed, plain = write(base(root / "26b-a4b", "26b-a4b"), tmp_path, 32, symmetric=False, change=change)
    assert distance(logits(packed), logits(plain)) > FAULT


def test_what_ranks_cannot_cut_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    packed, _ = write(base(root / "31b", "31b"), tmp_path, 128, symmetric=True)
    with pytest.raises(CheckpointError, match=r"down_proj.*blocks of 128 cannot be cut at 0 and 64 of 256"):
        logits(packed, 4)


def test_random_words_are_those_of_one_model(root: Path, tmp_path: Path) -> None:
    """Each rank's random weights are its part of one model's."""
    packed, _ = write(base(root / "26b-a4b", "26b-a4b"), tmp_path, 32, symmetric=True)

    def filled(parallel: Parallel) -> Gemma4:
        made = Gemma4(read_geometry(packed), parallel, torch.float32, CPU)
        dummy(made, TENSORS, weights=read_quantisation(packed))
        return made

    whole, parts = filled(Single()), run_ranks(2, filled)
    down = [next(each for name, each in made.named_modules() if name.endswith("mlp.down")) for made in (whole, *parts)]
    assert all(isinstance(each, Int4Weight) for each in down)
    assert torch.equal(down[0].weight, torch.cat([down[1].weight, down[2].weight], 1))
    assert 0.5 < down[0].weight.std() * down[0].shape[1] ** 0.5 < 2
