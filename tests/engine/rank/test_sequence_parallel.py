"""Sums of many rows, each rank norming rows of its own: processes that share memory, against an all-reduce.

Ranks pause at random before they wait for others and before they copy. What a GPU's kernel waits for, a loop waits for here.
"""

import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import MagicMock

import msgspec
import pytest
import torch
from torch import Tensor

import kernels.sequence_parallel
from engine.config import EngineConfig, Mtp
from engine.geometry import kv_groups, read_geometry
from engine.memory import INBOX_BYTES, exchange_bytes, inbox_rows
from engine.quantisation import read_quantisation
from engine.rank.attention import attention_backend
from engine.rank.batch import Chunk, eager_batch
from engine.rank.kv import GroupCache, KVCache
from engine.rank.load.loader import load
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Inboxes, Parallel, check_own_rows, make_inboxes
from engine.rank.products import Peers
from engine.rank.stages.forward_stage import ForwardStage
from engine.step_shapes import sequence_rows
from kernels.allreduce import MappedCollectives, shared_bytes
from kernels.fused_allreduce_norm import AllReduceInbox, Norms
from kernels.launch import plain_torch
from kernels.norm import norm_add, rms_norm
from kernels.sequence_parallel import SequenceParallel, sum_norm
from tests.bench.sequence_parallel import Mlps
from tests.conftest import Nano
from tests.support import interpreter
from tests.support.engine.quantised import saved
from tests.support.engine.shared_memory import mapped
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
HIDDEN, WIDTH, LAYERS = 32, 48, 3
ROWS, MOST = (21, 32, 16), 64  # of three forwards; of the check at boot too
WAIT_S = 60.0
Forward = Callable[[int, SequenceParallel | None], Tensor]


class Pausing(SequenceParallel):
    """Ranks that are early and late."""

    def wait_for(self, what: int, piece: int, number: int) -> None:
        pause()
        deadline = time.monotonic() + WAIT_S
        while not bool((self._flags[self.rank][what, piece] == number).all()):
            assert time.monotonic() < deadline, (what, piece, number)
            time.sleep(0.0005)

    def scatter(self, part: Tensor, piece: int, number: int) -> None:
        pause()
        super().scatter(part, piece, number)


class NotWaiting(Pausing):
    """A planted fault: nobody waits for what others copy."""

    def wait_for(self, what: int, piece: int, number: int) -> None:
        pause()


class EarlyFlags(Pausing):
    """A planted fault: a part's flag comes before the part."""

    def scatter(self, part: Tensor, piece: int, number: int) -> None:
        for copy in self.pieces[piece].copies:
            copy.part_flag.fill_(number)
        time.sleep(0.02)
        super().scatter(part, piece, number)


class Unsent(Pausing):
    """A planted fault: parts are not sent, their flags are."""

    def scatter(self, part: Tensor, piece: int, number: int) -> None:
        super().scatter(torch.zeros_like(part), piece, number)


def pause() -> None:
    time.sleep(random.choice((0.0, 0.0, 0.01)))


@dataclass(frozen=True)
class Group:
    """Processes that compute the same with norms of own rows, by `kind`, and with all-reduces. model: a folder; none: MLPs."""

    size: int
    kind: type[SequenceParallel]
    model: Path | None = None

    @property
    def width(self) -> int:
        return HIDDEN if self.model is None else read_geometry(self.model).hidden

    def distance(self) -> float:
        """The largest over all ranks, inf where one of them failed or its check at boot refused."""
        forks, ends, ranks = multiprocessing.get_context("fork"), [], []
        lengths = [SequenceParallel.bytes(self.size, MOST, self.width, torch.float32)] * self.size
        memories = [mapped(length) for length in [*lengths, shared_bytes(self.size)]]
        for rank in range(self.size):
            ours, theirs = forks.Pipe(duplex=False)
            ends.append(ours)
            ranks.append(forks.Process(target=self.rank, args=(rank, memories, theirs)))
            ranks[-1].start()
            theirs.close()
        try:
            return max(end.recv() for end in ends)
        except EOFError:
            return float("inf")
        finally:
            for process in ranks:
                process.kill()
                process.join()

    @torch.inference_mode()
    def rank(self, rank: int, memories: list[memoryview], end: Connection) -> None:
        """One process: sends how far it is from an all-reduce's."""
        random.seed(rank)
        torch.set_num_threads(1)
        kernels.sequence_parallel.BLOCK = 2  # type: ignore[misc]  # of a process of its own
        *shared, collectives = memories
        parallel = MappedCollectives(collectives, rank, self.size, WAIT_S)
        buffers = [torch.frombuffer(memory, dtype=torch.uint8) for memory in shared]
        peers = self.kind(buffers, rank, range(MOST + 1), self.width, torch.float32, torch.zeros(2, dtype=torch.int32))
        forward = mlps(parallel) if self.model is None else layers(parallel, self.model)
        expected = [forward(rows, None) for rows in ROWS]
        check_own_rows(parallel, peers, torch.float32)
        actual = [forward(rows, peers.begin(rows)).clone() for rows in ROWS]
        end.send(max(float((one - other).abs().max()) for one, other in zip(expected, actual, strict=True)))


