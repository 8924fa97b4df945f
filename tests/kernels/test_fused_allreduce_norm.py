"""The fused norm over one rank and over four, whose inboxes lie in one process, in the interpreter; and its reference."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.fused_allreduce_norm import (
    BUFFERS,
    AllReduceInbox,
    Norms,
    _launch,
    fused_allreduce_norm,
)
from kernels.launch import plain_torch
from kernels.linear import linear_send
from kernels.norm import norm_add, rms_norm
from tests.support import interpreter
from tests.support.dtypes import both_dtypes
from tests.support.launches import record

pytestmark = pytest.mark.cpu

EPS = 1e-6
SIZE, ROWS, N = 4, 6, 48
TOLERANCE = 2e-6  # fp32: the sum of squares is added in another order


@dataclass(frozen=True)
class Case:
    """Parts of SIZE ranks, and what is joined to their sum."""

    parts: list[Tensor]
    residual: Tensor
    norms: Norms
    scalar: Tensor

    @property
    def whole(self) -> Tensor:
        """The sum in rank order."""
        total = self.parts[0]
        for part in self.parts[1:]:
            total = total + part
        return total

    @property
    def want(self) -> tuple[Tensor, Tensor]:
        """h and x."""
        with plain_torch():
            h, x = fused_allreduce_norm(self.whole, self.residual, self.norms, EPS, self.scalar)
        assert x is not None
        return h, x


def case(seed: int = 0, branches: int = 1, rows: int = ROWS) -> Case:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    parts = [draw(rows, branches * N) for _ in range(SIZE)]
    for part in parts:
        part[:, 5] = -0.0  # what an inbox takes for "not there"
    each = (draw(N).abs() + 0.5, draw(N).abs() + 0.5) if branches == 2 else None
    return Case(parts, draw(rows, N), Norms(draw(N).abs() + 0.5, draw(N).abs() + 0.5, each), torch.tensor([1.25]))


def group(width: int, sharded: int = 1 << 30, dtype: torch.dtype = torch.float32) -> list[AllReduceInbox]:
    """SIZE ranks whose inboxes are ordinary memory."""
    memories = [torch.zeros(AllReduceInbox.bytes(SIZE, ROWS, width, dtype), dtype=torch.uint8) for _ in range(SIZE)]
    ranks = [AllReduceInbox(memories, rank, ROWS, width, dtype) for rank in range(SIZE)]
    for rank in ranks:
        rank.sharded_rows, rank.sent_rows = sharded, ROWS
    return ranks


ONE_SHOT = ((True, False), (False, True))  # every rank writes, then every rank reads
SHARDED = ((True, False, False), (False, True, False), (False, False, True))  # likewise


def in_stages(it: Case, peers: list[AllReduceInbox], stages: Sequence[tuple[bool, ...]]) -> list[tuple[Tensor, Tensor]]:
    """Each rank's h and x; the interpreter runs one after the other in each stage. What is not written stays NaN."""
    found = [(torch.full_like(it.residual, torch.nan), torch.full_like(it.residual, torch.nan)) for _ in peers]
    buffers = [rank.next_buffer() for rank in peers]
    for stage in stages:
        for part, rank, out, buffer in zip(it.parts, peers, found, buffers, strict=True):
            _launch(part, it.residual, it.norms, EPS, it.scalar, 1.0, rank, *out, buffer, stage)
    return found


def empty(peers: list[AllReduceInbox]) -> bool:
    return all(rank.empty for rank in peers)


