"""A profile of a decode step: its stages, their bytes and times, and how a device's kernels find their modules."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from engine.config import engine_config
from engine.errors import ConfigError
from engine.geometry import kv_groups, read_geometry
from engine.plan import encode_plan
from engine.rank.builder import load_rank
from engine.rank.models.layers import VocabTable
from engine.rank.parallel import Parallel, Single
from engine.rank.step import StepSizes
from tests.bench.profiling import bare_rank, step_profile
from tests.bench.profiling.bare_rank import BareRank, pages_held
from tests.bench.profiling.loopback import Loopback
from tests.bench.profiling.session import ProfileRequest, fitting, most_pages
from tests.bench.profiling.step_profile import Span, StepProfile, medians, modules_of, profile_step, recorded, spans_of
from tests.conftest import Nano
from tests.support.engine.plans import PageAppend

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
BATCH, CONTEXT, STEPS = 3, 70, 24
RATE = 1e12


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def rank_of(folder: Path, parallel: Parallel) -> BareRank:
    config = engine_config(
        model=str(folder), tp=parallel.size, device="cpu", dtype="float32", load_format="dummy", max_seqs=BATCH, max_len=128
    )
    pages = pages_held(kv_groups(read_geometry(folder), parallel.size), BATCH, CONTEXT, STEPS)
    return bare_rank.build(load_rank(config, parallel, CPU, checked=False), pages)


def profile_of(rank: BareRank) -> StepProfile:
    return profile_step(rank, BATCH, CONTEXT, STEPS, 1, RATE)


@pytest.mark.parametrize(("member", "tp"), [("31b", 1), ("31b", 2), ("26b-a4b", 1), ("e2b", 1)])
def test_the_stages_of_a_step(nano: Nano, member: str, tp: int) -> None:
    """Every module that computes is in a stage, as often as there are layers of its kind; weights, K and V are each read once;
    times add up."""
    rank = rank_of(nano(member), Single() if tp == 1 else Loopback(tp, CPU))
    profiled = profile_of(rank)
    counts = {stage.name: stage.count for stage in profiled.stages}
    for kind in ("sliding", "full"):
        layers = sum(layer.kind == kind for layer in rank.geometry.layers)
        for module in ("attention.qkv", "attention", "attention.o", "block", "mlp", "mlp.down"):
            assert counts[f"{kind} {module}"] == layers
    assert [name for name in counts if " " not in name] == outside(member)
    dense = [p for name, p in rank.model.named_parameters() if "experts" not in name and "ple_tokens" not in name]
    tables = [module for module in rank.model.modules() if isinstance(module, VocabTable)]
    rows = BATCH * sum(table.head.weight[0].nbytes for table in tables)
    hit = 0.0 if rank.geometry.moe is None else 1 - (1 - rank.geometry.moe.top_k / rank.geometry.moe.experts) ** BATCH
    experts = sum(int(hit * p.nbytes) for name, p in rank.model.named_parameters() if "experts" in name and p.ndim > 1)
    keys = sum(stage.bytes for stage in profiled.stages if stage.name.endswith(" attention"))
    read = sum(stage.bytes for stage in profiled.stages)
    assert read == pytest.approx(sum(p.nbytes for p in dense if p.ndim > 1) + rows + experts + keys, abs=99)
    assert keys == 4 * BATCH * sum(
        2 * group.kv_heads * group.head_dim * min(CONTEXT, group.window or CONTEXT)
        for group in (rank.cache.of(layer).group for layer in rank.geometry.layers)
    )
    assert read == rank.step_bytes(BATCH, CONTEXT)
    assert sum(stage.us for stage in profiled.stages) == pytest.approx(1e3 * profiled.step_ms)


def outside(member: str) -> list[str]:
    """Stages outside the layers."""
    tables = ["embedding.tokens", "embedding.ple_tokens", "embedding", "embedding.ple_projection"]
    return ["inputs", *(tables if member == "e2b" else ["embedding.tokens", "embedding"]), "head", "sampling"]


def test_sequences_have_their_pages(nano: Nano) -> None:
    """Those of all positions that run, and of what their windows see; no page twice where there are enough."""
    rank = rank_of(nano("31b"), Single())
    plan = rank.admission(BATCH, CONTEXT, STEPS, 1)
    for cache in rank.cache:
        appends = [PageAppend(*append) for append in plan.appends if append[0] == cache.group.index]
        entries = cache.group.pages_for(CONTEXT - 1, CONTEXT + STEPS + 8)
        assert [(append.slot, append.index) for append in appends] == [(slot, at) for slot in range(BATCH) for at in entries]
        assert sorted(append.page for append in appends) == list(range(1, cache.pool.shape[1]))


class LeftOut(torch.nn.Module):
    """Gives back what it is given."""

    def forward(self, x: torch.Tensor, peers: object = None) -> torch.Tensor:
        return x


def test_a_product_left_out_is_seen(nano: Nano) -> None:
    """Planted fault: where a layer's MLP is left out, its stage counts a layer less, and its weights are missing."""
    rank = rank_of(nano("31b"), Single())
    whole = profile_of(rank)
    mlp, kind = rank.model.blocks[1].mlp, rank.geometry.layers[1].kind
    rank.model.blocks[1].mlp = LeftOut()
    left = profile_of(rank)
    (before, after) = ({stage.name: stage.count for stage in found.stages}[f"{kind} mlp.down"] for found in (whole, left))
    assert after == before - 1
    missing = sum(stage.bytes for stage in whole.stages) - sum(stage.bytes for stage in left.stages)
    assert missing == sum(p.nbytes for p in mlp.parameters())


