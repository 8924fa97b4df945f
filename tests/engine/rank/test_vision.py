"""Vision towers and the 12B's embedder against transformers', picture by picture and all at once."""

import math
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.rank.graphs import StageGraphs
from engine.rank.models import captured_layers, vision
from engine.rank.models.clipped import ClippedProduct, load_encoder
from engine.rank.models.encoder_weights import ENCODER_TENSORS
from engine.rank.models.vision import Tower, VisionBlock, VisionEmbedder, VisionEncoder
from engine.vision_geometry import CELL, VisionGeometry, read_vision
from kernels.ragged_attention import ragged_attention
from tests.conftest import Nano
from tests.support.engine.checkpoints import rewrite
from tests.support.engine.rerun import Rerun
from tests.support.judge.oracle import error, load_oracle
from tests.support.judge.pictures import padded, pictures

pytestmark = pytest.mark.cpu

MEMBERS = ("e2b", "26b-a4b", "12b")  # of each kind one: heads of 64 and bounds; of 72, standardised; no layers
TOLERANCE = 1e-5  # fp32, relative to the largest value
FAULT = 100 * TOLERANCE
Both = Callable[[str], tuple[VisionEncoder, Any]]
SIZES = ((1, 1), (2, 5), (5, 2), (4, 4), (2, 5))  # cells, rows and columns


def encoder(folder: Path) -> VisionEncoder:
    geometry = read_vision(folder)
    assert geometry is not None
    model = (VisionEmbedder if geometry.unified else Tower)(geometry, torch.float32, torch.device("cpu"))
    load_encoder(model, ENCODER_TENSORS[VisionGeometry], folder)
    return model


def theirs(oracle: Any, picture: Tensor, budget: int) -> Tensor:
    """transformers' rows of one picture [height, width, 3], padded as its processor pads it."""
    with torch.no_grad():
        (rows,) = oracle.model.get_image_features(*padded(oracle, [picture], budget)).pooler_output
    return rows  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def both(nano: Nano) -> Both:
    return cache(lambda member: (encoder(nano(member)), load_oracle(nano(member))))


