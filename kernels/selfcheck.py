"""Each of our kernels once against plain torch, on one ugly shape: what a rank does before it serves on a GPU that nobody tried.

    RUN_ON     compute capabilities on which the GPU tests have run (tests/gpu): there nothing is checked at start
    failures   the ops whose kernel and whose plain torch disagree here; `kernels.launch.disable` then turns their modules off

A kernel may compile for an architecture and be wrong on it. Sizes are such that all of it takes half a second, compilation apart.
What ranks write into each other's memory is `kernels.inbox_check`'s; sums and gathers are `engine.rank.parallel.self_check`'s.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from triton.errors import TritonError

from kernels.accept import DraftInputs, Verified, accept
from kernels.activation import geglu
from kernels.adjust import adjust, count_accepted
from kernels.axial_rope import head_norm, norm_axial_rope
from kernels.block_tables import block_tables
from kernels.candidates import block_peaks, candidates, choose_candidates
from kernels.choose import choose_best, local_best
from kernels.chunks import ResultInputs, StepRows, chunk_inputs, extend_tiles
from kernels.clusters import best_of_clusters
from kernels.decode import DecodeScratch, decode_attention
from kernels.embed import embed
from kernels.experts import experts
from kernels.filters import Share, filtered_tokens, scaled_rows, write_tokens
from kernels.fused_allreduce_norm import Norms, fused_allreduce_norm
from kernels.grid import cdiv
from kernels.launch import INTERPRET, plain_torch
from kernels.linear import linear, linear_geglu, linear_gelu_mul
from kernels.ple import per_layer_inputs
from kernels.prefill import extend_attention, tile_tokens
from kernels.qkv import qkv_post
from kernels.ragged_attention import ragged_attention
from kernels.route import route, router_logits
from kernels.sampling_batch import BAD_WORDS, BIASED, LIMITED, PENALIZED, SamplingBatch, SlotAdjustments, SlotParameters
from kernels.slots import PlanLayout, apply_plan, decode_inputs, gather_pages, rotary_table
from kernels.table_check import COPIED_ENTRY, ROW_ENTRY, TABLE_ENTRY, check_rows, new_violations
from kernels.verify import verify_attention

RUN_ON = frozenset({(9, 0)})
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-3}  # of a row's norm: a rounding or two of bf16; other orders of sums
_EPS = 1e-6
_PAGE = 16

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Failure:
    """What of `module` disagrees, and by how much: the largest error of a row as a part of its norm, of integers how many."""

    module: str
    what: str
    error: float

    def __str__(self) -> str:
        return f"{self.what} ({self.module}) is wrong by {self.error:.2g}"


@dataclass(frozen=True)
class RandomInputs:
    """Random inputs: the same ones for every draw of the same sizes in the same order."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def floats(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device, dtype or self.dtype)

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


Op = Callable[[RandomInputs], Outputs]


@dataclass(frozen=True)
class Check:
    """`run` gives an op's outputs, what it writes in place too; `want` those of another op, where plain torch lacks that one."""

    module: str
    what: str
    run: Op
    want: Op | None = None


