"""Weights of four bits in groups, as kernels read them.

    int4    W[row, column] = (q - z) * s    q 0 to 15; s and z, 0 to 15, of a row's group of columns; z is 8 without zero points

Eight neighbouring columns are a word of 32 bits. Column c of a word lies in its bits 4 p to 4 p + 3, p the place of c in `ORDER`:
then one mask takes columns 2 i and 2 i + 1 out as the low bits of the two halves of a register, and together with 0x4300 each is
the bf16 number 128 + q. Zero points are words too, of eight neighbouring rows each, in plain order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import INTERPRET, cdiv, launch, trigger, wait
from kernels.numerics import cast

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MIDDLE = constexpr(8)  # the zero point of symmetric weights


def interleaved(words: Tensor) -> Tensor:
    """int32 words of columns in plain order, the first in the lowest bits, as kernels read them."""
    parts = [(words >> 4 * column & 15) << 4 * place for place, column in enumerate(ORDER)]
    return torch.stack(parts).sum(0, dtype=torch.int64).to(torch.int32)


def columns_of(words: Tensor) -> Tensor:
    """int32 words [..., n / 8] as kernels read them -> 0 to 15 [..., n]."""
    places = torch.tensor([4 * ORDER.index(column) for column in range(8)], device=words.device, dtype=torch.int32)
    return (words[..., None] >> places & 15).flatten(-2)


def rows_of(words: Tensor) -> Tensor:
    """int32 words of zero points [..., m / 8, groups] -> 0 to 15 [..., m, groups]."""
    places = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)[:, None]
    return (words[..., None, :] >> places & 15).flatten(-3, -2)


def unpacked_groups(words: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """words [..., m, n / 8], scale [..., m, groups], zero points [..., m / 8, groups] -> values [..., m, n] in scale's dtype."""
    if words.is_cuda:
        return _unpack_on_gpu(words, scale, zero)
    values = columns_of(words).unflatten(-1, (scale.shape[-1], -1))
    middle = torch.full_like(scale, MIDDLE.value) if zero is None else rows_of(zero)
    return ((values - middle[..., None]).float() * scale[..., None].float()).flatten(-2).to(scale.dtype)


