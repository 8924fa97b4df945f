"""A profile of a decode step: its nodes, their bytes and times, and how a device's kernels are told apart."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import engine_config
from engine.errors import ConfigError
from engine.geometry import kv_groups, read_geometry
from engine.plan import encode_plan
from engine.rank.builder import load_rank
from engine.rank.parallel import Parallel, Single
from engine.rank.profiling import bare_rank, step_profile
from engine.rank.profiling.bare_rank import BareRank, pages_held
from engine.rank.profiling.chrome_trace import chrome_trace
from engine.rank.profiling.decode_times import admit
from engine.rank.profiling.loopback import Loopback
from engine.rank.profiling.scopes import align, trace
from engine.rank.profiling.session import ProfileRequest, fitting, most_pages
from engine.rank.profiling.step_nodes import StepNode, StepProfile
from engine.rank.profiling.step_profile import KernelSpan, medians, profile_step
from tests.conftest import Nano

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
def test_the_nodes_of_a_step(nano: Nano, member: str, tp: int) -> None:
    """Every module that computes is a node, in the order of the model; weights, K and V are each read once; times add up."""
    rank = rank_of(nano(member), Single() if tp == 1 else Loopback(tp, CPU))
    found = profile_of(rank)
    names = [node.name for node in found.nodes if node.layer == 1]
    wanted = ["attention.qkv", "attention", "attention.o", "mlp", "mlp.down"]
    assert [name for name in names if name in wanted] == wanted
    assert [node.name for node in found.nodes if node.layer is None] == outside(member)
    dense = [p for name, p in rank.model.named_parameters() if "experts" not in name and "ple_tokens" not in name]
    matrices = sum(p.nbytes for p in dense if p.ndim > 1)
    rows = sum(node.weights for node in found.nodes if node.name.startswith("embedding.") and node.name.endswith("tokens"))
    experts = sum(node.weights for node in found.nodes if node.name == "experts")
    assert sum(node.weights for node in found.nodes) == matrices + rows + experts
    assert sum(node.keys for node in found.nodes) == rank.step_bytes(BATCH, CONTEXT) - rank.step_bytes(0, CONTEXT)
    assert sum(node.us for node in found.nodes) == pytest.approx(1e3 * found.step_ms, rel=0.1)
    assert found.hidden_share is None


def outside(member: str) -> list[str]:
    """Nodes outside the layers."""
    tables = ["embedding.tokens", "embedding.ple_tokens", "embedding 1", "embedding.ple_projection", "embedding 2"]
    return ["inputs", *(tables if member == "e2b" else ["embedding.tokens", "embedding"]), "head", "sampling"]


class LeftOut(torch.nn.Module):
    """Gives back what it is given."""

    def forward(self, x: torch.Tensor, peers: object = None) -> torch.Tensor:
        return x


def test_a_product_left_out_is_seen(nano: Nano) -> None:
    """Planted fault: where a layer's MLP is left out, its nodes and their weights are missing."""
    rank = rank_of(nano("31b"), Single())
    whole = profile_of(rank)
    mlp = rank.model.blocks[1].mlp
    rank.model.blocks[1].mlp = LeftOut()
    missing = sum(node.weights for node in whole.nodes) - sum(node.weights for node in profile_of(rank).nodes)
    assert missing == sum(p.nbytes for p in mlp.parameters())


def test_tracing_changes_nothing(nano: Nano) -> None:
    """The same plans give the same results while a step is traced as without; hooks are gone behind it."""
    rank = rank_of(nano("31b"), Single())
    plan = encode_plan(rank.admission(BATCH, CONTEXT, STEPS, 1))
    plain, _ = rank.run([plan])
    traced: list[bytes] = []
    stretches = trace(rank.model, lambda: traced.extend(rank.run([plan])[0]))
    assert traced == plain
    assert sum(stretch.operations.count("torch.mm") for stretch in stretches) == 4 * len(rank.geometry.layers) + 1
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in rank.model.modules())
    assert "logits" not in vars(rank.model)


def test_folding_keeps_sums(nano: Nano) -> None:
    """Layers of one kind fold into a row a node: counts are those of the layers, bytes and times the same in all."""
    found = profile_of(rank_of(nano("31b"), Single()))
    folded = found.folded()
    kinds = Counter(layer.kind for layer in found.layers)
    assert {node.name: count for count, node in folded}["full attention.o"] == kinds["full"]
    assert sum(count for count, _ in folded) == len(found.nodes)
    assert sum(node.bytes for _, node in folded) == sum(node.bytes for node in found.nodes)
    assert sum(node.us for _, node in folded) == pytest.approx(sum(node.us for node in found.nodes))


def profile_from(*nodes: StepNode, step_ms: float = 1.0) -> StepProfile:
    return StepProfile(1, 1024, RATE, step_ms, True, (), nodes)


