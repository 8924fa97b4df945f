"""NVFP4 folders in four bits: whole models, FlashInfer's front end, the check at start, and what is refused."""

import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError, ConfigError
from engine.geometry import read_geometry
from engine.quantisation import Quantisation, read_quantisation
from engine.rank import nvfp4, start_checks
from engine.rank.builder import load_rank
from engine.rank.load.slices import pieces
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.nvfp4 import Fp4Calls, Nvfp4Weight
from engine.rank.parallel import Single
from engine.weight_formats import FORMATS
from kernels.linear import GEGLU
from kernels.selfcheck import row_error
from tests.conftest import Nano
from tests.support import flashinfer_fp4
from tests.support.engine.format_model import logits, model, unrounded, write_base
from tests.support.engine.fp4 import codes, numbers, round_rows
from tests.support.engine.quantised import KINDS, Tensors, dequantised, saved
from tests.support.engine.recording import config_of
from tests.support.flashinfer_calls import signature
from tests.support.flashinfer_fp4 import NEWEST, SIGNATURES, Fp4Kernels, pinned, real

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
# fp32 logits of the middle row: another order of sums. Where a number lies halfway between two, the order decides how it is
# rounded, and all later rows see that: by 4e-4 in the one row of 480 in which it happened.
TOLERANCE = 1e-4
FAULT = 100 * TOLERANCE
ROUNDED = 1.0  # of the logits' deviation: what four bits of activations move logits of random weights by, at most
BF16 = 0.005  # of a row's norm: two roundings to bf16
MEMBERS = ("31b", "26b-a4b", "e2b")
NAMES = ("nvfp4", "nvfp4-modelopt")

Base = Callable[[str], Path]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    root = tmp_path_factory.mktemp("nvfp4")
    return cache(lambda member: write_base(root / member, member))


def kept(folder: Path) -> Quantisation:
    """The format with four bits; what stays in eight rounds no activations, as the plain folder that it is compared with."""
    return unrounded(read_quantisation(folder, "nvfp4"))


def distance(one: Tensor, other: Tensor) -> float:
    """Of the middle row."""
    return (one - other).abs().nan_to_num(torch.inf).amax(1).median().item()


# ---- whole models


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("member", MEMBERS)
def test_logits_are_those_of_rounded_activations(base: Base, tmp_path: Path, member: str, kind: str) -> None:
    """On one rank and on two, logits are those of an fp64 emulation with the folder's numbers, experts and per-layer inputs in
    eight bits. Those of plain activations are further off than that, and are within the stated part of the deviation."""
    folder = saved(base(member), tmp_path / "saved", kind=kind)
    plain = dequantised(folder, tmp_path / "plain", four_bits=True)
    exact = logits(plain, read_quantisation(plain))
    for tp in (1, 2):
        found = logits(folder, kept(folder), tp)
        error = distance(found, logits(plain, read_quantisation(plain), tp, round_rows))
        off = ((found - exact).pow(2).mean().sqrt() / exact.std()).item()
        print(f"{member} {kind} TP={tp}: {error:.1e}; rounded activations move logits by {off:.2g} of their deviation")
        assert error < TOLERANCE
        assert distance(found, exact) > FAULT
        assert off < ROUNDED


def of_mlps(change: Callable[[Tensor], Tensor], *ends: str) -> Callable[[Tensors], Tensors]:
    def fault(tensors: Tensors) -> Tensors:
        return tensors | {name: change(each) for name, each in tensors.items() if ".mlp." in name and name.endswith(ends)}

    return fault


def another_ratio(tensors: Tensors) -> Tensors:
    """Of gate to up; that of up itself would be undone by the norm after the MLP."""
    ends = ("gate_proj.weight_global_scale", "gate_proj.weight_scale_2")
    return of_mlps(lambda factor: factor * 1.5, *ends)(tensors)


FAULTS: dict[str, Callable[[Tensors], Tensors]] = {
    "scales shifted by a group": of_mlps(lambda scale: scale.float().roll(1, 1).to(scale.dtype), "weight_scale"),
    "the factor inverted": of_mlps(lambda scale: 1 / scale, "weight_scale_2", "weight_global_scale"),
    "halves of a byte swapped": of_mlps(lambda byte: byte >> 4 | byte << 4, "weight_packed", "proj.weight"),
    "another ratio of a pair": another_ratio,
}


