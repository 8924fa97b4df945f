"""Low-rank products of rows with adapters, against fp64: rows of several, of none, merged parts; experts too."""

import pytest
import torch
from torch import Tensor

from kernels.activation import geglu
from kernels.experts import AdaptedRows, ExpertAdapters, adapted_experts
from kernels.linear import GEGLU, NONE, _run, linear
from kernels.lora import LowRank, add_lora
from kernels.packed import PackedRows, fp8_matrix, pack_rows, packed_matrix, unpacked
from kernels.tiles import Tile
from tests.support import interpreter
from tests.support.launches import record

pytestmark = pytest.mark.cpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative to the largest value; bf16 rounds A's product and the sum
CASES = [
    (1, 96, (32,), 16, 2),
    (5, 130, (40, 56, 72), 16, 3),
    (37, 64, (70, 140), 48, 9),
    (33, 1100, (24,), 32, 4),
]
Case = tuple[int, int, tuple[int, ...], int, int]


def drawn(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """out, x, index, a, b; some rows have no adapter."""
    rows, n, ends, rank, adapters = case
    generator = torch.Generator().manual_seed(rows)
    index = torch.randint(-1, adapters, (rows,), generator=generator, dtype=torch.int32)
    index[0] = adapters - 1
    shapes = (rows, ends[-1]), (rows, n), (adapters, len(ends) * rank, n), (adapters, ends[-1], rank)
    out, x, a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return out, x, index, (a / n**0.5).to(dtype), (b / rank**0.5).to(dtype)


def right(out: Tensor, x: Tensor, index: Tensor, a: Tensor, b: Tensor, ends: tuple[int, ...], shift: int = 0) -> Tensor:
    """In fp64, a row at a time. shift: planted fault, parts have A of another."""
    total = out.double()
    rank = b.shape[2]
    for row, adapter in enumerate(index.tolist()):
        if adapter < 0:
            continue
        inner = a[adapter].double() @ x[row].double()
        start = 0
        for part, end in enumerate(ends):
            own = (part + shift) % len(ends)
            total[row, start:end] += b[adapter, start:end].double() @ inner[own * rank : (own + 1) * rank]
            start = end
    return total


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


def check(case: Case, dtype: torch.dtype) -> None:
    ends = case[2]
    out, x, index, a, b = drawn(case, dtype)
    wanted = right(out, x, index, a, b, ends)
    before = out.clone()
    add_lora(out, x, index, a, b, ends)
    assert error(out, wanted) < TOLERANCE[dtype]
    assert torch.equal(out[index < 0], before[index < 0])
    faults = [before.double(), right(before, x, (index + 1) % case[4], a, b, ends)]
    if len(ends) > 1:
        faults.append(right(before, x, index, a, b, ends, shift=1))
    for fault in faults:
        assert error(out, fault) > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_adapters_add(case: Case, dtype: torch.dtype) -> None:
    """B A x of each row's own adapter, and of each part's own A; rows of none keep their bits."""
    check(case, dtype)


def low_rank(x: Tensor, index: Tensor, a: Tensor, b: Tensor, ends: tuple[int, ...]) -> LowRank:
    """With B's memory as a stack's."""
    together = b.transpose(0, 1).contiguous().transpose(0, 1)
    return LowRank(x, index, a, together, ends, torch.zeros(1, dtype=torch.int32))


TILES = [
    (Tile("gemm", 16, 16, 64, stages=2), 1),
    (Tile("gemm", 16, 16, 64, stages=2), 11),
    (Tile("gemm", 32, 16, 32, stages=3, swap=True), 33),
    (Tile("gemm", 16, 8, 64, stages=2, splits=2), 16),
]


def in_the_products_kernel(tile: Tile, rows: int, gated: bool, fp8: bool, dtype: torch.dtype) -> None:
    """The product's kernel adds what adapters add, before the epilogue, and in the first part of a sum."""
    n, m, adapters = 256, 64, 5
    generator = torch.Generator().manual_seed(rows)
    ends = (m, 2 * m) if gated else (16, 40, m)
    if tile.bn > 8:
        ends = (m, 2 * m) if gated else (32, 48, m)
    outputs = ends[-1]
    x, weight, a, b = (
        torch.randn(shape, generator=generator)
        for shape in ((rows, n), (outputs, n), (adapters, len(ends) * 16, n), (adapters, outputs, 16))
    )
    x, weight, a, b = x.to(dtype), (weight / n**0.5).to(dtype), (a / n**0.5).to(dtype), (b / 4).to(dtype)
    index = torch.randint(-1, adapters, (rows,), generator=generator, dtype=torch.int32)
    index[-1] = adapters - 1
    matrix = fp8_matrix(weight) if fp8 else packed_matrix(weight)
    of_x = pack_rows(x) if fp8 else x
    plain = unpacked(matrix).double()
    values = of_x.values.double() * of_x.scale.double()[:, None] if isinstance(of_x, PackedRows) else of_x.double()

    def wanted(of_row: Tensor, shift: int = 0) -> Tensor:
        whole = right(values @ plain.t(), x, of_row, a, b, ends, shift)
        return geglu(whole.float()).double() if gated else whole

    added = low_rank(x, index, a, b, ends)
    assert added.fits(tile, gated=gated)
    out = torch.empty((tile.splits, rows, m) if tile.splits > 1 else (rows, m), dtype=torch.float32)
    _run(tile, of_x, matrix, out, GEGLU if gated else NONE, added=added)
    assert added.begun.item() == 0, "only where kernels overlap is it a word"
    found = out.sum(0) if tile.splits > 1 else out
    assert error(found, wanted(index)) < TOLERANCE[dtype]
    for fault in (wanted((index + 1) % adapters), wanted(index, shift=1), wanted(index * 0 - 1)):
        assert error(found, fault) > 5 * TOLERANCE[dtype]


def interpreted_the_products_kernel_adds_it() -> None:
    """One row, several, in blocks, swapped, in parts; gated; fp8 weights."""
    for tile, rows in TILES:
        for gated in (False, True) if tile.splits == 1 else (False,):
            for fp8 in (False, True):
                for dtype in (torch.float32, torch.bfloat16):
                    in_the_products_kernel(tile, rows, gated, fp8, dtype)


def interpreted_a_product_takes_the_way_that_fits() -> None:
    """`linear` gives the same by the product's own kernel and, where parts do not end with its blocks, by two more."""
    for ends in ((256,), (100, 256)):
        for rows in (1, 5, 90):
            generator = torch.Generator().manual_seed(rows)
            shapes = (rows, 128), (256, 128), (3, 16 * len(ends), 128), (3, 256, 16)
            x, weight, a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
            added = low_rank(x, torch.arange(rows, dtype=torch.int32) % 4 - 1, a, b, ends)
            whole = right(x.double() @ weight.double().t(), x, added.of_row, a, b, ends)
            assert error(linear(x, weight, added=added), whole) < TOLERANCE[torch.bfloat16]


def experts_case(dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, AdaptedRows]:
    generator = torch.Generator().manual_seed(rows)
    count, hidden, width, rank, adapters, top_k = 6, 32, 16, 16, 3, 2

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    chosen = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(rows)]).int()
    index = torch.randint(-1, adapters, (rows,), generator=generator, dtype=torch.int32)
    index[0] = 1
    ends = (width, 2 * width)
    pair = ExpertAdapters(draw(count * adapters, 2 * rank, hidden), draw(count * adapters, 2 * width, rank), ends, adapters)
    last = ExpertAdapters(draw(count * adapters, rank, width), draw(count * adapters, hidden, rank), (hidden,), adapters)
    weights = torch.rand((rows, top_k), generator=generator)
    x = (torch.randn((rows, hidden), generator=generator)).to(dtype)
    return x, weights, chosen, draw(count, 2 * width, hidden), draw(count, hidden, width), AdaptedRows(index, pair, last)


