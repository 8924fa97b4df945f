"""Greedy and plain sampling in the interpreter: the tokens of whole logits, whatever the cut."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.choose import ROW_HAS_NAN, ArgmaxInbox, choose_best, local_best
from kernels.sampling_batch import SamplingBatch
from tests.kernels.test_filters import SLOTS, SOFTCAP, Case, case
from tests.support import interpreter

pytestmark = pytest.mark.cpu

VOCAB = 1 << 14
GREEDY = 6  # the row that is


def plain(seed: int) -> Case:
    """No row has a small top_k."""
    it = case(seed, vocab=VOCAB)
    it.parameters.integers[:, 1] = 0
    return it


def chosen(it: Case, size: int, parts: int) -> tuple[Tensor, Tensor]:
    """Token and flags of each row, and the token table, once every rank gave the same."""
    share = VOCAB // size
    memories = [torch.zeros(ArgmaxInbox.bytes(size, SLOTS), dtype=torch.uint8) for _ in range(size)]
    errors = torch.zeros(2, dtype=torch.int32)
    inboxes = [ArgmaxInbox(memories, rank, SLOTS, errors) for rank in range(size)]
    tokens = [torch.zeros(SLOTS, 200, dtype=torch.int32) for _ in range(size)]
    results = [torch.zeros(SLOTS, 2, dtype=torch.int32) for _ in range(size)]
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
    """Greedy and plain rows, stop ids masked and not, give the reference's tokens, stored behind each row's input; nothing is
    stored of padding."""
    for seed in range(2):
        it = plain(seed)
        results, tokens = chosen(it, size, parts)
        assert torch.equal(results[:-1], it.unfiltered[:-1])
        assert torch.equal(tokens[it.slots[:-1].long(), it.positions[:-1].long() + 1], results[:-1, 0])
        assert tokens.count_nonzero() < SLOTS
        assert not torch.equal(replace(it, positions=it.positions + 1).unfiltered, results)


def interpreted_a_nan_silences_its_row() -> None:
    """A NaN in any rank's slice flags the row on every rank; other rows keep their tokens."""
    it = plain(0)
    expected = it.unfiltered
    it.logits[2, VOCAB - 5] = torch.nan
    it.logits[4, it.suppress[0]] = torch.nan  # also where it may not be given
    expected[[2, 4]] = torch.tensor([0, ROW_HAS_NAN], dtype=torch.int32)
    assert torch.equal(chosen(it, 4, 2)[0][:-1], expected[:-1])


def interpreted_a_negative_zero_reaches_the_peers() -> None:
    """A best of -0.0, which is what an inbox takes for nothing, is seen by every rank, without an error."""
    it = plain(0)
    it.logits[GREEDY], it.logits[GREEDY, 777] = -1.0, -0.0
    results, _ = chosen(it, 4, 2)
    assert results[GREEDY].tolist() == [777, 0]
    assert not results[:, 1].any()