@pytest.mark.parametrize("kind", NAMES)
def test_planted_faults_show(base: Base, tmp_path: Path, kind: str) -> None:
    folder = saved(base("31b"), tmp_path / "saved", kind=kind)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    expected = logits(folder, kept(folder))
    for name, fault in FAULTS.items():
        save_file({each: tensor.contiguous() for each, tensor in fault(tensors).items()}, path)
        assert distance(logits(folder, kept(folder)), expected) > FAULT, name


def test_what_stays_in_eight_bits(base: Base, tmp_path: Path) -> None:
    """Experts, per-layer inputs, and the fp8 matrices of a mixed folder; random weights have the deviation of plain ones."""
    experts = model(saved(base("26b-a4b"), tmp_path / "experts", kind="nvfp4"), Single(), quantised(tmp_path / "experts")).blocks[0]
    inputs = model(saved(base("e2b"), tmp_path / "inputs", kind="nvfp4"), Single(), quantised(tmp_path / "inputs"))
    mixed = model(saved(base("31b"), tmp_path / "mixed", kind="mixed"), Single(), quantised(tmp_path / "mixed")).blocks[0]
    eight = (experts.experts.down, inputs.embedding.ple_projection, inputs.blocks[0].ple_gate, mixed.attention.qkv)
    assert {type(each).__name__ for each in eight} == {"Fp8Weight"}
    four = (experts.mlp.down, experts.attention.o, inputs.blocks[0].mlp.gate_up, mixed.mlp.down)
    assert {type(each) for each in four} == {Nvfp4Weight}
    assert quantised(tmp_path / "mixed").name == "fp8, nvfp4"
    config = msgspec.structs.replace(config_of(tmp_path / "experts", 1, weights="nvfp4"), load_format="dummy")
    down = load_rank(config, Single(), CPU, checked=False).model.get_submodule("blocks.0.mlp.down")
    assert isinstance(down, Nvfp4Weight)
    assert down.weight.std().item() == pytest.approx(down.shape[1] ** -0.5, rel=0.03)


def quantised(folder: Path) -> Quantisation:
    return read_quantisation(folder, "nvfp4")


def test_what_is_refused(base: Base, nano: Nano, tmp_path: Path) -> None:
    """A plain folder, one without NVFP4 matrices, and a cut through the columns of a scale."""
    with pytest.raises(CheckpointError, match="not quantised; Quartet loads nvfp4 weights"):
        read_quantisation(nano("31b"), "nvfp4")
    with pytest.raises(CheckpointError, match="no NVFP4 matrices"):
        read_quantisation(saved(base("31b"), tmp_path / "fp8", kind="channel"), "nvfp4")
    with pytest.raises(CheckpointError, match=r"int8.*; Quartet loads nvfp4 weights"):
        read_quantisation(saved(base("31b"), tmp_path / "int8", kind="int8"), "nvfp4")
    narrow = saved(nano("31b"), tmp_path / "narrow", kind="nvfp4")
    with pytest.raises(CheckpointError, match=r"down_proj.*blocks of 16 cannot be cut at 0 and 24 of 192"):
        pieces(TENSORS, read_geometry(narrow), 0, 8, quantised(narrow))
    assert pieces(TENSORS, read_geometry(narrow), 0, 4, quantised(narrow))
    folder = saved(base("31b"), tmp_path / "saved", kind="nvfp4")
    assert read_quantisation(folder).name == "fp8"
    assert any("also of a weight-only folder" in note for note in quantised(folder).notes)
    with pytest.raises(ConfigError, match="nvfp4 with dtype float32"):
        config_of(folder, 1, weights="nvfp4", device="cuda", dtype="float32")


def test_rows_are_rounded_by_the_formats_definition() -> None:
    """Numbers, scales and factors of rows with groups of very different sizes, zeros among them, are those of tables in fp64."""
    torch.manual_seed(2)
    x = torch.randn(200, 160) * 2.0 ** torch.randint(-14, 1, (200, 10)).repeat_interleave(16, 1)
    x[5], x[6, :16] = 0, 0
    code, scale, factor = codes(x)
    found, factors = nvfp4.rounded(x)
    assert (found - numbers(code, scale)).abs().max() < 1e-3 * 2**-9
    assert (factors[:, 0] / factor - 1)[factor > 0].abs().max() < 1e-6
    assert not torch.equal(found, numbers(code, scale.roll(1, 1)).float())


