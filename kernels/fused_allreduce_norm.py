"""All-reduce, post-norm, residual add and the next pre-norm in one launch: Gemma's sandwich.

    s = cast( p_0 + ... + p_{n-1} )                 each rank's part, in rank order, in fp32
    h = ( r + rms_norm(s; post) ) * scalar          with two parts: rms_norm( rms_norm(s_a; a) + rms_norm(s_b; b); post)
    h = s * scale                                   the first, of an embedding
    x = rms_norm(h; next_norm)

Ranks need no barrier. Each writes its part into every peer's inbox, polls its own for all parts, reads them and empties it. Empty
is -0.0, which parts write as +0.0. No rank writes part k + 1 before it has read all parts k. Five buffers, two for a forward's
first two calls and three in turn for the rest, keep forwards of any number of calls apart.

**Sharded**, for many rows on more than two ranks: rank i sums and norms rows r with r mod n = i, keeps their residual, and sends
x, or h without a next norm, to all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import INTERPRET, enabled, launch, next_power_of_2, now, trigger, wait
from kernels.norm import norm_add, rms_norm
from kernels.packed import Activations, PackedRows, store_scaled

BUFFERS = 5
WAIT_S = 10.0  # for a peer's part, until `AllReduceInbox.wait_at_most` says otherwise
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
_ONE_SHOT: tuple[bool, ...] = (True, True)  # stages: send this rank's part, receive all parts
_SHARDED = (True, True, True)  # stages: send parts to their rows' owners, norm own rows and send x, receive x
_EMPTY_WORD = {torch.bfloat16: -0x7FFF8000, torch.float32: -(1 << 31)}  # an inbox is read and emptied by words of 32 bits


class Norms(NamedTuple):
    post: Tensor | None
    next_norm: Tensor | None  # None: no x
    halves: tuple[Tensor, Tensor] | None = None  # a norm for each of two parts
    packs: bool = False  # x may be `PackedRows`


class Inbox:
    """One rank's end of `memories`, writable by all ranks."""

    def __init__(self, memories: Sequence[Tensor], rank: int, rows: int, dtype: torch.dtype) -> None:
        self.rank = rank
        self.size = len(memories)
        self.rows = rows
        # In words of `dtype`; an empty word is a sign bit alone.
        self.inbox = memories[rank].view(dtype)
        self.nothing = torch.iinfo(dtype).min
        self.pointers = torch.tensor([memory.data_ptr() for memory in memories], device=self.inbox.device)
        self.inbox.fill_(self.nothing)

    @property
    def empty(self) -> bool:
        """Whether this rank has read everything. Synchronises."""
        return bool((self.inbox == self.nothing).all())


