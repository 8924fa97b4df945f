"""Plans for measuring a rank without a core: sequences of random tokens, whose context is said to be computed, on random pages."""

from collections.abc import Sequence

import numpy as np

from engine.plan import Admission, StepPlan
from engine.protocol import SamplingParams
from engine.rank.kv import GroupCache, KVCache


class SyntheticPlans:
    """Admits sequences to a rank's slots; in a small pool they share pages."""

    def __init__(self, cache: KVCache, vocab: int) -> None:
        self._cache, self._vocab = cache, vocab

    def admit(self, step: int, slots: Sequence[int], length: int, cached: int, end: int) -> StepPlan:
        """Plan `step`: sequences of `length` tokens, `cached` of them computed, with pages for positions [cached, end)."""
        admissions = [
            Admission(slot, slot + 1, self._tokens(slot, length), length, SamplingParams(max_tokens=1), cached=cached)
            for slot in slots
        ]
        appends = [append for cache in self._cache for append in _appends(cache, slots, cached, end)]
        return StepPlan(step, admissions=admissions, appends=appends)

    def _tokens(self, slot: int, length: int) -> list[int]:
        """Random: equal ones would all go to the same experts."""
        return np.random.default_rng(slot).integers(0, self._vocab, length, np.int32).tolist()


def _appends(cache: GroupCache, slots: Sequence[int], start: int, end: int) -> list[tuple[int, ...]]:
    entries, count = cache.group.pages_for(start, end), cache.pool.shape[1] - 1
    pages = 1 + np.random.default_rng(0).permutation(count)
    return [
        (cache.group.index, slot, entry, int(pages[(slot * len(entries) + index) % count]))
        for slot in slots
        for index, entry in enumerate(entries)
    ]
