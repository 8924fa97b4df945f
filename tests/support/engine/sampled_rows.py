"""Rows that sample, one a slot: as a sampler takes them, and their tokens by `kernels.sample` over whole logits."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.protocol import Logprobs, PromptLogprobs
from engine.rank.parallel import Single
from engine.rank.sampler import ResultRows, Sampler
from kernels import sample
from kernels.choose import ROW_HAS_NAN, ROW_NO_TOKEN
from kernels.sampling_batch import SMALL_TOP_K, SamplingBatch, SlotParameters
from tests.support.engine.choose_reference import choose_filtered
from tests.support.engine.threads import ThreadParallel

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SampledRows:
    """positions of the tokens, seeds, top_k int64 [R]; temperature (0: greedy), top_p, min_p fp32 [R]; forbidden int64 [R, m], -1:
    none; logprobs: how many alternatives each row reports, None: no logprobs."""

    positions: Tensor
    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    forbidden: Tensor
    logprobs: Sequence[int | None]

    def __len__(self) -> int:
        return len(self.positions)

    def at(self, rows: Sequence[int]) -> "SampledRows":
        """These of them, in this order."""
        tensors = {name: value[list(rows)] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors, logprobs=[self.logprobs[row] for row in rows])

    @property
    def greedy(self) -> Tensor:
        return self.temperature == 0

    @property
    def plain(self) -> Tensor:
        return ~self.greedy & (self.top_k == 0) & (self.top_p >= 1) & (self.min_p == 0)

    @property
    def special(self) -> ResultRows:
        small = ~self.greedy & (self.top_k > 0) & (self.top_k <= SMALL_TOP_K)
        counts = [count for count in self.logprobs if count is not None]
        return ResultRows(
            small_top_k=bool(small.any()),
            filtered=(~self.greedy & ~self.plain & ~small).nonzero().flatten().tolist(),
            reported=[row for row, count in enumerate(self.logprobs) if count is not None],
            alternatives=max(counts, default=0),
        )

    @property
    def parameters(self) -> SlotParameters:
        """Row i's in slot i; ids are forbidden as stop ids that may not come yet."""
        integers = torch.stack([self.seeds, self.top_k, torch.full_like(self.seeds, 10_000)], dim=1)
        floats = torch.stack([self.temperature, self.top_p, self.min_p], dim=1)
        return SlotParameters(integers, floats, self.forbidden.int().contiguous())

    def tokens(self, capped: Tensor, suppress: Sequence[int] = (), raw: Tensor | None = None) -> list[int]:
        """Of whole logits behind the cap; greedy rows of `raw` ones, if they are others."""
        ids = torch.cat([self.forbidden, torch.tensor(suppress, dtype=torch.int64).expand(len(self), -1)], dim=1)
        allowed, temperature = sample.mask(capped, ids, 0), self.temperature.clamp(min=1e-3)
        drawn = choose_filtered(allowed, temperature, self.seeds, self.positions, self.top_k, self.top_p, self.min_p)
        best = sample.mask(capped if raw is None else raw, ids, 0).argmax(-1)
        return torch.where(self.greedy, best, drawn).tolist()


@dataclass(frozen=True)
class Drawn:
    """What a sampler gave: tokens int64 [R]; bool [R]: nan, empty; logprobs of the rows that report them, in their order."""

    tokens: Tensor
    nan: Tensor
    empty: Tensor
    words: bytes = b""
    logprobs: Sequence[Logprobs] = field(default=(), compare=False)

    def same(self, other: "Drawn") -> bool:
        """Bit for bit."""
        pairs = ((self.tokens, other.tokens), (self.nan, other.nan), (self.empty, other.empty))
        return self.words == other.words and all(torch.equal(*pair) for pair in pairs)


def drawn(
    sampler: Sampler, mine: Tensor, rows: SampledRows, batch: SamplingBatch | None = None, special: ResultRows | None = None
) -> Drawn:
    """By a rank that has the logits `mine`, once its token table has the tokens."""
    if batch is None:
        batch = batch_of(sampler, rows)
    special = special or rows.special
    chosen, words = sampler.sample(mine.clone(), batch, None, special)
    live = batch.positions >= 0
    assert torch.equal(batch.tokens[batch.slots.long(), batch.positions.long() + 1][live], chosen[live, 0])
    data = b"" if words is None else words.numpy().tobytes()
    logprobs = [found for _, found in PromptLogprobs(0, special.alternatives, data).entries()]
    flags = chosen[:, 1]
    assert not (flags & ~(ROW_HAS_NAN | ROW_NO_TOKEN)).any()
    return Drawn(chosen[:, 0].long(), (flags & ROW_HAS_NAN) != 0, (flags & ROW_NO_TOKEN) != 0, data, logprobs)


def batch_of(sampler: Sampler, rows: SampledRows) -> SamplingBatch:
    slots, tokens = torch.arange(len(rows), dtype=torch.int32), torch.zeros(len(rows), 5002, dtype=torch.int32)
    return sampler.batch(slots, rows.positions.int() - 1, rows.parameters, tokens)


def cut(logits: Tensor, parallel: ThreadParallel | Single) -> Tensor:
    """A rank's slice of whole logits."""
    return logits.chunk(parallel.size, dim=1)[parallel.rank].contiguous()