def test_hidden_share() -> None:
    """Products of 60 us and others of 40 in a step of 70: three quarters of the others are hidden; in one of 100, nothing is."""
    nodes = (
        StepNode("qkv", None, ("_gemv",), weights=100, alone_us=60.0, us=55.0, end_us=55.0),
        StepNode("allreduce_norm", None, ("_allreduce_norm",), alone_us=40.0, us=15.0, start_us=30.0, end_us=70.0),
    )
    assert profile_from(*nodes, step_ms=0.070).hidden_share == pytest.approx(0.75)
    assert profile_from(*nodes, step_ms=0.100).hidden_share == pytest.approx(0.0)
    events = [event for event in chrome_trace(profile_from(*nodes))["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [("qkv", 0.0, 55.0), ("allreduce_norm", 30.0, 40.0)]
    assert len({event["tid"] for event in events}) == 2


@pytest.mark.parametrize("seed", range(20))
def test_kernels_find_their_operations(seed: int) -> None:
    """Of a random step, every kernel of ours falls to its operation, and torch's lie between their neighbours, in order."""
    operations, kernels, owners = drawn(random.Random(seed))
    found = align(operations, kernels)
    assert found == sorted(found)
    for place, (kernel, owner) in enumerate(zip(kernels, owners, strict=True)):
        if not kernel.startswith("at::"):
            assert found[place] == owner, (operations, kernels, found)
    single = [place for place, owner in enumerate(owners) if owners.count(owner) == 1]
    if len(single) == len(owners) == len(operations):
        assert found == owners


def drawn(rng: random.Random) -> tuple[list[str], list[str], list[int]]:
    """Operations, the kernels that they run, and which operation each kernel belongs to."""
    operations = [rng.choice(["_gemv", "_allreduce_norm", "_gemv", "torch.mm", "torch.add"]) for _ in range(rng.randint(1, 30))]
    kernels, owners = [], []
    for at, name in enumerate(operations):
        for _ in range(rng.randint(0, 2) if name.startswith("torch.") else 1):
            kernels.append(f"at::{name}" if name.startswith("torch.") else name)
            owners.append(at)
    return operations, kernels, owners


def test_kernels_of_another_step_are_refused() -> None:
    """Planted faults: two kernels of ours in each other's place, and one too many, are named."""
    assert align(["_gemv", "torch.mm", "_allreduce_norm"], ["_gemv", "cublas", "splitk", "_allreduce_norm"]) == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="kernel 0 of the step is _allreduce_norm, expected _gemv"):
        align(["_gemv", "_allreduce_norm"], ["_allreduce_norm", "_gemv"])
    with pytest.raises(ValueError, match="kernel 1 of the step is _gemv, expected the end"):
        align(["_gemv"], ["_gemv", "_gemv"])


def test_medians_of_runs() -> None:
    """Each kernel's median start and end over the runs, from its run's start; a run with a kernel missing is refused."""
    runs = [[KernelSpan("a", at, at + 1 + at / 100), KernelSpan("b", at + 2, at + 5)] for at in (0.0, 100.0, 300.0)]
    flat = [kernel for run in runs for kernel in run]
    assert medians(flat, 3) == [KernelSpan("a", 0.0, 2.0), KernelSpan("b", 2.0, 5.0)]
    with pytest.raises(RuntimeError, match="5 kernels in 3 runs"):
        medians(flat[:-1], 3)
    with pytest.raises(RuntimeError, match="some are missing"):
        medians([*flat[:-1], KernelSpan("c", 302.0, 305.0)], 3)


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


def test_wall_times_see_a_slow_module(nano: Nano) -> None:
    """Planted fault: a product that sleeps a fifth of a second is the node that takes it."""
    rank = rank_of(nano("31b"), Single())
    slow = rank.model.blocks[2].mlp.down
    slow.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    slowest = max(profile_of(rank).nodes, key=lambda node: node.us)
    assert (slowest.layer, slowest.us > 1.9e5) == (2, True)


class Replays:
    """Stands in for captured graphs: a replay is a plan more."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step

    def replay(self, stage: str, rows: int) -> None:
        if stage == "forward":
            self._step()


@pytest.mark.parametrize("captured", [True, False])
def test_the_gpus_way_on_a_cpu(nano: Nano, monkeypatch: pytest.MonkeyPatch, *, captured: bool) -> None:
    """With a profiler that sees each operation take 2 us alone and 1 us more a step: times reach their nodes, and add up."""
    rank = rank_of(nano("31b"), Single())
    plans = iter(admit(rank, BATCH, CONTEXT, STEPS, 1))

    def step() -> None:
        graphs, rank.runner.graphs = rank.runner.graphs, None
        rank.run([next(plans)])
        rank.runner.graphs = graphs

    def kernels(run: Callable[[], object]) -> list[KernelSpan]:
        names = [name for stretch in trace(rank.model, run) for name in stretch.operations]
        far = 1.0 if captured and not apart.pop() else 2.0
        return [KernelSpan(name, at * far, at * far + 2.0) for at, name in enumerate(names)]

    apart = [False, captured]
    monkeypatch.setattr(rank.runner, "repeat", lambda rows: step())
    rank.runner.graphs = Replays(step) if captured else None  # type: ignore[assignment]
    monkeypatch.setattr(rank.runner, "graphs_of", lambda sizes: Replays(step))
    monkeypatch.setattr(step_profile, "_kernels", kernels)
    monkeypatch.setattr(step_profile, "replay_ms", lambda *_: 0.5)
    nodes, step_ms = step_profile._on_gpu(rank, BATCH, CONTEXT, STEPS)
    count = sum(len(node.kernels) for node in nodes)
    assert all(node.alone_us == pytest.approx(2.0 * len(node.kernels)) for node in nodes)
    if captured:
        assert step_ms == 0.5
        assert sum(node.us for node in nodes) == pytest.approx(count + 1.0)
        found = replace(profile_from(*nodes), step_ms=step_ms)
        products = sum(node.alone_us for node in nodes if node.weights)
        assert found.hidden_share == pytest.approx(1 - (500 - products) / (2.0 * count - products))
    else:
        assert sum(node.us for node in nodes) == pytest.approx(2.0 * count) == pytest.approx(1e3 * step_ms)
