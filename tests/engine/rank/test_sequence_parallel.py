"""Sums of many rows, each rank norming rows of its own: processes that share memory, against an all-reduce.

Ranks pause at random before they wait for others and before they copy. What a GPU's kernel waits for, a loop waits for here.
"""

import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

import kernels.sequence_parallel
from engine.geometry import kv_groups, read_geometry
from engine.rank.attention import AttentionConfig, attention_backend
from engine.rank.batch import Chunk, eager_batch
from engine.rank.kv import GroupCache, KVCache
from engine.rank.load.loader import load
from engine.rank.models.allreduce_norm import Peers
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Inboxes, Parallel, allocated_inboxes, check_own_rows
from engine.rank.stages.forward_stage import ForwardStage
from kernels.allreduce import MappedCollectives, shared_bytes
from kernels.sequence_parallel import SequenceParallel
from tests.bench.sequence_parallel import Mlps
from tests.conftest import Nano
from tests.support import interpreter
from tests.support.engine.shared_memory import mapped

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
        for copy in self._copies[piece]:
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
    """A whole model, over one chunk."""
    geometry = read_geometry(folder)
    model = Gemma4(geometry, parallel, torch.float32, CPU)
    load(model, TENSORS, folder)
    cache = KVCache([GroupCache(group, 2, 1, max(ROWS), CPU) for group in kv_groups(geometry, parallel.size, dtype="float32")])
    for group in cache:
        group.table[0, 0] = 1
    attention = attention_backend(AttentionConfig(), geometry, cache, parallel.size, (1,), CPU)

    def forward(rows: int, peers: Peers) -> Tensor:
        ids = (torch.arange(rows) * 7 + 2) % geometry.vocab
        batch = eager_batch(cache, model.frequencies, ids, torch.zeros_like(ids), torch.arange(rows), (Chunk(0, 0, rows, 0),))
        return model.forward(batch, cache, attention, peers)

    return forward


@pytest.mark.parametrize("size", [2, 3])
def test_norms_of_own_rows_give_what_an_all_reduce_gives(size: int) -> None:
    """Forwards of several numbers of rows, one behind the other, on ranks that pause."""
    assert Group(size, Pausing).distance() < 1e-5


@pytest.mark.parametrize("size", [2, 4])
def test_a_model_gives_the_same_final_rows(nano: Nano, size: int) -> None:
    """Attention, embedding and the last norm too."""
    assert Group(size, Pausing, nano("31b")).distance() < 1e-4


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", [NotWaiting, EarlyFlags, Unsent])
def test_rows_that_have_not_come_are_seen(fault: type[SequenceParallel], size: int) -> None:
    """Planted faults: they are taken for those that have."""
    assert Group(size, fault).distance() > 0.01


@pytest.mark.parametrize(("rows", "by_rows"), [(11, False), (12, True), (23, True), (24, True), (99, False)])
def test_captured_steps_need_fewer_rows(rows: int, by_rows: bool) -> None:
    """A step with prompts has norms of own rows from 12 rows on in a graph, and from 12 a rank launched kernel by kernel, where the
    host is the bound below; one without prompts has none, nor one of more rows than there is memory for."""
    stage = ForwardStage.__new__(ForwardStage)
    stage._inboxes = Inboxes(MagicMock(), MagicMock(), MagicMock(rows=range(12, 99), size=2, begin=lambda rows: rows))
    stage.model, stage._cache, stage._attention = MagicMock(forward=lambda *given: given[-1]), MagicMock(), MagicMock()

    def peers(**changes: object) -> object:
        return stage.run(MagicMock(**{"rows": rows, "prompts": 8, "chunks": ()} | changes))

    assert peers() == (rows if by_rows else None)
    assert peers(chunks=(Chunk(0, 0, 8, 0),)) == (rows if rows == 24 else None)
    assert peers(prompts=0) is None


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_inboxes_are_aligned(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that kernels write 16 bytes at once to. Planted: flags that take no more bytes than they are."""

    def misaligned() -> int:
        memory = torch.zeros(64 << 20, dtype=torch.uint8)
        made = allocated_inboxes(0, 100, 5376, torch.bfloat16, range(1536, 1637), size, lambda length: [memory[:length]] * size)
        assert made.sequence is not None
        shared = made.sequence._x[0], made.sequence._parts[0]
        return sum((memory.data_ptr() - tensor.data_ptr()) % 16 for tensor in (made.allreduce.inbox, made.argmax.inbox, *shared))

    assert not misaligned()
    monkeypatch.setattr(kernels.sequence_parallel, "_FLAG_BYTES", 24 * (size - 1))
    assert misaligned()
    monkeypatch.undo()
    memories = [torch.zeros(SequenceParallel.bytes(size, 16, HIDDEN, torch.float32), dtype=torch.uint8)] * size
    peers = SequenceParallel(memories, 0, range(17), HIDDEN, torch.float32, torch.zeros(2, dtype=torch.int32))
    peers._x[0].fill_(0)
    peers._parts[0].fill_(0)
    assert bool((peers._flags[0] == -1).all()), "flags share memory with rows"


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
