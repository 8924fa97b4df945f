"""How long this rank's steps take, by their rows: measured once at boot, with plans such as the core would send.

Wall time, not device time: a step with prompt tokens is launched kernel by kernel, and what the host needs for that is in it. Every
rank runs the same plans, in as many repeats: nothing here may depend on a clock.
"""

from contextlib import nullcontext
from time import monotonic

import numpy as np
import torch

from engine.config import EngineConfig
from engine.lifeline import StepTimes
from engine.plan import Admission, PageAppend, PrefillChunk, StepPlan, encode_plan
from engine.protocol import SamplingParams
from engine.rank.runner import Runner

SERIES, REPEATS = 2, 3  # timed steps a point, after one that is not; the quicker series counts
CONTEXTS = (16, 1024)  # tokens behind each decode row, where max_len allows it
BEHIND = 16_384  # tokens behind a chunk, likewise
TILE = 128  # rows that a GPU's large products are cut by
_GREEDY = SamplingParams(max_tokens=1)


@torch.inference_mode()
def measure(runner: Runner, config: EngineConfig, vocab: int) -> StepTimes:
    """Step times of a runner that has run no plan; it is left as it was. Every rank of the group must call it.

    Two seconds at most for 31B on four H200 by what its steps take: forty of decode rows, sixty with prompts.
    """
    probe = _Probe(runner, vocab)
    with nullcontext() if runner.pages is None else runner.pages.unjudged():
        times = _measured(probe, config)
        probe.clear()
    return times


def _measured(probe: "_Probe", config: EngineConfig) -> StepTimes:
    most = min(config.prefill_budget, config.max_len - 1)
    short, long = (min(context, config.max_len - 3 - SERIES * REPEATS) for context in CONTEXTS)
    decodes = _ascending([(rows, probe.decode_ms(rows, short)) for rows in _points(config.max_seqs, (1, 32, 128))])
    prefills = _ascending([(rows, probe.prefill_ms(rows)) for rows in _points(most, (1, 128, 512))])
    counts = [count for count in _points(min(config.max_seqs, most) - 1, (1, 32, 128)) if count]
    beside = [(count, max(0.0, probe.beside_ms(count, short, prefills))) for count in counts]
    context_ms = max(0.0, probe.decode_ms(config.max_seqs, long) - decodes[-1][1]) / max(1, config.max_seqs * (long - short))
    read_ms, behind_ms = _behind(probe, prefills[0], prefills[len(prefills) // 2], config.max_len - 1)
    tile = TILE if config.device == "cuda" else 1
    return StepTimes(decodes, prefills, tuple(beside) or ((1, 0.0),), context_ms, read_ms, behind_ms, tile)


def _behind(probe: "_Probe", few: tuple[int, float], many: tuple[int, float], length: int) -> tuple[float, float]:
    """What a token before a chunk adds to its step, and to each of its tokens: of chunks of few rows and of many."""
    behind = max(0, min(BEHIND, length - many[0]))
    if not behind:
        return 0.0, 0.0
    less, more = (max(0.0, probe.prefill_ms(rows, behind) - alone) / behind for rows, alone in (few, many))
    each = max(0.0, more - less) / max(1, many[0] - few[0])
    return max(0.0, less - few[0] * each), each


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
        return self._timed(self._decoding(rows, context), StepPlan(0, decodes=list(range(rows))))

    def prefill_ms(self, rows: int, behind: int = 0) -> float:
        """A step of so many tokens of one prompt, behind others of it."""
        return self._timed(*self._chunked(0, rows, behind))

    def beside_ms(self, rows: int, context: int, prefills: tuple[tuple[int, float], ...]) -> float:
        """How much longer than a step of prompt tokens alone, of `prefills`, one takes of which so many rows are decode rows."""
        whole, alone = next((point for point in prefills if point[0] >= 2 * rows), prefills[-1])
        decoding, (newcomer, chunk) = self._decoding(rows, context), self._chunked(rows, whole - rows, 0)
        first = StepPlan(0, admissions=decoding.admissions + newcomer.admissions, appends=[*decoding.appends, *newcomer.appends])
        return self._timed(first, StepPlan(0, chunks=chunk.chunks, decodes=list(range(rows)))) - alone

    def clear(self) -> None:
        """Forget all of it: pages, tables, lengths, the state hash."""
        slots = self._runner.slots
        for cache in slots.cache:
            used = cache.table.max()
            cache.pool[:, : int(used) + 1] = 0
            cache.table.zero_()
        slots.lengths.zero_()
        self._runner.state_hash = 0

    def _decoding(self, rows: int, context: int) -> StepPlan:
        """Sequences in the first slots, with pages for all rows that are timed."""
        end = context + SERIES * REPEATS + 2
        admissions = [self._admission(slot, context + 1, context) for slot in range(rows)]
        appends = [append for slot in range(rows) for append in self._appends(slot, context, end)]
        return StepPlan(0, admissions=admissions, appends=appends)

    def _chunked(self, slot: int, rows: int, behind: int) -> tuple[StepPlan, StepPlan]:
        """A prompt in a slot, and a step of so many tokens of it, behind others."""
        end = behind + rows
        admitted = StepPlan(0, admissions=[self._admission(slot, end, behind)], appends=self._appends(slot, behind, end))
        return admitted, StepPlan(0, chunks=[PrefillChunk(slot, behind, end, end - 1)])

    def _timed(self, first: StepPlan, plan: StepPlan) -> float:
        """Milliseconds of a plan, behind one that admits; two are out at a time as in the worker's loop. The quicker series."""
        self._run([first, plan])
        return min(self._run([plan] * REPEATS) for _ in range(SERIES))

    def _run(self, plans: list[StepPlan]) -> float:
        """Mean milliseconds of plans."""
        began = monotonic()
        self._runner.run(map(self._encoded, plans))
        return 1e3 * (monotonic() - began) / len(plans)

    def _encoded(self, plan: StepPlan) -> bytes:
        """Under the next step's number."""
        self._step += 1
        return encode_plan(StepPlan(self._step, plan.stop, [], plan.admissions, plan.appends, [], plan.chunks, plan.decodes))

    def _admission(self, slot: int, length: int, cached: int) -> Admission:
        """A sequence of random tokens: equal ones would all ask for the same experts."""
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