def failures(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[Failure]:
    """The checks that do not hold on `device`."""
    return [failed for check in CHECKS if (failed := failure(check, device, torch.float32 if INTERPRET else dtype)) is not None]


def failure(check: Check, device: torch.device, dtype: torch.dtype) -> Failure | None:
    """What is wrong, if `check` does not hold; an op that raises is wrong."""
    try:
        actual = check.run(inputs(device, dtype))
    except (TritonError, RuntimeError, ValueError) as error:  # it does not compile, or does not start
        return raised(check, error)
    with plain_torch(check.module):
        expected = (check.want or check.run)(inputs(device, dtype))
    worst = max(row_error(one, other) for one, other in zip(actual, expected, strict=True))
    return Failure(check.module, check.what, worst) if not worst <= TOLERANCE[dtype] else None


def inputs(device: torch.device, dtype: torch.dtype) -> RandomInputs:
    """Those that every check begins with, on every rank."""
    return RandomInputs(device, dtype, torch.Generator().manual_seed(7))


def raised(check: Check, error: Exception) -> Failure:
    """The failure of a check whose op does not compile, or does not start."""
    return Failure(check.module, f"{check.what}: {type(error).__name__}: {error}", math.inf)


def row_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error of a row, as a part of its norm; of integers how many differ. NaN is right where it is expected."""
    if not expected.is_floating_point():
        return float((actual != expected).sum())
    actual, expected = (x.double().reshape(-1, x.shape[-1]) for x in (actual, expected))
    unknown = expected.isnan()
    off = (actual - expected).masked_fill(unknown & actual.isnan(), 0.0).norm(dim=1)
    size = expected.masked_fill(unknown, 0.0).norm(dim=1)
    return float((off / size.clamp(min=1e-6)).nan_to_num(math.inf).max())


# ---- the checks


def _step_inputs(draw: RandomInputs, *, width: int) -> Outputs:
    """A plan of two decode rows, a chunk, two appends, one left out and a release, applied; then the inputs of three rows of up to
    `width` tokens."""
    layout, counts = PlanLayout(header=5, step=4, counts=0, row=2, chunk=3, append=4, release=4), (2, 1, 3, 1)
    rows = [[2, 1], [0, width], [1, 0, 33], [0, 2, 3, 9], [1, 0, 1, 4], [-1, 1, 1, 3], [0, 2, 0, 2]]
    plan = draw.ints(*counts, 7, *(number for row in rows for number in row))
    tables = [torch.arange(4 * width, dtype=torch.int32, device=draw.device).view(4, width) for width in (6, 5)]
    lengths, tokens = draw.ints(40, 7, 47, 0), torch.arange(4 * 60, dtype=torch.int32, device=draw.device).view(4, 60)
    ids, positions, slots = (torch.full((3 * width,), -7, dtype=torch.int32, device=draw.device) for _ in range(3))
    apply_plan(plan, layout, tables, lengths)
    decode_inputs(plan, layout, tokens, lengths, 3, ids, positions, slots, width)
    pages = torch.full((3, 4), -7, dtype=torch.int32, device=draw.device)
    gather_pages(tables[0], slots, positions, _PAGE, 20, pages)
    angles = torch.empty((3 * width, 10), device=draw.device)
    rotary_table(positions, 0.1 * torch.arange(1, 6, device=draw.device), angles)
    return *tables, lengths, ids, positions, slots, pages, angles


def _block_tables(draw: RandomInputs) -> Outputs:
    table = torch.arange(1, 19, dtype=torch.int32, device=draw.device).view(2, 9)
    tables, lengths = torch.full((3, 16), 7, dtype=torch.int32, device=draw.device), draw.ints(9, 9, 9)
    block_tables(table, draw.ints(1, 0, 0), draw.ints(100, 15, -1), _PAGE, 40, tables, lengths)
    return tables, lengths


def _geglu(draw: RandomInputs) -> Outputs:
    return (geglu(draw.floats(3, 2 * 70)),)


def _products(rows: int) -> Op:
    """`rows` rows: each class has a kernel or a tile of its own."""

    def run(draw: RandomInputs) -> Outputs:
        x, weight = draw.floats(rows, 264), draw.floats(2 * 19, 264, scale=264**-0.5)
        gated = linear_gelu_mul(x, weight, draw.floats(rows, 2, 38)[:, 1])
        return linear(x, weight), linear(x, weight, dtype=torch.float32), linear_geglu(x, weight), gated

    return run


def _allreduce_norm(draw: RandomInputs) -> Outputs:
    n = 72
    norms = Norms(draw.floats(n), draw.floats(n), (draw.floats(n), draw.floats(n)))
    h, x = fused_allreduce_norm(draw.floats(3, 2 * n), draw.floats(3, n), norms, _EPS, draw.floats(1))
    first, normed = fused_allreduce_norm(draw.floats(2, n), None, Norms(None, draw.floats(n)), _EPS, scale=8.5)
    assert x is not None
    assert normed is not None
    return h, x, first, normed


def _per_layer_inputs(draw: RandomInputs) -> Outputs:
    return (per_layer_inputs(draw.floats(3, 5 * 40), draw.floats(3, 5 * 40), draw.floats(40), _EPS, 0.1, 16.0),)


def _embed(draw: RandomInputs) -> Outputs:
    return (embed(draw.ints(5, 40, 41, 73, 39, 7), draw.floats(33, 70), 40, draw.ints(7, 73), 41),)


def _qkv_post(draw: RandomInputs) -> Outputs:
    """Two projections, grouped heads, a padding row; the pool amid NaN."""
    heads, kv_heads, d, pairs = 4, 2, 32, 5
    pool, q = draw.floats(5, 2, kv_heads, _PAGE, d) * math.nan, draw.floats(4, heads, d)
    rows = (draw.ints(3, 1, 4, 2).view(2, 2), draw.ints(0, 1, 0, 1), draw.ints(17, 15, -1, 31))
    raw, cos_sin = draw.floats(4, (heads + 2 * kv_heads) * d), draw.floats(4, 2 * pairs, dtype=torch.float32)
    qkv_post(raw, pool, *rows, cos_sin, draw.floats(d), draw.floats(d), _EPS, q)
    return q, pool


def _axial_rope(draw: RandomInputs) -> Outputs:
    """Heads of 24, turned and not."""
    x, cos, sin = draw.floats(5, 3, 24), draw.floats(5, 12, dtype=torch.float32), draw.floats(5, 12, dtype=torch.float32)
    return norm_axial_rope(x, draw.floats(24), cos, sin, _EPS), head_norm(x, _EPS)


def _ragged(draw: RandomInputs) -> Outputs:
    """Two pictures, of one row and of many; heads of 16 and a rest of 8."""
    q, k, v = (draw.floats(40, 2, 24, scale=24**-0.25) for _ in range(3))
    return (ragged_attention(q, k, v, draw.ints(0, 1, 40), 39),)


def _decode(heads: int, kv_heads: int, d: int, kv_projections: int, window: int | None) -> Op:
    """Rows over several splits, one of a single key, and padding; ids behind a row's own page name no page of the pool."""

    def run(draw: RandomInputs) -> Outputs:
        rows, splits, pages = 3, 3, 8
        pool = draw.floats(1 + 2 * pages, 2, kv_heads, _PAGE, d, scale=d**-0.25)
        ids = 1 + torch.arange(2 * pages, dtype=torch.int32, device=draw.device).flip(0).view(2, pages)
        ids = torch.cat([ids, ids[:1]])
        positions = draw.ints(pages * _PAGE - 14, 0, -1)
        ids[1, 1:] = 2**31 - 7
        out = draw.floats(rows, heads * d)
        scratch = DecodeScratch(rows, heads, kv_heads, d, rows * splits, draw.device)
        raw, cos_sin = draw.floats(rows, (heads + kv_projections * kv_heads) * d), draw.floats(rows, 12, dtype=torch.float32)
        norms = draw.floats(d, scale=d**-0.25), draw.floats(d, scale=d**-0.25) if kv_projections else None
        decode_attention(raw, pool, ids, positions, cos_sin, *norms, _EPS, window, scratch, out, splits)
        return out, pool

    return run


def _verify(draw: RandomInputs) -> Outputs:
    """Rows of several queries: behind a window, at the beginning with one query less, and padding."""
    heads, kv_heads, d, q_len, splits = 8, 1, 512, 4, 3
    pool, q = draw.floats(9, 2, kv_heads, _PAGE, d, scale=d**-0.25), draw.floats(3 * q_len, heads, d, scale=d**-0.25)
    ids = draw.ints(8, 7, 6, 5, 4, 3, *[2**31 - 7] * 9).view(3, 5)
    positions = draw.ints(200, 201, 202, 203, 0, 1, 2, -1, -1, -1, -1, -1)
    out = draw.floats(3 * q_len, heads, d)
    scratch = DecodeScratch(3, heads, kv_heads, d, 3 * q_len * splits, draw.device)
    verify_attention(q, pool, ids, positions, 70, scratch, out, splits)
    return (out,)


def _chunks(draw: RandomInputs) -> Outputs:
    """Two chunks, of which one gives a result, beside two decode rows of two tokens each, padded; and their tiles."""
    plan = draw.ints(*[0] * 4, 2, 2, *[0] * 10, 1, 2, 0, 3, 1, 0, 0, 0, 20, 20, 0, 0, 2, 70, 83, 82, 0, 0)
    tokens = torch.arange(5 * 90, dtype=torch.int32, device=draw.device).view(5, 90)
    decodes = [1] * 6, [5, 6, 9, -1, -1, -1], [1, 1, 3, 3, 4, 4]
    rows = StepRows(*(draw.ints(*[7] * 40, *behind) for behind in decodes))
    chunks, empty = draw.ints(*[9] * 20).view(5, 4), [9] * 10
    results = ResultInputs(draw.ints(*empty).long(), draw.ints(*empty), draw.ints(*empty))
    layout = PlanLayout(16, 2, 4, 3, 6, 4, 4)
    chunk_inputs(plan, layout, tokens, 4, rows, 40, chunks, results, 2)
    return *rows, chunks, *results, extend_tiles(chunks, 8, 40)


def _extend(heads: int, kv_heads: int, d: int, window: int | None, *, image: bool = False) -> Op:
    """A fresh chunk, one behind a prefix, with an image or without, and padding; rows that no tile names are left."""

    def run(draw: RandomInputs) -> Outputs:
        pool, q = draw.floats(17, 2, kv_heads, _PAGE, d, scale=d**-0.25), draw.floats(60, heads, d, scale=d**-0.25)
        table = 1 + torch.arange(16, dtype=torch.int32, device=draw.device).flip(0).view(2, 8)
        chunks = draw.ints(0, 2, 0, 33, 1, 40, 83, 20, 1, 35, -5, 5).view(3, 4)
        tiles = extend_tiles(chunks, tile_tokens(heads, kv_heads, d), 60)
        out = draw.floats(60, heads, d)
        last_seen = draw.ints(*[0] * 3, *[32] * 32, *[-1] * 5, *range(83, 90), *[99] * 10, 100, 101, 102) if image else None
        extend_attention(q, pool, table, tiles, window, out, last_seen=last_seen)
        return (out,)

    return run


_VOCABULARY, _CAP, _PARTS = 5000, 30.0, 2
_SUPPRESSED, _STOP = 17, 1242  # ids that would win, were they not forbidden


def sampled_rows(draw: RandomInputs, vocabulary: int) -> tuple[Tensor, Tensor, SlotParameters]:
    """Logits fp32 of four rows, positions of their inputs, and how they sample: greedy and plain, two of them not to stop yet."""
    logits = draw.floats(4, vocabulary, scale=4, dtype=torch.float32)
    logits[:, _SUPPRESSED], logits[:, _STOP] = 80.0, 79.0
    integers = torch.tensor([[3, 0, 0], [2**40 + 5, 0, 0], [3, 0, 50], [2**40 + 5, 0, 50]], dtype=torch.int64)
    floats = torch.tensor([[0.0, 1, 0], [0.8, 1, 0]]).repeat(2, 1)
    stop = torch.full((4, 8), -1, dtype=torch.int32)
    stop[:, 5] = _STOP
    return logits, draw.ints(9, 8, 7, 6), SlotParameters(*(x.to(draw.device) for x in (integers, floats, stop)))


def sampling_batch(
    draw: RandomInputs, positions: Tensor, parameters: SlotParameters, capped: Tensor | None = None
) -> SamplingBatch:
    """Four rows, a slot each."""
    tokens = torch.zeros((4, 12), dtype=torch.int32, device=draw.device)
    slots, suppress = draw.ints(0, 1, 2, 3), draw.ints(_SUPPRESSED)
    return SamplingBatch(slots, positions, parameters, tokens, suppress, _CAP, capped=capped)


def _adjust(draw: RandomInputs, *, width: int) -> Outputs:
    """Four rows, each with another kind of adjustment, the last with a mask too; the second's input is counted. Of `width` 2: an
    input and a draft of the second and the last slot."""
    logits, positions, parameters = sampled_rows(draw, _VOCABULARY)
    slots = draw.ints(0, 1, 2, 3)
    if width == 2:
        slots, positions = draw.ints(1, 1, 3, 3), draw.ints(8, 9, 6, 7)
    words, device = cdiv(_VOCABULARY, 32), draw.device
    tables = SlotAdjustments(
        flags=draw.ints(BIASED, PENALIZED, LIMITED, BAD_WORDS),
        bias_ids=draw.ints(5, 900, 4999, -1).repeat(4, 1),
        bias=torch.tensor([2.5, -math.inf, -3.0, 9.0], device=device).repeat(4, 1),
        penalties=torch.tensor([1.3, 0.7, 0.2], device=device).repeat(4, 1),
        counts=torch.arange(-9, 11, device=device).repeat(4, _VOCABULARY // 20).to(torch.int16),
        starts=draw.ints(3, 8).repeat(4, 1),
        allowed=torch.full((4, words), 0x55555555, dtype=torch.int32, device=device),
        bad_words=draw.ints(77, 6, 7, 44, 7, 8, 45).repeat(4, 1),
        word_ends=draw.ints(1, 4, 7, 7).repeat(4, 1),
        masks=torch.tensor([0, 0x33333333], device=device).repeat_interleave(2).to(torch.int32)[:, None].repeat(1, words),
        mask_rows=draw.ints(-1, 0, -1, 0, -1, 0, 9, 2).view(4, 2),
    )
    history = torch.arange(12, dtype=torch.int32, device=device).repeat(4, 1)
    batch = replace(sampling_batch(draw, positions, parameters), slots=slots, tokens=history, adjustments=tables)
    capped = adjust(logits, replace(batch, plan=draw.ints(9), width=width), 0, _PARTS).capped
    assert capped is not None
    slots, positions, inputs = slots[::width].contiguous(), positions[::width].contiguous(), history[: 4 // width, 6:9].contiguous()
    count_accepted(tables, slots, positions, inputs, draw.ints(2, 2, 3, 1)[: 4 // width], 0)
    return *_finite(logits), tables.counts.int(), capped


def _finite(logits: Tensor) -> Outputs:
    """What is compared of logits, some of which are -inf."""
    return logits.clamp(min=-1e3), logits.isneginf().int()


def _choose(draw: RandomInputs, *, adjusted: bool) -> Outputs:
    logits, positions, parameters = sampled_rows(draw, _VOCABULARY)
    batch, results = sampling_batch(draw, positions, parameters, draw.ints(0, 1, 0, 0) if adjusted else None), draw.ints(*[9] * 8)
    best = local_best(logits, batch, 0, _PARTS)
    choose_best(best, batch, results.view(4, 2), None)
    return best[..., 0].amax(-1), results, batch.tokens, *_finite(logits)


def _filtered_inputs(draw: RandomInputs) -> tuple[Tensor, Tensor, SlotParameters]:
    """As `sampled_rows`, with a filter for each row: top_k, top_p, min_p and all of them."""
    logits, positions, parameters = sampled_rows(draw, _VOCABULARY)
    integers = torch.tensor([[3, 200, 0], [2**40, 0, 0], [9, 0, 50], [11, 150, 50]], dtype=torch.int64)
    floats = torch.tensor([[0.7, 1, 0], [1.3, 0.6, 0], [1.0, 1, 0.05], [0.9, 0.8, 0.02]])
    return logits, positions, SlotParameters(integers.to(draw.device), floats.to(draw.device), parameters.stop)


def _filter(draw: RandomInputs, *, adjusted: bool) -> Outputs:
    logits, positions, parameters = _filtered_inputs(draw)
    chosen, share = draw.ints(*[0] * 8).view(4, 2), Share(0, 1)
    batch = sampling_batch(draw, positions, parameters, draw.ints(0, 1, 0, 1) if adjusted else None)
    with plain_torch("kernels.choose"):
        choose_best(local_best(logits, batch, 0, 1), replace(batch, tokens=batch.tokens.clone()), chosen, None)
    scaled = scaled_rows(logits[None], batch, share, _VOCABULARY)
    drawn = filtered_tokens(scaled, batch, chosen, share)
    write_tokens(drawn, batch, chosen)
    return *_finite(scaled.values), drawn, chosen, batch.tokens


def _small_top_k(draw: RandomInputs, *, adjusted: bool) -> Outputs:
    logits, positions, parameters = _filtered_inputs(draw)
    parameters.integers[:, 1] = torch.tensor([20, 1, 100, 7])
    batch = sampling_batch(draw, positions, parameters, draw.ints(0, 1, 0, 1) if adjusted else None)
    peaks, chosen = block_peaks(logits, batch), draw.ints(*[0] * 8).view(4, 2)
    best = candidates(logits, peaks, batch, 0)
    choose_candidates(best, batch, chosen)
    return peaks, *best.unbind(-1), chosen, batch.tokens


def _accept(draw: RandomInputs) -> Outputs:
    """No draft stands, all do, a stop id ends the row, and padding."""
    chosen = torch.stack([draw.ints(7, 8, 9).repeat(4), draw.ints(*[0] * 12)], dim=1)
    ids, slots = draw.ints(0, 6, 8, 0, 7, 8, 0, 7, 8, 0, 7, 8), draw.ints(0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0)
    positions, lengths = draw.ints(5, 6, 7, 6, 7, 8, 7, 8, 9, -1, -1, -1), draw.ints(6, 7, 8, 0)
    out = DraftInputs(draw.ints(*[9] * 5), draw.ints(*[9] * 5), draw.ints(*[9] * 15).view(3, 5), draw.floats(5, 40))
    rows = Verified(chosen, ids, slots, positions, draw.floats(12, 40), 3)
    return accept(rows, draw.ints(-1, -1, 7, -1).view(4, 1), lengths, 3, out), lengths, *out


def _clusters(draw: RandomInputs) -> Outputs:
    """Clusters of no power of two."""
    order = torch.randperm(6 * 20, generator=draw.generator).to(draw.device)
    clusters = torch.tensor([[0, 5], [3, 2], [4, 1]], device=draw.device)
    best = best_of_clusters(draw.floats(3, 72), draw.floats(6 * 20, 72), order, clusters, 6)
    return best[..., 0], best[..., 1:].int()


def _table_check(draw: RandomInputs) -> Outputs:
    """A table with one entry outside the pool, gathered rows that are right, and a copied row with one entry outside it."""
    expected = torch.arange(1, 19, dtype=torch.int32, device=draw.device).view(2, 9)
    table, gathered, copies = expected.clone(), expected[:1, :3].clone(), expected[:1].clone()
    table[1, 4], copies[0, 1], copies[0, 40 // _PAGE + 1 :] = 99, 99, 0
    violations, plan, row = new_violations(draw.device), draw.ints(*[0] * 16), (draw.ints(0), draw.ints(40))
    every_slot = (draw.ints(0, 1), draw.ints(*[9 * _PAGE - 1] * 2))
    for kind, actual, rows in ((TABLE_ENTRY, table, every_slot), (ROW_ENTRY, gathered, row), (COPIED_ENTRY, copies, row)):
        check_rows(kind, 0, plan, 0, actual, expected, 20, *rows, _PAGE, None, 1, violations)
    return table, copies, violations


def _router(draw: RandomInputs) -> Outputs:
    n, count = 72, 12
    proj, scale = draw.floats(count, n, dtype=torch.float32), draw.floats(n, dtype=torch.float32)
    logits, x = router_logits(draw.floats(3, n), proj, scale, draw.floats(n), _EPS)
    many, _ = router_logits(draw.floats(140, n), proj, scale, draw.floats(n), _EPS)
    weights, chosen = route(draw.floats(3, count, dtype=torch.float32), draw.floats(count, dtype=torch.float32), 3)
    return logits, x, many, weights, chosen


def _experts(rows: int, top_k: int = 2) -> Op:
    def run(draw: RandomInputs) -> Outputs:
        n, m, count = 40, 24, top_k + 4
        first = torch.arange(rows, dtype=torch.int32, device=draw.device) % 4
        chosen = torch.stack([first + k for k in range(top_k)], dim=1)
        weights = draw.floats(rows, top_k, dtype=torch.float32)
        gate_up, down = draw.floats(count, 2 * m, n, scale=n**-0.5), draw.floats(count, n, m, scale=m**-0.5)
        return (experts(draw.floats(rows, n), weights, chosen, gate_up, down, draw.floats(rows, n)),)

    return run


CHECKS = (
    *(Check("kernels.slots", f"a step's inputs, {width} tokens a row", partial(_step_inputs, width=width)) for width in (1, 3)),
    Check("kernels.block_tables", "rows of page ids", _block_tables),
    Check("kernels.activation", "the gate", _geglu),
    *(Check("kernels.linear", f"products of {rows} rows", _products(rows)) for rows in (1, 2, 5, 30, 64)),
    Check("kernels.fused_allreduce_norm", "a fused norm of one rank", _allreduce_norm),
    Check("kernels.embed", "the embedding", _embed),
    Check("kernels.ple", "per-layer embeddings", _per_layer_inputs),
    Check("kernels.qkv", "head norms, rotation and pages", _qkv_post),
    Check("kernels.axial_rope", "head norms and rotation of pictures", _axial_rope),
    Check("kernels.ragged_attention", "attention within pictures", _ragged),
    Check("kernels.decode", "decode attention at head dim 256", _decode(4, 2, 256, 2, 50)),
    Check("kernels.decode", "decode attention at head dim 512", _decode(8, 1, 512, 1, None)),
    Check("kernels.verify", "attention of several queries a row", _verify),
    Check("kernels.chunks", "inputs of prefill chunks", _chunks),
    Check("kernels.prefill", "prefill attention at head dim 256", _extend(4, 2, 256, 30)),
    Check("kernels.prefill", "prefill attention at head dim 512", _extend(8, 1, 512, None)),
    Check("kernels.prefill", "prefill attention over images", _extend(4, 2, 256, 30, image=True)),
    *(Check("kernels.adjust", f"adjusted logits of {width} rows a slot", partial(_adjust, width=width)) for width in (1, 2)),
    *(
        Check(f"kernels.{module}", f"{what}{' of adjusted rows' * adjusted}", partial(run, adjusted=adjusted))
        for module, what, run in (
            ("choose", "sampling", _choose),
            ("candidates", "sampling behind a small top_k", _small_top_k),
            ("filters", "filtered sampling", _filter),
        )
        for adjusted in (False, True)
    ),
    Check("kernels.accept", "drafts that stand", _accept),
    Check("kernels.clusters", "a drafter's head by cluster", _clusters),
    Check("kernels.table_check", "the check of page tables", _table_check),
    Check("kernels.route", "the router", _router),
    *(Check("kernels.experts", f"experts of {rows} tokens", _experts(rows)) for rows in (1, 3, 20, 45, 90, 300)),
    Check("kernels.experts", "experts of several blocks of assignments", _experts(300, top_k=16)),
)


def checked_modules() -> Iterator[str]:
    yield from dict.fromkeys(check.module for check in CHECKS)