def off(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@pytest.mark.parametrize("branches", [1, 2])
def interpreted_ranks_agree_and_leave_empty_inboxes(branches: int) -> None:
    """More calls in a row than there are inboxes give the reference's h and x, the same bits on all ranks, and inboxes that are
    empty again; a part left out is 100 tolerances off, and the next call right."""
    peers = group(branches * N)
    for seed in range(BUFFERS + 1):
        it = case(seed, branches, rows=3)
        if seed == 1:
            lost = replace(it, parts=[*it.parts[:3], torch.zeros_like(it.parts[3])])
            assert max(map(off, in_stages(lost, peers, ONE_SHOT)[0], it.want)) > 100 * TOLERANCE
        found = in_stages(it, peers, ONE_SHOT)
        assert all(torch.equal(h, found[0][0]) and torch.equal(x, found[0][1]) for h, x in found)
        assert max(map(off, found[0], it.want)) < TOLERANCE
        assert empty(peers)


def interpreted_sharded_rows() -> None:
    """Each rank ends with every row's x, the same bits everywhere, and with h of its own rows alone; x is h without a next norm."""
    peers = group(N)
    for seed in range(4):
        it = case(seed)
        want_h, want_x = it.want
        if seed == 3:
            it, want_x = replace(it, norms=Norms(it.norms.post, None)), want_h
        found = in_stages(it, peers, SHARDED)
        for rank, (h, x) in enumerate(found):
            assert torch.equal(x, found[0][1])
            assert off(x, want_x) < TOLERANCE
            assert off(h[rank::SIZE], want_h[rank::SIZE]) < TOLERANCE
            assert h.isnan().all(1).tolist() == [row % SIZE != rank for row in range(ROWS)]
        assert empty(peers)


@both_dtypes
@pytest.mark.parametrize("rows", [1, ROWS])
def interpreted_products_send_their_parts(rows: int, dtype: torch.dtype) -> None:
    """Parts that products write to the inboxes themselves join to what parts in memory do, also where one rounds to -0.0; one that
    another rank's product writes in its place is seen."""
    generator = torch.Generator().manual_seed(rows)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    residual, norms, scalar = draw(rows, N), Norms(draw(N).abs() + 0.5, draw(N).abs() + 0.5), torch.tensor([1.25]).to(dtype)
    for fault in (False, True):
        peers = group(N, dtype=dtype)
        x, weights = draw(SIZE, rows, 64), draw(SIZE, N, 64) / 8
        x[0, 0], weights[0, 5] = 1e-20, -1e-22  # their product is no zero in fp32
        sent = [linear_send(x[rank], weights[0 if fault else rank], peers[rank]) for rank in range(SIZE)]
        pairs = zip(sent, peers, strict=True)
        found = [fused_allreduce_norm(part, residual, norms, EPS, scalar, peers=rank) for part, rank in pairs]
        whole = sum((x[rank] @ weights[rank].t()).float() for rank in range(SIZE)).to(dtype)
        with plain_torch():
            want = fused_allreduce_norm(whole, residual, norms, EPS, scalar)
        tolerance = 10 * TOLERANCE if dtype == torch.float32 else 0.1
        assert all(torch.equal(h, found[0][0]) and torch.equal(normed, found[0][1]) for h, normed in found)
        assert (max(map(off, found[0], want)) < tolerance) is not fault
        assert empty(peers)


def interpreted_one_rank() -> None:
    """Without peers the part is the sum; where nothing follows nothing is normed for it."""
    it = case()
    h, x = fused_allreduce_norm(it.whole, it.residual, Norms(it.norms.post, None), EPS, it.scalar)
    assert x is None
    assert off(h, it.want[0]) < TOLERANCE


def receive(it: Case, peers: AllReduceInbox, buffer: int) -> tuple[float, Tensor]:
    """Seconds that a fused norm of what others have sent takes, and its h."""
    out = torch.empty_like(it.residual), torch.empty_like(it.residual)
    began = time.monotonic()
    _launch(it.parts[0], it.residual, it.norms, EPS, it.scalar, 1.0, peers, *out, buffer, (False, True))
    return time.monotonic() - began, out[0]


def interpreted_a_failed_group_does_not_wait_again() -> None:
    """A fused norm whose peers send nothing waits for its time and sets the error flag; the next give up when they first look."""
    it, peers = case(rows=1), group(N)[0]
    peers.wait_at_most(2.0)
    assert receive(it, peers, peers.next_buffer())[0] > 2.0
    assert peers.failed
    assert min(receive(it, peers, peers.next_buffer())[0] for _ in range(3)) < 2.0
    peers.errors[0] = 0
    assert receive(it, peers, peers.next_buffer())[0] > 2.0


@pytest.mark.parametrize("wait_s", [60.0, 0.1])
def interpreted_a_rank_that_was_stopped_is_waited_for(wait_s: float) -> None:
    """Parts that come half a second late are joined as if they had come at once; where so long a wait is not allowed, it ends."""
    it, peers = case(rows=1), group(N)
    buffers = [rank.next_buffer() for rank in peers]
    for part, rank in zip(it.parts, peers, strict=True):
        _launch(part, it.residual, it.norms, EPS, it.scalar, 1.0, rank, *it.want, buffers[0], (True, False))
    sent = peers[0].inbox.clone()
    peers[0].inbox.fill_(peers[0].nothing)
    peers[0].wait_at_most(wait_s)
    fault = wait_s < 0.5
    late = threading.Timer(10.0 if fault else 0.5, peers[0].inbox.copy_, [sent])
    late.start()
    _, h = receive(it, peers[0], buffers[0])
    late.cancel()
    assert peers[0].failed is fault
    assert (off(h, it.want[0]) < TOLERANCE) is not fault


def test_the_reference_is_the_norms_one_after_the_other() -> None:
    """Sum, post-norm, residual, scalar and next norm are `kernels.norm`'s ops in this order."""
    it = case(branches=2)
    assert it.norms.halves is not None
    assert it.norms.post is not None
    one, other = it.whole.chunk(2, dim=1)
    y = rms_norm(one, it.norms.halves[0], EPS) + rms_norm(other, it.norms.halves[1], EPS)
    h, x = fused_allreduce_norm(it.whole, it.residual, it.norms, EPS, it.scalar)
    assert torch.equal(h, norm_add(it.residual, y, it.norms.post, EPS, it.scalar))
    assert x is not None
    assert torch.equal(x, rms_norm(h, it.norms.next_norm, EPS))


@both_dtypes
@pytest.mark.parametrize("sharded", [1, 1 << 30])
def test_no_two_warps_poll_a_word(dtype: torch.dtype, sharded: int) -> None:
    """Of every width a word of an inbox has one thread, or threads of one warp, which read it at once: of two warps one could see a
    part come, and the other go on with what was there before."""
    meta = torch.device("meta")
    for width in (32, 64, 80, 96, 128, 160, 256, 512, 1536, 2560, 2816, 3840, 5376):
        memory = torch.empty(AllReduceInbox.bytes(2, ROWS, width, dtype), dtype=torch.uint8, device=meta)
        peers = AllReduceInbox([memory] * 2, 0, ROWS, width, dtype)
        peers.sharded_rows = sharded
        part, weight = torch.empty(ROWS, width, dtype=dtype, device=meta), torch.empty(width, dtype=dtype, device=meta)
        with record(target=(9, 0)) as nodes:
            fused_allreduce_norm(part, part, Norms(weight, weight), EPS, peers=peers)
        (node,) = nodes
        assert node.kernel == ("_allreduce_norm_sharded" if sharded == 1 else "_allreduce_norm")
        words, warps = node.constexprs["BLOCK"] * dtype.itemsize // 4, node.constexprs["warps"]
        assert warps == 1 or 32 * warps <= words, (width, warps)


@pytest.mark.parametrize("calls", [3, 4, 5, 121])
def test_an_inbox_rests_for_two_calls(calls: int) -> None:
    """Whatever number of calls a forward has, no inbox serves two of any three calls in a row, across forwards too."""
    peers = group(N)[0]
    buffers = [peers.begin().next_buffer() if call == 0 else peers.next_buffer() for _ in range(4) for call in range(calls)]
    assert max(buffers) < BUFFERS
    assert all(len({*buffers[at : at + 3]}) == 3 for at in range(len(buffers) - 2))


@both_dtypes
def interpreted_parts_of_a_product(dtype: torch.dtype) -> None:
    """One rank's fused norm adds fp32 parts of a product and rounds once, as the whole product would be; it notices a lost one."""
    it = case()
    parts, residual = torch.stack(it.parts), it.residual.to(dtype)
    norms = Norms(it.norms.post.to(dtype), it.norms.next_norm.to(dtype))  # type: ignore[union-attr]
    want = fused_allreduce_norm(parts.sum(0).to(dtype), residual, norms, EPS)
    for given, fault in ((parts, False), (parts[:3], True)):
        h, x = fused_allreduce_norm(given, residual, norms, EPS)
        assert x is not None
        assert h.dtype == x.dtype == dtype
        off = max(float((one.double() - other.double()).abs().max()) for one, other in zip((h, x), want, strict=True))  # type: ignore[arg-type]
        assert (off > 0.1) if fault else (off <= 8 * torch.finfo(dtype).eps)
