"""FP8 weights, made at load and read from folders: values, logits over ranks, mixed folders, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError, ConfigError
from engine.quantisation import Quantisation, read_quantisation
from engine.rank.fp8 import Fp8Weight
from engine.rank.models.gemma4 import Gemma4
from engine.rank.nvfp4 import fp8_from_factor
from engine.rank.parallel import Single
from engine.rank.weight import OwnProduct, Weight
from engine.weight_formats import FP8
from kernels.packed import unpacked
from tests.conftest import Nano
from tests.support.engine.format_model import logits, model
from tests.support.engine.quantised import saved
from tests.support.engine.threads import run_ranks

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-4  # of fp32 logits: the same products in another order
E4M3 = torch.float8_e4m3fn
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
MLP, EXPERTS = r"re:.*\.mlp\..*", r"re:.*\.experts\..*"


class Expected(OwnProduct, Fp8Weight):
    """The products by their formula: each row of x in e4m3 with a scale of its own. The sums are exact: where a rounding to e4m3
    fell the other way, all later rows would differ."""

    def rows_product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        scale = x.abs().amax(1, keepdim=True) / 448
        sums = (x / scale).to(E4M3).double() @ self.values.double().T
        return (sums.float() * (scale * self.scale.T)).to(dtype)


def formats(folder: Path) -> dict[str, set[str]]:
    """The classes of a loaded model's matrices, by their last name."""
    found: dict[str, set[str]] = {}
    for name, each in model(folder, Single(), read_quantisation(folder)).named_modules():
        if isinstance(each, Weight):
            found.setdefault(name.rpartition(".")[2], set()).add(type(each).__name__)
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return (found - expected).abs().max().item()


def test_values_do_not_depend_on_ranks(nano: Nano) -> None:
    """A rank's part of a matrix that is packed at load is that part of the whole matrix packed, to the bit."""
    folder = nano("31b")
    at_load = read_quantisation(folder, "fp8")
    whole = model(folder, Single(), at_load)
    ranks = run_ranks(2, lambda parallel: model(folder, parallel, at_load))
    for name in ("blocks.0.attention.o", "blocks.1.mlp.down"):
        one = whole.get_submodule(name)
        parts = [rank.get_submodule(name) for rank in ranks]
        assert torch.equal(one.values.float(), torch.cat([part.values.float() for part in parts], 1))
        assert all(torch.equal(one.scale, part.scale) for part in parts)
    plain = model(folder, Single(), read_quantisation(folder)).blocks[0].mlp.down.weight
    rounded = unpacked(whole.blocks[0].mlp.down.matrix)
    assert 0 < ((rounded - plain).abs() / plain.abs().amax(1, keepdim=True)).max() < 2**-4


