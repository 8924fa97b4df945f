"""Samples from logits cut over ranks: every rank computes the same tokens, and none is sent.

    every row        is adjusted (`kernels.adjust`); greedy and plain rows take the best of all ranks (`kernels.choose`)
    small top_k      each rank's best SMALL_TOP_K ids are gathered and filtered (`kernels.candidates`)
    other filters    each rank gets whole rows of logits for its share and filters them (`kernels.filters`)

Logprobs are of capped, unadjusted logits. A row with a NaN gets token 0 and its flag.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.memory import PIECE_LOGITS
from engine.rank.parallel import Parallel
from engine.rank.upload import uploaded
from kernels.adjust import adjust
from kernels.candidates import block_peaks, candidates, choose_candidates
from kernels.choose import ArgmaxInbox, choose_best, local_best, parts_of
from kernels.filters import filtered_tokens, scaled_rows, write_tokens
from kernels.launch import processors
from kernels.sample import cap
from kernels.sampling_batch import SamplingBatch, SlotParameters


@dataclass(frozen=True)
class ResultRows:
    # int32 [R] on the host, in the result's order, `width` of each sequence
    slots: np.ndarray = field(default_factory=partial(np.empty, 0, np.int32), compare=False)
    # int32 [R]: low 31 bits of each row's admission number
    numbers: np.ndarray = field(default_factory=partial(np.empty, 0, np.int32), compare=False)
    logprobs: Sequence[int | None] = ()  # alternatives that each row reports; None: no logprobs
    width: int = 1
    adjusted: bool = False
    small_top_k: bool = False
    filtered: Sequence[int] = ()  # rows with other filters, ascending
    reported: Sequence[int] = ()  # rows with logprobs, ascending
    alternatives: int = 0  # the most that a row reports


class Sampler:
    def __init__(
        self, parallel: Parallel, vocabulary: int, softcap: float | None, suppress: Sequence[int], device: torch.device
    ) -> None:
        self._parallel = parallel
        self._vocabulary = vocabulary
        self._softcap = softcap
        self._suppressed = torch.tensor(list(suppress), dtype=torch.int32, device=device)
        self._processors = processors(device)

    def batch(self, slots: Tensor, positions: Tensor, parameters: SlotParameters, tokens: Tensor) -> SamplingBatch:
        return SamplingBatch(slots, positions, parameters, tokens, self._suppressed, self._softcap)

    def sample(
        self, logits: Tensor, batch: SamplingBatch, inbox: ArgmaxInbox | None, asked: ResultRows = ResultRows()
    ) -> tuple[Tensor, Tensor | None]:
        """logits fp32 [R, vocab share], before the soft cap, -inf after the vocabulary's end -> int32 [R, 2]: token, flags
        (`kernels.choose`); and `token_logprobs` of reported rows. Overwrites logits. Capturable if no row is filtered or
        reported.
        """
        raw = None
        if asked.reported:
            reported = _index(asked.reported, logits.device)
            raw = logits[reported]
        size = max(1, PIECE_LOGITS // logits.shape[1])  # rows of PIECE_LOGITS logits
        first = self._parallel.rank * logits.shape[1]
        parts = parts_of(logits.shape[1], len(logits), self._processors)
        if batch.adjustments is not None:
            batch = adjust(logits, batch, first, parts)
        best = local_best(logits, batch, first, parts)
        if inbox is None:
            best = self._parallel.all_gather(best.flatten(1)).view(len(logits), -1, best.shape[2])
        chosen = logits.new_empty((len(logits), 2), dtype=torch.int32)
        choose_best(best, batch, chosen, inbox)
        if asked.small_top_k:
            few = candidates(logits, block_peaks(logits, batch), batch, first)
            choose_candidates(self._parallel.all_gather(few.flatten(1)).view(len(logits), -1, 2), batch, chosen)
        for rows in _index(asked.filtered, logits.device).split(size) if asked.filtered else ():
            self._filter(logits, batch, chosen, rows)
        if raw is None:
            return chosen, None
        pieces = zip(raw.split(size), chosen[reported, 0].long().split(size), strict=True)
        return chosen, torch.cat([self.token_logprobs(rows, ids, asked.alternatives) for rows, ids in pieces])

    def token_logprobs(self, logits: Tensor, ids: Tensor, alternatives: int) -> Tensor:
        """logits as in `sample`, ids int64 [R] -> int32 [R, 2 + 2 alternatives], as in `engine.protocol.PromptLogprobs`. Does not
        synchronise."""
        rows, share = logits.shape
        first = self._parallel.rank * share
        local = ids - first
        here = (local >= 0) & (local < share)
        capped = cap(logits, self._softcap).masked_fill_(logits.isneginf(), -torch.inf)
        own = capped.gather(1, local.clamp(0, share - 1)[:, None]).masked_fill(~here[:, None], -torch.inf)
        best = capped.topk(alternatives)
        best_ids = (best.indices + first).float()  # an id is exact below 2^24
        parts = torch.cat([capped.logsumexp(-1, keepdim=True), own, best.values, best_ids], 1)
        parts = self._parallel.all_gather(parts).view(rows, self._parallel.size, -1)
        total = parts[:, :, 0].logsumexp(-1, keepdim=True)
        chosen = parts[:, :, 1].amax(-1, keepdim=True)
        ahead = self._parallel.all_gather((capped >= chosen).sum(-1, keepdim=True).float()).sum(-1, keepdim=True)
        values, order = parts[:, :, 2 : 2 + alternatives].flatten(1).topk(alternatives)
        top = parts[:, :, 2 + alternatives :].flatten(1).gather(1, order)
        numbers = [(chosen - total).view(torch.int32), ahead.int(), top.int(), (values - total).view(torch.int32)]
        return torch.cat(numbers, 1)

    def _filter(self, logits: Tensor, batch: SamplingBatch, chosen: Tensor, rows: Tensor) -> None:
        capped = None if batch.capped is None else batch.capped[rows]
        batch = replace(batch, slots=batch.slots[rows], positions=batch.positions[rows], capped=capped)
        local = logits[rows]
        spare = -len(rows) % self._parallel.size
        slices = self._parallel.exchange_rows(functional.pad(local, (0, 0, 0, spare)) if spare else local)
        taken = chosen[rows]
        tokens = filtered_tokens(scaled_rows(slices, batch, self._parallel.rank, self._vocabulary), batch, taken)
        drawn = self._parallel.all_gather(tokens[:, None].float())  # an id is exact below 2^24
        write_tokens(drawn.flatten().int(), batch, taken)
        chosen[rows] = taken


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    return uploaded(torch.tensor(rows), device)
