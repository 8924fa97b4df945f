"""The few-row product with its weights streamed by TMA, in Gluon, for sm_90 and above: `kernels.linear` starts it.

A CTA owns BN outputs, of a gated product BN of the gate and the BN of the up half beside them. Weight and x tiles of BK columns
pass through a ring of STAGES buffers in shared memory, each with an mbarrier that counts the bytes of its tiles. All the ring's
weight tiles are asked for before the kernel waits for its predecessors (kernels.launch), x's tiles after, so that a kernel that
starts early has up to 227 KiB an SM on its way when its input is ready. A buffer is refilled as soon as its tile is in registers
(mma.sync) or its MMA has ended (wgmma). The weight is the MMA's left operand, whose 16 or 64 rows it fills, x the right one.
TMA fills what lies outside a tensor with zeros: no padded row of x is read, and any K divisible by 8 is right.
"""

from functools import lru_cache

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.activation import gelu
from kernels.launch import INTERPRET, launch, trigger, wait
from kernels.tiles import Tile

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in triton 3.7


def gemm_tma(tile: Tile, x: Tensor, weight: Tensor, out: Tensor, *, gated: bool) -> None:
    """x [T, n] bf16, weight [m, n] or, gated, [2 m, n] -> out [T, m]; T at most `tile.rows`, n divisible by 8.

    Not under Triton's interpreter, which does not know Gluon."""
    assert not INTERPRET
    rows, m = out.shape
    n = x.shape[1]
    assert n % 8 == 0, x.shape
    assert rows <= tile.rows, (rows, tile)
    launch(
        _gemm_tma, (triton.cdiv(m, tile.bn),), _tiles(x, tile.rows, tile.bk), _tiles(weight, tile.bn, tile.bk), out, rows,
        M=m, K=n, ROWS=tile.rows, BN=tile.bn, BK=tile.bk, STAGES=min(tile.stages, triton.cdiv(n, tile.bk)),
        WGMMA=tile.kind == "wgmma", GATED=gated, START=tile.start, warps=tile.warps, registers=tile.registers,
    )  # fmt: skip


def _tiles(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """`matrix` as tiles [rows, columns] in the layout that MMA reads without bank conflicts."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], _layout(rows, columns))


@lru_cache(maxsize=64)
def _layout(rows: int, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


@gluon.jit
def _ask(
    tiles: tma.tensor_descriptor, ring: gl.shared_memory_descriptor, full: gl.shared_memory_descriptor, row: gl.tensor,
    turn: gl.tensor, SIDE: gl.constexpr, SIDES: gl.constexpr, STAGES: gl.constexpr, pred: gl.tensor,
) -> None:  # fmt: skip
    """Asks for columns [turn BK, (turn + 1) BK) of the tile at `row`, into that turn's buffer of the ring."""
    stage = turn % STAGES
    BK: gl.constexpr = tiles.block_shape[1]
    tma.async_copy_global_to_shared(tiles, [row, turn * BK], full.index(stage), ring.index(stage * SIDES + SIDE), pred=pred)


@gluon.jit
def _ask_weight(
    weight: tma.tensor_descriptor, ring: gl.shared_memory_descriptor, full: gl.shared_memory_descriptor, first: gl.tensor,
    turn: gl.tensor, SIDES: gl.constexpr, STAGES: gl.constexpr, M: gl.constexpr, BYTES: gl.constexpr, pred: gl.tensor,
) -> None:  # fmt: skip
    """Expects the `BYTES` of a turn, x's among them, and asks for its weight tiles."""
    mbarrier.expect(full.index(turn % STAGES), BYTES, pred=pred)
    for side in gl.static_range(SIDES):
        _ask(weight, ring, full, first + side * M, turn, side, SIDES, STAGES, pred)


@gluon.jit
def _multiply(
    weight: gl.shared_memory_descriptor, x: gl.shared_memory_descriptor, total: gl.tensor, WGMMA: gl.constexpr
) -> gl.tensor:  # fmt: skip
    """total + weight x^T; with wgmma the product is under way, not done."""
    if WGMMA:
        total = warpgroup_mma(weight, x.permute((1, 0)), total, is_async=True)
    else:
        LEFT: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 2)
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, total.type.layout, 2)
        total = mma_v2(weight.load(LEFT), x.permute((1, 0)).load(RIGHT), total)
    return total


@gluon.jit
def _await(total: gl.tensor, up: gl.tensor, OUTSTANDING: gl.constexpr, GATED: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Until all but the last `OUTSTANDING` wgmmas have ended."""
    if GATED:
        total, up = warpgroup_mma_wait(OUTSTANDING, deps=(total, up))
    else:
        total = warpgroup_mma_wait(OUTSTANDING, deps=(total,))
    return total, up


@gluon.jit(do_not_specialize=["T"])
def _gemm_tma(
    x: tma.tensor_descriptor, weight: tma.tensor_descriptor, out: gl.tensor, T: gl.tensor, M: gl.constexpr, K: gl.constexpr,
    ROWS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, WGMMA: gl.constexpr, GATED: gl.constexpr,
    START: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """BN outputs of up to ROWS rows."""
    if START:
        trigger(PDL)
    TURNS: gl.constexpr = (K + BK - 1) // BK
    SIDES: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = 2 * BK * (BN * SIDES + ROWS)
    first = gl.program_id(0) * BN
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * SIDES, BN, BK], weight.layout)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BK], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        _ask_weight(weight, ring, full, first, i, SIDES, STAGES, M, BYTES, True)
    wait(PDL)
    for i in gl.static_range(STAGES):
        _ask(x, xs, full, 0, i, 0, 1, STAGES, True)
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0] if WGMMA else [2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROWS, 16] if WGMMA else [16, 8]
    )
    total = gl.zeros([BN, ROWS], gl.float32, MMA)
    up = total
    LAG: gl.constexpr = 1 if WGMMA else 0  # turns whose MMA may still read its buffer
    for turn in range(TURNS):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        total = _multiply(ring.index(stage * SIDES), xs.index(stage), total, WGMMA)
        if GATED:
            up = _multiply(ring.index(stage * SIDES + 1), xs.index(stage), up, WGMMA)
        if WGMMA:
            total, up = _await(total, up, SIDES, GATED)
        _barrier()
        further = turn + STAGES - LAG
        more = (turn >= LAG) & (further < TURNS)
        _ask_weight(weight, ring, full, first, further, SIDES, STAGES, M, BYTES, more)
        _ask(x, xs, full, 0, further, 0, 1, STAGES, more)
    if WGMMA:
        total, up = _await(total, up, 0, GATED)
        _barrier()  # the ring's memory is used again for the change of layout
    if GATED:
        total = gelu(total) * up
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [1, WARPS], [0, 1])
    column = first + gl.arange(0, BN, layout=gl.SliceLayout(1, STORED))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))[None, :]
    result = gl.convert_layout(total.to(out.dtype.element_ty), STORED)
    gl.store(out + row.to(gl.int64) * M + column, result, (column < M) & (row < T))
