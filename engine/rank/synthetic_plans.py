"""Plans for measuring a rank without a core: sequences of random tokens, whose context is said to be computed, on random pages."""

from collections.abc import Sequence

import numpy as np

from engine.plan import Admission, StepPlan
from engine.protocol import SamplingParams
from engine.rank.kv import GroupCache, KVCache


def admission_plan(cache: KVCache, vocab: int, slots: Sequence[int], length: int, cached: int, end: int, step: int = 0) -> StepPlan:
    """Make plan `step`, which admits sequences of `length` tokens to a rank's slots, `cached` of them computed, with pages for
    positions [cached, end); in a small pool they share pages. Tokens are random: equal ones would all go to the same experts."""
    params, admissions = SamplingParams(max_tokens=1), []
    for slot in slots:
        tokens = np.random.default_rng(slot).integers(0, vocab, length, np.int32).tolist()
        admissions.append(Admission(slot, slot + 1, tokens, length, params, cached=cached))
    appends = [append for group in cache for append in _appends(group, slots, cached, end)]
    return StepPlan(step, admissions=admissions, appends=appends)


def _appends(cache: GroupCache, slots: Sequence[int], start: int, end: int) -> list[tuple[int, ...]]:
    entries, count = cache.group.pages_for(start, end), cache.pool.shape[1] - 1
    pages = 1 + np.random.default_rng(0).permutation(count)
    return [
        (cache.group.index, slot, entry, int(pages[(slot * len(entries) + index) % count]))
        for slot in slots
        for index, entry in enumerate(entries)
    ]
