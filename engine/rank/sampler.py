"""Logits to tokens over a vocabulary that is cut across ranks: every rank ends with the same tokens, and none is sent.

    maxima   greedy and plain rows on a GPU, adjusted ones too: each rank's best goes out in one small launch (`kernels.choose`)
    token_logprobs  of known tokens: each rank's part of the sum, its best and what is asked for are gathered, a few numbers a row
    every_kind  rows of all kinds on a GPU: a rank is sent the whole logits of its share of the rows, 4 x vocabulary bytes
             each, filters those that filter (`kernels.filters`) and reports what is asked for; tokens come back by a small gather.
             Greedy and plain rows keep what maxima gives them, whoever stands beside them
    sample   rows of all kinds on a CPU, and what the others are held to:
        greedy rows        each rank's best (value, id) and NaN flag are gathered: 12 bytes a row and rank; lowest id wins ties
        all other rows     the whole logits are gathered: 4 x vocabulary bytes a row, 105 MB for 100 rows of 262 144
        rows with logprobs likewise

The order of work is in `kernels.adjust`, then `kernels.sample`; log-probabilities are of the capped logits, before anything is
adjusted or masked. A row with a NaN anywhere samples nothing: its token is 0 and its flag is set, on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.rank.parallel import Parallel
from engine.rank.upload import uploaded
from kernels.adjust import adjust
from kernels.choose import Ballot, choose_best, local_best, parts_of
from kernels.filters import Share, adopt, filtered_tokens, scaled_rows
from kernels.launch import processors
from kernels.sample import cap, choose, choose_filtered, mask, top_logprobs
from kernels.sampling_batch import SamplingBatch, SlotParameters


@dataclass(frozen=True)
class SamplingRows:
    """How each of R rows samples: views of device state, and what the host knows of it, so that no device is asked.

    positions   int64 [R]     position that the sampled token will take
    seeds, top_k int64 [R];   temperature, top_p, min_p fp32 [R]
    forbidden   int64 [R, m]  stop ids of rows that may not stop yet, -1: none
    greedy, plain, filtered   the rows of each kind, ascending; together all
    logprobs                  for each row how many alternatives it reports, None: no logprobs
    """

    positions: Tensor
    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    forbidden: Tensor
    greedy: Sequence[int]
    plain: Sequence[int]
    filtered: Sequence[int]
    logprobs: Sequence[int | None]


@dataclass(frozen=True)
class TopLogprobs:
    """Of rows `rows`: chosen fp32 [n], ids int64 [n, most], values fp32 [n, most], best first."""

    rows: Sequence[int]
    chosen: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class Sampled:
    """tokens int64 [R]; bool [R], where there is none: nan, empty (every id is forbidden); logprobs of the rows that want them."""

    tokens: Tensor
    nan: Tensor
    empty: Tensor
    logprobs: TopLogprobs | None


class Sampler:
    """Samples from this rank's slice of the logits. `suppress`: ids that no row may ever give."""

    def __init__(
        self, parallel: Parallel, vocabulary: int, softcap: float | None, suppress: Sequence[int], device: torch.device
    ) -> None:
        self._parallel = parallel
        self._vocabulary, self._softcap = vocabulary, softcap
        self._suppress = torch.tensor(list(suppress), dtype=torch.int64, device=device)
        self._suppressed = self._suppress.int()
        self._processors = processors(device)

    def batch(self, slots: Tensor, positions: Tensor, parameters: SlotParameters, tokens: Tensor) -> SamplingBatch:
        """Rows that sample, for slots and input positions int32 [R] and the slots' tables. Their logits are not adjusted."""
        return SamplingBatch(slots, positions, parameters, tokens, self._suppressed, self._softcap)

    def maxima(self, logits: Tensor, batch: SamplingBatch, ballot: Ballot | None) -> Tensor:
        """logits fp32 [R, vocab share] of rows that are greedy or plain -> int32 [R, 2]: token, flags (`kernels.choose`).

        Overwrites logits of forbidden ids, and of rows to adjust. Capturable.
        """
        rows, share = logits.shape
        if batch.adjustments is not None and batch.capped is None:
            batch = self._adjust(logits, batch)
        parts = parts_of(share, rows, self._processors)
        first = self._parallel.rank * share
        best = local_best(logits, batch, first, parts)
        chosen = torch.empty((rows, 2), dtype=torch.int32, device=logits.device)
        choose_best(best, batch, chosen, ballot)
        return chosen

    def every_kind(
        self, logits: Tensor, batch: SamplingBatch, ballot: Ballot | None, alternatives: int | None
    ) -> tuple[Tensor, TopLogprobs | None]:
        """As `maxima`, of rows of any kind. `alternatives`: also every row's logprobs, so many beside the token's. Capturable."""
        share = Share(self._parallel.rank, self._parallel.size)
        batch, slices, logprobs = self._exchanged(logits, batch, report=alternatives is not None)
        scaled = scaled_rows(slices, batch, share, self._vocabulary)
        chosen = self.maxima(logits, batch, ballot)
        own = filtered_tokens(scaled, batch, chosen, share)
        reports = [own[:, None].float()]  # an id is exact below 2^24
        if logprobs is not None and alternatives is not None:
            best = logprobs.topk(min(alternatives, self._vocabulary), dim=-1)
            reports += [logprobs.gather(1, own[:, None].long()), best.indices.float(), best.values]
        mine = torch.cat(reports, dim=1)
        report = self._parallel.all_gather(mine).view(-1, mine.shape[1])[: len(logits)]  # in the rows' order
        adopt(report[:, 0], batch, chosen)
        if logprobs is None:
            return chosen, None
        ids, values = report[:, 2:].chunk(2, dim=1)
        return chosen, TopLogprobs(range(len(logits)), report[:, 1], ids.long(), values)

    def token_logprobs(self, logits: Tensor, ids: Tensor, alternatives: int) -> Tensor:
        """logits fp32 [R, vocab share], -inf behind the vocabulary's end, ids int64 [R] -> int32 [R, 2 + 2 alternatives], as
        `engine.protocol.PromptLogprobs` has them, of `ids`. The host waits for nothing."""
        rows, share = logits.shape
        mine = ids - self._parallel.rank * share
        here = (mine >= 0) & (mine < share)
        capped = cap(logits, self._softcap).masked_fill_(logits.isneginf(), -torch.inf)
        own = capped.gather(1, mine.clamp(0, share - 1)[:, None]).masked_fill(~here[:, None], -torch.inf)
        best = capped.topk(alternatives, dim=-1)
        best_ids = (best.indices + self._parallel.rank * share).float()  # an id is exact below 2^24
        parts = torch.cat([capped.logsumexp(-1, keepdim=True), own, best.values, best_ids], dim=1)
        parts = self._parallel.all_gather(parts).view(rows, self._parallel.size, -1)
        total, chosen = parts[:, :, 0].logsumexp(-1, keepdim=True), parts[:, :, 1].amax(-1, keepdim=True)
        ahead = self._parallel.all_gather((capped >= chosen).sum(-1, keepdim=True).float()).sum(-1, keepdim=True)
        values, places = parts[:, :, 2 : 2 + alternatives].flatten(1).topk(alternatives, dim=-1)
        top = parts[:, :, 2 + alternatives :].flatten(1).gather(1, places)
        numbers = [(chosen - total).view(torch.int32), ahead.int(), top.int(), (values - total).view(torch.int32)]
        return torch.cat(numbers, dim=1)

    def _exchanged(self, logits: Tensor, batch: SamplingBatch, *, report: bool) -> tuple[SamplingBatch, Tensor, Tensor | None]:
        """The batch, its logits adjusted; those of this rank's rows, [ranks, rows, n]; to `report`: logprobs before any change."""
        slices, logprobs = logits[None], None
        if report or batch.adjustments is None:
            slices = self._exchange(logits)
            logprobs = self._own_logprobs(slices) if report else None
        if batch.adjustments is not None:
            batch = self._adjust(logits, batch)
            slices = self._exchange(logits)
        return batch, slices, logprobs

    def _exchange(self, logits: Tensor) -> Tensor:
        spare = -len(logits) % self._parallel.size
        return self._parallel.exchange_rows(functional.pad(logits, (0, 0, 0, spare)) if spare else logits)

    def _own_logprobs(self, slices: Tensor) -> Tensor:
        """slices fp32 [ranks, rows, n] -> fp32 [rows, vocabulary]."""
        whole = slices.transpose(0, 1).flatten(1)[:, : self._vocabulary]
        return cap(whole, self._softcap).log_softmax(-1)

    def sample(self, logits: Tensor, rows: SamplingRows, batch: SamplingBatch | None = None) -> Sampled:
        """logits fp32 [R, vocab share], before the soft cap; -inf behind the vocabulary's end. `batch`: how some are adjusted."""
        assert logits.shape[0] == len(rows.greedy) + len(rows.plain) + len(rows.filtered), logits.shape
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        nan, empty, capped = torch.zeros((3, logits.shape[0]), dtype=torch.bool, device=logits.device).unbind()
        raw = logits
        if batch is not None:
            logits = raw.clone()
            adjusted = self._adjust(logits, batch).capped
            assert adjusted is not None
            capped = adjusted.bool()
        if rows.greedy:
            index = _index(rows.greedy, logits.device)
            tokens[index], nan[index], empty[index] = self._greedy(logits[index], rows.forbidden[index])
        gathered = sorted({*rows.plain, *rows.filtered, *(row for row, count in enumerate(rows.logprobs) if count is not None)})
        whole = self._whole(logits, gathered)
        place = {row: at for at, row in enumerate(gathered)}
        for kind in (rows.plain, rows.filtered):
            if kind:
                index = _index(kind, logits.device)
                mine = whole[_index([place[row] for row in kind], logits.device)]
                mine = torch.where(capped[index, None], mine, cap(mine, self._softcap))
                tokens[index], nan[index], empty[index] = self._draw(mine, index, rows, filtered=kind is rows.filtered)
        reported = whole if batch is None else self._whole(raw, gathered)
        return Sampled(tokens, nan, empty, self._logprobs(reported, place, tokens, rows))

    def _adjust(self, logits: Tensor, batch: SamplingBatch) -> SamplingBatch:
        """As `kernels.adjust`."""
        rows, n = logits.shape
        return adjust(logits, batch, self._parallel.rank * n, parts_of(n, rows, self._processors))

    def _whole(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """[R, vocab share] of every rank -> [rows, vocabulary]."""
        mine = logits[_index(rows, logits.device)]
        return (self._parallel.all_gather(mine) if rows else mine)[:, : self._vocabulary]

    def _greedy(self, logits: Tensor, forbidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, nan, empty) of rows whose best allowed id is taken, from slices."""
        first = self._parallel.rank * logits.shape[1]
        masked = self._mask(logits, forbidden, first)
        best = masked.argmax(-1, keepdim=True)
        nan = logits.isnan().any(-1, keepdim=True)
        mine = torch.cat([masked.gather(1, best), (best + first).float(), nan.float()], dim=1)  # an id is exact below 2^24
        values, ids, flags = self._parallel.all_gather(mine).view(len(logits), -1, 3).unbind(-1)
        highest, rank = values.max(-1, keepdim=True)
        return _given(ids.gather(1, rank).squeeze(1).long(), flags.any(-1), highest.squeeze(1))

    def _draw(self, whole: Tensor, index: Tensor, rows: SamplingRows, *, filtered: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, nan, empty) of the rows `index`, drawn from whole logits behind the cap."""
        nan = whole.isnan().any(-1)
        logits = self._mask(whole, rows.forbidden[index], 0)
        arguments = (logits, rows.temperature[index], rows.seeds[index], rows.positions[index])
        if filtered:
            token = choose_filtered(*arguments, rows.top_k[index], rows.top_p[index], rows.min_p[index])
        else:
            token = choose(*arguments)
        return _given(token, nan, logits.gather(1, token[:, None]).squeeze(1))

    def _mask(self, logits: Tensor, forbidden: Tensor, first: int) -> Tensor:
        return mask(logits, torch.cat([forbidden, self._suppress.expand(len(logits), -1)], dim=1), first)

    def _logprobs(self, whole: Tensor, place: dict[int, int], tokens: Tensor, rows: SamplingRows) -> TopLogprobs | None:
        wanted = [row for row, count in enumerate(rows.logprobs) if count is not None]
        if not wanted:
            return None
        most = max(count for count in rows.logprobs if count is not None)
        logits = cap(whole[_index([place[row] for row in wanted], tokens.device)], self._softcap)
        return TopLogprobs(wanted, *top_logprobs(logits, tokens[_index(wanted, tokens.device)], most))


def _given(tokens: Tensor, nan: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, nan, empty): tokens whose logits are `values`, but where there is a NaN or nothing that may come."""
    empty = values.isneginf() & ~nan
    return tokens.masked_fill(nan | empty, 0), nan, empty


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    return uploaded(torch.tensor(rows, dtype=torch.int64), device)
