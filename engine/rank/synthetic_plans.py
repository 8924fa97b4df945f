"""Plans for measuring a rank without a core: sequences of random tokens, whose context is said to be computed, on random pages."""

from collections.abc import Sequence

import numpy as np

from engine.plan import Admission, StepPlan
from engine.protocol import SamplingParams
from engine.rank.kv import KVCache


def admission_plan(cache: KVCache, vocab: int, slots: Sequence[int], length: int, cached: int, end: int) -> StepPlan:
    """Make a plan that admits sequences of `length` tokens to a rank's slots, `cached` of them computed, with pages for
    positions [cached, end); in a small pool they share pages. Tokens are random: equal ones would all go to the same experts."""
    params, admissions = SamplingParams(max_tokens=1), []
    for slot in slots:
        tokens = np.random.default_rng(slot).integers(0, vocab, length, np.int32).tolist()
        admissions.append(Admission(slot, slot + 1, tokens, length, params, cached=cached))
    plan = StepPlan(0, admissions=admissions)
    for group in cache:
        entries, count = group.group.pages_for(cached, end), group.pool.shape[1] - 1
        pages = 1 + np.random.default_rng(0).permutation(count)
        plan.appends += [
            (group.group.index, slot, entry, int(pages[(slot * len(entries) + index) % count]))
            for slot in slots
            for index, entry in enumerate(entries)
        ]
    return plan