def mlps(parallel: Parallel) -> Forward:
    made = Mlps(parallel, LAYERS, HIDDEN, WIDTH, torch.float32, CPU)
    return lambda rows, peers: made.forward(made.input(rows), peers)


def layers(parallel: Parallel, folder: Path) -> Forward:
    """A whole model, over one chunk: its final rows, and of another forward two of them alone."""
    geometry = read_geometry(folder)
    model = Gemma4(geometry, parallel, torch.float32, CPU)
    load(model, TENSORS, folder, read_quantisation(folder))
    cache = KVCache([GroupCache(group, 2, 1, max(ROWS), CPU) for group in kv_groups(geometry, parallel.size, dtype="float32")])
    for group in cache:
        group.table[0, 0] = 1
    attention = attention_backend(None, geometry, cache, parallel.size, (2,))

    def forward(rows: int, peers: Peers) -> Tensor:
        ids = (torch.arange(rows) * 7 + 2) % geometry.vocab
        batch = eager_batch(cache, model.frequencies, ids, torch.zeros_like(ids), torch.arange(rows), (Chunk(0, 0, rows, 0),))
        narrow = model.states(replace(batch, logit_rows=torch.tensor([0, rows - 1])), attention, peers)[1].clone()
        return torch.cat([narrow, model.states(batch, attention, peers and peers.begin(rows))[1]])

    return forward


@pytest.mark.parametrize("size", [2, 3])
def test_norms_of_own_rows_give_what_an_all_reduce_gives(size: int) -> None:
    """Forwards of several numbers of rows, one behind the other, on ranks that pause."""
    assert Group(size, Pausing).distance() < 1e-5


@pytest.mark.parametrize("size", [2, 4])
def test_a_model_gives_the_same_final_rows(nano: Nano, size: int) -> None:
    """Attention, embedding and the last norm too."""
    assert Group(size, Pausing, nano("31b")).distance() < 1e-4


@pytest.mark.parametrize(("kind", "size"), [("int8", 2), ("int8", 4)])
def test_a_quantised_model_gives_the_same_final_rows(nano: Nano, tmp_path: Path, kind: str, size: int) -> None:
    """A format with a product of its own computes each piece. Planted fault: parts are not sent."""
    folder = saved(nano("31b"), tmp_path / "saved", kind=kind)
    assert Group(size, Pausing, folder).distance() < 1e-4
    assert Group(size, Unsent, folder).distance() > 0.01


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", [NotWaiting, EarlyFlags, Unsent])
def test_rows_that_have_not_come_are_seen(fault: type[SequenceParallel], size: int) -> None:
    """Planted faults: they are taken for those that have."""
    assert Group(size, fault).distance() > 0.01


