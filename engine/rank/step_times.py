"""Measures at boot how long this rank's steps take, in wall time, with plans like the core's.

All ranks run the same plans equally often, so nothing may depend on a clock.
"""

from collections.abc import Sequence
from functools import partial
from time import monotonic

import numpy as np
import torch

from engine.config import EngineConfig
from engine.lifeline import Points, StepTimes
from engine.plan import Admission, StepPlan, encode_plan, single_rows
from engine.protocol import SamplingParams
from engine.rank.kv import KVCache
from engine.rank.runner import Runner

SERIES = {"cuda": (3, 3), "cpu": (1,)}  # steps timed at each point, after an untimed one; the quicker series counts
CONTEXTS = (16, 1024)  # context of each decode row, if max_len allows it
CHUNK_CONTEXT = 16_384  # context before a chunk, likewise
Measured = tuple[tuple[int, float], ...]  # rows of a step, and its milliseconds
TILE = 128  # rows of a tile in a GPU's large matrix products


@torch.inference_mode()
def measure(runner: Runner, config: EngineConfig, vocab: int) -> StepTimes:
    """Measure a fresh runner, which is left as it was. A collective call of about two seconds for 31B on four H200, more with
    drafts."""
    probe = _Probe(runner, vocab, SERIES[config.device])
    tile = TILE if config.device == "cuda" else 1
    drafts: tuple[tuple[int, Points], ...] = ()
    drafting: Points = ()
    width = 1
    if len(config.drafts) > 1 and config.max_len > probe.steps * config.widest + 1:
        width = config.widest
        points = _points(config.max_seqs, (1, 8, 32, 128))
        drafts = tuple((count, tuple((rows, probe.drafts_ms(rows, count)) for rows in points)) for count in config.drafts)
    if not config.measures_steps:
        probe.clear()
        return StepTimes((), (), (), 0.0, 0.0, 0.0, tile, drafts)
    most = min(config.prefill_budget, config.max_len - 1)
    short, long = (min(context, config.max_len - 1 - probe.steps * width) for context in CONTEXTS)
    decodes = _ascending([(rows, probe.decode_ms(rows, short)) for rows in _points(config.max_seqs, (1, 32, 128))])
    prefills = _ascending([(rows, probe.prefill_ms(rows)) for rows in _points(most, (1, 128, 512, 2048))])
    counts = [count for count in _points(min(config.max_seqs, most) - 1, (1, 32, 128)) if count]
    mixed = [(count, max(0.0, probe.mixed_ms(count, short, prefills))) for count in counts]
    if width > 1:
        drafting = tuple((count, probe.drafting_ms(count, long, prefills, width)) for count in sorted({*counts[:1], *counts[-1:]}))
    slower_ms = max(0.0, probe.decode_ms(config.max_seqs, long) - decodes[-1][1])
    context_ms = slower_ms / max(1, config.max_seqs * (long - short))
    read_ms = 0.0
    attend_ms = 0.0
    few = prefills[0]
    many = prefills[len(prefills) // 2]
    if context := max(0, min(CHUNK_CONTEXT, config.max_len - 1 - many[0])):  # before chunks of few rows and of many
        less, more = (max(0.0, probe.prefill_ms(rows, context) - alone) / context for rows, alone in (few, many))
        attend_ms = max(0.0, more - less) / max(1, many[0] - few[0])
        read_ms = max(0.0, less - few[0] * attend_ms)
    probe.clear()
    sizes = tuple(sorted({each.prompts for each in runner.shapes.sizes if each.prompts}))
    return StepTimes(
        decodes, prefills, tuple(mixed) or ((1, 0.0),), context_ms, read_ms, attend_ms, tile, drafts, drafting, sizes
    )


def admission_plan(cache: KVCache, vocab: int, slots: Sequence[int], length: int, cached: int, end: int) -> StepPlan:
    """Admits sequences of `length` random tokens, `cached` of them computed, with pages for [cached, end)."""
    params = SamplingParams(max_tokens=1)
    admissions = []
    for slot in slots:
        tokens = np.random.default_rng(slot).integers(0, vocab, length, np.int32).tolist()  # equal ones would share experts
        admissions.append(Admission(slot, slot + 1, tokens, length, params, cached=cached))
    plan = StepPlan(0, admissions=admissions)
    for group in cache:
        entries = group.group.pages_for(cached, end)
        count = group.pool.shape[1] - 1
        pages = 1 + np.random.default_rng(0).permutation(count)
        plan.appends += [
            (group.group.index, slot, entry, int(pages[(slot * len(entries) + index) % count]))
            for slot in slots
            for index, entry in enumerate(entries)
        ]
    return plan


def _points(most: int, usual: tuple[int, ...]) -> list[int]:
    return [*(rows for rows in usual if rows < most), most]


def _ascending(points: list[tuple[int, float]]) -> Measured:
    least = 0.0
    ascending = []
    for rows, milliseconds in points:
        least = max(milliseconds, least + 1e-3)
        ascending.append((rows, least))
    return tuple(ascending)


class _Probe:
    def __init__(self, runner: Runner, vocab: int, series: tuple[int, ...]) -> None:
        self._runner = runner
        self._series = series
        self.steps = 2 + sum(series)
        self._admission = partial(admission_plan, runner.slots.cache, vocab)
        self._step = 0

    def decode_ms(self, rows: int, context: int) -> float:
        return self._timed(self._decoding(rows, context), StepPlan(0, rows=single_rows(range(rows))))

    def drafts_ms(self, rows: int, drafts: int) -> float:
        width = 1 + drafts
        first = self._admission(range(rows), 2, 1, 1 + self.steps * width)
        return self._timed(first, StepPlan(0, drafts=drafts, rows=[(slot, width, 0) for slot in range(rows)]))

    def prefill_ms(self, rows: int, context: int = 0) -> float:
        return self._timed(*self._chunked(0, rows, context))

    def mixed_ms(self, sequences: int, context: int, prefills: Measured, width: int = 1, drafts: int = 0) -> float:
        """Extra ms over `prefills` of equally many prompt tokens."""
        rows = sequences * width
        whole, alone = next((point for point in prefills if point[0] >= 2 * rows), prefills[-1])
        decoding, (newcomer, chunk) = self._decoding(sequences, context, width), self._chunked(sequences, max(1, whole - rows), 0)
        first = StepPlan(0, admissions=decoding.admissions + newcomer.admissions, appends=[*decoding.appends, *newcomer.appends])
        plan = StepPlan(0, drafts=drafts, rows=[(slot, width, 0) for slot in range(sequences)], chunks=chunk.chunks)
        return self._timed(first, plan) - alone

    def drafting_ms(self, sequences: int, context: int, prefills: Measured, width: int) -> float:
        """Extra time of drafts, beyond their rows."""
        drafted = self.mixed_ms(sequences, context, prefills, width, width - 1)
        return max(0.0, drafted - max(0.0, self.mixed_ms(sequences, context, prefills)))

    def clear(self) -> None:
        slots = self._runner.slots
        for cache in slots.cache:
            used = cache.table.max()
            cache.pool[:, : int(used) + 1] = 0
            cache.table.zero_()
        slots.lengths.zero_()
        if (pages := self._runner.forward_stage.pages) is not None:
            pages.clear()
        self._runner.report_stage.state_hash = 0

    def _decoding(self, sequences: int, context: int, width: int = 1) -> StepPlan:
        return self._admission(range(sequences), context + 1, context, context + self.steps * width)

    def _chunked(self, slot: int, rows: int, context: int) -> tuple[StepPlan, StepPlan]:
        end = context + rows
        return self._admission([slot], end, context, end), StepPlan(0, chunks=[(slot, context, end, end - 1, 0, 0)])

    def _timed(self, first: StepPlan, plan: StepPlan) -> float:
        """ms of `plan`, after the admitting `first`; two steps are in flight."""
        self._run([first, plan])
        return min(self._run([plan] * count) for count in self._series)

    def _run(self, plans: list[StepPlan]) -> float:
        began = monotonic()
        self._runner.run(map(self._encoded, plans))
        return 1e3 * (monotonic() - began) / len(plans)

    def _encoded(self, plan: StepPlan) -> bytes:
        self._step += 1
        plan.step = self._step
        return encode_plan(plan)