def test_recording_changes_nothing(nano: Nano) -> None:
    """The same plans give the same results while modules are recorded as without; hooks are gone behind it."""
    rank = rank_of(nano("31b"), Single())
    plan = encode_plan(rank.admission(BATCH, CONTEXT, STEPS, 1))
    plain, _ = rank.run([plan])
    with recorded(rank.model):
        assert rank.run([plan])[0] == plain
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in rank.model.modules())
    assert "logits" not in vars(rank.model.head)


def seen_on_a_gpu(*events: tuple[str, float, float]) -> profile:
    """A profile with these events of a GPU, beside one of the CPU."""
    made = [SimpleNamespace(name=name, device_type=DeviceType.CUDA, time_range=SimpleNamespace(start=start, end=end))
            for name, start, end in events]  # fmt: skip
    launched = SimpleNamespace(name="cuLaunchKernelEx", device_type=DeviceType.CPU, cpu_parent=None)
    return cast(profile, SimpleNamespace(events=lambda: [*reversed(made), launched]))


def test_kernels_find_their_modules() -> None:
    """A GPU's scope spans the kernels that it started itself, and others' between them: the innermost one counts, and one that
    begins where another ends is in the second. What is in none comes before the model, or behind the head."""
    scopes = {"blocks.0", "blocks.0.mlp", "head"}
    seen = seen_on_a_gpu(
        ("_inputs", 0, 1), ("blocks.0", 1, 7), ("_allreduce_norm", 1, 2), ("blocks.0.mlp", 2, 5), ("_gemv", 2, 4), ("_gemv", 4, 5),
        ("_allreduce_norm", 5, 7), ("head", 7, 9), ("_gemv", 7, 9), ("_choose", 9, 10),
    )  # fmt: skip
    kernels, modules = spans_of(seen, scopes)
    names = ["_inputs", "_allreduce_norm", "_gemv", "_gemv", "_allreduce_norm", "_gemv", "_choose"]
    assert [kernel.name for kernel in kernels] == names
    assert modules_of(kernels, modules) == [
        "inputs", "blocks.0", "blocks.0.mlp", "blocks.0.mlp", "blocks.0", "head", "sampling",
    ]  # fmt: skip


