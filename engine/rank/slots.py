"""A rank's state per slot: a pure fold over plans and the tokens it sampled.

    tokens  [slots, max_len + 1]    prompt | generated ... | (next)        lengths [slots]: positions computed
                                                  ^ position `length`: the next decode row's input

    plan --apply--> page tables, token rows, sampling parameters --batch--> ForwardBatch --store--> sampled tokens, lengths

What only plans decide is mirrored on the host: tenants (admission number, sampling parameters) and the lengths. The token of a
decode row is known to the device alone, so everything that a step computes from is read there. Host arrays go up in few copies,
each from memory that belongs to it: no step waits for the host, nor the host for a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.plan import Admission, PageAppend, PageRelease, StepPlan
from engine.protocol import SamplingParams
from engine.rank.batch import Chunk, ForwardBatch
from engine.rank.kv import KVCache
from engine.rank.sampler import SamplingRows
from kernels.slots import clear, put, take

GREEDY_BELOW = 1e-5  # temperatures under it are greedy: logits divided by less would overflow into ties
_STOP_IDS = 8  # the stop table's first width


@dataclass(frozen=True)
class StepRows:
    """The rows of a step that sample: host facts for the result, device tensors for the sampler.

    slots, numbers  of each row, in the result's order;   device_slots int64 [R];   sampling as the sampler takes it
    """

    slots: tuple[int, ...]
    numbers: tuple[int, ...]
    device_slots: Tensor
    sampling: SamplingRows


class SlotState:
    """Device tables of all slots, and the host's mirror of what plans alone decide."""

    def __init__(self, slots: int, max_len: int, cache: KVCache, device: torch.device) -> None:
        self.device = device
        self.cache = cache
        self.tokens = torch.zeros((slots, max_len + 1), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.bounds = [0] * slots
        self._numbers = [0] * slots
        self._params = [SamplingParams(max_tokens=0)] * slots
        self._integers = torch.zeros((slots, 3), dtype=torch.int64, device=device)  # seed, top_k, first position that may stop
        self._floats = torch.zeros((slots, 3), dtype=torch.float32, device=device)  # temperature, top_p, min_p
        self._stop = torch.full((slots, _STOP_IDS), -1, dtype=torch.int64, device=device)

    # -- the plan's deltas

    def apply(self, plan: StepPlan) -> None:
        """Releases, admissions, appends: in this order."""
        self._release(plan.releases)
        self._admit(plan.admissions)
        self._append(plan.appends)

    def _release(self, releases: Sequence[PageRelease]) -> None:
        for cache in self.cache:
            mine = [release for release in releases if release.group == cache.group.index]
            if mine:
                rows = np.repeat([release.slot for release in mine], [release.count for release in mine])
                columns = np.concatenate([np.arange(release.first, release.first + release.count) for release in mine])
                row, column = self._upload(rows, columns)
                put(cache.table, row, column, torch.zeros_like(row))

    def _append(self, appends: Sequence[PageAppend]) -> None:
        for cache in self.cache:
            mine = {(append.slot, append.index): append.page for append in appends if append.group == cache.group.index}
            if mine:
                rows, columns = np.array(list(mine)).T
                put(cache.table, *self._upload(rows, columns, np.array(list(mine.values()))))

    def _admit(self, admissions: Sequence[Admission]) -> None:
        if not admissions:
            return
        (slots,) = self._upload(np.array([admission.slot for admission in admissions]))
        for cache in self.cache:
            clear(cache.table, slots)
        self.lengths.index_fill_(0, slots, 0)
        self._store_tokens(admissions)
        self._store_params(admissions, slots)
        for admission in admissions:
            self.bounds[admission.slot] = 0
            self._numbers[admission.slot] = admission.number
            self._params[admission.slot] = admission.params

    def _store_tokens(self, admissions: Sequence[Admission]) -> None:
        sizes = [len(admission.tokens) for admission in admissions]
        rows = np.repeat([admission.slot for admission in admissions], sizes)
        columns = np.concatenate([np.arange(size) for size in sizes])
        values = np.concatenate([admission.tokens for admission in admissions])
        put(self.tokens, *self._upload(rows, columns, values))

    def _store_params(self, admissions: Sequence[Admission], slots: Tensor) -> None:
        params = [admission.params for admission in admissions]
        self._widen_stop(max(len(param.stop_ids) for param in params))
        stop = np.full((len(params), self._stop.shape[1]), -1)
        for row, param in zip(stop, params, strict=True):
            row[: len(param.stop_ids)] = param.stop_ids
        free = [admission.prompt + admission.params.min_tokens for admission in admissions]
        integers = np.array([(param.seed, param.top_k, first) for param, first in zip(params, free, strict=True)])
        floats = np.array([(param.temperature, param.top_p, param.min_p) for param in params], np.float64)
        stop_rows, integer_rows, float_bits = self._upload(stop, integers, floats.view(np.int64))
        self._stop[slots] = stop_rows
        self._integers[slots] = integer_rows
        self._floats[slots] = float_bits.view(torch.float64).float()

    def _widen_stop(self, width: int) -> None:
        if width > self._stop.shape[1]:
            wider = self._stop.new_full((len(self._stop), 2 * width), -1)
            wider[:, : self._stop.shape[1]] = self._stop
            self._stop = wider

    # -- the step's inputs

    def batch(self, plan: StepPlan) -> ForwardBatch:
        """Inputs of the plan's forward; advances the lengths, so call it once, after `apply`."""
        sizes = [chunk.end - chunk.start for chunk in plan.chunks]
        offsets = [0, *np.cumsum(sizes, dtype=int).tolist()]
        slots, known, logit_rows, chunked, ends = self._upload(
            np.array([*np.repeat([chunk.slot for chunk in plan.chunks], sizes), *plan.decodes], np.int64),
            np.concatenate([[], *(np.arange(chunk.start, chunk.end) for chunk in plan.chunks)]).astype(np.int64),
            np.array(_logit_rows(plan, offsets), np.int64),
            np.array([chunk.slot for chunk in plan.chunks], np.int64),
            np.array([chunk.end for chunk in plan.chunks], np.int64),
        )
        decoded = slots[offsets[-1] :]
        positions = torch.cat([known, self.lengths[decoded]])
        ids = take(self.tokens, slots, positions).long()
        self.lengths[chunked] = ends
        self.lengths[decoded] += 1
        self._advance(plan)
        chunks = [Chunk(chunk.slot, chunk.start, chunk.end, offset) for chunk, offset in zip(plan.chunks, offsets, strict=False)]
        return ForwardBatch(ids, positions, slots, logit_rows, tuple(chunks), tuple(self.bounds[slot] for slot in plan.decodes))

    def _advance(self, plan: StepPlan) -> None:
        """The host's mirror of the lengths."""
        for chunk in plan.chunks:
            self.bounds[chunk.slot] = chunk.end
        for slot in plan.decodes:
            self.bounds[slot] += 1

    # -- the step's outputs

    def rows(self, plan: StepPlan) -> StepRows:
        """Who samples and how, after `batch`: each row's token goes to position `lengths[slot]`."""
        slots = plan.result_slots
        (index,) = self._upload(np.array(slots, np.int64))
        positions, (seeds, top_k, may_stop) = self.lengths[index], self._integers[index].unbind(1)
        temperature, top_p, min_p = self._floats[index].unbind(1)
        params = [self._params[slot] for slot in slots]
        kinds = [_kind(param) for param in params]
        greedy, plain, filtered = ([row for row, kind in enumerate(kinds) if kind == wanted] for wanted in _KINDS)
        sampling = SamplingRows(
            positions=positions,
            seeds=seeds,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            forbidden=self._stop[index].masked_fill((positions >= may_stop)[:, None], -1),
            greedy=greedy,
            plain=plain,
            filtered=filtered,
            logprobs=[param.logprobs for param in params],
        )
        return StepRows(tuple(slots), tuple(self._numbers[slot] for slot in slots), index, sampling)

    def store(self, rows: StepRows, tokens: Tensor) -> None:
        """Write the sampled `tokens` int64 [R] where the next decode rows will read them."""
        put(self.tokens, rows.device_slots, rows.sampling.positions, tokens)

    def check(self) -> None:
        """Every table entry names a page of its own pool. Waits for the device: for tests and debugging."""
        for cache in self.cache:
            low, high, pages = int(cache.table.min()), int(cache.table.max()), cache.pool.shape[1]
            assert 0 <= low <= high < pages, f"group {cache.group.name}: entries {low} .. {high} in a pool of {pages} pages"

    def _upload(self, *arrays: np.ndarray) -> list[Tensor]:
        """Each array as int64 on the device; one copy for all."""
        packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(np.int64, copy=False))
        if self.device.type == "cuda":
            packed = packed.pin_memory().to(self.device, non_blocking=True)  # torch keeps the host side until the copy is over
        parts = packed.split([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


_KINDS = ("greedy", "plain", "filtered")


def _kind(params: SamplingParams) -> str:
    if params.temperature < GREEDY_BELOW:
        return "greedy"
    return "filtered" if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else "plain"


def _logit_rows(plan: StepPlan, offsets: list[int]) -> list[int]:
    """Batch rows whose logits are wanted: of each chunk that samples its last, then all decodes."""
    chunks = [offset + chunk.end - chunk.start - 1 for chunk, offset in zip(plan.chunks, offsets, strict=False) if chunk.samples]
    return chunks + list(range(offsets[-1], offsets[-1] + len(plan.decodes)))
