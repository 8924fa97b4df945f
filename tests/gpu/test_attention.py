"""The attention kernels on a GPU, at the public models' shapes: against fp64, in graphs, and beyond 2^31 elements."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.chunks import extend_tiles
from kernels.decode import DecodeScratch, decode_attention
from kernels.prefill import extend_attention, paged_prefill, tile_tokens
from kernels.qkv import qkv_post
from tests.bench.attention import PAGE
from tests.bench.timing import precompile_all
from tests.kernels import test_kv_scales as scaled_pages
from tests.support.attention import EPS, Case, Shape, decode_case, decode_node
from tests.support.dtypes import both_dtypes

pytestmark = pytest.mark.gpu

TOLERANCE = 0.03  # bf16: roundings of q, of the softmax's weights and of the output, values of unit size
SHAPES = {
    "31b sliding": Shape(8, 4, 256, 128, window=1024),
    "31b full": Shape(8, 1, 512, 64, kv_projections=1),
    "26b tp4 sliding": Shape(4, 2, 256, 128, window=1024),
    "26b full": Shape(16, 2, 512, 64, kv_projections=1),
    "12b full": Shape(16, 1, 512, 64, kv_projections=1),
    "e2b sliding": Shape(8, 1, 256, 128, window=512),
    "e2b sliding shared": Shape(8, 1, 256, 128, kv_projections=0, window=512),
    "e4b full": Shape(8, 2, 512, 64),
    "small heads": Shape(6, 2, 32, 4, window=40),
    "page 16": Shape(8, 4, 256, 128, window=1024, page=16),
    "page 64": Shape(8, 1, 512, 64, kv_projections=1, page=64),
}
SPLITS = {torch.bfloat16: (1, 3, 8, 17), torch.float32: (3,)}
LENGTHS = [1, 31, 32, 33, 0, 511, 512, 513, 1023, 1024, 1025, 1500]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Every variant below, compiled in parallel."""
    width = pages_of(LENGTHS)
    target, rows = torch.cuda.get_device_capability(), len(LENGTHS)
    nodes = [
        decode_node(shape, rows, count, target, None, dtype, width[shape.page])
        for shape in SHAPES.values() for dtype, splits in SPLITS.items() for count in splits
    ]  # fmt: skip
    precompile_all(nodes, target)


