"""PEFT folders: those that trainers save are mapped whole, others are refused by name, and nothing of them is loaded."""

import json
import os
import time
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from deploy.cli.main import main
from engine.adapters import MAX_RANK, read_adapter
from engine.errors import CheckpointError, ConfigError
from engine.geometry import Geometry, read_geometry
from engine.rank.adapter_store import load_adapters
from engine.rank.load import adapter_tensors
from engine.rank.load.adapter_tensors import AdapterTensors, map_adapter
from engine.rank.load.loader import load
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Single
from tests.conftest import Nano
from tests.support.engine.adapters import ALL, FILE, Recipe, write
from tests.support.judge.oracle import load_oracle
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.cpu

PREFIX = "base_model.model.model.layers."
Tensors = dict[str, Tensor]
Edit = Callable[[Tensors], None]


@pytest.fixture(scope="module")
def oracles(nano: Nano) -> Mapping[str, Any]:
    return {member: load_oracle(nano(member)) for member in ("e2b", "26b-a4b", "31b")}


@pytest.fixture
def folder(oracles: Mapping[str, Any], tmp_path: Path) -> Path:
    """An adapter of the 26B's shape, one tensor an expert."""
    return write(tmp_path, oracles["26b-a4b"], Recipe(3, experts="each"))


def mapped(folder: Path, model: Path) -> AdapterTensors:
    return map_adapter(read_adapter("mine", folder), TENSORS, read_geometry(model))


def change_tensors(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


PREFIXES = ("base_model.model.model.", "base_model.model.model.language_model.")
TARGETS = ("(q|v)_proj", "(q|k|v|o)_proj", "(q|k|v|o|gate|up|down)_proj", ALL)


@pytest.mark.parametrize(("member", "prefix", "targets"), [*product(("e2b", "26b-a4b", "31b"), PREFIXES, TARGETS)])
def test_layouts_of_trainers_are_mapped_whole(
    nano: Nano, oracles: Mapping[str, Any], tmp_path: Path, member: str, prefix: str, targets: str
) -> None:
    """Every tensor of a folder is a half of a mapped product, whichever class of transformers its names are of; but for K and V of
    layers that read another's, where the model has no product."""
    for experts in ("", "fused", "each") if member == "26b-a4b" else ("",):
        path = write(tmp_path / f"it{experts}", oracles[member], Recipe(1, targets=targets, prefix=prefix, experts=experts))
        found = mapped(path, nano(member)).matrices
        halves = {name for matrix in found for name in (matrix.a, matrix.b)}
        assert halves <= load_file(path / FILE).keys()
        left = load_file(path / FILE).keys() - halves
        assert all(".k_proj." in name or ".v_proj." in name for name in left)
        assert not left or member == "e2b"


def _is_halved(tensors: Tensors) -> None:
    del tensors[PREFIX + "0.self_attn.q_proj.lora_B.weight"]


def _has_dora(tensors: Tensors) -> None:
    tensors[PREFIX + "0.self_attn.q_proj.lora_magnitude_vector"] = torch.ones(8)


def _has_a_tower(tensors: Tensors) -> None:
    for half in "AB":
        tensors[f"base_model.model.model.vision_tower.encoder.layers.0.mlp.down_proj.linear.lora_{half}.weight"] = torch.ones(8, 8)


def _has_an_idle_tower(tensors: Tensors) -> None:
    for module in ("vision_tower.encoder.layers.0.mlp.down_proj.linear", "embed_vision.embedding_projection"):
        tensors[f"base_model.model.model.{module}.lora_A.weight"] = torch.ones(8, 8).bfloat16()
        tensors[f"base_model.model.model.{module}.lora_B.weight"] = torch.zeros(1 << 17, 8).bfloat16()


def _has_a_tower_that_acts_at_its_end(tensors: Tensors) -> None:
    _has_an_idle_tower(tensors)
    tensors["base_model.model.model.embed_vision.embedding_projection.lora_B.weight"][-1, -1] = 1e-30


def _has_a_head(tensors: Tensors) -> None:
    for half in "AB":
        tensors[f"base_model.model.lm_head.lora_{half}.weight"] = torch.ones(8, 8)


def _has_an_embedding(tensors: Tensors) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(8, 8)


def _has_a_layer_too_many(tensors: Tensors) -> None:
    for half in "AB":
        tensors[f"{PREFIX}99.mlp.up_proj.lora_{half}.weight"] = torch.ones(8, 8)


def _has_another_shape(tensors: Tensors) -> None:
    tensors[PREFIX + "0.mlp.up_proj.lora_B.weight"] = torch.ones(7, 8)


def _has_another_rank(tensors: Tensors) -> None:
    tensors[PREFIX + "0.mlp.up_proj.lora_A.weight"] = torch.ones(9, 80)


def _has_integers(tensors: Tensors) -> None:
    name = PREFIX + "0.mlp.up_proj.lora_A.weight"
    tensors[name] = tensors[name].to(torch.int8)


def _is_named_twice(tensors: Tensors) -> None:
    for half in "AB":
        name = f"{PREFIX}0.mlp.up_proj.lora_{half}.weight"
        tensors[name.replace("model.layers", "model.language_model.layers")] = tensors[name].clone()


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (_is_halved, "q_proj.lora_B.weight is missing"),
        (_has_dora, "lora_magnitude_vector is no lora_A or lora_B"),
        (_has_a_tower, "vision_tower.encoder.layers.0.mlp.down_proj.linear is no matrix"),
        (_has_a_tower_that_acts_at_its_end, r"wrong tensors \(1\): .*embed_vision.embedding_projection is no matrix"),
        (_has_a_head, "lm_head is no matrix"),
        (_has_an_embedding, "lora_embedding_A is no lora_A"),
        (_has_a_layer_too_many, "layers.99.mlp.up_proj is no matrix"),
        (_has_another_shape, r"up_proj.lora_B.weight has shape \[7, 8\], not"),
        (_has_another_rank, r"up_proj.lora_A.weight has shape \[9, 80\], not \[8, 80\]"),
        (_has_integers, "has dtype I8"),
        (_is_named_twice, "are for one matrix"),
    ],
)
def test_a_tensor_without_a_place_refuses_the_adapter(nano: Nano, folder: Path, edit: Edit, why: str) -> None:
    """The tensor is named; without the change the same folder is mapped."""
    mapped(folder, nano("26b-a4b"))
    change_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=why) as refused:
        mapped(folder, nano("26b-a4b"))
    assert "adapters.mine" in str(refused.value)


