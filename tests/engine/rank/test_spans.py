"""Images in prompts, as far as the layers know of them: which positions see each other both ways, against transformers' own masks.

What stands at an image's positions is a token of text, since rows of an encoder differ from those of the table in no way that a
layer could tell.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from engine.config import engine_config
from engine.plan import Admission, StepPlan
from engine.protocol import SamplingParams
from engine.rank.builder import build
from engine.rank.kv import KVCache
from engine.rank.parallel import Single
from tests.engine.rank.test_model import FAULT, PAGES, TOLERANCE, Case, case_of
from tests.support.engine.paged import PlantFault, Spans, script
from tests.support.engine.plans import result_rows
from tests.support.engine.ranks import run, single
from tests.support.engine.threads import run_ranks
from tests.support.judge.oracle import judge, load_oracle

pytestmark = pytest.mark.cpu

PAGES_OF_GROUPS = (40, 40)
Nano = Callable[[str], Path]


def spans_of(window: int) -> Spans:
    """Images at the beginning and the end of prompts, over edges of pages and windows, a token apart, and longer than a window."""
    first = ((5, 2 * window + 14), (2 * window + 15, 2 * window + 40), (3 * window - 2, 3 * window + 33))
    return (first, ((0, 32), (window - 3, window + 5)), ((1, window // 2),))


@pytest.fixture(scope="module")
def case(nano: Nano) -> Callable[[str], Case]:
    """Prompts with images, and what transformers says of them."""

    @cache
    def make(member: str) -> Case:
        it = case_of(nano(member))
        if member == "e2b":
            return it  # whose verdicts are causal
        oracle = load_oracle(it.folder)
        images = zip(it.ids, spans_of(it.geometry.window), strict=True)
        return replace(it, verdicts=tuple(judge(oracle, ids, spans) for ids, spans in images))

    return make


def error(it: Case, spans: Spans, *, whole: bool = False, tp: int = 1, plant_fault: PlantFault | None = None) -> float:
    """The largest difference to transformers of a run whose chunks have these spans."""
    steps = script(it.geometry, it.lengths, PAGES, 3, whole=whole, spans=spans)
    assert whole or sum(bool(step.chunks and step.decodes) for step in steps) > 0
    return it.error(run_ranks(tp, lambda parallel: it.run(parallel if tp > 1 else Single(), steps, plant_fault))[0])


@pytest.mark.parametrize(("member", "tp"), [("12b", 1), ("26b-a4b", 1), ("31b", 1), ("31b", 2), ("e2b", 1)])
def test_logits_are_transformers(case: Callable[[str], Case], member: str, tp: int) -> None:
    """Prompts with images, whole or in chunks: logits lie within 1e-4 of transformers', those of the E2B of its causal ones."""
    it = case(member)
    for whole in (True, False) if tp == 1 else (False,):
        assert error(it, spans_of(it.geometry.window), whole=whole, tp=tp) < TOLERANCE


def test_other_masks_are_seen(case: Callable[[str], Case]) -> None:
    """Images that are seen causally, that are a position shorter, or that full layers see both ways too: over 1e-2."""
    it = case("31b")
    spans = spans_of(it.geometry.window)

    def full_layers_too(_: int, cache: KVCache) -> None:
        for group in cache:
            group.group = replace(group.group, bidirectional=True)

    assert error(it, ((),) * 3) > FAULT
    assert error(it, tuple(tuple((first, last - 1) for first, last in each) for each in spans)) > FAULT
    assert error(it, spans, plant_fault=full_layers_too) > FAULT


def test_a_step_takes_an_image_that_is_longer_than_its_budget(nano: Nano) -> None:
    """A plan's spans reach the layers, in a chunk of more rows than `prefill_budget`; without them the logprob is another."""
    folder, ids, image = nano("31b"), list(range(20, 220)), (3, 190)
    sizes = {"pages": PAGES_OF_GROUPS, "prefill_budget": 32, "max_len": 256}
    rank = single(engine_config(model=str(folder), tp=1, device="cpu", dtype="float32", **sizes))
    rank = replace(rank, encoders={"image": MagicMock()})
    want = judge(load_oracle(folder), torch.tensor(ids), [image]).logits[-1].log_softmax(-1)

    def logprob(spans: list[tuple[int, ...]]) -> float:
        admission = Admission(0, 1, ids, len(ids), SamplingParams(max_tokens=9, logprobs=1))
        appends = [(group, 0, entry, 1 + entry) for group in (0, 1) for entry in range(7)]
        chunks = [(0, 0, len(ids), len(ids) - 1, 0, len(spans))]
        plan = StepPlan(1, chunks=chunks, appends=appends, spans=spans, admissions=[admission])
        (row,) = result_rows(run(build(rank, PAGES_OF_GROUPS), plan))
        assert row.tokens == (int(want.argmax()),) or not spans
        return abs(row.logprobs[0].chosen - want[row.tokens[0]].item())

    assert logprob([image]) < TOLERANCE
    assert logprob([]) > FAULT
