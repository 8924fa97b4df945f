"""What is run before it is captured; the capture itself is for GPUs (tests/gpu)."""

from unittest.mock import MagicMock

import pytest

from engine.rank import graphs
from engine.rank import runner as rank_runner
from engine.rank.runner import Runner
from engine.rank.stages.sample_stage import SAMPLERS

pytestmark = pytest.mark.cpu


def test_each_sampler_is_warmed_behind_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samplers that follow each other without sums between them would write into an inbox that a slower rank has not read;
    each warms up as a step of its own, and is recorded behind the forward that all share."""
    monkeypatch.setattr(graphs, "torch", MagicMock())
    monkeypatch.setattr(rank_runner.torch.cuda, "synchronize", lambda _: None)
    ran: list[str] = []
    runner = Runner.__new__(Runner)
    runner._device, runner._inputs, runner._widths, runner.draft_stage = MagicMock(), MagicMock(), (1,), None
    runner.forward_stage, runner.sample_stage = MagicMock(), MagicMock()
    runner.forward_stage.decode = lambda rows, *_: ran.append(f"forward {rows}") or (rows, None)
    runner.sample_stage.captured = lambda name, _, rows, __: ran.append(f"{name} {rows}")
    made = runner.graphs_of((1, 8))
    warmed = [entry for name in SAMPLERS for entry in ("forward 8", f"{name} 8")]
    recorded = ["forward 8", *(f"{name} 8" for name in SAMPLERS)]
    assert ran == [*warmed, *recorded, *(name.replace("8", "1") for name in warmed + recorded)]
    assert made.replay("forward", 8) == (8, None)
    with pytest.raises(KeyError):
        made.replay("forward", 4)