@pytest.mark.parametrize(
    ("rows", "captured", "launched"),
    [(8, "inbox", "inbox"), (9, None, None), (12, 12, None), (23, 23, None), (24, 24, 24), (99, None, None)],
)
def test_captured_steps_need_fewer_rows(rows: int, captured: object, launched: object) -> None:
    """A step goes over inboxes that hold its rows; with more it norms own rows from 12 on in a graph, and from 12 a rank
    launched kernel by kernel, where the host is the bound below; with more than there is memory for it has collectives."""
    stage = ForwardStage.__new__(ForwardStage)
    inbox, sequence = MagicMock(rows=8), MagicMock(rows=range(12, 99), size=2, begin=lambda rows: rows)
    stage.inboxes = Inboxes(inbox, MagicMock(), sequence)
    stage.model, stage.attention = MagicMock(states=lambda *given: (None, given[-1])), MagicMock()

    def peers(*chunks: Chunk) -> object:
        return stage.run(MagicMock(rows=rows, chunks=chunks))

    named = {"inbox": inbox}
    assert peers() == named.get(captured, captured)
    assert peers(Chunk(0, 0, 8, 0)) == named.get(launched, launched)


@pytest.mark.parametrize(
    ("member", "tp", "budget", "drafts", "rows"),
    [
        ("31b", 2, 8192, 0, 1535), ("31b", 4, 8192, 5, 1535), ("31b", 4, 512, 0, 616), ("31b", 4, 512, 5, 1136),
        ("31b", 8, 8192, 0, 1109), ("12b", 2, 8192, 0, 3010), ("26b-a4b", 2, 8192, 0, 104), ("26b-a4b", 2, 8192, 4, 520),
    ],
)  # fmt: skip
def test_inboxes_hold_steps_that_do_not_norm_own_rows(member: str, tp: int, budget: int, drafts: int, rows: int) -> None:
    """Of a dense model all of them, prompts' too; of one whose ranks read the residual, decode rows; and none beyond INBOX_BYTES.
    `exchange_bytes` is what the kernels say that all takes, but for flags."""
    geometry = read_geometry(ROOT / "deploy" / "models" / "public" / member)
    mtp = Mtp(model="drafter", drafts=drafts) if drafts else Mtp()
    config = EngineConfig(model="", tp=tp, device="cuda", dtype="bfloat16", max_seqs=100, prefill_budget=budget, mtp=mtp)
    assert inbox_rows(config, geometry) == rows
    width, by_rows = geometry.summed_width, sequence_rows(config, geometry)
    taken = AllReduceInbox.bytes(tp, rows, width, torch.bfloat16)
    assert taken <= INBOX_BYTES
    if by_rows:
        taken += SequenceParallel.bytes(tp, by_rows[-1], width, torch.bfloat16)
    assert 0 <= taken - exchange_bytes(config, geometry) < 1 << 20
    assert not exchange_bytes(msgspec.structs.replace(config, tp=1), geometry)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_inboxes_are_aligned(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that kernels write 16 bytes at once to. Planted: flags that take no more bytes than they are."""

    def misaligned() -> int:
        group = SimpleNamespace(rank=0, size=size, peer_memory=lambda length: [torch.empty(length, dtype=torch.uint8)] * size)
        made = make_inboxes(cast("Parallel", group), 100, 5376, torch.bfloat16, range(1536, 1637))
        assert made is not None
        assert made.sequence is not None
        shared = made.sequence._x[0], made.sequence._parts[0]
        return sum(tensor.data_ptr() % 16 for tensor in (made.allreduce.inbox, made.argmax.inbox, *shared))

    assert not misaligned()
    monkeypatch.setattr(kernels.sequence_parallel, "_FLAG_BYTES", 24 * (size - 1))
    assert misaligned()
    monkeypatch.undo()
    memories = [torch.zeros(SequenceParallel.bytes(size, 16, HIDDEN, torch.float32), dtype=torch.uint8)] * size
    peers = SequenceParallel(memories, 0, range(17), HIDDEN, torch.float32, torch.zeros(2, dtype=torch.int32))
    peers._x[0].fill_(0)
    peers._parts[0].fill_(0)
    assert bool((peers._flags[0] == -1).all()), "flags share memory with rows"


def test_each_forward_counts_its_sums_from_0() -> None:
    """A CUDA graph has the numbers of its first run, so every run must have the same."""
    memories = [torch.zeros(SequenceParallel.bytes(2, 16, HIDDEN, torch.float32), dtype=torch.uint8)] * 2
    peers = SequenceParallel(memories, 0, range(17), HIDDEN, torch.float32, torch.zeros(2, dtype=torch.int32))
    peers.wait_for = lambda *_: None  # type: ignore[method-assign]  # for the other rank, which is not there
    norms = Norms(torch.ones(HIDDEN), None)
    numbers = []
    for _ in range(2):
        peers.begin(16)
        rows = torch.zeros(16, HIDDEN)
        numbers.append([peers.norm(peers.cut(rows), rows, norms, 1e-6, None)[1].number for _ in range(3)])
    assert numbers == [[0, 1, 2]] * 2


@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_memory_holds_the_parts_of_every_piece(size: int, missing: int) -> None:
    """Of any number of rows, for each rank. Planted: three rows less for each other rank, which some numbers need."""
    short = 0
    for rows in range(16, 200):
        length = SequenceParallel.bytes(size, rows, HIDDEN, torch.float32) - missing * (size - 1) * HIDDEN * 4
        memories = [torch.zeros(length, dtype=torch.uint8)] * size
        for rank in range(size):
            peers = SequenceParallel(memories, rank, range(rows + 1), HIDDEN, torch.float32, torch.zeros(2, dtype=torch.int32))
            try:
                peers.begin(rows)
            except RuntimeError:
                short += 1
    assert (short > 0) is (missing > 0)


def test_every_rank_adds_parts_in_the_same_order() -> None:
    """In fp32 1e8 - 1e8 + 1 is 1 in the ranks' order, and 0 with the last rank's own part first."""
    parts = torch.tensor([1e8, -1e8, 1.0])[:, None, None].expand(3, 2, HIDDEN).contiguous()
    norms = Norms(torch.ones(HIDDEN), None)
    expected = torch.ones(2, HIDDEN)
    for rank in range(3):
        h = torch.empty(2, HIDDEN)
        others = torch.cat([parts[:rank], parts[rank + 1 :]])
        sum_norm(parts[rank], others, rank, torch.zeros(2, HIDDEN), norms, 1e-6, None, h, torch.empty(2, HIDDEN))
        assert torch.allclose(h, expected, atol=1e-5)
    own_first = torch.cat([parts[2:], parts[:2]]).sum(0)
    assert not own_first.any()


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


def interpreted_a_wait_ends_when_all_have_come_or_in_time() -> None:
    """A rank that is gone is an error, not a hung GPU."""
    memories = [torch.zeros(SequenceParallel.bytes(2, 8, HIDDEN, torch.float32), dtype=torch.uint8) for _ in range(2)]
    errors = [torch.tensor([0, 50], dtype=torch.int32) for _ in range(2)]
    first, second = (SequenceParallel(memories, rank, range(9), HIDDEN, torch.float32, errors[rank]).begin(8) for rank in range(2))
    for peers in (first, second):
        peers.scatter(torch.zeros(8, HIDDEN), 0, 0)
    first.wait_for(0, 0, 0)
    assert not errors[0][0]
    second.wait_for(0, 1, 0)
    assert errors[1][0]


def interpreted_own_rows_are_normed_by_formula() -> None:
    """The kernel adds each rank's parts and norms the sum, in fp32 to rounding, for every rank of three. Planted: another row's."""
    torch.manual_seed(1)
    parts, residual = torch.randn(3, 5, 40), torch.randn(5, 40)
    norms, scalar = Norms(torch.randn(40), torch.randn(40)), torch.tensor(0.5)
    assert norms.post is not None
    assert norms.next_norm is not None
    with plain_torch():
        wanted = norm_add(residual, parts.sum(0), norms.post, 1e-6, scalar)
        next_x = rms_norm(wanted, norms.next_norm, 1e-6)
    for rank in range(3):
        h, x = torch.empty(5, 40), torch.empty(5, 40)
        others = torch.cat([parts[:rank], parts[rank + 1 :]])
        sum_norm(parts[rank], others, rank, residual, norms, 1e-6, scalar, h, x)
        for found, right in ((h, wanted), (x, next_x)):
            assert (found - right).abs().max() < 1e-5
            assert (found - right.roll(1, 0)).abs().max() > 1e-3
