"""Steps of one rank on a GPU: captured ones give the CPU's tokens and the eager step's bits, known launches give Triton's."""

from dataclasses import dataclass
from typing import Any

import pytest

from deploy.models.resolve import resolve
from engine.plan import StepPlan, StepResult
from engine.rank.builder import build
from engine.rank.runner import Runner
from kernels import launch as launcher
from kernels.relaunch import Variant
from tests.golden.record import load
from tests.support.engine.plan_stream import logprob_error
from tests.support.engine.plans import encoded
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import PAGES, config_of, tokens_of

pytestmark = pytest.mark.gpu


def runner(dtype: str, member: str = "31b", **changes: object) -> Runner:
    """A nano model on the GPU, its decode steps captured unless `graphs` is False."""
    made = build(single(config_of(resolve(f"nano:{member}"), 1, **{"device": "cuda", "dtype": dtype, **changes})), PAGES)
    if made.capturable:
        made.capture()
    return made


def replay(made: Runner, plans: list[StepPlan]) -> list[StepResult]:
    return [run(made, plan) for plan in plans]


def test_fp32_gives_the_cpus_tokens() -> None:
    """The committed stream, decoded by graphs in fp32, gives the committed tokens and, to 1e-3, logprobs."""
    plans, expected = load()
    made = runner("float32")
    assert made.capturable
    results = replay(made, plans)
    print(f"logprob error {logprob_error(results, expected):.1e}")
    assert tokens_of(results) == tokens_of(expected)
    assert logprob_error(results, expected) < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("member", ["31b", "26b-a4b", "e2b"])
def test_a_graph_gives_the_eager_steps_bits(member: str, dtype: str) -> None:
    """With and without graphs every step's tokens and final hidden rows are the same bits; a changed page changes them."""
    plans, _ = load()
    captured, eager, wrong = runner(dtype, member), runner(dtype, member, graphs=False), runner(dtype, member)
    assert captured.capturable
    assert encoded(replay(captured, plans)) == encoded(replay(eager, plans))
    assert captured.state_hash == eager.state_hash
    replay(wrong, plans[:30])
    next(iter(wrong.slots.cache)).pool[:, 1:] *= 1.01
    replay(wrong, plans[30:])
    assert wrong.state_hash != captured.state_hash


@pytest.mark.parametrize("member", ["31b", "26b-a4b", "e2b"])
def test_known_launches_give_tritons_bits(member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps launched kernel by kernel give the same tokens and final hidden rows past Triton's Python as through it; with one known
    launch left out they do not."""
    plans, _ = load()
    started, omitted = replay_known(monkeypatch, member, plans), replay_known(monkeypatch, member, plans, omit="decode_kernel")
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "launch_key", lambda *_: None)
        through = replay_known(monkeypatch, member, plans)
    assert (encoded(started.results), started.state_hash) == (encoded(through.results), through.state_hash)
    assert omitted.state_hash != through.state_hash
    assert through.starts == 0
    assert started.starts > 20 * len(plans), started.starts


@dataclass(frozen=True)
class Replayed:
    results: list[StepResult]
    state_hash: int
    starts: int


def replay_known(
    monkeypatch: pytest.MonkeyPatch, member: str, plans: list[StepPlan], omit: str | None = None, device: str = "cuda"
) -> Replayed:
    """The plans by eager steps; the first known launch of the kernel `omit` is left out."""
    made, start, launched = runner("bfloat16", member, graphs=False, device=device), Variant.start, []

    def counted(variant: Variant, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        launched.append(variant.compiled.name)
        if variant.compiled.name != omit or omit in launched[:-1]:
            start(variant, grid, args)

    with monkeypatch.context() as patch:
        patch.setattr(Variant, "start", counted)
        results = replay(made, plans)
    return Replayed(results, made.state_hash, len(launched))
