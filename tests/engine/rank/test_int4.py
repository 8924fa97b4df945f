"""int4 folders: what ranks cannot cut, and random weights."""

from pathlib import Path

import pytest
import torch

from engine.errors import CheckpointError
from engine.geometry import read_geometry
from engine.quantisation import read_quantisation
from engine.rank.int4 import Int4Weight
from engine.rank.load.random_fill import dummy
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Parallel, Single
from kernels.four_bits import interleaved
from tests.support.engine.format_model import logits, write_base
from tests.support.engine.quantised import saved
from tests.support.engine.threads import run_ranks

pytestmark = pytest.mark.cpu


def test_what_ranks_cannot_cut_is_refused_by_name(tmp_path: Path) -> None:
    packed = saved(write_base(tmp_path / "31b", "31b"), tmp_path / "int4", kind="int4-128")
    with pytest.raises(CheckpointError, match=r"down_proj.*blocks of 128 cannot be cut at 0 and 64 of 256"):
        logits(packed, read_quantisation(packed), 4)


def test_random_words_are_those_of_one_model(tmp_path: Path) -> None:
    """Each rank's random weights are its part of one model's."""
    packed = saved(write_base(tmp_path / "26b-a4b", "26b-a4b"), tmp_path / "int4", kind="int4-32")

    def filled(parallel: Parallel) -> Gemma4:
        made = Gemma4(read_geometry(packed), parallel, torch.float32, torch.device("cpu"))
        dummy(made, TENSORS, weights=read_quantisation(packed))
        return made

    whole, parts = filled(Single()), run_ranks(2, filled)
    down = [next(each for name, each in made.named_modules() if name.endswith("mlp.down")) for made in (whole, *parts)]
    assert all(isinstance(each, Int4Weight) for each in down)
    assert torch.equal(down[0].weight, torch.cat([down[1].weight, down[2].weight], 1))
    assert not torch.equal(down[0].weight, torch.cat([down[2].weight, down[1].weight], 1))
    assert 0.5 < down[0].weight.std() * down[0].shape[1] ** 0.5 < 2


def test_words_are_brought_into_the_kernels_order() -> None:
    """Of any number of rows, in the same memory."""
    made = Int4Weight((12, 128), torch.float32, torch.device("cpu"))
    made.values = torch.arange(12 * 16, dtype=torch.int32).view(12, 16)
    stored = made.values.clone()
    made.loaded()
    assert torch.equal(made.values, interleaved(stored))
    assert not torch.equal(made.values, stored)
