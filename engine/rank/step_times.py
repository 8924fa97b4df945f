"""How long this rank's steps take, by their rows: measured once at boot, with plans such as the core would send.

Wall time, not device time: a step with prompt tokens is launched kernel by kernel, and what the host needs for that is in it. Every
rank runs the same plans, in as many repeats: nothing here may depend on a clock.
"""

from time import monotonic

import numpy as np
import torch

from engine.config import EngineConfig
from engine.lifeline import StepTimes
from engine.plan import Admission, PageAppend, PrefillChunk, StepPlan, encode_plan
from engine.protocol import SamplingParams
from engine.rank.runner import Runner

REPEATS = 3  # timed steps a point, after one that is not
CONTEXTS = (16, 1024)  # tokens behind each decode row, where max_len allows it
BEHIND = 16_384  # tokens behind a chunk, likewise
TILE = 128  # rows that a GPU's large products are cut by
_GREEDY = SamplingParams(max_tokens=1)


@torch.inference_mode()
def measure(runner: Runner, config: EngineConfig, vocab: int) -> StepTimes:
    """Step times of a runner that has run no plan; it is left as it was. Every rank of the group must call it.

    A second at most for 31B on four H200 by what its steps take: twenty of decode rows, twenty of prompts.
    """
    probe = _Probe(runner, vocab)
    short, long = (min(context, config.max_len - 2 - REPEATS) for context in CONTEXTS)
    most = min(config.prefill_budget, config.max_len - 1)
    decodes = [(rows, probe.decode_ms(rows, short)) for rows in _points(config.max_seqs, (1, 32, 128))]
    prefills = [(rows, probe.prefill_ms(rows)) for rows in _points(most, (1, 128, 512))]
    context_ms = max(0.0, probe.decode_ms(config.max_seqs, long) - decodes[-1][1]) / max(1, config.max_seqs * (long - short))
    rows, first = prefills[len(prefills) // 2]
    behind = min(BEHIND, config.max_len - 1 - rows)
    behind_ms = max(0.0, probe.prefill_ms(rows, behind) - first) / max(1, rows * behind)
    probe.clear()
    return StepTimes(_ascending(decodes), _ascending(prefills), context_ms, behind_ms, TILE if config.device == "cuda" else 1)


def _points(most: int, usual: tuple[int, ...]) -> list[int]:
    """Row counts to measure, ascending: the usual ones, and the most there can be."""
    return [*(rows for rows in usual if rows < most), most]


def _ascending(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The points with no time below, or at, that of fewer rows: noise of a microsecond must not turn the curve."""
    least, found = 0.0, []
    for rows, milliseconds in points:
        least = max(milliseconds, least + 1e-3)
        found.append((rows, least))
    return tuple(found)


class _Probe:
    """Runs plans of its own on a runner."""

    def __init__(self, runner: Runner, vocab: int) -> None:
        self._runner = runner
        self._vocab = vocab
        self._step = 0

    def decode_ms(self, rows: int, context: int) -> float:
        """A step of so many decode rows, each behind `context` tokens."""
        end = context + REPEATS + 1
        admissions = [self._admission(slot, context + 1, context) for slot in range(rows)]
        appends = [append for slot in range(rows) for append in self._appends(slot, context, end)]
        self._run([StepPlan(0, admissions=admissions, appends=appends), StepPlan(0, decodes=list(range(rows)))])
        return self._run([StepPlan(0, decodes=list(range(rows)))] * REPEATS)

    def prefill_ms(self, rows: int, behind: int = 0) -> float:
        """A step of so many tokens of one prompt, behind others of it."""
        end = behind + rows
        chunk, appends = PrefillChunk(0, behind, end, end - 1), self._appends(0, behind, end)
        plan = StepPlan(0, admissions=[self._admission(0, end, behind)], appends=appends, chunks=[chunk])
        self._run([plan])
        return self._run([plan] * REPEATS)

    def clear(self) -> None:
        """Forget all of it: pages, tables, lengths, the state hash."""
        slots = self._runner.slots
        for cache in slots.cache:
            used = cache.table.max()
            cache.pool[:, : int(used) + 1] = 0
            cache.table.zero_()
        slots.lengths.zero_()
        self._runner.state_hash = 0

    def _run(self, plans: list[StepPlan]) -> float:
        """Mean milliseconds of plans, two out at a time as in the worker's loop."""
        began = monotonic()
        self._runner.run(map(self._encoded, plans))
        return 1e3 * (monotonic() - began) / len(plans)

    def _encoded(self, plan: StepPlan) -> bytes:
        """Under the next step's number."""
        self._step += 1
        return encode_plan(StepPlan(self._step, plan.stop, [], plan.admissions, plan.appends, [], plan.chunks, plan.decodes))

    def _admission(self, slot: int, length: int, cached: int) -> Admission:
        """A tenant of random tokens: equal ones would all ask for the same experts."""
        tokens = np.random.default_rng(slot).integers(0, self._vocab, length, np.int32).tolist()
        return Admission(slot, slot + 1, tokens, length, _GREEDY, cached=cached)

    def _appends(self, slot: int, start: int, end: int) -> list[PageAppend]:
        """Pages for positions [start, end); where the pools are small, several slots write to one."""
        found = []
        for cache in self._runner.slots.cache:
            group, count = cache.group, cache.pool.shape[1] - 1
            indices = group.pages_for(start, end)
            found += [PageAppend(group.index, slot, index, 1 + (slot * len(indices) + index) % count) for index in indices]
        return found