# ---- FlashInfer's front end


@pytest.fixture(params=[NEWEST, (10, 0), (10, 3)], ids=str)
def front(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fp4Calls, Fp4Kernels]]:
    """The pinned front end, and the installed one as on each GPU."""
    kernels = Fp4Kernels()
    if isinstance(request.param, str):
        yield pinned(request.param, kernels), kernels
        return
    with real(kernels, monkeypatch, request.param) as calls:
        yield calls, kernels


def made(rows: int, columns: int, second: float = 3.0) -> Nvfp4Weight:
    """A fused pair of matrices, whose factors differ by `second`."""
    torch.manual_seed(rows + columns)
    uneven = 2.0 ** (torch.arange(columns) // 16 * 3 % 5)
    halves = [torch.randn(rows // 2, columns) * uneven for _ in range(2)]
    weight = Nvfp4Weight((rows, columns), torch.bfloat16, CPU).stored_as(FORMATS["nvfp4"][0])
    assert isinstance(weight, Nvfp4Weight)
    for index, (half, scale) in enumerate(zip(halves, (1.0, second), strict=True)):
        stored = KINDS["nvfp4-modelopt"][0](half)
        part = slice(index * rows // 2, (index + 1) * rows // 2)
        weight.values[part] = stored["weight"]
        weight.scale[part] = stored["weight_scale"]
        weight.factor[part] = 0.01 * scale
    return weight


SHAPES = [(64, 64), (96, 160), (288, 80), (272, 144)]  # the last two have no multiple of 32 columns, or rows


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("second", [1.0, 3.0])
def test_products_through_the_front_end(front: tuple[Fp4Calls, Fp4Kernels], shape: tuple[int, int], second: float) -> None:
    """In bf16 they are those in plain torch, of one row and of many; a row's do not depend on other rows. The matrix reads as
    before. Scales in another order, or shifted, halves of bytes swapped, and a ratio left out are a hundred times as far off."""
    calls, kernels = front
    weight = made(*shape, second)
    x = (start_checks.exact_rows(130, shape[1]) * 2.0 ** (torch.arange(130) % 9)[:, None]).bfloat16()
    x[3] = 0
    expected, dense = weight.reference(x), weight.weight.clone()
    assert row_error(expected, x.double() @ (weight.numbers() * weight.factor).double().t()) < 1e-6
    tiles = nvfp4.in_tiles(weight.scale)
    weight.arrange(calls)
    found = weight.rows_product(x, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert row_error(found, expected) < BF16
    assert torch.equal(weight.rows_product(x[7:8], torch.bfloat16), found[7:8])
    assert torch.equal(weight.weight, dense)
    assert torch.equal(weight.scale, tiles)
    assert (weight.ratios is None) == (second == 1)
    zero = made(*shape)
    zero.factor.zero_()
    zero.arrange(calls)
    assert not zero.rows_product(x, torch.bfloat16).any()
    assert kernels.calls[0]["alpha"] == pytest.approx(0.01 * second)
    assert weight.product(x, GEGLU).shape == (130, shape[0] // 2)
    for fault in faults(weight, second):
        assert row_error(weight.rows_product(x, torch.bfloat16), expected) > 100 * BF16, fault
    assert row_error(weight.rows_product(x, torch.bfloat16), expected) < BF16


def faults(weight: Nvfp4Weight, second: float) -> Iterator[str]:
    """Plants one at a time, and takes it back."""
    values_made, scale, ratios = weight.values.clone(), weight.scale.clone(), weight.ratios
    raw = scale.view(torch.uint8)
    weight.scale.copy_(raw.flatten().roll(1).view(raw.shape).view(scale.dtype))
    yield "scales shifted by a group"
    weight.scale.copy_(nvfp4.out_of_tiles(scale))
    yield "scales not in tiles"
    weight.scale.copy_(scale)
    weight.values.copy_(values_made >> 4 | values_made << 4)
    yield "halves of a byte swapped"
    weight.values.copy_(values_made)
    if second != 1:
        weight.ratios = None
        yield "a ratio left out"
        weight.ratios = ratios


@pytest.mark.parametrize("member", MEMBERS)
def test_a_model_through_the_front_end(front: tuple[Fp4Calls, Fp4Kernels], base: Base, tmp_path: Path, member: str) -> None:
    """In bf16 every product of a model passes the launchers' checks, and logits are near those in plain torch: nearer than bf16's
    and four bits' noise, and those of another order of scales are not."""
    calls, kernels = front
    folder = saved(base(member), tmp_path / "saved", kind="nvfp4")

    def found(change: Callable[[Gemma4], None]) -> Tensor:
        return logits(folder, quantised(folder), change=change, dtype=torch.bfloat16).float()

    expected = found(lambda _: None)
    served = found(partial(arranged, calls=calls))
    assert len(kernels.calls) == 4 * len(read_geometry(folder).layers)
    wrong = found(partial(arranged, calls=calls, fault=True))
    off, faulty = ((each - expected).pow(2).mean().sqrt() / expected.std() for each in (served, wrong))
    print(f"{member}: {off:.2g} of the logits' deviation, {faulty:.2g} with scales in another order")
    assert off < ROUNDED
    assert faulty > 1.2 * off


def arranged(model: Gemma4, calls: Fp4Calls, *, fault: bool = False) -> None:
    for weight in model.modules():
        if isinstance(weight, Nvfp4Weight):
            weight.arrange(calls)
            if fault:
                weight.scale.copy_(nvfp4.out_of_tiles(weight.scale))


# ---- the check at start, and signatures


def test_the_check_at_start(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies with a matrix of each shape. A GPU that has scales in another order or bytes in another, or a factor that is
    wrong by a twentieth, stops the boot."""
    folder = saved(base("31b"), tmp_path / "saved", kind="nvfp4")
    calls = pinned(NEWEST, kernels := Fp4Kernels())
    served = model(folder, Single(), quantised(folder))
    start_checks.check_products(served)
    assert not kernels.calls
    arranged(served, calls)
    start_checks.check_products(served)
    matrices = [weight for weight in served.modules() if isinstance(weight, Nvfp4Weight)]
    assert len(kernels.calls) == len({weight.shape for weight in matrices})
    named = r"weights: nvfp4.* 128 x 256 is wrong by"
    layouts = {
        "place": lambda rows, columns: torch.arange(rows)[:, None] * -(-columns // 4) * 4 + torch.arange(columns),
        "packed": lambda code: (code[:, 1::2] + 16 * code[:, ::2]).to(torch.uint8),
    }
    for name, layout in layouts.items():
        with monkeypatch.context() as patch:
            patch.setattr(flashinfer_fp4, name, layout)
            with pytest.raises(ConfigError, match=named):
                start_checks.check_products(served)
    for weight in matrices:
        weight.calls = calls._replace(multiply=lambda *given, **named: calls.multiply(*given, **named) * 1.05)
    with pytest.raises(ConfigError, match=named):
        start_checks.check_products(served)


@pytest.mark.parametrize("version", SIGNATURES)
def test_a_version_takes_what_we_give(version: str) -> None:
    for text, names in zip(SIGNATURES[version], (nvfp4.QUANTISE_ARGUMENTS, nvfp4.MULTIPLY_ARGUMENTS), strict=True):
        known = signature(text).parameters
        assert set(names) <= set(known)
        assert {name for name, each in known.items() if each.default is each.empty} <= set(names)


def test_without_flashinfer_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"weights: nvfp4 needs FlashInfer \(make install-gpu\)"):
        nvfp4.load_calls()


def test_the_installed_version_is_one_that_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters, their order and their plain defaults are those that are pinned. One that lacks an argument is refused."""
    with real(Fp4Kernels(), monkeypatch, (10, 0)) as found:
        version = importlib.metadata.version("flashinfer-python")
        assert version in SIGNATURES, f"FlashInfer {version} is new here: read its front end, then pin it"
        for call, text in zip(found, SIGNATURES[version], strict=True):
            theirs = inspect.signature(call).parameters.values()
            pinned_ones = signature(text).parameters.values()
            assert [each.name for each in theirs] == [each.name for each in pinned_ones]
            for one, other in zip(theirs, pinned_ones, strict=True):
                if isinstance(one.default, bool | int | str | None) and one.name != "sfLayout":
                    assert one.default == other.default, one.name
        monkeypatch.setattr("flashinfer.mm_fp4", lambda a, b: None)
        with pytest.raises(ConfigError, match="has no a_descale, alpha"):
            nvfp4.load_calls()