def test_modules_of_encoders_that_add_nothing_are_left_out(nano: Nano, folder: Path) -> None:
    """PEFT's all-linear changes towers too; trained with text alone, their B stays 0. The rest is mapped as without them."""
    before = mapped(folder, nano("26b-a4b")).matrices
    change_tensors(folder, _has_an_idle_tower)
    assert mapped(folder, nano("26b-a4b")).matrices == before


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"invented_next_year": {"x": 1}}, "invented_next_year"),
        ({"r": -8}, "Expected `int` >= 1"),
        ({"r": MAX_RANK + 1}, "Expected `int` <= 512"),
        ({"rank_pattern": {"q_proj": 0}}, "Expected `int` >= 1"),
        ({"lora_alpha": "many"}, "Expected `float`"),
    ],
)
def test_a_config_that_asks_for_more_is_refused(nano: Nano, folder: Path, changes: dict[str, Any], why: str) -> None:
    """By the key's name, before a tensor is looked at."""
    change_config(folder, **changes)
    (folder / FILE).write_bytes(b"nothing of this is read")
    with pytest.raises(CheckpointError, match=why):
        mapped(folder, nano("26b-a4b"))


def test_a_pattern_that_is_no_regex_is_refused(nano: Nano, folder: Path) -> None:
    """It is named."""
    change_config(folder, rank_pattern={"(": 4})
    with pytest.raises(CheckpointError, match=r"'\(' in a pattern"):
        mapped(folder, nano("26b-a4b"))


