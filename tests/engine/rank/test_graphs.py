"""What is captured, and what is run before; the capture itself is for GPUs (tests/gpu)."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from engine.plan import StepPlan, encode_plan, read_plan, single_rows
from engine.rank import graphs
from engine.rank import runner as rank_runner
from engine.rank.builder import build
from engine.rank.runner import Runner
from engine.rank.stages.sample_stage import LARGEST_SAMPLERS, SAMPLERS
from engine.step_shapes import StepShapes, StepSizes
from tests.conftest import Nano
from tests.support.engine import drafters
from tests.support.engine.answers import answers, requests, texts
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import PAGES, config_of
from tests.support.engine.rerun import Rerun

pytestmark = pytest.mark.cpu


def test_steps_with_drafts_are_replayed(nano: Nano, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of decode rows is a forward, a sampler and the drafts behind it, of the width that its rows are padded to; the drafts
    behind a prompt are the same graph. Whatever the steps, replays give the eager steps' state. Planted fault: drafts of a step
    before are verified."""
    folder = drafters.fill(nano("e2b"), tmp_path)
    config = config_of(nano("e2b"), 1, mtp={"model": str(folder), "drafts": 3})
    sizes = tuple(StepSizes.decoding(rows, width) for rows in range(1, config.max_seqs + 1) for width in config.widths)
    shapes = replace(StepShapes.of(config), sizes=sizes)
    eager, captured, wrong = (build(single(config), PAGES, shapes) for _ in range(3))
    monkeypatch.setattr(rank_runner, "StageGraphs", Rerun)
    monkeypatch.setattr(rank_runner.torch.cuda, "synchronize", lambda _: None)
    for made in (captured, wrong):
        made.inputs.upload(read_plan(encode_plan(StepPlan(0, rows=single_rows([0])))))  # on the null page
        made.capture()
        made.slots.lengths.zero_()
        for cache in made.slots.cache:
            cache.pool.zero_()
    asked = requests()[2:7]
    expected, _, _ = answers(partial(run, eager), config, asked)
    given, _, _ = answers(partial(run, captured), config, asked)
    assert texts(given) == texts(expected)
    assert captured.state_hash == eager.state_hash
    found = captured.graphs
    assert {(stage, sizes.width) for stage, sizes in found.replayed} >= {("forward", 4), ("draft", 4), ("small_top_k", 4)}
    assert {sizes.width for stage, sizes in found.replayed if stage == "draft"} == {4}
    stages = wrong.graphs
    stages.stages = {key: (run, kept) if key[0] != "draft" else (lambda: None, None) for key, (run, kept) in stages.stages.items()}
    given, _, _ = answers(partial(run, wrong), config, asked)
    assert texts(given) == texts(expected)
    assert wrong.state_hash != eager.state_hash


def test_each_sampler_is_warmed_behind_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samplers that follow each other without sums between them would write into an inbox that a slower rank has not read;
    each that launches what others do not warms up as a step of its own, and all are recorded behind the forward that they share."""
    monkeypatch.setattr(graphs, "torch", MagicMock())
    monkeypatch.setattr(rank_runner.torch.cuda, "synchronize", lambda _: None)
    ran = []
    one, eight, four = map(StepSizes.decoding, (1, 8, 4))
    stage = MagicMock(inboxes=None)
    other = MagicMock()
    runner = Runner(StepShapes((one, eight), 8, 8), other, other, stage, other, None, other, other, adapted=False, capturable=True)
    stage.padded = lambda sizes: ran.append(f"forward {sizes.decodes}") or (sizes, None)
    runner._sampled_by = lambda name, sizes, _: ran.append(f"{name} {sizes.decodes}")  # type: ignore[method-assign,assignment,return-value]
    runner.capture()
    made = runner.graphs
    warmed = [entry for name in LARGEST_SAMPLERS for entry in ("forward 8", f"{name} 8")]
    recorded = ["forward 8", *(f"{name} 8" for name in SAMPLERS)]
    assert ran == [*warmed, *recorded, *(name.replace("8", "1") for name in warmed + recorded)]
    assert made.replay("forward", eight) == (eight, None)
    with pytest.raises(KeyError):
        made.replay("forward", four)