class AllReduceInbox(Inbox):
    """Takes rows of at most `width` elements."""

    sharded_rows = 65  # from which on fused norms are sharded
    sent_rows = 64  # up to which products write their parts themselves (`kernels.linear.linear_send`): none of them is sharded

    def __init__(self, memories: Sequence[Tensor], rank: int, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(memories, rank, rows, _BITS[dtype])
        self.width = width
        self.errors = self.inbox.new_zeros(2, dtype=torch.int32)  # 1 once a peer's part did not come in time; that time in ms
        self.wait_at_most(WAIT_S)
        self._calls = 0

    @torch.inference_mode()
    def wait_at_most(self, seconds: float) -> None:
        self.errors[1] = min(int(1000 * seconds), 2**31 - 1)

    @property
    def failed(self) -> bool:
        return bool(self.errors[0])

    @staticmethod
    def bytes(size: int, rows: int, width: int, dtype: torch.dtype) -> int:
        return BUFFERS * (size + 1) * rows * width * dtype.itemsize

    def begin(self) -> "AllReduceInbox":
        """Begin a forward: its calls are numbered from here."""
        self._calls = 0
        return self

    def next_buffer(self) -> int:
        buffer = 3 + self._calls if self._calls < 2 else (self._calls - 2) % 3
        self._calls += 1
        return buffer


@dataclass(frozen=True)
class InboxPart:
    peers: AllReduceInbox
    buffer: int


def fused_allreduce_norm(
    part: Tensor | InboxPart,
    residual: Tensor | None,
    norms: Norms,
    eps: float,
    scalar: Tensor | None = None,
    scale: float = 1.0,
    peers: AllReduceInbox | None = None,
) -> tuple[Tensor, Activations | None]:
    """part [T, n], or [T, 2 n] for two parts -> (h [T, n], x [T, n] or None), in part's dtype.

    With `peers`, part is this rank's; otherwise the whole sum, perhaps as [parts, T, n] (`kernels.linear.linear_parts`). residual
    [T, n]; None: h = s * scale. If rows are sharded, h has only this rank's, and the next fused norm must get it.
    """
    buffer = 0
    stages = _ONE_SHOT
    if isinstance(part, InboxPart):
        assert residual is not None, "the first fused norm's part is an embedding"
        peers = part.peers
        buffer = part.buffer
        stages = (False, True)
        part = residual  # not read: what its product has sent is
    elif not enabled(part):
        assert peers is None, "on this device sums are made by a collective"
        if part.ndim == 3 and residual is not None:
            part = part.sum(0).to(residual.dtype)
        if norms.halves is not None:
            one, other = (rms_norm(*half, eps) for half in zip(part.chunk(2, -1), norms.halves, strict=True))
            part = one + other
        if residual is None or norms.post is None:
            h = part * scale
        else:
            h = norm_add(residual, part, norms.post, eps, scalar)
        return h, None if norms.next_norm is None else rms_norm(h, norms.next_norm, eps)
    elif peers is not None:
        buffer = peers.next_buffer()
        if part.shape[-2] >= peers.sharded_rows and not norms.halves:
            stages = _SHARDED
    h = torch.empty_like(part if residual is None else residual)
    x: Activations | None = None
    if norms.next_norm is not None or stages is _SHARDED:
        x = PackedRows.empty(h) if norms.packs and stages is not _SHARDED else torch.empty_like(h)
    _launch(part, residual, norms, eps, scalar, scale, peers, h, x, buffer, stages)
    return h, x


def _launch(
    part: Tensor,
    residual: Tensor | None,
    norms: Norms,
    eps: float,
    scalar: Tensor | None,
    scale: float,
    peers: AllReduceInbox | None,
    h: Tensor,
    x: Activations | None,
    buffer: int,
    stages: tuple[bool, ...] = _ONE_SHOT,
) -> None:
    """stages: fewer after a product that sent the part; one at a time under the interpreter."""
    rows, n = h.shape
    size, inbox_rows, width = (1, 0, 0) if peers is None else (peers.size, peers.rows, peers.width)
    group = (None, None, None, 0) if peers is None else (peers.pointers, peers.inbox, peers.errors, peers.rank)
    halves: tuple[Tensor | None, ...] = norms.halves or (None, None)
    outs: tuple[Tensor | None, ...] = (x.values, x.scale) if isinstance(x, PackedRows) else (x, None)
    kernel = _allreduce_norm
    own = {"RECEIVE": stages[1], "PARTS": part.shape[0] if part.ndim == 3 else 1}
    if len(stages) == len(_SHARDED):
        kernel = _allreduce_norm_sharded
        own = {"NORM": stages[1], "RECEIVE": stages[2]}
        halves = ()
        outs = outs[:1]
    launch(
        kernel, (rows,), part, residual, norms.post, *halves, norms.next_norm, scalar, h, *outs, *group, buffer, eps, scale,
        N=n, SIZE=size, ROWS=inbox_rows, WIDTH=width, EMPTY=_EMPTY_WORD[h.dtype], SEND=stages[0], **own,
        warps=row_warps(n, h.dtype), BLOCK=next_power_of_2(n),
    )  # fmt: skip


def row_warps(n: int, dtype: torch.dtype) -> int:
    """At most a warp for each 32 words: two warps must not poll the same word."""
    words = next_power_of_2(n) * dtype.itemsize // 4
    return max(1, min(8 if n > 2048 else 4, words // 32))


# ---- kernels


@triton.jit
def normed(x, weight, N: constexpr, eps, dtype: constexpr):
    return (x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def hidden(total, post, residual, scalar, scale, N: constexpr, eps, dtype: constexpr):
    if post is None:
        h = (total * scale).to(dtype).to(tl.float32)
    else:
        h = (residual.to(tl.float32) + normed(total, post, N, eps, dtype)).to(dtype).to(tl.float32)
        if scalar is not None:
            h = (h * scalar).to(dtype).to(tl.float32)
    return h


@triton.jit
def inboxes_of(pointers, dtype: constexpr, SIZE: constexpr):
    """Constant, so they may be read before the PDL wait."""
    inboxes: tl.tuple = ()
    for peer in tl.static_range(SIZE):
        inboxes += (tl.multiple_of(tl.load(pointers + peer), 16).to(tl.pointer_type(dtype)),)
    return inboxes


@triton.jit
def send(bits, inboxes, offset, lane, live, SIZE: constexpr, EMPTY: constexpr):
    """Write bits to every inbox. The separate `offset` keeps lanes 32 bits wide."""
    sent = without_negative_zero(bits, EMPTY)
    for peer in tl.static_range(SIZE):
        tl.store(inboxes[peer] + offset + lane, sent, live)


@triton.jit
def _negative_zeros(bits, EMPTY: constexpr):
    """The sign bit of each -0.0 among the values in `bits`."""
    # Adding all ones to the rest of -0.0 does not carry into the sign.
    return bits & EMPTY & ~((bits & ~EMPTY) + ~EMPTY)


@triton.jit
def without_negative_zero(bits, EMPTY: constexpr):
    return bits & ~_negative_zeros(bits, EMPTY)


@triton.jit
def polled(polls, deadline, errors):
    """(polls, deadline) after one more poll; deadline 0: not begun, negative: over."""
    LOOK: constexpr = 1 if INTERPRET else 1024
    polls += 1
    if polls % LOOK == 0:
        time = now()
        deadline = tl.where(deadline == 0, time + tl.load(errors + 1).to(tl.int64) * 1000000, deadline)
        over = (time > deadline) | (tl.load(errors, volatile=True) != 0)
        deadline = tl.where(over, -1, deadline)
    return polls, deadline


@triton.jit
def _parts(inbox, offset, lane, live, STRIDE: constexpr, COUNT: constexpr):
    parts: tl.tuple = ()
    for rank in tl.static_range(COUNT):
        parts += (tl.load(inbox + offset + rank * STRIDE + lane, live, 0, volatile=True),)
    return parts


@triton.jit
def _missing(parts, COUNT: constexpr, EMPTY: constexpr):
    absent = _negative_zeros(parts[0], EMPTY)
    for rank in tl.static_range(1, COUNT):
        absent |= _negative_zeros(parts[rank], EMPTY)
    return tl.max((absent != 0).to(tl.int32), 0)


@triton.jit
def _receive(inbox, offset, lane, live, errors, STRIDE: constexpr, COUNT: constexpr, EMPTY: constexpr):
    """Waits for COUNT parts of a row, and empties the inbox."""
    parts = _parts(inbox, offset, lane, live, STRIDE, COUNT)
    missing = _missing(parts, COUNT, EMPTY)
    polls = 0
    deadline = tl.full((), 0, tl.int64)
    while (missing > 0) & (deadline >= 0):
        parts = _parts(inbox, offset, lane, live, STRIDE, COUNT)
        missing = _missing(parts, COUNT, EMPTY)
        polls, deadline = polled(polls, deadline, errors)
    if missing > 0:
        tl.store(errors, 1)
    for rank in tl.static_range(COUNT):
        tl.store(inbox + offset + rank * STRIDE + lane, tl.full(lane.shape, EMPTY, tl.int32), live)
    return parts


@triton.jit
def _sum(parts, COUNT: constexpr, dtype: constexpr):
    if dtype == tl.float32:
        total = parts[0].to(tl.float32, bitcast=True)
        for rank in tl.static_range(1, COUNT):
            total += parts[rank].to(tl.float32, bitcast=True)
    else:  # of each word's two values a half is the upper half of an fp32
        low = (parts[0] << 16).to(tl.float32, bitcast=True)
        high = (parts[0] & -65536).to(tl.float32, bitcast=True)
        for rank in tl.static_range(1, COUNT):
            low += (parts[rank] << 16).to(tl.float32, bitcast=True)
            high += (parts[rank] & -65536).to(tl.float32, bitcast=True)
        total = tl.interleave(low, high)
    return total.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rank", "buffer"])
def _allreduce_norm(
    part, residual, post, post_a, post_b, next_norm, scalar, h_out, x_out, x_scale, pointers, inbox, errors, rank, buffer,
    eps, scale,
    N: constexpr, SIZE: constexpr, ROWS: constexpr, WIDTH: constexpr, EMPTY: constexpr, SEND: constexpr, RECEIVE: constexpr,
    PARTS: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    dtype: constexpr = h_out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    live = lane < N
    branches: constexpr = 1 if post_a is None else 2
    VALUES: constexpr = 32 // dtype.primitive_bitwidth  # of a word
    STRIDE: constexpr = ROWS * WIDTH // VALUES
    word = tl.arange(0, BLOCK // VALUES)
    live_word = word < N // VALUES
    if SIZE > 1:
        inboxes = inboxes_of(pointers, tl.int32, SIZE if SEND else 0)
    post_weight = None if post is None else tl.load(post + lane, live, 0.0)
    next_weight = None if next_norm is None else tl.load(next_norm + lane, live, 0.0)
    factor = None if scalar is None else tl.load(scalar).to(tl.float32)
    wait(PDL)
    trigger(PDL)  # not before: products that start early would take the memory that this one waits for
    if SIZE > 1:
        inbox = inbox.to(tl.pointer_type(tl.int32))
        offset = (row + buffer * ((SIZE + 1) * ROWS)) * (WIDTH // VALUES)
        if SEND:
            mine = part.to(tl.pointer_type(tl.int32)) + row * (branches * N // VALUES)
            for branch in tl.static_range(branches):
                words = tl.load(mine + branch * (N // VALUES) + word, live_word, 0)
                send(words, inboxes, offset + rank * STRIDE + branch * (N // VALUES), word, live_word, SIZE, EMPTY)
    if RECEIVE:
        before = None if post is None else tl.load(residual + row * N + lane, live, 0.0)
        if SIZE > 1:
            total = _sum(_receive(inbox, offset, word, live_word, errors, STRIDE, SIZE, EMPTY), SIZE, dtype)
        else:
            total = tl.load(part + row * (branches * N) + lane, live, 0.0).to(tl.float32)
            for i in tl.static_range(1, PARTS):
                total += tl.load(part + (i * tl.num_programs(0) + row) * N + lane, live, 0.0)
            if PARTS > 1:
                total = total.to(dtype).to(tl.float32)
        if branches == 2:
            if SIZE > 1:
                other = _receive(inbox, offset + N // VALUES, word, live_word, errors, STRIDE, SIZE, EMPTY)
                other = _sum(other, SIZE, dtype)
            else:
                other = tl.load(part + row * (branches * N) + N + lane, live, 0.0).to(tl.float32)
            one = normed(total, tl.load(post_a + lane, live, 0.0), N, eps, dtype)
            total = (one + normed(other, tl.load(post_b + lane, live, 0.0), N, eps, dtype)).to(dtype).to(tl.float32)
        h = hidden(total, post_weight, before, factor, scale, N, eps, dtype)
        tl.store(h_out + row * N + lane, h.to(dtype), live)
        if next_norm is not None:
            x = normed(h, next_weight, N, eps, dtype)
            if x_scale is None:
                tl.store(x_out + row * N + lane, x.to(dtype), live)
            else:
                store_scaled(x, x_out, x_scale, row, N, BLOCK)


@triton.jit(do_not_specialize=["rank", "buffer"])
def _allreduce_norm_sharded(
    part, residual, post, next_norm, scalar, h_out, x_out, pointers, inbox, errors, rank, buffer, eps, scale,
    N: constexpr, SIZE: constexpr, ROWS: constexpr, WIDTH: constexpr, EMPTY: constexpr, SEND: constexpr, NORM: constexpr,
    RECEIVE: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    dtype: constexpr = part.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    owner = (row % SIZE).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    live = lane < N
    VALUES: constexpr = 32 // dtype.primitive_bitwidth  # of a word
    STRIDE: constexpr = ROWS * WIDTH // VALUES
    word = tl.arange(0, BLOCK // VALUES)
    live_word = word < N // VALUES
    owners_inbox = tl.multiple_of(tl.load(pointers + owner), 16).to(tl.pointer_type(tl.int32))
    bits_type: constexpr = inbox.dtype.element_ty
    inboxes = inboxes_of(pointers, bits_type, SIZE)
    next_weight = None if next_norm is None else tl.load(next_norm + lane, live, 0.0)
    post_weight = None if post is None else tl.load(post + lane, live, 0.0)
    factor = None if scalar is None else tl.load(scalar).to(tl.float32)
    wait(PDL)
    trigger(PDL)  # not before: products that start early would take the memory that this one waits for
    inbox = inbox.to(tl.pointer_type(tl.int32))
    parts_at = (row + buffer * ((SIZE + 1) * ROWS)) * (WIDTH // VALUES)
    x_at = parts_at + SIZE * STRIDE
    if SEND:
        words = tl.load(part.to(tl.pointer_type(tl.int32)) + row * (N // VALUES) + word, live_word, 0)
        tl.store(owners_inbox + parts_at + rank * STRIDE + word, without_negative_zero(words, EMPTY), live_word)
    if NORM:  # noqa: SIM102 (NORM is known when the kernel is compiled)
        if owner == rank:
            before = None if post is None else tl.load(residual + row * N + lane, live, 0.0)
            total = _sum(_receive(inbox, parts_at, word, live_word, errors, STRIDE, SIZE, EMPTY), SIZE, dtype)
            h = hidden(total, post_weight, before, factor, scale, N, eps, dtype)
            tl.store(h_out + row * N + lane, h.to(dtype), live)
            x = (h if next_norm is None else normed(h, next_weight, N, eps, dtype)).to(dtype)
            send(x.to(bits_type, bitcast=True), inboxes, x_at * VALUES, lane, live, SIZE, -(1 << (dtype.primitive_bitwidth - 1)))
    if RECEIVE:
        received = _receive(inbox, x_at, word, live_word, errors, STRIDE, 1, EMPTY)
        tl.store(x_out.to(tl.pointer_type(tl.int32)) + row * (N // VALUES) + word, received[0], live_word)
