"""Filtered rows without sorting, in the interpreter: the tokens of `kernels.sample`, which sorts, whatever cut and filters."""

from dataclasses import dataclass, replace

import pytest
import torch
import triton.language as tl
from torch import Tensor

import kernels.filters
from kernels import sample
from kernels.choose import ROW_HAS_NAN
from kernels.filters import filtered_tokens, scaled_rows, write_tokens
from kernels.sampling_batch import SamplingBatch, SlotParameters
from tests.support import interpreter
from tests.support.engine.choose_reference import choose, choose_filtered

pytestmark = pytest.mark.cpu

VOCAB, SLOTS, SOFTCAP = 1500, 9, 30.0
OFF = (0, 1.0, 0.0)
FILTERS = (  # top_k, top_p, min_p
    (5, 1.0, 0.0), (0, 0.3, 0.0), (0, 1.0, 0.2), (20, 0.8, 0.0), (64, 0.95, 0.0), (0, 0.999, 0.01),
    (400, 0.6, 0.001), (1, 1.0, 0.0), (1400, 0.9, 0.0), (0, 1e-9, 0.0), (5000, 1.0, 0.0), (3, 0.5, 0.9),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Logits of rows, one a slot but the last two: row 6 is greedy, row 7 draws from everything, row 8 is padding."""

    logits: Tensor
    positions: Tensor
    parameters: SlotParameters
    suppress: Tensor

    @property
    def slots(self) -> Tensor:
        return torch.arange(SLOTS, dtype=torch.int32).flip(0)

    @property
    def _rows(self) -> tuple[Tensor, ...]:
        """What each row's slot says."""
        slots = self.slots.long()
        seeds, top_k, may_stop = self.parameters.integers[slots].unbind(1)
        temperature, top_p, min_p = self.parameters.floats[slots].unbind(1)
        return temperature, seeds, self.positions.long() + 1, top_k, top_p, min_p, may_stop

    @property
    def unfiltered(self) -> Tensor:
        """int32 [rows, 2]: what kernels.choose gives."""
        temperature, seeds, ahead, *_ = self._rows
        greedy = self.masked(self.logits).argmax(-1)
        plain = choose(self.masked(sample.cap(self.logits, SOFTCAP)), temperature.clamp(min=1e-3), seeds, ahead)
        tokens = torch.where(temperature < 1e-5, greedy, plain)
        return torch.stack([tokens, torch.zeros_like(tokens)], 1).int()

    @property
    def want(self) -> list[int]:
        """Each row's token, by the reference over whole logits."""
        temperature, *rest, _ = self._rows
        drawn = choose_filtered(self.masked(sample.cap(self.logits, SOFTCAP)), temperature.clamp(min=1e-3), *rest)
        return torch.where(temperature < 1e-5, self.unfiltered[:, 0].long(), drawn).tolist()

    def masked(self, logits: Tensor) -> Tensor:
        *_, may_stop = self._rows
        stop = self.parameters.stop[self.slots.long()].long().masked_fill((self.positions + 1 >= may_stop)[:, None], -1)
        return sample.mask(logits, torch.cat([stop, self.suppress.long().expand(SLOTS, -1)], dim=1), 0)


def case(seed: int, spread: float = 4.0, vocab: int = VOCAB) -> Case:
    """Filters from FILTERS in turn; the best ids of some rows are forbidden."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(SLOTS, vocab, generator=generator) * spread
    logits[0, 40:60] = logits[0].max()  # ties at the top, which a filter cuts through
    integers, floats = torch.zeros(SLOTS, 3, dtype=torch.int64), torch.ones(SLOTS, 3)
    integers[:, 0] = torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator)
    integers[:, 2] = torch.tensor([0, 50, 90, 50, 0, 0, 0, 0, 90])
    floats[:, 0] = torch.rand(SLOTS, generator=generator) + 0.5
    for row in range(SLOTS):
        top_k, floats[SLOTS - 1 - row, 1], floats[SLOTS - 1 - row, 2] = OFF if row == 7 else FILTERS[(seed + row) % len(FILTERS)]
        integers[SLOTS - 1 - row, 1] = top_k
    floats[SLOTS - 1 - 6, 0] = 0.0
    stop = torch.full((SLOTS, 16), -1, dtype=torch.int32)
    stop[1, 0], stop[3, 3], stop[8, :2], stop[2, 3] = 7, vocab - 1, logits[0].topk(2).indices.int(), logits[6].argmax()
    positions = torch.randint(1, 80, (SLOTS,), generator=generator).int()
    positions[-1] = -1
    return Case(logits, positions, SlotParameters(integers, floats, stop), logits[4].argmax().int()[None])


def drawn(it: Case, ranks: int, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(chosen, token table), of `ranks` ranks that filter their share of the rows."""
    chosen = it.unfiltered if chosen is None else chosen
    rows = -(-SLOTS // ranks)
    n = -(-VOCAB // ranks)
    whole = torch.full((rows * ranks, n * ranks), 77.0)  # padding of rows and columns must not be drawn
    whole[:SLOTS, :VOCAB] = it.masked(it.logits)
    found = torch.zeros(rows, ranks, dtype=torch.int32)
    tokens = torch.zeros(SLOTS, 200, dtype=torch.int32)
    batch = SamplingBatch(it.slots, it.positions, it.parameters, tokens, it.suppress, SOFTCAP)
    for rank in range(ranks):
        slices = whole[rank::ranks].unflatten(1, (ranks, n)).transpose(0, 1).contiguous()
        found[:, rank] = filtered_tokens(scaled_rows(slices, batch, rank, VOCAB), batch, chosen)
    write_tokens(found.flatten(), batch, chosen)
    return chosen, tokens


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@pytest.mark.parametrize(("ranks", "listed", "seeds"), [(1, 128, (0, 4, 8)), (4, 2, (4,))])
def interpreted_tokens_are_the_references(ranks: int, listed: int, seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every filter gives the sorting reference's tokens, stored behind each row's input, over any number of ranks and however few
    blocks are read at once; nothing is stored of padding. Rows that do not filter keep theirs."""
    monkeypatch.setattr(kernels.filters, "_TILE", tl.constexpr(listed))
    for seed in seeds:
        it = case(seed)
        chosen, tokens = drawn(it, ranks)
        assert chosen[:-1, 0].tolist() == it.want[:-1]
        for row, (slot, position) in enumerate(zip(it.slots.tolist(), it.positions.tolist(), strict=True)):
            assert position < 0 or tokens[slot, position + 1] == chosen[row, 0]
        assert not tokens[it.slots[-1]].any()


@pytest.mark.parametrize("spread", [0.0, 0.5])
def interpreted_flat_rows(spread: float) -> None:
    """Where all ids are nearly, or quite, alike, kept sets are large: more blocks than are listed, and many ids are tried."""
    for seed in (1, 5):
        it = case(seed, spread)
        assert drawn(it, 1)[0][:-1, 0].tolist() == it.want[:-1]


def interpreted_what_is_listed_is_just_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the listed blocks hold 0.95 of the mass that top_p keeps, the others are read too: an id there is kept only if what
    stands above it, wherever that is, holds less."""
    monkeypatch.setattr(kernels.filters, "_TILE", tl.constexpr(2))
    it = case(0, 0.1)
    it.parameters.integers[:, 1:], it.parameters.floats[:] = 0, torch.tensor([1.0, 0.5, 0.0])
    it.parameters.stop[:] = -1
    it = replace(it, logits=it.logits.clamp(-1, 1), suppress=it.suppress[:0])
    it.logits[:, 64:192] = 2.3
    mass = sample.cap(it.logits, SOFTCAP).softmax(-1)
    assert ((mass[:, 64:192].sum(-1) / 0.5 - 0.95).abs() < 0.03).all()
    assert drawn(it, 1)[0][:-1, 0].tolist() == it.want[:-1]


def interpreted_faults_are_seen() -> None:
    """Other filters, another seed, rows of another rank, or a token that nothing filtered give other tokens."""
    it = case(4)
    want = it.want[:-1]
    assert it.unfiltered[:-1, 0].tolist() != want
    loose = it.parameters._replace(floats=it.parameters.floats.clone().fill_(1.0), integers=it.parameters.integers.clone())
    loose.integers[:, 1] = 0
    assert drawn(replace(it, parameters=loose), 1)[0][:-1, 0].tolist() != want
    assert drawn(replace(it, positions=it.positions + 1), 1)[0][:-1, 0].tolist() != want
    assert drawn(replace(it, logits=it.logits.roll(1, 0)), 2)[0][:-1, 0].tolist() != want


def interpreted_a_nan_silences_its_row() -> None:
    """A row that `kernels.choose` has flagged keeps its token and its flag; the others are drawn as ever."""
    it = case(0)
    want = it.want
    chosen = it.unfiltered
    chosen[3] = torch.tensor([0, ROW_HAS_NAN])
    it.logits[3, 5] = torch.nan
    found, _ = drawn(it, 2, chosen)
    assert found[3].tolist() == [0, ROW_HAS_NAN]
    assert [token for row, token in enumerate(found[:-1, 0].tolist()) if row != 3] == [*want[:3], *want[4:-1]]
