"""Each kernel once against plain torch, on one ugly shape (`CHECKS`).

A kernel may compile for an architecture and be wrong on it. tests/gpu and `quartet doctor --kernels` run all; a rank runs them at
boot on GPUs other than RUN_ON. `kernels.inbox_check` and `engine.rank.parallel.self_check` check exchanges.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from kernels.accept import DraftInputs, Verified, accept
from kernels.activation import geglu, geglu_rows
from kernels.adjust import adjust, count_accepted
from kernels.admissions import RECORD, admit
from kernels.axial_rope import head_norm, norm_axial_rope
from kernels.candidates import block_peaks, candidates, choose_candidates
from kernels.choose import choose_best, local_best
from kernels.chunks import ResultInputs, StepRows, chunk_inputs, extend_tiles
from kernels.clusters import best_of_clusters
from kernels.decode import DecodeScratch, decode_attention
from kernels.embed import embed
from kernels.experts import AdaptedRows, ExpertAdapters, adapted_experts, experts
from kernels.filters import filtered_tokens, scaled_rows, write_tokens
from kernels.fused_allreduce_norm import Norms, fused_allreduce_norm
from kernels.launch import enabled, plain_torch
from kernels.linear import FP32, GEGLU, gelu_times, linear
from kernels.lora import LowRank, add_lora
from kernels.packed import E4M3, Load, PackedMatrix, PackedRows, fp8_matrix, pack_rows, unpacked
from kernels.ple import per_layer_inputs
from kernels.prefill import extend_attention, tile_tokens
from kernels.qkv import qkv_post, replace_unturned
from kernels.ragged_attention import ragged_attention
from kernels.recheck import recheck
from kernels.route import route, router_logits, router_parts
from kernels.sampling_batch import BAD_WORDS, BIASED, LIMITED, PENALIZED, SamplingBatch, SlotAdjustments, SlotParameters
from kernels.sequence_parallel import sum_norm
from kernels.slots import PlanLayout, apply_plan, decode_inputs, gather_pages, rotary_table
from kernels.table_check import COPIED_ENTRY, ROW_ENTRY, TABLE_ENTRY, check_rows, new_violations
from kernels.verify import verify_attention, verify_cut_of

RUN_ON = frozenset({(9, 0)})
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-3}  # of a row's norm: a rounding or two of bf16; other orders of sums
_EPS = 1e-6
_PAGE = 16
_NO_PAGE = 2**31 - 7  # an id that names no page of a pool

Outputs = tuple[Any, ...]  # tensors


@dataclass(frozen=True)
class RandomInputs:
    """The same for the same sizes in the same order, on every rank."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    def fp32(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device)

    def floats(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.fp32(*shape, scale=scale).to(self.dtype)

    def pool(self, pages: int, kv_heads: int, d: int) -> Tensor:
        return self.floats(pages, 2, kv_heads, _PAGE, d, scale=d**-0.25)

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def rising(self, *shape: int) -> Tensor:
        return torch.arange(math.prod(shape), dtype=torch.int32, device=self.device).view(shape)

    def filled(self, value: int, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class Check:
    """`run` returns an op's outputs, in-place ones too, for its own inputs and `arguments`."""

    module: str
    what: str
    run: Callable[..., Outputs]
    arguments: tuple[Any, ...] = ()


@torch.inference_mode()
def failures(checks: Iterable[Check], device: torch.device, dtype: torch.dtype) -> list[str]:
    return [wrong for check in checks if (wrong := failure(check, device, dtype)) is not None]


def failure(check: Check, device: torch.device, dtype: torch.dtype) -> str | None:
    name = f"{check.what} ({check.module})"
    try:
        actual = check.run(RandomInputs(device, dtype), *check.arguments)
    except (TritonError, RuntimeError, ValueError) as error:  # it does not compile, or does not start
        return f"{name} does not run: {type(error).__name__}: {error}"
    with plain_torch():
        expected = check.run(RandomInputs(device, dtype), *check.arguments)
    worst = max((row_error(*pair) for pair in zip(actual, expected, strict=True)), default=0.0)
    return None if worst <= TOLERANCE[dtype] else f"{name} is wrong by {worst:.2g}"


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Largest error relative to a row's norm; of integers how many differ. An expected NaN is right."""
    if not expected.is_floating_point():
        return float((actual != expected).sum())
    actual, expected = (x.double().reshape(-1, x.shape[-1]) for x in (actual, expected))
    unknown = expected.isnan()
    off = (actual - expected).masked_fill(unknown & actual.isnan(), 0.0).norm(dim=1)
    size = expected.masked_fill(unknown, 0.0).norm(dim=1)
    return float((off / size.clamp(min=1e-6)).nan_to_num(math.inf).max())


# ---- the checks


def _step_inputs(draw: RandomInputs, width: int) -> Outputs:
    layout = PlanLayout(header=5, counts=0, row=2, chunk=4, append=4, release=4)
    counts = (2, 2, 3, 1)
    decodes = [[2, 1], [0, width]]
    chunked = [[1, 0, 20, 20], [3, 70, 83, 82]]
    changes = [[0, 2, 3, 9], [1, 0, 1, 4], [-1, 1, 1, 3], [0, 2, 0, 2]]
    plan = draw.ints(*counts, 7, *(number for row in decodes + chunked + changes for number in row))
    tables = [draw.rising(5, 6), draw.rising(5, 5)]
    tokens = draw.rising(5, 90)
    lengths = draw.ints(40, 7, 47, 0, 0)
    padding = 4
    prompts = 40
    rows = StepRows(*(draw.filled(-7, prompts + 3 * width) for _ in range(3)))
    ids, positions, slots = (column[prompts:] for column in rows)
    apply_plan(plan, layout, tables, lengths)
    decode_inputs(plan, layout, tokens, lengths, padding, ids, positions, slots, width)
    chunks = draw.filled(9, 5, 4)
    results = ResultInputs(draw.filled(9, 10).long(), *draw.filled(9, 2, 10))
    chunk_inputs(plan, layout, tokens, padding, rows, prompts, chunks, results, width)
    pages = draw.filled(-7, 3, 4)
    angles = draw.fp32(3 * width, 10)
    gather_pages(tables[0], slots, positions, _PAGE, 20, pages)
    rotary_table(positions, draw.rising(5) / 10, angles)
    copies, keys = draw.filled(7, 3, 16), draw.ints(9, 9, 9)  # for other libraries
    gather_pages(1 + draw.rising(2, 9), draw.ints(1, 0, 0), draw.ints(100, 15, -1), _PAGE, 40, copies, keys)
    return *tables, lengths, *rows, chunks, *results, extend_tiles(chunks, 8, prompts), pages, angles, copies, keys


def _admissions(draw: RandomInputs) -> Outputs:
    tables = [draw.rising(4, 6), draw.rising(4, 1100)]
    tokens = draw.rising(4, 9)
    lengths = draw.ints(1, 2, 3, 4)
    records = [2, 2 * RECORD, 2, 5, 3, *range(40, 49), 0, 2 * RECORD + 7, 0, 0, 0, *range(50, 59)]
    floats = draw.fp32(4, 3)
    parameters = SlotParameters(draw.rising(4, 3).long(), floats, draw.rising(4, 1024))
    admit(draw.ints(*records, *range(7)), 2, 5, tokens, lengths, tables, parameters)
    return *tables, tokens, lengths, parameters.integers, floats.view(torch.int32), parameters.stop


def _products(draw: RandomInputs, rows: int) -> Outputs:
    x = draw.floats(rows, 264)
    weight = draw.floats(2 * 19, 264, scale=264**-0.5)
    gated = linear(x, weight, gelu_times(draw.floats(rows, 2, 38)[:, 1]))
    return linear(x, weight), linear(x, weight, FP32), linear(x, weight, GEGLU), gated


def _has_fp8(x: Tensor) -> bool:
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 9)


def _unpacked(rows: PackedRows) -> Tensor:
    return rows.values.float() * rows.scale[:, None]


def _fp8_products(draw: RandomInputs, rows: int) -> Outputs:
    x = draw.floats(rows, 2100)  # packed in parts
    weight = fp8_matrix(draw.floats(2 * 19, 264, scale=264**-0.5))
    return (linear(x[:, :264].contiguous(), weight), _unpacked(pack_rows(x))) if _has_fp8(x) else ()


def _int4_matrix(draw: RandomInputs, *shape: int, group: int = 32, zeros: bool = False, scale: float = 0.01) -> PackedMatrix:
    *stack, m, n = shape
    words = 40503 * draw.rising(*stack, m, n // 8)
    zero = 30011 * draw.rising(*stack, m // 8, n // group)
    return PackedMatrix(words, draw.floats(*stack, m, n // group, scale=scale), "int4", zero if zeros else None)


def _int4_products(draw: RandomInputs, rows: int, group: int, zeros: bool) -> Outputs:
    x = draw.floats(rows, 320)
    weight = _int4_matrix(draw, 2 * 24, 320, group=group, zeros=zeros)
    return linear(x, weight), linear(x, weight, GEGLU), unpacked(weight)


def _packed_gate(draw: RandomInputs) -> Outputs:
    x = draw.floats(3, 2 * 70)
    return (_unpacked(geglu_rows(x) if enabled(x) else pack_rows(geglu(x))),) if _has_fp8(x) else ()


def _packed_norm(draw: RandomInputs) -> Outputs:
    """Compares the scales of x: a rounding to bf16 may move a value to the next e4m3."""
    x = draw.floats(3, 72)
    norms = Norms(draw.floats(72), draw.floats(72), packs=True)
    if not _has_fp8(x):
        return ()
    h, normed = fused_allreduce_norm(x, draw.floats(3, 72), norms, _EPS)
    assert normed is not None
    return h, pack_rows(normed).scale


def _allreduce_norm(draw: RandomInputs) -> Outputs:
    n = 72
    norms = Norms(draw.floats(n), draw.floats(n), (draw.floats(n), draw.floats(n)))
    layer = fused_allreduce_norm(draw.floats(3, 2 * n), draw.floats(3, n), norms, _EPS, draw.floats(1))
    first = fused_allreduce_norm(draw.floats(2, n), None, Norms(None, draw.floats(n)), _EPS, scale=8.5)
    return *layer, *first


def _own_rows(draw: RandomInputs) -> Outputs:
    n = 72
    norms = Norms(draw.floats(72), draw.floats(72))
    own = draw.floats(4, n)
    others = draw.floats(2, 5, n)[:, 1:]
    residual = draw.floats(4, n)
    h = torch.empty_like(residual)
    x = torch.empty_like(residual)
    sum_norm(own, others, 1, residual, norms, _EPS, draw.floats(1), h, x)
    return h, x


def _qkv_post(draw: RandomInputs, e4m3: bool = False) -> Outputs:
    heads = 4
    kv_heads = 2
    d = 32
    pairs = 5
    pool = draw.pool(5, kv_heads, d) * math.nan
    q = draw.floats(4, heads, d)
    if e4m3 and not _has_fp8(pool):
        return ()
    if e4m3:
        pool = pool.to(E4M3)
    rows = draw.ints(3, 1, 4, 2).view(2, 2), draw.ints(0, 1, 0, 1), draw.ints(17, 15, -1, 31)
    raw = draw.floats(4, (heads + 2 * kv_heads) * d)
    cos_sin = draw.fp32(4, 2 * pairs)
    qkv_post(raw, pool, *rows, cos_sin, draw.floats(d), draw.floats(d), _EPS, q)
    return q, pool


def _axial_rope(draw: RandomInputs) -> Outputs:
    x, (cos, sin) = draw.floats(5, 3, 24), draw.fp32(2, 5, 12)
    return norm_axial_rope(x, draw.floats(24), cos, sin, _EPS), head_norm(x, _EPS)


def _ragged(draw: RandomInputs) -> Outputs:
    q, k, v = draw.floats(3, 180, 2, 72, scale=72**-0.25)
    return (ragged_attention(q, k, v, draw.ints(0, 1, 40, 180), 140),)


def _decode(
    draw: RandomInputs, heads: int, kv_heads: int, d: int, kv_projections: int, window: int | None, e4m3: bool = False
) -> Outputs:
    """Rows over several splits, one of a single key, and padding; ids after a row's page are outside the pool."""
    rows = 3
    splits = 3
    pages = 8
    pairs = 32
    pool = draw.pool(1 + 2 * pages, kv_heads, d)
    out = draw.floats(rows, heads * d)
    ids = 1 + draw.rising(rows, pages) % (2 * pages)
    ids[1, 1:] = _NO_PAGE
    scratch = DecodeScratch(rows, heads, kv_heads, d, rows * splits, draw.device)
    raw = draw.floats(rows, (heads + kv_projections * kv_heads) * d)
    cos_sin = draw.fp32(rows, 2 * pairs)
    q_norm, k_norm = draw.floats(2, d, scale=d**-0.25)
    if kv_projections == 1:
        pool[:, 0] = replace_unturned(pool[:, 0], pool[:, 1] * k_norm, pairs)
    if e4m3 and not _has_fp8(pool):
        return ()
    if e4m3:
        pool = pool.to(E4M3)
    norms = q_norm, k_norm if kv_projections else None
    decode_attention(raw, pool, ids, draw.ints(114, 0, -1), cos_sin, *norms, _EPS, window, scratch, out, splits)
    return out, pool


def _verify(draw: RandomInputs, d: int, pairs: int, e4m3: bool = False) -> Outputs:
    heads = d // 64
    q_len = 4
    splits = 3
    pool = draw.pool(9, 1, d)
    if e4m3 and not _has_fp8(pool):
        return ()
    if e4m3:
        pool = pool.to(E4M3)
    q = draw.floats(3 * q_len, heads, d, scale=d**-0.25)
    if e4m3:
        q = q.half()
    ids = draw.ints(*range(8, 2, -1), *[_NO_PAGE] * 9).view(3, 5)
    out = draw.floats(3 * q_len, heads, d)
    positions = draw.ints(*range(200, 204), 0, 1, 2, *[-1] * 5)
    scratch = DecodeScratch(3, heads, 1, d, 3 * q_len * splits, draw.device)
    if pairs:
        weight = draw.floats(d)
        pool[:, 0] = replace_unturned(pool[:, 0], pool[:, 1] * weight, pairs)
        q = replace_unturned(q, q * weight, pairs) if enabled(q) else q
    _, tile = verify_cut_of(pool, 3, heads * q_len, 5, pairs)
    verify_attention(q, pool, ids, positions, 70, scratch, out, splits, tile)
    return (out,)


def _extend(
    draw: RandomInputs, heads: int, kv_heads: int, d: int, window: int | None, image: bool = False, e4m3: bool = False
) -> Outputs:
    pool = draw.pool(17, kv_heads, d)
    out = draw.floats(60, heads, d)
    if e4m3 and not _has_fp8(pool):
        return ()
    if e4m3:
        pool = pool.to(E4M3)
    chunks = draw.ints(0, 2, 0, 33, 1, 40, 83, 20, 1, 35, -5, 5).view(3, 4)
    tiles = extend_tiles(chunks, tile_tokens(heads, kv_heads), 60)
    last_seen = draw.ints(*[0] * 3, *[32] * 32, *[-1] * 5, *range(83, 90), *[99] * 10, 100, 101, 102) if image else None
    q = draw.floats(60, heads, d, scale=d**-0.25)
    table = 1 + draw.rising(2, 8)
    if e4m3:
        q = q.half()
    extend_attention(q, pool, table, tiles, window, out, last_seen=last_seen)
    return (out,)


_VOCABULARY = 5000
_SUPPRESSED, _STOP = 17, 1242  # ids that would win, were they not forbidden
# Seed, top_k, first position that may stop; temperature, top_p, min_p: greedy and plain rows, two of them not to stop yet; and rows
# with a filter each, the last with all.
_PLAIN = ([3, 0, 0], [2**40 + 5, 0, 0], [3, 0, 50], [2**40 + 5, 0, 50]), ([0.0, 1, 0], [0.8, 1, 0]) * 2
_FILTERED = (
    ([3, 200, 0], [2**40, 0, 0], [9, 0, 50], [11, 150, 50]), ([0.7, 1, 0], [1.3, 0.6, 0], [1.0, 1, 0.05], [0.9, 0.8, 0.02])
)  # fmt: skip


def sampled_rows(
    draw: RandomInputs, vocabulary: int = _VOCABULARY, *, filtered: bool = False, adjusted: bool = False
) -> tuple[Tensor, SamplingBatch]:
    logits = draw.fp32(4, vocabulary, scale=4)
    logits[:, _SUPPRESSED], logits[:, _STOP] = 80.0, 79.0
    integers, floats = (torch.tensor(numbers, device=draw.device) for numbers in (_FILTERED if filtered else _PLAIN))
    stop = draw.filled(-1, 4, 8)
    stop[:, 5] = _STOP
    rows = (draw.rising(4), draw.ints(9, 8, 7, 6))
    capped = draw.ints(0, 1, 0, 1) if adjusted else None
    parameters = SlotParameters(integers, floats, stop)
    return logits, SamplingBatch(*rows, parameters, draw.filled(0, 4, 12), draw.ints(_SUPPRESSED), 30.0, capped=capped)


def _adjust(draw: RandomInputs, width: int) -> Outputs:
    logits, batch = sampled_rows(draw)
    if width == 2:
        batch = replace(batch, slots=draw.ints(1, 1, 3, 3), positions=draw.ints(8, 9, 6, 7))
    alike = {  # in every slot
        "bias_ids": draw.ints(5, 900, 4999, -1),
        "bias": torch.tensor([2.5, -math.inf, -3.0, 9.0], device=draw.device),
        "penalties": torch.tensor([1.3, 0.7, 0.2], device=draw.device),
        "counts": (draw.rising(20) - 9).short().repeat(_VOCABULARY // 20),
        "starts": draw.ints(3, 8),
        "allowed": draw.filled(0x55555555, 157),
        "bad_words": draw.ints(77, 6, 7, 44, 7, 8, 45),
        "word_ends": draw.ints(1, 4, 7, 7),
    }
    tables = SlotAdjustments(
        flags=draw.ints(BIASED, PENALIZED, LIMITED, BAD_WORDS),
        masks=draw.ints(0, 0, 0x33333333, 0x33333333)[:, None].repeat(1, 157),
        mask_rows=draw.ints(-1, 0, -1, 0, -1, 0, 9, 2).view(4, 2),
        **{name: row.repeat(4, 1) for name, row in alike.items()},
    )
    history = draw.rising(12).repeat(4, 1)
    capped = adjust(logits, replace(batch, tokens=history, adjustments=tables, plan=draw.ints(9), width=width), 0, 2).capped
    first = slice(0, None, width)  # of each slot
    slots = batch.slots[first].contiguous()
    positions = batch.positions[first].contiguous()
    count_accepted(tables, slots, positions, history[first, 6:9].contiguous(), draw.ints(2, 2, 3, 1)[first].contiguous(), 0)
    return *_finite(logits), tables.counts.int(), capped


def _finite(logits: Tensor) -> Outputs:
    return logits.clamp(min=-1e3), logits.isneginf().int()


def _choose(draw: RandomInputs, adjusted: bool) -> Outputs:
    logits, batch = sampled_rows(draw, adjusted=adjusted)
    best = local_best(logits, batch, 0, 2)
    results = draw.filled(9, 4, 2)
    choose_best(best, batch, results, None)
    return best[..., 0].amax(-1), results, batch.tokens, *_finite(logits)


def _filter(draw: RandomInputs, adjusted: bool) -> Outputs:
    logits, batch = sampled_rows(draw, filtered=True, adjusted=adjusted)
    chosen = draw.filled(0, 4, 2)
    choose_best(local_best(logits, batch, 0, 1), replace(batch, tokens=batch.tokens.clone()), chosen, None)
    scaled = scaled_rows(logits[None], batch, 0, _VOCABULARY)
    drawn = filtered_tokens(scaled, batch, chosen)
    write_tokens(drawn, batch, chosen)
    return *_finite(scaled.values), drawn, chosen, batch.tokens


def _small_top_k(draw: RandomInputs, adjusted: bool) -> Outputs:
    logits, batch = sampled_rows(draw, filtered=True, adjusted=adjusted)
    batch.parameters.integers[:, 1] = draw.ints(20, 1, 100, 7)
    peaks = block_peaks(logits, batch)
    chosen = draw.filled(0, 4, 2)
    best = candidates(logits, peaks, batch, 0)
    choose_candidates(best, batch, chosen)
    return peaks, *best.unbind(-1), chosen, batch.tokens


def _recheck(draw: RandomInputs) -> Outputs:
    x = draw.floats(2, 72)
    table = draw.floats(2007, 72, scale=72**-0.5)
    table[:16] *= 0.6  # this block is not among the best
    logits = draw.fp32(2, len(table), scale=0.04)
    logits += x.float() @ table.float().T
    near = logits.clone()
    recheck(logits, x, table)
    return logits, (logits != near).int()


def _accept(draw: RandomInputs) -> Outputs:
    chosen = torch.stack([draw.ints(7, 8, 9).repeat(4), draw.filled(0, 12)], 1)
    ids = draw.ints(0, 6, 8, *[0, 7, 8] * 3)
    slots = draw.ints(0, 1, 2, 0).repeat_interleave(3)
    positions = draw.ints(5, 6, 7, 6, 7, 8, 7, 8, 9, -1, -1, -1)
    lengths = draw.ints(6, 7, 8, 0)
    out = DraftInputs(draw.filled(9, 5), draw.filled(9, 5), draw.filled(9, 3, 5), draw.floats(5, 40))
    rows = Verified(chosen, ids, slots, positions, draw.floats(12, 40), 3)
    return accept(rows, draw.ints(-1, -1, 7, -1).view(4, 1), lengths, 3, out), lengths, *out


def _clusters(draw: RandomInputs) -> Outputs:
    order = torch.randperm(6 * 20, generator=draw.generator).to(draw.device)
    clusters = draw.ints(0, 5, 3, 2, 4, 1).view(3, 2).long()
    best = best_of_clusters(draw.floats(3, 72), draw.floats(6 * 20, 72), order, clusters, 6)
    return best[..., 0], best[..., 1:].int()


def _table_check(draw: RandomInputs) -> Outputs:
    expected = 1 + draw.rising(2, 9)
    table = expected.clone()
    gathered = expected[:1, :3].clone()
    copies = expected[:1].clone()
    table[1, 4], copies[0, 1], copies[0, 40 // _PAGE + 1 :] = 99, 99, 0
    violations = new_violations(draw.device)
    row = (draw.ints(0), draw.ints(40))
    every_slot = (draw.rising(2), draw.filled(143, 2))
    for kind, actual, rows in ((TABLE_ENTRY, table, every_slot), (ROW_ENTRY, gathered, row), (COPIED_ENTRY, copies, row)):
        check_rows(kind, 0, actual, expected, 20, *rows, _PAGE, None, violations)
    return table, copies, violations


def _router(draw: RandomInputs) -> Outputs:
    n = 72
    count = 12
    proj = draw.fp32(count, n)
    scale = draw.fp32(n)
    few, many = (router_logits(draw.floats(rows, n), router_parts(proj, scale), draw.floats(n), _EPS) for rows in (3, 140))
    chosen = route(draw.fp32(3, count), draw.fp32(count), 3)
    return *few, *many, *chosen


def _experts(draw: RandomInputs, rows: int, top_k: int = 2) -> Outputs:
    n = 40
    m = 24
    count = top_k + 4
    chosen = draw.rising(rows, 1) % 4 + draw.rising(top_k)
    weights = draw.fp32(rows, top_k)
    gate_up = draw.floats(count, 2 * m, n, scale=n**-0.5)
    down = draw.floats(count, n, m, scale=m**-0.5)
    return (experts(draw.floats(rows, n), weights, chosen, gate_up, down, partial(draw.floats, rows, n)),)


def _packed_experts(draw: RandomInputs, rows: int, load: Load) -> Outputs:
    x = draw.floats(rows, 64)
    if load == "fp8" and not _has_fp8(x):
        return ()
    chosen = draw.rising(rows, 1) % 4 + draw.rising(2)
    shapes = (6, 2 * 64, 64), (6, 64, 64)
    if load == "fp8":
        gate_up, down = (fp8_matrix(draw.floats(*shape, scale=0.125)) for shape in shapes)
    else:
        gate_up, down = (_int4_matrix(draw, *shape, scale=0.03) for shape in shapes)
    weights = draw.fp32(rows, 2, scale=0.1)  # a bf16 rounding may move an e4m3 one: by 0.08 of a row's experts, 0.01 of all
    return (experts(x, weights, chosen, gate_up, down, partial(draw.floats, rows, 64)),)


def _adapted_experts(draw: RandomInputs, rows: int) -> Outputs:
    n = 40
    m = 24
    count = 6
    adapters = 2
    chosen = draw.rising(rows, 1) % 4 + draw.rising(2)
    weights = draw.fp32(rows, 2)
    of_row = ((draw.rising(rows, 1) + 1) % 3 - 1).view(-1)
    pairs = count * adapters
    of_gate_up = draw.floats(pairs, 32, n, scale=n**-0.5), draw.floats(pairs, 2 * m, 16, scale=0.25)
    of_down = draw.floats(pairs, 16, m, scale=m**-0.5), draw.floats(pairs, n, 16, scale=0.25)
    adapted = AdaptedRows(of_row, ExpertAdapters(*of_gate_up, (m, 2 * m), adapters), ExpertAdapters(*of_down, (n,), adapters))
    gate_up = draw.floats(count, 2 * m, n, scale=n**-0.5)
    down = draw.floats(count, n, m, scale=m**-0.5)
    return (adapted_experts(draw.floats(rows, n), weights, chosen, gate_up, down, partial(draw.floats, rows, n), adapted),)


def _lora(draw: RandomInputs, rows: int) -> Outputs:
    out = draw.floats(rows, 200)
    x = draw.floats(rows, 700)
    a = draw.floats(3, 64, 700, scale=700**-0.5)
    b = draw.floats(3, 200, 32, scale=32**-0.5)
    of_row = ((draw.rising(rows, 1) + 1) % 4 - 1).view(-1)
    add_lora(out, x, of_row, a, b, (130, 200))
    weight = draw.floats(256, 700, scale=700**-0.5)
    b = draw.floats(256, 3, 32, scale=32**-0.5).transpose(0, 1)
    words = torch.zeros(2, dtype=torch.int32, device=x.device).split(1)
    fused = (LowRank(x, of_row, a, b, (128, 256), word) for word in words)
    return out, linear(x, weight, added=next(fused)), linear(x, weight, GEGLU, added=next(fused))


CHECKS = (
    *(Check("kernels.slots", f"a step's inputs, {width} tokens a row", _step_inputs, (width,)) for width in (1, 3)),
    Check("kernels.chunks", "inputs of prefill chunks", _step_inputs, (2,)),
    Check("kernels.admissions", "new sequences", _admissions),
    Check("kernels.activation", "the gate", lambda draw: (geglu(draw.floats(3, 2 * 70)),)),
    *(Check("kernels.linear", f"products of {rows} rows", _products, (rows,)) for rows in (1, 2, 5, 64)),
    *(
        Check("kernels.four_bits", f"int4 products of {rows} rows", _int4_products, (rows, group, zeros))
        for rows, group, zeros in ((1, 32, False), (20, 64, True), (64, 32, True), (130, 32, False))
    ),
    *(Check("kernels.packed", f"fp8 products of {rows} rows", _fp8_products, (rows,)) for rows in (1, 5, 64, 80)),
    *(Check("kernels.lora", f"what adapters add to {rows} rows", _lora, (rows,)) for rows in (1, 37)),
    Check("kernels.activation", "the gate of packed rows", _packed_gate),
    Check("kernels.fused_allreduce_norm", "a fused norm of one rank", _allreduce_norm),
    Check("kernels.fused_allreduce_norm", "a fused norm that packs rows", _packed_norm),
    Check("kernels.sequence_parallel", "norms of own rows", _own_rows),
    Check(
        "kernels.embed", "the embedding",
        lambda draw: (embed(draw.ints(5, 40, 41, 73, 39, 7), draw.floats(33, 70), 40, draw.ints(7, 73), 41),),
    ),
    Check(
        "kernels.ple", "per-layer embeddings",
        lambda draw: (per_layer_inputs(draw.floats(3, 200), draw.floats(3, 200), draw.floats(40), _EPS, 0.1, 16.0),),
    ),
    Check("kernels.qkv", "head norms, rotation and pages", _qkv_post),
    Check("kernels.qkv", "head norms, rotation and e4m3 pages", _qkv_post, (True,)),
    Check("kernels.axial_rope", "head norms and rotation of pictures", _axial_rope),
    Check("kernels.ragged_attention", "attention within pictures", _ragged),
    Check("kernels.decode", "decode attention at head dim 256", _decode, (4, 2, 256, 2, 50)),
    Check("kernels.decode", "decode attention at head dim 512", _decode, (16, 4, 512, 1, None)),
    Check("kernels.decode", "decode attention at head dim 256 over e4m3 pages", _decode, (4, 2, 256, 2, 50, True)),
    Check("kernels.decode", "decode attention at head dim 512 over e4m3 pages", _decode, (16, 4, 512, 1, None, True)),
    Check("kernels.verify", "attention of several queries a row", _verify, (256, 0)),
    Check("kernels.verify", "attention of several queries a row over e4m3 pages", _verify, (512, 0, True)),
    Check("kernels.verify", "attention of several queries a row, keys read from values", _verify, (512, 64)),
    Check("kernels.prefill", "prefill attention at head dim 256", _extend, (4, 2, 256, 30)),
    Check("kernels.prefill", "prefill attention at head dim 512", _extend, (8, 1, 512, None)),
    Check("kernels.prefill", "prefill attention over images", _extend, (4, 2, 256, 30, True)),
    Check("kernels.prefill", "prefill attention at head dim 256 over e4m3 pages", _extend, (4, 2, 256, 30, True, True)),
    Check("kernels.prefill", "prefill attention at head dim 512 over e4m3 pages", _extend, (8, 1, 512, None, False, True)),
    *(Check("kernels.adjust", f"adjusted logits of {width} rows a slot", _adjust, (width,)) for width in (1, 2)),
    *(
        Check(f"kernels.{module}", f"{what}{' of adjusted rows' * adjusted}", run, (adjusted,))
        for module, what, run in (
            ("choose", "sampling", _choose),
            ("candidates", "sampling with a small top_k", _small_top_k),
            ("filters", "filtered sampling", _filter),
        )
        for adjusted in (False, True)
    ),
    Check("kernels.recheck", "the best logits of an fp8 head", _recheck),
    Check("kernels.accept", "accepted drafts", _accept),
    Check("kernels.clusters", "a drafter's head by cluster", _clusters),
    Check("kernels.table_check", "the check of page tables", _table_check),
    Check("kernels.route", "the router", _router),
    *(Check("kernels.experts", f"experts of {rows} tokens", _experts, (rows,)) for rows in (1, 3, 20, 45, 90, 300)),
    Check("kernels.experts", "experts of several blocks of assignments", _experts, (300, 16)),
    *(
        Check("kernels.experts", f"{load} experts of {rows} tokens", _packed_experts, (rows, load))
        for load, rows in (("fp8", 1), ("fp8", 20), ("fp8", 90), ("int4", 1), ("int4", 20))
    ),
    *(Check("kernels.experts", f"adapted experts of {rows} tokens", _adapted_experts, (rows,)) for rows in (5, 1, 20)),
)