def test_files_that_are_no_adapter(nano: Nano, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a config above 1 MiB, absent, pickled, cut short, with a tensor a byte, without a config: each is said as it is."""
    config = folder / "adapter_config.json"
    text = config.read_bytes()
    config.write_bytes(text.ljust(1 << 20))
    assert mapped(folder, nano("26b-a4b")).matrices
    config.write_bytes(text.ljust((1 << 20) + 1))
    with pytest.raises(CheckpointError, match="no file of at most 1048576 bytes"):
        mapped(folder, nano("26b-a4b"))
    config.write_bytes(text)
    monkeypatch.setattr(adapter_tensors, "MAX_TENSORS", 10)
    with pytest.raises(CheckpointError, match="tensors; at most 10"):
        mapped(folder, nano("26b-a4b"))
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        mapped(folder, nano("26b-a4b"))
    (folder / FILE).unlink()
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin, and only safetensors are read"):
        mapped(folder, nano("26b-a4b"))
    config.unlink()
    with pytest.raises(CheckpointError, match=r"adapters\.mine: .*does not exist"):
        mapped(folder, nano("26b-a4b"))


def test_bombs_are_refused_quickly(nano: Nano, folder: Path) -> None:
    """A hundred thousand tensors, shapes that the file does not have, a config that is a pipe or has a megabyte and more: each is
    refused in some seconds, which a reader of all of them would not be done in."""
    member = nano("26b-a4b")
    began = time.monotonic()
    whole = (folder / FILE).read_bytes()
    empty = {"dtype": "F32", "shape": [0, 1], "data_offsets": [0, 0]}
    many = {f"{PREFIX}{at}.mlp.up_proj.lora_A.weight": empty for at in range(10**5)}
    write_header(folder / FILE, many)
    with pytest.raises(CheckpointError, match="100000 tensors; at most"):
        mapped(folder, member)
    name = PREFIX + "0.mlp.up_proj.lora_A.weight"
    write_header(folder / FILE, {name: {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}})
    with pytest.raises(CheckpointError, match="cannot be read"):
        mapped(folder, member)
    (folder / FILE).write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        mapped(folder, member)
    (folder / FILE).write_bytes(whole)
    mapped(folder, member)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text() + " " * (1 << 20))
    with pytest.raises(CheckpointError, match="no file of at most"):
        mapped(folder, member)
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(CheckpointError, match="no file of at most"):
        mapped(folder, member)
    assert time.monotonic() - began < 60


def write_header(path: Path, tensors: dict[str, Any]) -> None:
    """A safetensors file with that header and no data."""
    header = json.dumps(tensors).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def model_of(folder: Path, geometry: Geometry) -> Gemma4:
    model = Gemma4(geometry, Single(), torch.float32, torch.device("cpu"))
    load(model, TENSORS, folder)
    return model


def test_an_adapter_that_changes_nothing_is_refused(nano: Nano, folder: Path) -> None:
    """Where B is zero everywhere, or alpha is; one matrix that acts is enough."""
    member = nano("26b-a4b")
    geometry = read_geometry(member)
    kept = load_file(folder / FILE)

    def zero(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if ".lora_B." in name and ".0.mlp.up_proj." not in name:
                tensor.zero_()

    change_tensors(folder, zero)
    load_adapters(model_of(member, geometry), TENSORS, {"mine": str(folder)})
    change_tensors(folder, lambda tensors: [tensor.zero_() for name, tensor in tensors.items() if ".lora_B." in name])
    with pytest.raises(CheckpointError, match=r"adapters\.mine: 0 of \d+ matrices act"):
        load_adapters(model_of(member, geometry), TENSORS, {"mine": str(folder)})
    save_file(kept, folder / FILE)
    change_config(folder, lora_alpha=0)
    with pytest.raises(ConfigError, match="0 of"):
        load_adapters(model_of(member, geometry), TENSORS, {"mine": str(folder)})


def test_numbers_that_are_none_are_refused(nano: Nano, folder: Path) -> None:
    """NaN in an adapter would be in every answer."""
    member = nano("26b-a4b")

    def spoil(tensors: Tensors) -> None:
        tensors[PREFIX + "0.mlp.up_proj.lora_A.weight"][0, 0] = torch.nan

    change_tensors(folder, spoil)
    with pytest.raises(CheckpointError, match="has NaN or infinity"):
        load_adapters(model_of(member, read_geometry(member)), TENSORS, {"mine": str(folder)})


def test_check_config_reads_adapters(nano: Nano, oracles: Mapping[str, Any], tmp_path: Path, capsys: Any) -> None:
    """A folder with a tensor that has no place is said to be wrong, by the adapter's name, and nothing starts; without it, not."""
    path = write(tmp_path / "it", oracles["31b"], Recipe(4))
    served = yaml.safe_load((ROOT / "deploy" / "nano.yaml").read_text())
    served["applications"][0]["args"] |= {"model": str(nano("31b")), "mtp": {}, "adapters": {"mine": str(path)}}
    config = tmp_path / "mine.yaml"
    config.write_text(yaml.safe_dump(served))
    assert main(["check-config", str(config)]) == 0
    change_tensors(path, _has_a_head)
    capsys.readouterr()
    assert main(["check-config", str(config)]) == 2
    said = capsys.readouterr().err
    assert "adapters.mine" in said
    assert "lm_head is no matrix" in said
