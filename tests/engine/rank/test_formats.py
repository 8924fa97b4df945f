"""Every format that folders come in: the logits of the weights that a folder stands for, on one rank and on two; planted faults.

A folder is written by our own quantiser with public names (`tests.support.engine.quantised`). It is read a second time by the
format's definition into a plain folder, and the engine loads both.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.quantisation import read_quantisation
from tests.support.engine.format_model import logits, unrounded, write_base
from tests.support.engine.quantised import KINDS, Tensors, as_held, dequantised, saved, values

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-4  # fp32 logits: another order of sums
FAULT = 100 * TOLERANCE
ROUNDED = 0.5  # of the logits' deviation: what rounding activations moves logits by, at most
MEMBERS = ("31b", "26b-a4b", "e2b")
INT4 = ("int4-32", "int4-64", "int4-128", "int4-32-zero")
NVFP4 = ("nvfp4", "nvfp4a16", "nvfp4-modelopt")
BLOCKS = ("blocks", "blocks-inverse")
FAST = ("channel", "tensor", "int8", "nvfp4", "nvfp4-modelopt", "blocks", "int4-32-zero")

Base = Callable[[str], Path]
Fault = Callable[[Tensors], Tensors]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Random members, whose widths every format cuts on four ranks."""
    root = tmp_path_factory.mktemp("formats")
    return cache(lambda member: write_base(root / member, member))


def exact(folder: Path, tp: int = 1) -> Tensor:
    return logits(folder, unrounded(read_quantisation(folder)), tp)


def distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().nan_to_num(torch.inf).max().item()


def cases() -> list[object]:
    """Every kind of every member; one member of each kind is in the fast tier."""
    found: list[object] = []
    for at, kind in enumerate(KINDS):
        for place, member in enumerate(MEMBERS):
            if (member, kind) != ("e2b", "int4-128"):  # it has 64 per-layer inputs
                is_fast = at % 3 == place or (member, kind) == ("31b", "int4-128")
                found.append(pytest.param(member, kind, marks=() if is_fast else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("member", "kind"), cases())
def test_a_folder_is_the_weights_that_it_stands_for(base: Base, tmp_path: Path, member: str, kind: str) -> None:
    """Without the rounding of activations, logits are those of its numbers in a plain folder. Those of the unquantised weights are
    not. With rounded activations they are near."""
    folder = saved(base(member), tmp_path / "saved", kind=kind)
    plain = dequantised(folder, tmp_path / "plain")
    expected = logits(plain, read_quantisation(plain))
    for tp in (1, 2):
        error = distance(exact(folder, tp), expected)
        served = logits(folder, read_quantisation(folder), tp)
        off = ((served - expected).pow(2).mean().sqrt() / expected.std()).item()
        print(f"{member} {kind} TP={tp}: {error:.1e}; with rounded activations {off:.2g} of the logits' deviation")
        assert error < TOLERANCE
        assert off < (TOLERANCE if kind in INT4 else ROUNDED)
    assert distance(expected, logits(base(member), read_quantisation(base(member)))) > FAULT


@pytest.mark.parametrize("kind", ["int4-32", "channel", "int8"])
def test_four_ranks_give_the_same(base: Base, tmp_path: Path, kind: str) -> None:
    folder = saved(base("31b"), tmp_path / "saved", kind=kind)
    plain = dequantised(folder, tmp_path / "plain")
    expected = logits(plain, read_quantisation(plain))
    assert distance(exact(folder, 4), expected) < TOLERANCE
    assert distance(exact(folder, 4).roll(1, 0), expected) > FAULT


@pytest.mark.parametrize(("member", "targets"), [("31b", r"re:.*\.mlp\..*"), ("26b-a4b", r"re:.*\.experts\..*")])
def test_a_folder_with_a_quantised_part(base: Base, tmp_path: Path, member: str, targets: str) -> None:
    """In int8 are the MLPs alone, or the routed experts alone: logits are those of its numbers in a plain folder, on one rank and
    on two. Those of a folder that is quantised whole are not."""
    folder = saved(base(member), tmp_path / "part", targets, kind="int8")
    plain = dequantised(folder, tmp_path / "plain")
    expected = logits(plain, read_quantisation(plain))
    assert max(distance(exact(folder, tp), expected) for tp in (1, 2)) < TOLERANCE
    assert distance(exact(saved(base(member), tmp_path / "whole", kind="int8")), expected) > FAULT


def of_scales(change: Callable[[Tensor], Tensor], *ends: str) -> Fault:
    """Changes the tensors of MLPs whose names have these ends."""

    def fault(tensors: Tensors) -> Tensors:
        changed = {name: change(each) for name, each in tensors.items() if ".mlp." in name and name.endswith(ends)}
        return tensors | changed

    return fault


def rolled(scale: Tensor, dim: int) -> Tensor:
    return scale.float().roll(1, dim).to(scale.dtype)  # e4m3 has no roll


def gate_and_up_swapped(tensors: Tensors) -> Tensors:
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def swapped(name: str) -> str:
        parts = name.split(".")
        return ".".join(other.get(part, part) for part in parts) if "mlp" in parts else name

    return {swapped(name): tensor for name, tensor in tensors.items()}


def zero_points_left_out(tensors: Tensors) -> Tensors:
    eights = -2004318072  # in each of a word's places
    return {name: torch.full_like(each, eights) if name.endswith("zero_point") else each for name, each in tensors.items()}


SCALES = "weight_scale", "weight_scale_inv"
A_ROW_OFF = of_scales(lambda scale: rolled(scale, 0), *SCALES)
GROUPS_SHIFTED = of_scales(lambda scale: rolled(scale, 1), *SCALES)
INVERTED = of_scales(lambda scale: 1 / scale, "weight_scale_2", "weight_global_scale")
TENSOR_INVERTED = of_scales(lambda scale: 1 / scale, "weight_scale")
NIBBLES_SWAPPED = of_scales(lambda words: (words.view(torch.uint8) >> 4 | words.view(torch.uint8) << 4).view(words.dtype), "packed")
FAULTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "scales a row off": (A_ROW_OFF, ("channel", "int8", *BLOCKS, *NVFP4, *INT4)),
    "groups shifted": (GROUPS_SHIFTED, (*BLOCKS, *NVFP4, *INT4)),
    "gate and up swapped": (gate_and_up_swapped, tuple(KINDS)),
    "the matrix's scale inverted": (INVERTED, (*NVFP4, "mixed")),
    "a scale for all inverted": (TENSOR_INVERTED, ("tensor", "modelopt")),
    "nibbles swapped": (NIBBLES_SWAPPED, ("nvfp4", *INT4)),
    "zero points left out": (zero_points_left_out, ("int4-32-zero",)),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in KINDS])
