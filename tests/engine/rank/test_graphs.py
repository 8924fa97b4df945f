"""What is run before it is captured; the capture itself is for GPUs (tests/gpu)."""

from unittest.mock import MagicMock

import pytest
import torch

from engine.rank import graphs

pytestmark = pytest.mark.cpu


def test_each_sampler_is_warmed_behind_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samplers that follow each other without sums between them would write into an inbox that a slower rank has not read;
    each warms up as a step of its own, and is recorded behind the forward that all share."""
    monkeypatch.setattr(graphs, "torch", MagicMock())
    ran: list[str] = []
    samplers = {name: lambda rows, _, name=name: ran.append(f"{name} {rows}") for name in ("argmax", "other")}
    graphs.DecodeGraphs(lambda rows: ran.append(f"forward {rows}"), samplers, (1, 8), torch.device("cuda"))
    warmed = ["forward 8", "argmax 8", "forward 8", "other 8"]
    recorded = ["forward 8", "argmax 8", "other 8"]
    assert ran == [*warmed, *recorded, *(name.replace("8", "1") for name in warmed + recorded)]