def _unpack_on_gpu(words: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    (m, width), block = words.shape, 1024
    out = words.new_empty((m, 8 * width), dtype=scale.dtype)
    group = 8 * width // scale.shape[1]
    launch(_unpack, (cdiv(m, 8), cdiv(8 * width, block)), words, scale, zero, out, M=m, K=8 * width, GROUP=group, BN=8, BK=block)
    return out


@triton.jit
def pair(words, PLACE: constexpr):
    """int32 words -> columns 2 PLACE and 2 PLACE + 1 of each, as the bits of two bf16 numbers 128 + q."""
    return ((words >> 4 * PLACE) & 0x000F000F) | 0x43004300


@triton.jit
def low(bits):
    """The number in the low half of a pair of bf16 numbers, fp32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(bits):
    """The number in the high half of a pair of bf16 numbers, fp32."""
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def in_order(p0, p1, p2, p3, p4, p5, p6, p7):
    """Tiles [rows, words] of the columns 0 to 7 of each word -> [rows, 8 words]."""
    even = tl.join(tl.join(p0, p4), tl.join(p2, p6))
    odd = tl.join(tl.join(p1, p5), tl.join(p3, p7))
    return tl.reshape(tl.join(even, odd), [p0.shape[0], 8 * p0.shape[1]])


@triton.jit
def offsets(zero, row, group, inside, GROUPS: constexpr):
    """128 + z of rows [n, 1] and groups [1, g], fp32; 136 where there are no zero points."""
    if zero is None:
        found = tl.full([row.shape[0], group.shape[1]], 136.0, tl.float32)
    else:
        words = tl.load(zero + (row // 8) * GROUPS + group, inside, 0)
        found = 128.0 + ((words >> (4 * (row % 8)).to(tl.int32)) & 15).to(tl.float32)
    return found


@triton.jit
def spread(x, TIMES: constexpr):
    """[n, g] -> [n, g TIMES], each column so many times."""
    wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], TIMES])
    return tl.reshape(wide, [x.shape[0], x.shape[1] * TIMES])


@triton.jit
def _scaled_pair(bits, offset, scale):
    """Pairs of bf16 numbers: (bits + offset) * scale, rounded once; offset and scale are pairs of equal numbers."""
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
    """bf16 -> the pair of it and it."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 65537


@triton.jit
def _bf16(bits):
    """The low 16 bits as a bf16 number."""
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def group_tile(weight, scale, zero, row, k, K: constexpr, GROUP: constexpr, BK: constexpr):
    """Columns [k, k + BK) of rows `row` [n, 1] (int64) of W [m, K] -> [n, BK] in scale's dtype; zeros after K."""
    GROUPS: constexpr = K // GROUP
    word = k // 8 + tl.arange(0, BK // 8)[None, :]
    group = k // GROUP + tl.arange(0, BK // GROUP)[None, :]
    inside = (group < GROUPS) | (K % BK == 0)  # a mask that holds everywhere is compiled away
    words = tl.load(weight + row * (K // 8) + word, (word < K // 8) | (K % BK == 0), 0, eviction_policy="evict_first")
    factor = tl.load(scale + row * GROUPS + group, inside, 0.0)
    offset = offsets(zero, row, group, inside, GROUPS)
    if INTERPRET or scale.dtype.element_ty != tl.bfloat16:
        factor, offset = spread(factor.to(tl.float32), GROUP // 8), spread(offset, GROUP // 8)
        tile = in_order(
            (low(pair(words, 0)) - offset) * factor, (high(pair(words, 0)) - offset) * factor,
            (low(pair(words, 1)) - offset) * factor, (high(pair(words, 1)) - offset) * factor,
            (low(pair(words, 2)) - offset) * factor, (high(pair(words, 2)) - offset) * factor,
            (low(pair(words, 3)) - offset) * factor, (high(pair(words, 3)) - offset) * factor,
        )  # fmt: skip
        tile = cast(tile, scale.dtype.element_ty)
    else:
        factor = spread(_twice(factor), GROUP // 8)
        offset = spread(_twice((-offset).to(tl.bfloat16)), GROUP // 8)
        p0, p1 = _scaled_pair(pair(words, 0), offset, factor), _scaled_pair(pair(words, 1), offset, factor)
        p2, p3 = _scaled_pair(pair(words, 2), offset, factor), _scaled_pair(pair(words, 3), offset, factor)
        tile = in_order(
            _bf16(p0), _bf16(p0 >> 16), _bf16(p1), _bf16(p1 >> 16), _bf16(p2), _bf16(p2 >> 16), _bf16(p3), _bf16(p3 >> 16)
        )
    return tile


@triton.jit
def group_sums(words, factor, offset, values):
    """Words [n, w] of weights, scale and `offsets` of each [n, w], and a row's values [1, 8 w], fp32 -> sums of their products over
    each word [n, w]."""
    tile = in_order(
        low(pair(words, 0)), high(pair(words, 0)), low(pair(words, 1)), high(pair(words, 1)),
        low(pair(words, 2)), high(pair(words, 2)), low(pair(words, 3)), high(pair(words, 3)),
    )  # fmt: skip
    sums = tl.sum(tl.reshape(tile * values, [words.shape[0], words.shape[1], 8]), 2)
    return (sums - offset * tl.sum(tl.reshape(values, [1, words.shape[1], 8]), 2)) * factor


@triton.jit
def _unpack(
    words, scale, zero, out, M: constexpr, K: constexpr, GROUP: constexpr, BN: constexpr, BK: constexpr, PDL: constexpr
):  # fmt: skip
    trigger(PDL)
    row = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
    k = tl.program_id(1) * BK
    tile = group_tile(words, scale, zero, tl.minimum(row, M - 1), k, K, GROUP, BK)
    column = k + tl.arange(0, BK)[None, :]
    wait(PDL)  # whoever read this memory before has ended
    tl.store(out + row * K + column, tile, (row < M) & (column < K))