def test_planted_faults_show(base: Base, tmp_path: Path, kind: str) -> None:
    """Each moves logits by a hundred tolerances, though the folder loads."""
    folder = saved(base("31b"), tmp_path / "saved", kind=kind)
    path, expected = folder / "model.safetensors", exact(folder)
    tensors = load_file(path)
    for name, (fault, kinds) in FAULTS.items():
        if kind in kinds:
            save_file({each: tensor.contiguous() for each, tensor in fault(tensors).items()}, path)
            error = distance(exact(folder), expected)
            print(f"{kind}, {name}: {error:.2g}")
            assert error > FAULT, name


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_expert_left_in_bf16_is_named(base: Base, tmp_path: Path, kind: str) -> None:
    """One matrix of one expert is plain, and config.json does not say so: the folder is refused by the matrix's name."""
    folder = saved(base("26b-a4b"), tmp_path / "saved", kind=kind)
    path, matrix = folder / "model.safetensors", "model.language_model.layers.1.experts.2.up_proj"
    tensors = load_file(path)
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{matrix}.")}
    save_file(rest | {f"{matrix}.weight": torch.zeros(256, 128, dtype=torch.bfloat16)}, path)
    with pytest.raises(CheckpointError, match=matrix):
        exact(folder)


def test_experts_left_out_of_packing_show(base: Base) -> None:
    """At load all experts are packed: those of plain experts are other logits."""
    folder = base("26b-a4b")
    packed = unrounded(read_quantisation(folder, "fp8"))
    expected = logits(folder, packed)
    assert distance(logits(folder, replace(packed, ignored=("re:.*experts.*",))), expected) > FAULT
    assert torch.equal(logits(folder, packed), expected)


@pytest.mark.parametrize("kind", ["blocks", "nvfp4", "nvfp4-modelopt"])
def test_what_is_packed_again_keeps_its_numbers(kind: str) -> None:
    """Each is rounded by a sixteenth of itself, or half the step between the smallest e4m3 numbers of its row; by another row's
    scale it is a hundred times as far off."""
    matrix = torch.randn(256, 384, generator=torch.Generator().manual_seed(1)) * 2.0 ** (torch.arange(256) // 128 * 6)[:, None]
    stored = KINDS[kind][0](matrix)
    exact, held = values(stored), as_held(stored)
    allowed = exact.abs() / 16 + 2**-10 * exact.abs().amax(1, keepdim=True) / 448
    assert not torch.equal(held, exact)
    assert bool(((held - exact).abs() <= 1.00001 * allowed).all())
    assert bool(((held.roll(128, 0) - exact).abs() > 100 * allowed).any())
