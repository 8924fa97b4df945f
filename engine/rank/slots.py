"""A rank's state per slot, a pure function of the plans and its sampled tokens.

    tokens  [slots, max_len + 1]    prompt | generated ... | (next)        lengths [slots]: positions computed
                                                  ^ position `length`: the next decode row's input

One more slot, for padding rows, samples greedily and stores nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.adapters import NO_ADAPTER
from engine.plan import NUMBER_MASK, Admission
from engine.protocol import MAX_STOP_IDS, SamplingParams
from engine.rank.adjustments import Adjustments
from engine.rank.kv import KVCache
from engine.rank.prompt_logprobs import PromptScoring
from engine.rank.sampler import ResultRows
from engine.rank.upload import uploaded
from kernels.admissions import RECORD_FIELDS, admit
from kernels.sampling_batch import GREEDY_BELOW, SMALL_TOP_K, SlotParameters

_RECORD = np.dtype(list(RECORD_FIELDS))


def _parameters(slots: int, device: torch.device) -> SlotParameters:
    return SlotParameters(
        integers=torch.zeros((slots, 3), dtype=torch.int64, device=device),
        floats=torch.zeros((slots, 3), dtype=torch.float32, device=device),
        stop=torch.full((slots, MAX_STOP_IDS), -1, dtype=torch.int32, device=device),
    )


class SlotState:
    """adapters: int32 [slots], -1: none."""

    def __init__(self, slots: int, max_len: int, cache: KVCache, ids: range, device: torch.device, drafts: int = 0) -> None:
        self.device = device
        self.adjustments = Adjustments(slots + 1, ids, device, 1 + drafts)
        self.cache = cache
        self.padding = slots
        self.tokens = torch.zeros((slots + 1, max_len + 1 + drafts), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.parameters = _parameters(slots + 1, device)
        self.adapters = torch.full((slots + 1,), NO_ADAPTER, dtype=torch.int32, device=device)
        self._adapters = np.full(slots + 1, NO_ADAPTER, np.int32)
        self._numbers = np.zeros(slots, np.int32)
        self._logprobs: list[int | None] = [None] * slots
        self._filters = ["none"] * slots
        self.prompt_scorings: dict[int, PromptScoring] = {}

    def admit(self, admissions: Sequence[Admission]) -> None:
        if not admissions:
            return
        self.adjustments.admit(admissions)
        self._store(admissions)
        self._set_adapters(admissions)
        for admission in admissions:
            slot = admission.slot
            number = admission.number & NUMBER_MASK
            params = admission.params
            self._numbers[slot], self._logprobs[slot], self._filters[slot] = number, params.logprobs, _filters(params)
            self.prompt_scorings.pop(slot, None)
            if params.prompt_logprobs is not None and admission.prompt > 1:
                self.prompt_scorings[slot] = PromptScoring(number, admission.prompt, params.prompt_logprobs)

    def _set_adapters(self, admissions: Sequence[Admission]) -> None:
        given = self._adapters.copy()
        for admission in admissions:
            given[admission.slot] = admission.adapter
        if (given != self._adapters).any():
            self._adapters = given
            self.adapters.copy_(uploaded(torch.from_numpy(given), self.device))

    def have_adapters(self, slots: np.ndarray) -> bool:
        return bool((self._adapters[slots] != NO_ADAPTER).any())

    def warm(self) -> None:
        self._store([Admission(self.padding, 0, (), 0, SamplingParams(max_tokens=1, temperature=0.0))])

    def _store(self, admissions: Sequence[Admission]) -> None:
        records = np.empty(len(admissions), _RECORD)
        rest = list[np.ndarray]()
        end = records.nbytes // 4
        for index, admission in enumerate(admissions):
            params = admission.params
            records[index] = (
                admission.slot,
                end,
                len(params.stop_ids),
                len(admission.tokens),
                admission.cached,
                params.seed,
                params.top_k,
                admission.prompt + params.min_tokens,
                params.temperature,
                params.top_p,
                params.min_p,
            )
            rest += [np.array(params.stop_ids, np.int32), np.asarray(admission.tokens, np.int32)]
            end += len(params.stop_ids) + len(admission.tokens)
        packed = uploaded(torch.from_numpy(np.concatenate([records.view(np.int32), *rest])), self.device)
        longest = max(len(admission.tokens) for admission in admissions)
        tables = [cache.table for cache in self.cache]
        admit(packed, len(admissions), longest, self.tokens, self.lengths, tables, self.parameters)

    def result_rows(self, slots: np.ndarray, step: int, width: int = 1) -> ResultRows:
        """How the rows of slots int32 [R] sample, `width` each. The masks of `step` must be set."""
        adjusted = any(self.adjustments.are_adjusted(slots, step))
        slots = slots.repeat(width)
        logprobs, filters = ([listed[slot] for slot in slots.tolist()] for listed in (self._logprobs, self._filters))
        return ResultRows(
            slots,
            self._numbers[slots],
            logprobs,
            width,
            adjusted,
            small_top_k="small top_k" in filters,
            filtered=[row for row, name in enumerate(filters) if name == "other"],
            reported=[row for row, count in enumerate(logprobs) if count is not None],
            alternatives=max((count for count in logprobs if count is not None), default=0),
        )


def _filters(params: SamplingParams) -> str:
    if params.temperature < GREEDY_BELOW or not (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
        return "none"
    if 0 < params.top_k <= SMALL_TOP_K:
        return "small top_k"
    return "other"
