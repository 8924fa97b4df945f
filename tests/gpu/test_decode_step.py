"""Steps of one rank on a GPU: captured ones give the CPU's tokens and the eager step's bits."""

import pytest

from deploy.models.resolve import resolve
from engine.plan import StepPlan, StepResult
from engine.rank.builder import build
from engine.rank.runner import Runner
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
