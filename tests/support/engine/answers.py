"""What a scheduler and one rank make of requests, step by step, with drafts and without."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.core.drafting import Drafting
from engine.core.loop import make_scheduler, read_vocabulary
from engine.core.masks import Masks
from engine.logit_adjustments import LogitAdjustments
from engine.plan import StepPlan, StepResult
from engine.protocol import AbortReason, FinishReason, GenerateRequest, Output
from engine.step_masks import decode_masks
from tests.support.engine.recording import constrained, request

Answers = dict[int, list[Output]]
RunStep = Callable[[StepPlan, bytes], StepResult]


def answers(
    step: RunStep,
    config: Any,
    requests: Sequence[GenerateRequest],
    every: int = 3,
    aborted: Sequence[int] = (),
    drafting: Drafting | None = None,
) -> tuple[Answers, list[StepPlan], int]:
    """Every output of each request, the plans, and preemptions; two plans are out at a time, and a request comes `every` steps.

    aborted: requests that are given up with their eighth token
    """
    scheduler = make_scheduler(config, config.pages)
    if drafting is not None:
        scheduler._drafting = scheduler._results._drafting = drafting
    masks = Masks(scheduler.requests, read_vocabulary(config), scheduler.config.widest)
    out: deque[StepPlan] = deque()
    waiting, plans, given = deque(requests), [], defaultdict[int, list[Output]](list)
    made: dict[int, bytes] = {}
    while waiting or scheduler.requests.unfinished or out:
        if waiting and (len(plans) % every == 0 or not scheduler.requests.unfinished):
            asked = waiting.popleft()
            masks.add(asked) if asked.params.grammar else scheduler.requests.add(asked)
        masks.advance()
        while len(out) < 2 and (plan := scheduler.schedule()) is not None:
            out.append(plan)
            plans.append(plan)
            if plan.masked:
                masks.planned(plan)
        for data in masks.due():
            made[decode_masks(data).step] = data
        if out:
            plan = out.popleft()
            scheduler.commit(step(plan, made.get(plan.step, b"")))
            masks.advance()
        for output in scheduler.requests.drain():
            given[output.id].append(output)
            if output.id in aborted and sum(len(one.tokens) for one in given[output.id]) >= 8:
                scheduler.requests.abort(output.id, AbortReason.client_gone)
    return given, plans, scheduler.requests.counters.preemptions


def texts(given: Answers) -> dict[int, tuple[list[int], FinishReason | None, int]]:
    """Tokens, the finish and the number of logprobs of each answer."""
    return {
        number: ([token for one in outputs for token in one.tokens], outputs[-1].finish, sum(len(one.logprobs) for one in outputs))
        for number, outputs in given.items()
    }


def requests() -> list[GenerateRequest]:
    """Greedy, sampled, filtered, with logprobs, stop ids, penalties and bad words, and two with grammars."""
    asked = [request(number, (40, 33, 25, 40)) for number in range(6)]
    penalties = LogitAdjustments(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4)
    for number in (1, 4):
        params = msgspec.structs.replace(asked[number].params, adjustments=penalties)
        asked[number] = msgspec.structs.replace(asked[number], params=params)
    return [*asked, constrained(7), constrained(9)]
