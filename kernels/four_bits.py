"""Weights of four bits in groups, as kernels read them.

    int4    W[row, column] = (q - z) * s    q and z 0 to 15; s and z of a row's group of columns; z is 8 without zero points

A run of 64 columns is eight int32 words. Word j has, for i = 0 .. 3, pair i (columns 16 i + 2 j and the next) in bits 4 i to 4 i
+ 3, and 16 above: one mask and 0x4300 make pair i two bf16 numbers 128 + q in an MMA operand, without exchange. Zero points are
words of eight neighbouring rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import INTERPRET, cdiv, check_contiguous, enabled, launch, trigger, wait
from kernels.numerics import cast

RUN = 64  # columns of eight words
MIDDLE = 8  # the zero point of symmetric weights


def interleaved(words: Tensor) -> Tensor:
    """int32 words [..., n / 8] of neighbouring columns, lowest bits first -> as kernels read them."""
    plain = (words[..., None] >> torch.arange(0, 32, 4, device=words.device, dtype=torch.int32) & 15).flatten(-2)
    pairs = plain.unflatten(-1, (-1, 4, 8, 2)).transpose(-3, -2)  # of each word: i, half
    places = torch.tensor([[4 * i, 4 * i + 16] for i in range(4)], device=words.device)
    return (pairs.long() << places).sum((-2, -1)).to(torch.int32).flatten(-2)


def columns_of(words: Tensor) -> Tensor:
    """Words [..., n / 8] as kernels read them -> 0 to 15 [..., n]."""
    places = torch.tensor([[4 * i, 4 * i + 16] for i in range(4)], device=words.device, dtype=torch.int32)
    pairs = words.unflatten(-1, (-1, 8))[..., None, None] >> places & 15
    return pairs.transpose(-3, -2).flatten(-4)


def rows_of(words: Tensor) -> Tensor:
    places = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)[:, None]
    return (words[..., None, :] >> places & 15).flatten(-3, -2)


def unpacked_groups(words: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """words [..., m, n / 8], scale [..., m, groups], zero [..., m / 8, groups] -> [..., m, n] in scale's dtype."""
    if enabled(words):
        return _unpacked_by_kernel(words.flatten(0, -2), scale.flatten(0, -2), zero).view(*words.shape[:-1], -1)
    values = columns_of(words).unflatten(-1, (scale.shape[-1], -1))
    middle = torch.full_like(scale, MIDDLE) if zero is None else rows_of(zero)
    return ((values - middle[..., None]).float() * scale[..., None].float()).flatten(-2).to(scale.dtype)