def pages_of(lengths: list[int]) -> dict[int, int]:
    """The width that `decode_case` gives page ids, by page size."""
    return {page: -(-max(lengths) // page) + 3 for page in (16, 32, 64)}


def on_gpu(case: Case) -> Case:
    """The inputs moved."""
    moved: dict[str, Any] = {name: x.cuda() for name, x in vars(case).items() if isinstance(x, Tensor)}
    return replace(case, **moved)


def scratch_of(case: Case, splits: int) -> DecodeScratch:
    shape, rows = case.shape, case.qkv.shape[0]
    return DecodeScratch(rows, shape.heads, shape.kv_heads, shape.d, rows * splits, torch.device("cuda"))


def attend(case: Case, splits: int, scratch: DecodeScratch) -> tuple[Tensor, Tensor]:
    """The output, and the pool as the launch leaves it."""
    shape, pool = case.shape, case.pool.clone()
    out = torch.full((case.qkv.shape[0], shape.heads * shape.d), torch.nan, dtype=case.qkv.dtype, device="cuda")
    decode_attention(*case.inputs(pool), shape.window, scratch, out, splits)
    return out, pool


def error(out: Tensor, case: Case) -> float:
    return float((out.double() - case.want).abs().nan_to_num(torch.inf).max())


@both_dtypes
@pytest.mark.parametrize("name", SHAPES)
def test_decode(name: str, dtype: torch.dtype) -> None:
    """Every shape at every edge and number of splits, NaN around: dense attention in fp64; a window off by one is not."""
    case = on_gpu(decode_case(SHAPES[name], LENGTHS, dtype))
    tolerance = TOLERANCE if dtype == torch.bfloat16 else 1e-4
    for splits in SPLITS[dtype]:
        scratch = scratch_of(case, splits)
        out, pool = attend(case, splits, scratch)
        assert error(out, case) < tolerance, splits
        assert torch.allclose(pool, case.pool_after, rtol=2**-7, atol=1e-5, equal_nan=True)
        assert not scratch.tickets.any()
        again, _ = attend(case, splits, scratch)
        assert torch.equal(out, again)
    window = case.shape.window
    if window is not None and dtype == torch.float32:  # one key of a thousand is lost in bf16's rounding
        off = replace(case, shape=replace(case.shape, window=window - 1), page_ids=shifted(case, window - 1))
        assert error(attend(off, 3, scratch_of(off, 3))[0], case) > 10 * tolerance


def shifted(case: Case, window: int) -> Tensor:
    """The page ids as a window of another size wants them."""
    page, own = case.shape.page, case.shape.window or 0
    ids = case.page_ids.clone()
    for row, position in enumerate(case.positions.tolist()):
        steps = max(0, position - window + 1) // page - max(0, position - own + 1) // page
        if steps:
            ids[row] = ids[row].roll(-steps)
    return ids


def test_a_graph_replays_and_follows_its_positions() -> None:
    """Captured once, a launch follows positions and pages that change on the device, padding rows included."""
    shape = SHAPES["31b sliding"]
    lengths = ([1500, 40, 7], [2, 1100, 0])
    cases = [on_gpu(decode_case(shape, each, torch.bfloat16, seed)) for seed, each in enumerate(lengths)]
    width, pages = max(case.page_ids.shape[1] for case in cases), max(case.pool.shape[0] for case in cases)
    rows, names = 3, ("qkv", "positions", "cos_sin", "q_norm", "k_norm")
    pool = torch.zeros(pages, *cases[0].pool.shape[1:], dtype=torch.bfloat16, device="cuda")
    page_ids = torch.zeros(rows, width, dtype=torch.int32, device="cuda")
    fixed = replace(cases[0], pool=pool, page_ids=page_ids, **{name: getattr(cases[0], name).clone() for name in names})
    out, scratch = torch.empty(rows, shape.heads * shape.d, dtype=torch.bfloat16, device="cuda"), scratch_of(fixed, 17)
    decode_attention(*fixed.inputs(), shape.window, scratch, out, 17)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(*fixed.inputs(), shape.window, scratch, out, 17)
    for case in (*cases, *cases):
        pool[: case.pool.shape[0]] = case.pool
        page_ids[:, : case.page_ids.shape[1]] = case.page_ids
        for name in names:
            getattr(fixed, name).copy_(getattr(case, name))
        graph.replay()
        assert error(out, case) < TOLERANCE
        assert torch.equal(out, attend(case, 17, scratch_of(case, 17))[0])


def test_pages_beyond_two_to_the_31st_element() -> None:
    """A pool of more than 2^31 elements, only its last pages used: the same bits as from a small pool."""
    shape = SHAPES["31b full"]
    case = on_gpu(decode_case(shape, [1100, 64, 33], torch.bfloat16))
    pages, used = 2**31 // case.pool[0].numel() + case.pool.shape[0] + 1, case.pool.shape[0]
    if torch.cuda.mem_get_info()[0] < 1.2 * pages * case.pool[0].numel() * 2:
        pytest.skip("too little memory")
    large = torch.full((pages, *case.pool.shape[1:]), torch.nan, dtype=torch.bfloat16, device="cuda")
    large[-used:] = case.pool
    moved = torch.where(case.page_ids < used, case.page_ids + (pages - used), case.page_ids)
    want, pool = attend(case, 8, scratch_of(case, 8))
    out, scratch = torch.empty_like(want), scratch_of(case, 8)
    decode_attention(*replace(case, page_ids=moved).inputs(large), shape.window, scratch, out, 8)
    assert torch.equal(out, want)
    assert torch.equal(large[-used:].nan_to_num(9.0), pool.nan_to_num(9.0))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "window"), [(8, 4, 256, 1024), (8, 1, 512, None), (16, 8, 256, 512), (16, 2, 512, None)]
)
def test_extend(heads: int, kv_heads: int, d: int, window: int | None) -> None:
    """Chunks of several sequences, fresh and continued, and a few rows behind a long prefix, equal the fp32 reference."""
    pairs = d // 2 if window else 64
    chunks = [(0, 0, 0, 700), (1, 700, 1000, 500), (2, 1200, 2047, 1), (3, 1201, 1500, 5)]
    tokens, slots = 1206, 4
    width = 72
    table = (torch.randperm(slots * width, dtype=torch.int32) + 1).view(slots, width).cuda()
    pool = torch.randn(slots * width + 1, 2, kv_heads, PAGE, d, device="cuda").bfloat16() * d**-0.25
    slot_of, position_of = (torch.empty(tokens, dtype=torch.int32) for _ in range(2))
    for slot, row, start, count in chunks:
        slot_of[row : row + count] = slot
        position_of[row : row + count] = torch.arange(start, start + count)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * d, device="cuda").bfloat16()
    angles = torch.randn(tokens, pairs, device="cuda")
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    norms = [torch.full((d,), d**-0.25, dtype=torch.bfloat16, device="cuda") for _ in "qk"]
    q = torch.empty(tokens, heads, d, dtype=torch.bfloat16, device="cuda")
    qkv_post(qkv, pool, table, slot_of.cuda(), position_of.cuda(), cos_sin, *norms, EPS, q)
    out = torch.full_like(q, torch.nan)
    listed = torch.tensor(chunks, dtype=torch.int32, device="cuda")
    tiles = extend_tiles(listed, tile_tokens(heads, kv_heads), sum(chunk[3] for chunk in chunks))
    extend_attention(q, pool, table, tiles, window, out)
    for slot, row, start, count in chunks:
        want = paged_prefill(q[row : row + count], pool, table[slot], start, window)
        assert (out[row : row + count].float() - want.float()).abs().max() < TOLERANCE, slot
    if window is not None:
        seen = position_of.clone()
        seen[3:650], seen[690:700], seen[701:1000] = 649, 699, 1299
        extend_attention(q, pool, table, tiles, window, out, last_seen=seen.cuda())
        for slot, row, start, count in chunks:
            rows = slice(row, row + count)
            want = paged_prefill(q[rows], pool, table[slot], start, window, seen[rows].cuda())
            assert (out[rows].float() - want.float()).abs().max() < TOLERANCE, slot
        causal = paged_prefill(q[:700], pool, table[0], 0, window)
        assert (out[:700].float() - causal.float()).norm() / causal.float().norm() > 1e-2
        extend_attention(q, pool, table, tiles, window, out)
    if window is not None:
        want = paged_prefill(q[700:1200], pool, table[1], 1000, window + 1)
        assert (out[700:1200].float() - want.float()).norm() / want.float().norm() > 1e-3


@pytest.mark.parametrize("kind", ["verify", "extend", "decode"])
def test_scales_of_pages(kind: str) -> None:
    """As for the references: over e4m3 pages with scales it is attention over the products."""
    with torch.device("cuda"):
        if kind == "decode":
            scaled_pages.test_a_decode_step_over_scaled_pages()
        else:
            scaled_pages.test_queries_over_scaled_pages(kind)
