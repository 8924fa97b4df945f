"""Small schedulers in tests: their two KV groups, requests, results of one token a row, and plans run to the end of what waits."""

from collections.abc import Iterable
from typing import Any

from engine.core.scheduler import Scheduler
from engine.geometry import KVGroup
from engine.plan import ResultRow, StepPlan, StepResult
from engine.protocol import GenerateRequest, SamplingParams, pack_tokens
from tests.support.engine.kvmachine import KVMachine
from tests.support.engine.plans import result_of


def two_groups(window: int = 8, page: int = 4, kv_heads: int = 1) -> tuple[KVGroup, KVGroup]:
    """A layer with a window, and one without."""
    return KVGroup(0, "sliding", (0,), kv_heads, 256, window, page), KVGroup(1, "full", (1,), 1, 512, None, page)


def request_of(number: int, prompt: Iterable[int], params: SamplingParams | int = 1, **fields: Any) -> GenerateRequest:
    """Of these tokens; `params` as a number: at most so many tokens."""
    sampling = SamplingParams(max_tokens=params) if isinstance(params, int) else params
    return GenerateRequest(id=number, prompt=pack_tokens(prompt), params=sampling, **fields)


def one_token_each(scheduler: Scheduler, plan: StepPlan, token: int = 7) -> StepResult:
    """A result in which every row of a plan, whose sequences still run, gives this token."""
    numbers = {sequence.slot: sequence.number for sequence in scheduler.requests.running}
    return result_of(plan.step, [ResultRow(slot, numbers[slot], (token,)) for slot in plan.result_slots])


def step(scheduler: Scheduler, machine: KVMachine) -> StepPlan:
    """Plan a step, run it, and commit its result."""
    plan = scheduler.schedule()
    assert plan is not None
    machine.submit(plan)
    scheduler.commit(machine.result())
    return plan


def finish(scheduler: Scheduler, machine: KVMachine) -> None:
    """Serve what waits, to its end."""
    while (plan := scheduler.schedule()) is not None:
        machine.submit(plan)
        scheduler.commit(machine.result())