def _unpacked_by_kernel(words: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    check_contiguous(words, scale, zero)
    (m, width), block = words.shape, 1024
    out = words.new_empty((m, 8 * width), dtype=scale.dtype)
    group = 8 * width // scale.shape[1]
    launch(_unpack, (cdiv(m, 8), cdiv(8 * width, block)), words, scale, zero, out, M=m, K=8 * width, GROUP=group, BN=8, BK=block)
    return out


@triton.jit
def run_columns(WORDS: constexpr):
    """[1, 2 WORDS]: columns of pair 0 of each word; pair i is 16 i further."""
    place = tl.arange(0, 2 * WORDS)[None, :]
    return place // 16 * 64 + place % 16


@triton.jit
def _pair(words, PLACE: constexpr):
    return ((words >> 4 * PLACE) & 0x000F000F) | 0x43004300


@triton.jit
def _low(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(bits):
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _bf16(bits):
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _offsets(zero, row, group, inside, GROUPS: constexpr):
    words = tl.load(zero + (row // 8) * GROUPS + group, inside, 0)
    return 128.0 + ((words >> (4 * (row % 8)).to(tl.int32)) & 15).to(tl.float32)


@triton.jit
def _spread(x, TIMES: constexpr):
    wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], TIMES])
    return tl.reshape(wide, [x.shape[0], x.shape[1] * TIMES])


@triton.jit
def _scaled_pair(bits, offset, scale):
    """(bits + offset) * scale, rounded once; offset and scale are pairs of equal numbers."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 one, none, sum;
        mov.b32 one, 0x3F803F80;
        mov.b32 none, 0x80008000;
        fma.rn.bf16x2 sum, $1, one, $2;
        fma.rn.bf16x2 $0, sum, $3, none;
        }""",
        "=r,r,r,r", [bits, offset, scale], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _twice(x):
    return (x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 65537


@triton.jit
def _by_half(x, GROUP: constexpr):
    """Values of groups [n, g] -> [n, w] for words' pairs 0 and 1, for pairs 2 and 3."""
    if GROUP < 64:
        first, second = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        first = _spread(first, 8)
        second = _spread(second, 8)
    else:
        first = _spread(x, GROUP // 8)
        second = first
    return first, second


@triton.jit
def load_words(weight, scale, zero, row, k, K: constexpr, GROUP: constexpr, BK: constexpr):
    """Columns [k, k + BK) of rows `row` [n, 1] (int64) of W [m, K]: words [n, BK / 8]; scales of pairs 0 and 1, of 2 and 3; 128 +
    z likewise. fp32; with bf16 scales pairs of bf16 and -(128 + z). Zeros after K.
    """
    GROUPS: constexpr = K // GROUP
    word = k // 8 + tl.arange(0, BK // 8)[None, :]
    group = k // GROUP + tl.arange(0, BK // GROUP)[None, :]
    inside = (group < GROUPS) | (K % BK == 0)  # a mask that holds everywhere is compiled away
    words = tl.load(weight + row * (K // 8) + word, (word < K // 8) | (K % BK == 0), 0, eviction_policy="evict_first")
    factor = tl.load(scale + row * GROUPS + group, inside, 0.0)
    PAIRS: constexpr = scale.dtype.element_ty == tl.bfloat16 and not INTERPRET
    if PAIRS:
        factor = _twice(factor)
    else:
        factor = factor.to(tl.float32)
    first, second = _by_half(factor, GROUP)
    if zero is None:
        if PAIRS:
            low = tl.full(words.shape, -1022835960, tl.int32)  # -136 twice
        else:
            low = tl.full(words.shape, 136.0, tl.float32)
        high = low
    else:
        offset = _offsets(zero, row, group, inside, GROUPS)
        if PAIRS:
            offset = _twice((-offset).to(tl.bfloat16))
        low, high = _by_half(offset, GROUP)
    return words, first, second, low, high


@triton.jit
def pair_tile(loaded, PLACE: constexpr, DTYPE: constexpr):
    """Pair PLACE of `load_words`' words [n, w] -> values [n, 2 w] of DTYPE, ordered as `run_columns`."""
    words = loaded[0]
    factor = loaded[1 + PLACE // 2]
    offset = loaded[3 + PLACE // 2]
    bits = _pair(words, PLACE)
    if factor.dtype == tl.float32:
        tile = cast(tl.join((_low(bits) - offset) * factor, (_high(bits) - offset) * factor), DTYPE)
    else:
        bits = _scaled_pair(bits, offset, factor)
        tile = tl.join(_bf16(bits), _bf16(bits >> 16))
    return tl.reshape(tile, [words.shape[0], 2 * words.shape[1]])


@triton.jit
def word_pairs(WORDS: constexpr):
    """[1, WORDS]: half the column of pair 0 of each word; pair i is 8 i further."""
    word = tl.arange(0, WORDS)[None, :]
    return word // 8 * 32 + word % 8


@triton.jit
def load_pairs(x, pair, inside):
    """Numbers 2 pair and 2 pair + 1 of x, in fp32."""
    if x.dtype.element_ty == tl.bfloat16:
        bits = tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + pair, inside, 0)
        low = _low(bits)
        high = _high(bits)
    else:
        low = tl.load(x + 2 * pair, inside, 0.0).to(tl.float32)
        high = tl.load(x + 2 * pair + 1, inside, 0.0).to(tl.float32)
    return low, high


@triton.jit
def by_fours(x):
    """[n, w] -> [n, w / 4]."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 4]), 2)


@triton.jit
def load_scaled_words(weight, scale, zero, row, k, K: constexpr, GROUP: constexpr, BK: constexpr):
    """As `load_words`, but as stored: words [n, BK / 8]; of each four words [n, BK / 32] scales and words of zero points."""
    GROUPS: constexpr = K // GROUP
    word = k // 8 + tl.arange(0, BK // 8)[None, :]
    words = tl.load(weight + row * (K // 8) + word, word < K // 8, 0, eviction_policy="evict_first")
    run = (k + 32 * tl.arange(0, BK // 32)[None, :]) // 64 * 64
    inside = run < K
    place = row * GROUPS + run // GROUP
    low = tl.load(scale + place, inside, 0.0)
    high = tl.load(scale + place + 1, inside, 0.0) if GROUP < 64 else low
    if zero is None:
        zeros = low
        others = low
    else:
        place = row // 8 * GROUPS + run // GROUP
        zeros = tl.load(zero + place, inside, 0)
        others = tl.load(zero + place + 1, inside, 0) if GROUP < 64 else zeros
    return words, low, high, zeros, others


@triton.jit
def _add_scaled(total, part, scale, zeros, row, sums, rest):
    offset = 136.0
    if zeros.dtype == tl.int32:
        offset = 128.0 + ((zeros >> (4 * (row % 8)).to(tl.int32)) & 15).to(tl.float32)
    return total + scale.to(tl.float32) * (by_fours(part) - offset * by_fours(sums) - by_fours(rest))


@triton.jit
def add_words(total, loaded, row, x, GROUP: constexpr, EXACT: constexpr):
    """total [n, w / 4] + W x. x: of each pair two numbers [1, w]. Unless EXACT, a pair's high number keeps the low one's bits,
    2^-16 (17152 + q): off by at most 2^-13.
    """
    REST: constexpr = 0.0 if EXACT else 17159.5 / 65536
    nothing = tl.zeros(x[0].shape, tl.float32)
    part = tl.zeros(loaded[0].shape, tl.float32)
    sums = nothing
    rest = nothing
    for i in tl.static_range(4):
        bits = _pair(loaded[0], i)
        part += _low(bits) * x[2 * i]
        part += (_high(bits) if EXACT else bits.to(tl.float32, bitcast=True)) * x[2 * i + 1]
        sums += x[2 * i] + x[2 * i + 1]
        rest += REST * x[2 * i + 1]
        if i == 1 and GROUP < 64:
            total = _add_scaled(total, part, loaded[1], loaded[3], row, sums, rest)
            part = tl.zeros(loaded[0].shape, tl.float32)
            sums = nothing
            rest = nothing
    return _add_scaled(total, part, loaded[2], loaded[4], row, sums, rest)


@triton.jit
def _unpack(
    words, scale, zero, out, M: constexpr, K: constexpr, GROUP: constexpr, BN: constexpr, BK: constexpr, PDL: constexpr
):  # fmt: skip
    trigger(PDL)
    row = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
    k = tl.program_id(1) * BK
    loaded = load_words(words, scale, zero, tl.minimum(row, M - 1), k, K, GROUP, BK)
    wait(PDL)  # the last readers of this memory have ended
    for i in tl.static_range(4):
        column = k + run_columns(BK // 8) + 16 * i
        tile = pair_tile(loaded, i, out.dtype.element_ty)
        tl.store(out + row * K + column, tile, (row < M) & (column < K))