@torch.inference_mode()
@pytest.mark.parametrize("member", MEMBERS)
def test_rows_are_transformers(both: Both, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of pictures of many sizes has the rows that transformers gives each of them, padded; with x and y swapped it has not,
    nor without the bounds of products, nor where pictures see each other."""
    model, oracle = both(member)
    batch = pictures(*SIZES)
    right = torch.cat([theirs(oracle, picture, 20) for picture in batch])
    print(f"{member}: {error(model(batch), right):.1e}")
    assert error(model(batch), right) < TOLERANCE
    swapped = {args: vision.patch_positions(*args)[::-1].copy() for args in ((*size, cell) for size in SIZES for cell in (1, CELL))}
    with monkeypatch.context() as patch:
        patch.setattr(vision, "patch_positions", lambda *args: swapped[args])
        assert error(model(batch), right) > FAULT
    if isinstance(model, Tower):
        with monkeypatch.context() as patch:
            one = lambda q, k, v, starts, longest: ragged_attention(q, k, v, starts[[0, -1]], len(q))  # noqa: E731 (of one line)
            patch.setattr(vision, "ragged_attention", one)
            assert error(model(batch), right) > FAULT
    if getattr(oracle.config.vision_config, "use_clipped_linears", False):
        with monkeypatch.context() as patch:
            for product in (module for module in model.modules() if isinstance(module, ClippedProduct)):
                patch.setattr(product, "bounds", None)
            assert error(model(batch), right) > FAULT


@torch.inference_mode()
@pytest.mark.parametrize("member", MEMBERS)
def test_a_batch_is_its_pictures(both: Both, member: str) -> None:
    """A picture has the same rows alone, in a batch in any order, and as a frame of a video."""
    model, _ = both(member)
    batch = pictures(*SIZES)
    single = [model([picture]) for picture in batch]
    assert error(model(batch), torch.cat(single)) < TOLERANCE
    assert error(model(batch[::-1]), torch.cat(single[::-1])) < TOLERANCE
    video = torch.stack([batch[1], batch[4]])
    assert error(model(model.inputs(video)), torch.cat([single[1], single[4]])) < TOLERANCE


@pytest.mark.parametrize(("shape", "value"), [((), -3.0), ((1,), -3.0), ((2,), -3.0), ((0,), -3.0), ((), torch.nan)])
def test_bounds_are_one_number_each(nano: Nano, tmp_path: Path, shape: tuple[int, ...], value: float) -> None:
    """A bound of another shape, or that is NaN, is refused by name; beside it those of one number are loaded."""
    folder = Path(shutil.copytree(nano("e2b"), tmp_path / "copy"))
    bound = "model.vision_tower.encoder.layers.0.self_attn.q_proj.input_min"
    rewrite(folder, lambda tensors: tensors | {bound: torch.full(shape, value)})
    if math.prod(shape) == 1 and value == -3.0:
        model = encoder(folder)
        assert isinstance(model, Tower)
        product = model.get_submodule("blocks.0.q")
        assert isinstance(product, ClippedProduct)
        assert (product.bounds or (0.0,))[0] == -3.0
        return
    with pytest.raises(CheckpointError, match=re.escape(f"q_proj.input_min, of shape {list(shape)}, is not one number")):
        encoder(folder)


@torch.inference_mode()
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("member", MEMBERS[:2])
def test_few_pictures_have_captured_layers(nano: Nano, member: str, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that graphs fit, padded or not, one after the other, have the rows of eager layers; larger ones take those. Planted
    fault: pictures begin where those of the first batch did."""
    model, sizes, graphs = encoder(nano(member)), (90, 180, 360), Rerun()
    shown = (((2, 5),), ((1, 1), (4, 4), (1, 3)), ((2, 2), (2, 2)), ((2, 5), (5, 2), (4, 4)), ((5, 9),), ((1, 1),) * 5)
    asked = [pictures(*batch) for batch in shown]
    right = [model(batch) for batch in asked]
    for module in (captured_layers, vision):
        monkeypatch.setattr(module, "SIZES", sizes)
    monkeypatch.setattr(captured_layers, "LAYERS", 2)
    assert isinstance(model, Tower)
    model.capture(cast("StageGraphs", graphs))
    captured, errors = model._captured, list[float]()
    assert captured is not None
    for batch, rows in zip(asked, right, strict=True):
        errors.append(error(model(batch), rows))
        if fault:
            captured._rows = captured._rows._replace(starts=captured._rows.starts.clone())
    assert {size for _, size, _ in graphs.replayed} == set(sizes)
    assert not all(each <= FAULT for each in errors[1:4]) if fault else max(errors) < TOLERANCE  # NaN where memory had it
    assert max(errors[4:]) == 0


@torch.inference_mode()
def test_the_largest_picture_has_its_places(both: Both) -> None:
    """The longest picture of the budget 1120, a row of 1120 cells, is within the table of places."""
    (picture,) = pictures((1, 1120))
    model, oracle = both("12b")
    assert error(model([picture]), theirs(oracle, picture, 1120)) < TOLERANCE
    assert [both(member)[0].geometry.positions for member in MEMBERS] == [CELL * 1120, CELL * 1120, 1120]


def test_a_bound_that_is_not_saved_bounds_nothing(nano: Nano, tmp_path: Path) -> None:
    """Without one product's tensors of bounds it is free, and the others keep theirs; a missing matrix is named."""
    shutil.copytree(nano("e2b"), tmp_path, dirs_exist_ok=True)
    first = "model.vision_tower.encoder.layers.0."
    rewrite(tmp_path, lambda tensors: {name: x for name, x in tensors.items() if "layers.0.mlp.up_proj.input_" not in name})
    bounds = [block.up.bounds for block in encoder(tmp_path).blocks if isinstance(block, VisionBlock)]
    assert [bound[:2] == (-torch.inf, torch.inf) for bound in bounds] == [True, False]
    assert all(1.5 <= abs(value) <= 2.5 for bound in bounds for value in bound[2:])
    rewrite(tmp_path, lambda tensors: {name: x for name, x in tensors.items() if not name.endswith("0.mlp.up_proj.linear.weight")})
    with pytest.raises(CheckpointError, match=re.escape(f"{first}mlp.up_proj.linear.weight is missing")):
        encoder(tmp_path)
