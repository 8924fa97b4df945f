"""What decode steps are timed by: a rank without core and replica, the bytes that a step must read, `tests.bench.step`."""

import json
import sys
from pathlib import Path

import pytest
import torch

from engine.config import engine_config
from engine.geometry import kv_groups, read_geometry
from engine.rank.builder import load_rank
from engine.rank.parallel import Parallel, Single
from engine.rank.stages import draft_stage
from tests.bench import step
from tests.bench.profiling import bare_rank
from tests.bench.profiling.bare_rank import BareRank, pages_held
from tests.bench.profiling.loopback import Loopback
from tests.conftest import Nano
from tests.support.engine.plans import PageAppend

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
BATCH, CONTEXT, STEPS = 3, 70, 24


@torch.inference_mode()
def rank_of(folder: Path, parallel: Parallel) -> BareRank:
    config = engine_config(
        model=str(folder), tp=parallel.size, device="cpu", dtype="float32", load_format="dummy", max_seqs=BATCH, max_len=128
    )
    pages = pages_held(kv_groups(read_geometry(folder), parallel.size), BATCH, CONTEXT, STEPS)
    return bare_rank.build(load_rank(config, parallel, CPU, checked=False), pages)


@pytest.mark.parametrize(("member", "tp"), [("31b", 1), ("31b", 2), ("26b-a4b", 1), ("e2b", 1)])
def test_the_bytes_of_a_step(nano: Nano, member: str, tp: int) -> None:
    """All matrices once, but of tables that are no head the rows of a step, of experts what random choices hit, and K and V in
    windows."""
    rank = rank_of(nano(member), Single() if tp == 1 else Loopback(tp, CPU))
    weights = {name: own for name, own in rank.model.named_parameters() if own.ndim > 1}
    tables = [own for name, own in weights.items() if "embedding" in name and "projection" not in name]
    experts = [own for name, own in weights.items() if "experts" in name]
    moe = rank.geometry.moe
    hit = 0.0 if moe is None else 1 - (1 - moe.top_k / moe.experts) ** BATCH
    groups = [rank.cache.of(layer).group for layer in rank.geometry.layers]
    seen = sum(2 * group.kv_heads * group.head_dim * min(CONTEXT, group.window or CONTEXT) for group in groups)
    dense = sum(own.nbytes for own in weights.values()) - sum(own.nbytes for own in [*tables, *experts])
    rows, head = BATCH * sum(own[0].nbytes for own in tables), rank.model.head.head.weight.nbytes
    read = dense + hit * sum(own.nbytes for own in experts) + rows + head + 4 * BATCH * seen
    assert rank.step_bytes(BATCH, CONTEXT) == pytest.approx(read, abs=1)


def test_sequences_have_their_pages(nano: Nano) -> None:
    """Those of all positions that run, and of what their windows see; no page twice where there are enough."""
    rank = rank_of(nano("31b"), Single())
    plan = rank.admission(BATCH, CONTEXT, STEPS, 1)
    for cache in rank.cache:
        appends = [PageAppend(*append) for append in plan.appends if append[0] == cache.group.index]
        entries = cache.group.pages_for(CONTEXT - 1, CONTEXT + STEPS + 8)
        assert [(append.slot, append.index) for append in appends] == [(slot, at) for slot in range(BATCH) for at in entries]
        assert sorted(append.page for append in appends) == list(range(1, cache.pool.shape[1]))


def test_steps_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a batch, with drafts a step's tokens too; no step is shorter than its bytes take."""
    monkeypatch.setattr(draft_stage, "accept", draft_stage.accept)  # the bench has its own
    sizes = "--batches 1 3 --steps 12 --context 40 --max-len 128 --drafts 2 --accepted 2.5"
    monkeypatch.setattr(sys, "argv", ["step", *f"--model nano:31b --tp 1 --device cpu {sizes}".split()])
    step.main()
    one, three = map(json.loads, capsys.readouterr().out.splitlines())
    assert [one["batch"], three["batch"]] == [1, 3]
    assert three["launch_ms"] > three["floor_ms"] > one["floor_ms"] > 0
    assert 1 < three["tokens"] <= 3
