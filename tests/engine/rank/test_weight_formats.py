"""What one class and one entry make of a checkpoint in a format that no file of the product knows: int8 rows, a scale for each."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deploy.cli.model_files import check_files
from deploy.cli.sizing import weight_bytes_and_count
from engine.errors import CheckpointError, ConfigError
from engine.geometry import read_geometry
from engine.quantisation import Quantisation, read_quantisation
from engine.rank.builder import load_rank
from engine.rank.load.loader import load
from engine.rank.load.slices import pieces
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Parallel, Single
from engine.rank.weight import OwnProduct, Weight
from engine.weight_formats import FORMATS, PLAIN, StoredTensor, WeightFormat
from tests.conftest import Nano
from tests.support.engine.paged import caches, run_steps, script
from tests.support.engine.recording import config_of
from tests.support.engine.threads import run_ranks

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
LENGTH = 70
TOLERANCE = 1e-4  # fp32: the scale is multiplied before the product, or behind it


class Int8Rows(OwnProduct):
    """W = values * scale, a scale a row."""

    values: Tensor
    scale: Tensor
    products = 0

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return (self.values * self.scale).to(self.dtype)

    def rows_product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Scaled after the sum."""
        Int8Rows.products += 1
        return (x @ self.values.t().to(x.dtype) * self.scale.t()).to(dtype)


INT8 = WeightFormat(
    f"{__name__}:Int8Rows",
    (
        StoredTensor("values", dtype="int8", saved=("I8",), draw=lambda normal, _: (30 * normal).round().clamp(-127, 127)),
        StoredTensor("scale", "_scale", (1, 0), "float32", ("F32",), draw=lambda normal, n: 0 * normal + 1 / (30 * n**0.5)),
    ),
    ("int8-rows",),
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one entry."""
    monkeypatch.setitem(FORMATS, "int8_rows", (INT8,))
    monkeypatch.setattr(Int8Rows, "products", 0)


def written(folder: Path, to: Path, roll: int = 0) -> tuple[Path, Path]:
    """(packed, plain): checkpoints of the same rounded matrices. roll: rows that the scales are moved by in the packed one."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    config = json.loads((folder / "config.json").read_text())
    packed, plain = dict(tensors), dict(tensors)
    for name, piece in pieces(TENSORS, read_geometry(folder)).items():
        if piece.kind == "matrix":
            matrix = tensors[name].float()
            scale = matrix.abs().amax(-1, keepdim=True) / 127
            packed[name] = (matrix / scale).round().to(torch.int8)
            plain[name] = packed[name] * scale
            packed[f"{name}_scale"] = scale.roll(roll, -2)
    for kind, held, said in (("packed", packed, {"quantization_config": {"quant_method": "int8-rows"}}), ("plain", plain, {})):
        (to / kind).mkdir()
        (to / kind / "config.json").write_text(json.dumps(config | said))
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, to / kind / "model.safetensors")
    return to / "packed", to / "plain"


def logits(folder: Path, parallel: Parallel) -> Tensor:
    """[LENGTH, vocab] of a few ids, prefilled whole."""
    geometry = read_geometry(folder)
    model = Gemma4(geometry, parallel, torch.float32, CPU)
    load(model, TENSORS, folder, weights=read_quantisation(folder))
    ids = torch.randint(3, geometry.vocab, (LENGTH,), generator=torch.Generator().manual_seed(1))
    steps = script(geometry, ((LENGTH, 0),), 40, 1, whole=True)
    return torch.stack(list(run_steps(model, caches(geometry, parallel.size, 1, LENGTH, 40), steps, [ids]).values()))