def test_medians_of_runs() -> None:
    """Each kernel's median start and end over the runs, from its run's start; a run with a kernel missing is refused."""
    runs = [[Span(at, at + 1 + at / 100, "a"), Span(at + 2, at + 5, "b")] for at in (0.0, 100.0, 300.0)]
    flat = [kernel for run in runs for kernel in run]
    assert medians(flat, 3) == [Span(0.0, 2.0, "a"), Span(2.0, 5.0, "b")]
    with pytest.raises(RuntimeError, match="5 kernels in 3 runs"):
        medians(flat[:-1], 3)
    with pytest.raises(RuntimeError, match="some are missing"):
        medians([*flat[:-1], Span(302.0, 305.0, "c")], 3)


def test_only_what_fits_is_run(nano: Nano) -> None:
    """Cells are taken in order while one set of pools holds them all; one byte less and the last is left out."""
    groups = kv_groups(read_geometry(nano("31b")), 1, dtype="float32")
    cells = [(1, 64), (8, 64), (1, 1024), (8, 1024)]
    pages = most_pages(groups, cells[:3], STEPS)
    budget = sum(count * group.page_bytes for count, group in zip(pages, groups, strict=True))
    assert list(fitting(cells, groups, STEPS, budget)) == cells[:3]
    assert list(fitting(cells, groups, STEPS, budget - 1)) == cells[:2]
    for cell in cells[:3]:
        assert all(most >= own for most, own in zip(pages, most_pages(groups, [cell], STEPS), strict=True))


def test_impossible_requests_are_refused(nano: Nano) -> None:
    """Several ranks on a CPU, and too few steps to time, are refused in a sentence."""
    request = ProfileRequest(nano("31b"), 1, False, "cpu", "float32", (1,), (64,), STEPS, 64)
    assert request.config().max_len == 64 + STEPS + 1
    with pytest.raises(ConfigError, match="2 ranks are measured on 2 GPUs"):
        replace(request, tp=2).config()
    with pytest.raises(ConfigError, match="steps must be more than 14"):
        replace(request, steps=14).config()


def test_a_slow_module_is_seen(nano: Nano) -> None:
    """Planted fault: the full layers' output product sleeps a fifth of a second; its stage takes that, and no other does."""
    rank = rank_of(nano("31b"), Single())
    slow = next(layer.index for layer in rank.geometry.layers if layer.kind == "full")
    product = rank.model.blocks[slow].attention.o
    forward = product.forward

    def sleeping(*args: Any) -> Any:
        time.sleep(0.2)
        return forward(*args)

    product.forward = sleeping
    times = {stage.name: stage.us for stage in profile_of(rank).stages}
    assert max(times, key=times.__getitem__) == "full attention.o"
    assert 2e5 < times["full attention.o"] < 1e6


class Replays:
    """Stands in for captured steps: replaying one runs it."""

    def __init__(self, step: Callable[[StepSizes], object]) -> None:
        self._step = step

    def replay(self, stage: str, sizes: StepSizes, _: int) -> None:
        if stage == "forward":
            self._step(sizes)


def test_captured_steps(nano: Nano, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are those of captured steps, whose kernels must be those of the eager one; the step's is its replay's. Planted fault:
    a captured step of more."""
    rank = rank_of(nano("31b"), Single())
    monkeypatch.setattr(step_profile, "replay_ms", lambda *_: 0.5)
    rank.runner.graphs = cast(Any, Replays(rank.runner.repeat))
    monkeypatch.setattr(rank.runner, "run", eager_run(rank))
    profiled = profile_of(rank)
    assert profiled.step_ms == 0.5
    assert {"full attention.o", "head"} <= {stage.name for stage in profiled.stages if stage.us > 0}
    rank.runner.graphs = cast(Any, Replays(lambda sizes: (rank.runner.repeat(sizes), torch.zeros(1))))
    with pytest.raises(RuntimeError, match=r"saw \d+ kernels in a step that starts \d+"):
        profile_of(rank)


def eager_run(rank: BareRank) -> Callable[..., list[bytes]]:
    """`Runner.run` without graphs."""
    run = rank.runner.run

    def eager(plans: Any) -> list[bytes]:
        graphs, rank.runner.graphs = rank.runner.graphs, None
        try:
            return run(plans)
        finally:
            rank.runner.graphs = graphs

    return eager
