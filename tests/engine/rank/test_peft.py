"""Adapters as PEFT itself saves them, against PEFT's own logits in fp32, not merged. Skipped where `peft` is not installed."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from deploy.models.nano import TRAINED
from engine.adapters import read_adapter
from engine.errors import CheckpointError
from engine.geometry import read_geometry
from engine.rank.load.adapter_tensors import map_adapter
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Single
from tests.conftest import Nano
from tests.support.engine.adapted import FAULT, TOLERANCE, case_of
from tests.support.engine.threads import run_ranks
from tests.support.judge.oracle import load_oracle

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT's, of names in patterns
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks transformers
]

DENSE = r".*language_model\..*\.(q|k|v|o|gate|up|down)_proj"
EVERY = r".*language_model\..*(_proj|per_layer_(input_gate|projection|model_projection)|router\.proj)"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def recipes(member: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two configs: small and plain; large, with patterns and rsLoRA, on all that PEFT can change."""
    large: dict[str, Any] = {
        "r": 12, "lora_alpha": 20, "target_modules": EVERY, "use_rslora": True,
        "rank_pattern": {"o_proj": 33}, "alpha_pattern": {r"layers\.1\..*q_proj": 9},
    }  # fmt: skip
    if member == "26b-a4b":
        large |= {"target_parameters": EXPERTS, "rank_pattern": {}}
    return {"r": 1, "lora_alpha": 2, "target_modules": DENSE}, large


def saved(folder: Path, model: Path, settings: Mapping[str, Any], seed: int) -> Any:
    """PEFT's model with a random adapter, which is saved to the folder."""
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(load_oracle(model), peft.LoraConfig(lora_dropout=0.0, **settings)).eval()
    for name, tensor in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(tensor, std=1 / math.sqrt(tensor.shape[1]) / (4 if ".lora_B." in name else 1))
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted


CASES = [("31b", 1), ("31b", 4), ("12b", 2), ("26b-a4b", 1), ("26b-a4b", 2), ("e2b", 1), ("e4b", 1)]


@pytest.mark.parametrize(("member", "tp"), CASES)
def test_logits_are_those_of_peft(nano: Nano, tmp_path: Path, member: str, tp: int) -> None:
    """Both adapters and a row of none in each step, within 1e-4; with the adapters exchanged they are a hundred times further."""
    folder = nano(member)
    models = [saved(tmp_path / str(seed), folder, settings, seed) for seed, settings in enumerate(recipes(member))]
    it = case_of(folder, {"small": str(tmp_path / "0"), "large": str(tmp_path / "1")}, [*models, load_oracle(folder)])
    if tp == 1:
        found = it.run(Single())
    else:
        found, *_ = run_ranks(tp, it.run)
    error = it.error(found)
    print(f"{member} TP={tp}: max error {error:.1e} against PEFT {peft.__version__}")
    assert error < TOLERANCE
    assert it.error(it.run(Single(), (1, -1, 0))) > FAULT


def test_all_linear_of_the_multimodal_class_is_mapped(tmp_path: Path) -> None:
    """Encoders' modules add nothing after training with text, and are left out. Planted: one of them acts, and is named."""
    folder = TRAINED / "31b"
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    outer = {name: tensor for name, tensor in adapted.named_parameters() if ".lora_B." in name}
    for name, tensor in outer.items():
        if ".language_model." in name:
            torch.nn.init.normal_(tensor)
    adapted.save_pretrained(tmp_path)
    geometry = read_geometry(folder)
    matrices = map_adapter(read_adapter("mine", tmp_path), TENSORS, geometry).matrices
    assert len(matrices) == sum(".language_model." in name for name in outer) < len(outer)
    with torch.no_grad():
        next(tensor for name, tensor in outer.items() if ".embed_vision." in name)[0, 0] = 1.0
    adapted.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"wrong tensors \(1\): model\.embed_vision\.embedding_projection is no matrix"):
        map_adapter(read_adapter("mine", tmp_path), TENSORS, geometry)
