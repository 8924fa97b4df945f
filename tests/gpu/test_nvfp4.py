"""FlashInfer's NVFP4 products on silicon (compute capability 10.0 and 10.3): layouts, rounding, graphs, and a nano model.

Skips elsewhere, and where FlashInfer is not installed (`make install-gpu`). The first product is compiled by nvcc for minutes,
unless flashinfer-jit-cache of the same version is installed. QUARTET_GPU_DEVICE=cpu has launchers that compute in fp64.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deploy.models.resolve import resolve
from engine.quantisation import read_quantisation
from engine.rank.builder import build
from engine.rank.nvfp4 import Fp4Calls, Nvfp4Weight, load_calls, out_of_tiles
from engine.rank.start_checks import exact_rows
from engine.weight_formats import FORMATS, NVFP4_GPUS
from kernels.selfcheck import row_error
from tests.gpu.exactness import DEVICE
from tests.nano.model_shapes import PUBLIC
from tests.support.engine.answers import answers, texts
from tests.support.engine.fp4 import codes
from tests.support.engine.products import products
from tests.support.engine.quantised import saved
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import config_of, request
from tests.support.flashinfer_fp4 import NEWEST, Fp4Kernels, packed, pinned, place

pytestmark = pytest.mark.gpu

BF16 = 0.005  # of a row's norm: two roundings to bf16
TIES = 0.02  # of numbers: in bf16 many lie halfway between two, and the kernel divides approximately
GPU = torch.device(DEVICE)
MODELS = [("31b", 1), ("31b", 4), ("26b-a4b", 4), ("12b", 2), ("e4b", 1)] if DEVICE == "cuda" else [("26b-a4b", 4)]
SHAPES = sorted(
    {
        (product.shape.m * (1 + product.shape.gated), product.shape.n)
        for member, tp in MODELS
        for product in products(PUBLIC[member], tp)
        if "ple" not in product.name and "head" not in product.name
    }
)


@pytest.fixture(scope="module")
def calls() -> Fp4Calls:
    if DEVICE == "cpu":
        return pinned(NEWEST, Fp4Kernels())
    if torch.cuda.get_device_capability() not in NVFP4_GPUS:
        pytest.skip("this GPU has no products of four bits")
    found = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    print(f"FlashInfer {found.__version__} on {torch.cuda.get_device_name()}", flush=True)
    return load_calls()


def weight_of(rows: int, columns: int, calls: Fp4Calls) -> Nvfp4Weight:
    """Random values, scales of four sizes, and two factors."""
    stored = FORMATS["nvfp4"][0]
    weight = Nvfp4Weight((rows, columns), torch.bfloat16, GPU).stored_as(stored)
    assert isinstance(weight, Nvfp4Weight)
    generator = torch.Generator().manual_seed(rows + columns)
    weight.values.copy_(torch.randint(0, 256, weight.values.shape, generator=generator))
    weight.scale.copy_(2.0 ** torch.randint(0, 4, weight.scale.shape, generator=generator))
    weight.factor.fill_(0.01)
    weight.factor[rows // 2 :] = 0.03
    weight.arrange(calls)
    return weight


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(calls: Fp4Calls, shape: tuple[int, int]) -> None:
    """Of rows that NVFP4 holds exactly: those in plain torch, to bf16, and of one row those of many, to the bit. Scales that are
    not in tiles, and halves of bytes swapped, are a hundred times as far off."""
    weight = weight_of(*shape, calls)
    last = slice(-300, None)
    for count in (1, 8, 130, 1000) if DEVICE == "cuda" else (1, 130):
        x = exact_rows(count, shape[1]).to(GPU, torch.bfloat16)
        found = weight.rows_product(x, torch.bfloat16)
        expected = weight.reference(x, last)
        error = row_error(found[:, last], expected)
        print(f"{shape} {count} rows: {error:.4f}, {taken_us(weight, x):.0f} us", flush=True)
        assert error < BF16
        assert torch.equal(weight.rows_product(x[-1:], torch.bfloat16), found[-1:])
    scale, values = weight.scale.clone(), weight.values.clone()
    weight.scale.copy_(out_of_tiles(scale))
    assert row_error(weight.rows_product(x, torch.bfloat16)[:, last], expected) > 100 * BF16
    weight.scale.copy_(scale)
    weight.values.copy_(values >> 4 | values << 4)
    assert row_error(weight.rows_product(x, torch.bfloat16)[:, last], expected) > 100 * BF16


def taken_us(weight: Nvfp4Weight, x: Tensor) -> float:
    """The mean of twenty eager products."""
    if DEVICE == "cpu":
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        weight.rows_product(x, torch.bfloat16)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 50


@torch.inference_mode()
def test_rows_are_rounded_as_we_know_it(calls: Fp4Calls) -> None:
    """Numbers, scales and factors of rows of very different sizes, zeros among them, but for what lies halfway between two."""
    torch.manual_seed(2)
    x = torch.randn(130, 5376) * 2.0 ** torch.randint(-12, 1, (130, 336)).repeat_interleave(16, 1)
    x[5], x[6, :16] = 0, 0
    x = x.bfloat16()
    values, scale, factor = (
        part.cpu() for part in calls.quantise(x.to(GPU), 1 / 2688, backend="cuda", per_token_activation=True, nvfp4_4over6=None)
    )
    code, scale_code, expected = codes(x)
    assert (factor - expected).abs().max() < 1e-6 * expected.max()
    different = scale.view(torch.uint8).flatten()[place(130, 336)] != scale_code
    print(f"{different.float().mean():.1e} of the scales differ", flush=True)
    assert different.float().mean() < TIES
    differ, shifted = ((values != packed(each)).float().mean() for each in (code, code.roll(1, 1)))
    print(f"{differ:.1e} of the bytes differ, {shifted:.2g} of those of columns shifted by one", flush=True)
    assert differ < 2 * TIES
    assert shifted > 20 * TIES


@pytest.mark.skipif(DEVICE == "cpu", reason="there are no graphs on a CPU")
@torch.inference_mode()
def test_a_graph_follows_its_rows(calls: Fp4Calls) -> None:
    """A captured product of other rows has the bits of the eager one."""
    weight = weight_of(2048, 5376, calls)
    x = exact_rows(8, 5376).to(GPU, torch.bfloat16)
    weight.rows_product(x, torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = weight.rows_product(x, torch.bfloat16)
    for _ in range(3):
        x.copy_(torch.randn(8, 5376) * 2.0 ** torch.randint(-6, 7, (8, 1)))
        graph.replay()
        assert torch.equal(found, weight.rows_product(x, torch.bfloat16))
    before = found.clone()
    x.mul_(1.5)
    graph.replay()
    assert not torch.equal(found, before)


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4-modelopt"])
def test_a_nano_model(calls: Fp4Calls, tmp_path: Path, kind: str) -> None:
    """It passes the check at start; captured steps give the eager steps' texts. The folder in fp8 gives others."""
    del calls
    folder = saved(resolve("nano:31b"), tmp_path / "saved", kind=kind)
    assert read_quantisation(folder, "nvfp4").name == "nvfp4"
    given = []
    for weights, graphs in (("nvfp4", False), ("nvfp4", True), ("auto", False)):
        config = config_of(folder, 1, device=DEVICE, dtype="bfloat16", weights=weights, graphs=graphs)
        runner = build(single(config), config.pages)
        if runner.capturable:
            runner.capture()
        found, _, _ = answers(partial(run, runner), config, [request(number) for number in range(8)])
        given.append(texts(found))
    assert sum(len(tokens) for tokens, _, _ in given[0].values()) > 50
    assert given[0] == given[1]
    assert given[0] != given[2]
