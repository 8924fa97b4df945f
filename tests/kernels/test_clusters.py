"""The best row of the chosen clusters, against a search through all of them."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.choose import choose_best
from kernels.clusters import best_of_clusters
from kernels.sampling_batch import SamplingBatch, SlotParameters
from tests.support import interpreter

pytestmark = pytest.mark.cpu

ROWS, SLOTS = 5, 8


@dataclass
class Case:
    """Queries and their clusters, of a table by cluster."""

    x: Tensor
    table: Tensor
    order: Tensor
    clusters: Tensor
    count: int

    def best(self) -> Tensor:
        return best_of_clusters(self.x, self.table, self.order, self.clusters, self.count)

    def ids(self) -> list[int]:
        """The best of all of a query's clusters, as the sampler decides."""
        zeros = torch.zeros((SLOTS, 3))
        parameters = SlotParameters(zeros.long(), zeros, torch.full((SLOTS, 1), -1, dtype=torch.int32))
        rows, tokens = torch.arange(ROWS, dtype=torch.int32), torch.zeros((SLOTS, 16), dtype=torch.int32)
        batch = SamplingBatch(rows, rows, parameters, tokens, torch.empty(0, dtype=torch.int32), None)
        results = torch.zeros((ROWS, 2), dtype=torch.int32)
        choose_best(self.best(), batch, results, None)
        assert torch.equal(tokens[rows.long(), rows.long() + 1], results[:, 0])
        return results[:, 0].tolist()


def case(size: int, n: int, count: int = 6, chosen: int = 4) -> Case:
    """Whole numbers, so that sums are exact and equal logits frequent."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(-2, 3, (ROWS, n), generator=generator).float()
    table = torch.randint(-1, 2, (count * size, n), generator=generator).float()
    order = torch.randperm(count * size, generator=generator)
    clusters = torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in range(ROWS)])
    return Case(x, table, order, clusters, count)


def searched(it: Case, *, highest: bool = False) -> list[int]:
    """The lowest id of the largest logit of each query's clusters; with `highest`, the highest."""
    found, size = [], len(it.table) // it.count
    for x, clusters in zip(it.x, it.clusters.tolist(), strict=True):
        rows = [row for cluster in clusters for row in range(cluster * size, (cluster + 1) * size)]
        logits = (it.table[rows] @ x).tolist()
        ids = [int(it.order[row]) for row, logit in zip(rows, logits, strict=True) if logit == max(logits)]
        found.append(max(ids) if highest else min(ids))
    return found


@pytest.mark.parametrize(("size", "n"), [(16, 8), (12, 100), (128, 32)])
def test_the_best_of_all_chosen_clusters(size: int, n: int) -> None:
    """Of equal logits the lowest id, within a cluster and among them; clusters of no power of two, rows longer than a block. Other
    clusters, or the highest id, give something else."""
    it = case(size, n)
    assert it.ids() == searched(it)
    it.clusters = (it.clusters + 1) % it.count
    assert it.ids() == searched(it)
    assert searched(it) != searched(case(size, n))
    few = case(128, 4)
    assert searched(few) != searched(few, highest=True)
    assert few.ids() == searched(few)


def test_a_nan_is_told() -> None:
    """Its cluster says so, and no other; the row has no token."""
    it = case(16, 8)
    it.table[int(it.clusters[2, 1]) * 16 + 3, 0] = torch.nan
    flags = it.best()[:, :, 2]
    assert flags[2].tolist() == [0, 1, 0, 0]
    assert it.ids()[2] == 0


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


interpreted_the_best_of_all_chosen_clusters = test_the_best_of_all_chosen_clusters
interpreted_a_nan_is_told = test_a_nan_is_told