def merged_experts(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, adapted: AdaptedRows, *, slowest: bool = False
) -> Tensor:
    """In fp64 with each token's adapter merged. slowest: planted fault, the index of an expert and an adapter is another."""
    assert adapted.gate_up is not None
    assert adapted.down is not None
    total = torch.zeros(x.shape, dtype=torch.float64)
    experts = len(gate_up)
    for row, adapter in enumerate(adapted.rows.tolist()):
        for weight, expert in zip(weights[row].double(), chosen[row].tolist(), strict=True):
            first, second = gate_up[expert].double(), down[expert].double()
            if adapter >= 0:
                at = adapter * experts + expert if slowest else expert * adapted.down.adapters + adapter
                rank = adapted.down.b.shape[2]
                a, b = adapted.gate_up.a[at].double(), adapted.gate_up.b[at].double()
                halves = zip(b.chunk(2), (a[:rank], a[rank:]), strict=True)
                first = first + torch.cat([outer @ inner for outer, inner in halves])
                second = second + adapted.down.b[at].double() @ adapted.down.a[at].double()
            total[row] += weight * (second @ geglu((first @ x[row].double())[None].float())[0].double())
    return total


def check_experts(dtype: torch.dtype, rows: int) -> None:
    x, weights, chosen, gate_up, down, adapted = experts_case(dtype, rows)
    dense = torch.ones_like(x)
    found = adapted_experts(x, weights, chosen, gate_up, down, lambda: dense, adapted)
    assert torch.equal(found[:, : x.shape[1]], dense)
    wanted = merged_experts(x, weights, chosen, gate_up, down, adapted)
    assert error(found[:, x.shape[1] :], wanted) < TOLERANCE[dtype]
    fault = merged_experts(x, weights, chosen, gate_up, down, adapted, slowest=True)
    assert error(found[:, x.shape[1] :], fault) > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_experts_of_adapters(rows: int) -> None:
    """Each token's experts have its own adapter's matrices; with the wrong pair of expert and adapter they have not."""
    check_experts(torch.float32, rows)


def test_a_product_and_what_is_added_are_one_merged_product() -> None:
    """W x + B A x is (W + B A) x."""
    out, x, index, a, b = drawn((7, 64, (48,), 16, 2), torch.float64)
    weight = torch.randn(48, 64, dtype=torch.float64)
    index[:] = 1
    made = linear(x, weight)
    add_lora(made, x, index, a.float(), b.float(), (48,))
    assert error(made, x @ (weight + b[1] @ a[1]).t()) < TOLERANCE[torch.float32]
    assert error(made, x @ weight.t()) > 100 * TOLERANCE[torch.float32]
    assert out.shape == made.shape


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


def interpreted_the_kernels_add_it() -> None:
    """`_shrink` and `_expand` in both dtypes."""
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            check(case, dtype)


def interpreted_blocks_of_outputs_are_those_of_each_part() -> None:
    """Parts of 40, 70 and 10 outputs have one, two and one block of 64."""
    out, x, index, a, b = drawn((5, 130, (40, 110, 120), 16, 3), torch.float32)
    with record() as nodes:
        add_lora(out, x, index, a, b, (40, 110, 120))
    assert [node.grid[1] for node in nodes] == [3, 4]


def interpreted_the_grouped_kernels_of_experts() -> None:
    """Of a single token, of fewer assignments than experts' adapters, and of more."""
    for rows in (1, 9, 20):
        check_experts(torch.bfloat16, rows)