@pytest.mark.parametrize(("member", "tp"), [("31b", 1), ("31b", 2), ("26b-a4b", 1), ("26b-a4b", 2), ("e2b", 2)])
def test_a_packed_model_runs(nano: Nano, tmp_path: Path, member: str, tp: int) -> None:
    """Its logits are those of its matrices in plain, and near those before rounding; with scales a row further they are neither."""
    packed, plain = written(nano(member), tmp_path)
    (tmp_path / "wrong").mkdir()
    wrong, _ = written(nano(member), tmp_path / "wrong", roll=1)
    found, expected, exact, faulty = (
        (logits(folder, Single()) if tp == 1 else run_ranks(tp, lambda parallel, folder=folder: logits(folder, parallel))[0])
        for folder in (packed, plain, nano(member), wrong)
    )
    assert Int8Rows.products > 0
    error, rounding = (found - expected).abs().max().item(), (expected - exact).abs().max().item()
    fault = (faulty - expected).abs().max().item()
    print(f"{member} TP={tp}: {error:.1e} from plain, which is {rounding:.2g} from the exact one; wrong rows {fault:.2g}")
    assert error < TOLERANCE
    assert error < rounding < fault / 2
    assert fault > 100 * TOLERANCE


def test_a_rank_of_it(nano: Nano, tmp_path: Path) -> None:
    """The checkpoint's config.json decides; bytes are those of its tensors, elements those of its matrices; asked for in plain, it
    is refused, as the nano checkpoint is in int8."""
    packed, _ = written(nano("26b-a4b"), tmp_path)
    config = config_of(packed, 1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(nano("26b-a4b") / name, packed)
    check_files(config, None)
    rank = load_rank(config, Single(), CPU, checked=False)
    assert {type(each) for each in rank.model.modules() if isinstance(each, Weight)} == {Int8Rows, Weight}
    size, count = weight_bytes_and_count(config)
    whole, same = weight_bytes_and_count(config_of(nano("26b-a4b"), 1))
    assert size == rank.weight_bytes < whole * 0.7  # of which encoders, in plain, are a fifth
    assert count == same
    with pytest.raises(CheckpointError, match=r"quantised \(int8-rows\); Quartet loads bf16"):
        config_of(packed, 1, weights="plain")
    with pytest.raises(CheckpointError, match="not quantised; Quartet loads int8_rows weights"):
        read_quantisation(nano("26b-a4b"), "int8_rows")
    with pytest.raises(ConfigError, match="weights"):
        config_of(packed, 1, weights="int3")


def test_random_weights(nano: Nano, tmp_path: Path) -> None:
    """They are drawn a tensor at a time, and have the deviation that plain ones have."""
    packed, _ = written(nano("31b"), tmp_path)
    rank = load_rank(msgspec.structs.replace(config_of(packed, 1), load_format="dummy"), Single(), CPU, checked=False)
    down = rank.model.get_submodule("blocks.0.mlp.down")
    assert isinstance(down, Int8Rows)
    assert down.weight.std().item() == pytest.approx(down.shape[1] ** -0.5, rel=0.03)


def test_random_words_stay_those_of_a_seed() -> None:
    """int4's words of a few normal numbers: random models, and figures of them, are the same in each version."""
    draw = FORMATS["int4"][0].tensors[0].draw
    assert draw is not None
    assert draw(torch.tensor([0.5, -1.25, 3.0]), 1).tolist() == [-1682122624, -1163402560, 644682496]


def test_what_is_wrong_is_named(nano: Nano, tmp_path: Path) -> None:
    """A scale that is missing, values of another dtype, and a block that ranks would cut, each by its tensor."""
    packed, _ = written(nano("31b"), tmp_path)
    tensors = load_file(packed / "model.safetensors")
    down = "model.language_model.layers.0.mlp.down_proj.weight"
    del tensors[f"{down}_scale"]
    tensors[down] = tensors[down].float()
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{down}_scale is missing; {down} has dtype F32, not one of I8"):
        logits(packed, Single())
    blocks = Quantisation(((("Linear",), WeightFormat(PLAIN.weight, (StoredTensor("weight", block=(1, 128)),))),))
    with pytest.raises(CheckpointError, match=r"down_proj.weight: blocks of 128 cannot be cut at 0 and 96 of 192"):
        pieces(TENSORS, read_geometry(nano("31b")), 0, 2, blocks)