def test_elements_of_nvfp4_are_in_order() -> None:
    """Each of the sixteen numbers, in both halves of a byte, times its scales. Planted: the halves are swapped."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.cat([torch.arange(16), torch.randperm(16, generator=torch.Generator().manual_seed(1))]).view(2, 16)
    scale = torch.tensor([[0.5], [4.0]])
    expected = torch.cat([numbers, -numbers])[codes] * scale * 0.25

    def misses(low: Tensor, high: Tensor) -> bool:
        values, rows = fp8_from_factor((low + 16 * high).to(torch.uint8), scale.to(E4M3), torch.tensor([[0.25]]))
        return bool(((values.float() * rows - expected).abs() > expected.abs() / 16).any())

    assert not misses(codes[:, ::2], codes[:, 1::2])
    assert misses(codes[:, 1::2], codes[:, ::2])


@pytest.mark.parametrize("member", ["31b", "e2b"])
def test_products_are_their_formula(nano: Nano, member: str) -> None:
    """Logits are those of the formula, over two ranks too; a scale of another row shows."""
    folder = nano(member)
    at_load = read_quantisation(folder, "fp8")
    formula = Quantisation(((("Linear",), at_load.groups[0][1]._replace(weight=f"{__name__}:Expected")),))
    found, expected = logits(folder, at_load), logits(folder, formula)
    over_two = logits(folder, at_load, 2)

    def roll(made: Gemma4) -> None:
        scale = made.blocks[0].mlp.down.scale
        scale.copy_(scale.roll(1, 0))

    fault = logits(folder, at_load, change=roll)
    plain = logits(folder, read_quantisation(folder))
    print(f"{member}: {error(found, expected):.1e}; two ranks {error(over_two, found):.2g}; plain {error(found, plain):.2g}")
    assert error(found, expected) < TOLERANCE
    assert error(fault, found) > 100 * TOLERANCE
    # A rank rounds rows of its own columns: two ranks' are as near to the plain model as one's.
    assert error(over_two, plain) < 2 * error(found, plain)


@pytest.mark.parametrize("member", ["31b", "26b-a4b", "e2b"])
def test_a_folder_gives_what_packing_at_load_gives(nano: Nano, tmp_path: Path, member: str) -> None:
    """compressed-tensors' folder, whose experts are one by one, and the plain folder packed at load: the same logits to the bit.
    Gate and up in each other's places do not."""
    folder = saved(nano(member), tmp_path / "saved")
    found, expected = logits(folder, read_quantisation(folder)), logits(nano(member), read_quantisation(nano(member), "fp8"))

    def swap(made: Gemma4) -> None:
        values = made.blocks[0].mlp.gate_up.values
        values.copy_(values.float().roll(len(values) // 2, 0).to(E4M3))

    assert torch.equal(found, expected)
    assert error(logits(folder, read_quantisation(folder), change=swap), expected) > 100 * TOLERANCE


def test_a_folder_may_quantise_a_part(nano: Nano, tmp_path: Path) -> None:
    """MLPs alone, as nvidia's 31B; routed experts alone, as its 26B; one matrix that the ignore list names stays plain."""
    mlp = formats(saved(nano("31b"), tmp_path / "mlp", MLP))
    assert mlp == {"head": {"Weight"}, "qkv": {"Weight"}, "o": {"Weight"}, "gate_up": {"Fp8Weight"}, "down": {"Fp8Weight"}}
    folder = saved(nano("26b-a4b"), tmp_path / "experts", EXPERTS)
    made = model(folder, Single(), read_quantisation(folder))
    assert type(made.blocks[0].experts.down) is Fp8Weight
    assert type(made.blocks[0].mlp.down) is Weight
    ignored = "model.language_model.layers.0.mlp.down_proj"
    part = saved(nano("31b"), tmp_path / "ignored", ignore=(ignored,))
    assert type(model(part, Single(), read_quantisation(part)).blocks[0].mlp.down) is Weight
    assert type(model(part, Single(), read_quantisation(part)).blocks[1].mlp.down) is Fp8Weight


def test_what_the_config_says_must_be_there(nano: Nano, tmp_path: Path) -> None:
    """A bf16 matrix where the config promises fp8 is named, with the scale that it lacks."""
    folder = saved(nano("31b"), tmp_path / "saved", ignore=("model.language_model.layers.0.mlp.down_proj",))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"down_proj.weight_scale is missing; .* has dtype .*, not one of F8_E4M3"):
        logits(folder, read_quantisation(folder))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": INT4}}}, "4-bit int group of 16 weights"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "modelopt, MXFP8"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "auto-round"}, "auto-round"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gguf"}, "gguf"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": INT4 | {"actorder": "group"}}}},
         "4-bit int group of 16 in order of activations weights"),
    ],
)  # fmt: skip
def test_formats_that_are_not_read_are_named(nano: Nano, tmp_path: Path, said: dict[str, object], words: str) -> None:
    config = json.loads((nano("31b") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    with pytest.raises(CheckpointError, match=re.escape(words)) as raised:
        read_quantisation(tmp_path)
    assert len(str(raised.value).removeprefix(str(tmp_path))) < 300
    assert "\n" not in str(raised.value)


def test_matrices_by_name() -> None:
    """Names, patterns and wildcards name a matrix; an ignored one is plain though a target names it."""
    quantisation = Quantisation(((("re:.*mlp.*", "a.q_proj"), FP8),), ("re:.*layers\\.0\\..*", "b.*"))
    named = {"a.layers.1.mlp.up_proj": True, "a.q_proj": True, "a.k_proj": False, "a.layers.0.mlp.up_proj": False, "b.mlp": False}
    assert {name: quantisation.format_of(name) is FP8 for name in named} == named
    with pytest.raises(CheckpointError, match=r"quantization_config: re:\(a is no regular expression"):
        Quantisation(ignored=("re:(a",)).format_of("a")


@pytest.mark.parametrize(("capability", "refused"), [((8, 8), True), ((8, 9), False), ((9, 0), False)])
def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], refused: bool) -> None:
    """Matrices in fp8 need compute capability 8.9."""
    monkeypatch.setattr(Weight, "__init__", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if not refused:
        Fp8Weight((2, 2), torch.bfloat16, torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match=r"8\.9 or later; this one has 8\.8"):
        Fp8Weight((2, 2), torch.bfloat16, torch.device("cuda"))
