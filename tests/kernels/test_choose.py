"""Greedy and plain sampling in the interpreter: the tokens of whole logits, whatever the cut."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels import sample
from kernels.choose import ROW_HAS_NAN, ArgmaxInbox, choose_best, local_best
from kernels.sampling_batch import SamplingBatch, SlotParameters
from tests.support import interpreter
from tests.support.engine.choose_reference import choose

pytestmark = pytest.mark.cpu

VOCAB, SLOTS, SOFTCAP = 1 << 14, 8, 30.0


@dataclass(frozen=True)
class Case:
    """Logits of rows whose slots are greedy, plain, forbidden to stop, or padding."""

    logits: Tensor
    slots: Tensor
    positions: Tensor
    parameters: SlotParameters
    suppress: Tensor

    @property
    def want(self) -> Tensor:
        """Each row's token, by the reference over whole logits."""
        slots, ahead = self.slots.long(), self.positions.long() + 1
        seeds, _, may_stop = self.parameters.integers[slots].unbind(1)
        temperature = self.parameters.floats[slots, 0]
        stop = self.parameters.stop[slots].long().masked_fill((ahead >= may_stop)[:, None], -1)
        forbidden = torch.cat([stop, self.suppress.long().expand(len(slots), -1)], dim=1)
        greedy = sample.mask(self.logits, forbidden, 0).argmax(-1)
        capped = sample.mask(sample.cap(self.logits, SOFTCAP), forbidden, 0)
        plain = choose(capped, temperature.clamp(min=1e-3), seeds, ahead)
        return torch.where(temperature < 1e-5, greedy, plain)


def case(seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, VOCAB, generator=generator) * 6
    integers = torch.zeros(SLOTS, 3, dtype=torch.int64)
    integers[:, 0] = torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator)
    integers[:, 2] = torch.tensor([0, 50, 0, 50, 0, 0, 0, 0])  # the first position that may stop
    floats = torch.ones(SLOTS, 3)
    floats[:, 0] = torch.tensor([0.7, 0.0, 1.3, 0.0, 1.0, 0.9, 1.0, 0.0])
    stop = torch.full((SLOTS, 16), -1, dtype=torch.int32)
    stop[1, 0], stop[3, 3] = logits[1].argmax(), logits[0].argmax()
    slots = torch.tensor([3, 1, 0, 2, 5, 7], dtype=torch.int32)
    positions = torch.tensor([4, 9, 100, 2, 7, -1], dtype=torch.int32)
    return Case(logits, slots, positions, SlotParameters(integers, floats, stop), logits[4].argmax().int()[None])


def chosen(it: Case, size: int, parts: int) -> tuple[Tensor, Tensor]:
    """Token and flags of each row, and the token table, once every rank gave the same."""
    share = VOCAB // size
    memories = [torch.zeros(ArgmaxInbox.bytes(size, 6), dtype=torch.uint8) for _ in range(size)]
    errors = torch.zeros(2, dtype=torch.int32)
    inboxes = [ArgmaxInbox(memories, rank, 6, errors) for rank in range(size)]
    tokens = [torch.zeros(SLOTS, 200, dtype=torch.int32) for _ in range(size)]
    results = [torch.zeros(6, 2, dtype=torch.int32) for _ in range(size)]
    batches = [SamplingBatch(it.slots, it.positions, it.parameters, table, it.suppress, SOFTCAP) for table in tokens]
    best = []
    for rank, batch in enumerate(batches):
        mine = it.logits[:, rank * share : (rank + 1) * share].contiguous()
        best.append(local_best(mine, batch, rank * share, parts))
    if size == 1:
        choose_best(best[0], batches[0], results[0], None)
        return results[0], tokens[0]
    for send in (True, False):
        for rank, inbox in enumerate(inboxes):
            choose_best(best[rank], batches[rank], results[rank], inbox, (send, not send))
    assert all(torch.equal(result, results[0]) for result in results)
    assert all(torch.equal(table, tokens[0]) for table in tokens)
    return results[0], tokens[0]


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (1, 4), (4, 2)])
def interpreted_tokens_are_the_references(size: int, parts: int) -> None:
    """Greedy and plain rows, stop ids masked and not, give the reference's tokens, stored behind each row's input."""
    for seed in range(2):
        it = case(seed)
        results, tokens = chosen(it, size, parts)
        assert results[:, 0].tolist() == it.want.tolist()
        assert not results[:, 1].any()
        for row, (slot, position) in enumerate(zip(it.slots.tolist(), it.positions.tolist(), strict=True)):
            assert position < 0 or tokens[slot, position + 1] == results[row, 0]
        assert tokens.count_nonzero() <= 5, "the padding row stored a token"
        other = replace(it, positions=it.positions + 1)
        assert other.want.tolist() != results[:, 0].tolist()


def interpreted_a_nan_silences_its_row() -> None:
    """A NaN in any rank's slice flags the row on every rank; other rows keep their tokens."""
    it = case(0)
    want = it.want.tolist()
    it.logits[2, VOCAB - 5] = torch.nan
    it.logits[4, it.suppress[0]] = torch.nan  # also where it may not be given
    results, _ = chosen(it, 4, 2)
    assert results[[2, 4]].tolist() == [[0, ROW_HAS_NAN]] * 2
    assert [token for row, token in enumerate(results[:, 0].tolist()) if row not in (2, 4)] == [*want[:2], want[3], want[5]]


def interpreted_a_negative_zero_reaches_the_peers() -> None:
    """A best of -0.0, which is what an inbox takes for nothing, is seen by every rank, without an error."""
    it = case(0)
    it.logits[1] = -1.0  # greedy
    it.logits[1, 777] = -0.0
    it.parameters.stop[:] = -1
    results, _ = chosen(it, 4, 2)
    assert results[1].tolist() == [777, 0]
    assert not results[:, 1].any()
