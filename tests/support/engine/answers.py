"""What a scheduler and one rank make of requests, step by step, with drafts and without."""

import json
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any
from unittest import mock

import msgspec

from engine.core.draft_policy import DraftPolicy
from engine.core.loop import Intake, make_scheduler, read_vocabulary
from engine.core.masks import Masks
from engine.logit_adjustments import LogitAdjustments
from engine.plan import StepPlan, StepResult
from engine.protocol import AbortReason, FinishReason, GenerateRequest, Grammar, Output, SamplingParams, pack_tokens
from engine.step_masks import decode_masks
from tests.support.engine.schemas import members

MAX_TOKENS = (6, 45, 45, 16)
HEAD = '%llguidance {"no_forcing": true}\n'
TRIGGER, ENDS = 864, (1, 106, 50)  # the trigger is a token that the last request gives
Answers = dict[int, list[Output]]
RunStep = Callable[[StepPlan, bytes], StepResult]


class AtOnce(Executor):
    """In place of a pool of threads: what is submitted is done."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> "Future[Any]":
        future = Future()
        future.set_result(work(*args, **options))
        return future


@mock.patch("engine.core.masks.ThreadPoolExecutor", AtOnce)
@mock.patch("engine.core.masks.SLOW_S", math.inf)
def answers(
    step: RunStep,
    config: Any,
    requests: Sequence[GenerateRequest | list[GenerateRequest]],
    every: int = 3,
    aborted: Sequence[int] = (),
    drafting: DraftPolicy | None = None,
) -> tuple[Answers, list[StepPlan], int]:
    """Every output of each request, the plans, and preemptions; two plans are out at a time, and a request, or a list of some,
    comes `every` steps. No plan depends on how long a grammar or a mask takes.

    aborted: requests that are given up with their eighth token
    """
    scheduler = make_scheduler(config, config.pages)
    scheduler._draft_policy = scheduler._results._draft_policy = drafting or scheduler._draft_policy
    masks = Masks(scheduler.requests, read_vocabulary(config), scheduler.config.widest)
    out = deque()
    waiting, plans, given = deque(map(_wave, requests)), [], defaultdict[int, list[Output]](list)
    made = {}
    while waiting or scheduler.requests.unfinished or out:
        if waiting and (len(plans) % every == 0 or not scheduler.requests.unfinished):
            for asked in waiting.popleft():
                Intake(scheduler.requests, masks).add(asked)
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


def _wave(asked: GenerateRequest | list[GenerateRequest]) -> list[GenerateRequest]:
    return asked if isinstance(asked, list) else [asked]


def texts(given: Answers) -> dict[int, tuple[list[int], FinishReason | None, int]]:
    """Tokens, the finish and the number of logprobs of each answer."""
    return {
        number: ([token for one in outputs for token in one.tokens], outputs[-1].finish, sum(len(one.logprobs) for one in outputs))
        for number, outputs in given.items()
    }


def request(number: int, max_tokens: Sequence[int] = MAX_TOKENS) -> GenerateRequest:
    """Greedy, sampled and filtered requests of 5 to 191 tokens, some with logprobs, some that a stop id may end by surprise."""
    length = (30, 28, 60, 140, 5)[number % 5]
    params = SamplingParams(
        max_tokens=max_tokens[number % 4],
        temperature=(0.0, 1.0, 0.8)[number % 3],
        top_k=20 if number % 3 == 2 else 0,
        top_p=0.9 if number % 3 == 2 else 1.0,
        seed=number * 0x1234567890AB - 5,
        stop_ids=tuple(range(0, 1000, 16)) if number % 4 == 3 else (),
        min_tokens=3 if number % 4 == 3 else 0,
        logprobs=3 if number % 4 == 0 else None,
    )
    prompt = pack_tokens((number * 31 + at * 7) % 900 + 10 for at in range(length))
    return GenerateRequest(id=number, prompt=prompt, params=params)


def constrained(number: int) -> GenerateRequest:
    """The same with a grammar: an object by a random schema; the fourth writes a word behind its trigger."""
    rules = Grammar(f"{HEAD}start: %json {json.dumps(members(random.Random(number), 1))}\n")
    if number % 4 == 3:
        rules = Grammar(f"{HEAD}start: /[a-z]{{3,9}}/ <[49]>\n", trigger=TRIGGER)
    asked = request(number)
    params = msgspec.structs.replace(asked.params, grammar=rules, stop_ids=ENDS, min_tokens=0, max_tokens=12, temperature=0.7)
    return msgspec.structs.replace(asked, params=params)


def requests() -> list[GenerateRequest]:
    """Greedy, sampled, filtered, with logprobs, stop ids, penalties and bad words, and two with grammars."""
    asked = [request(number, (40, 33, 25, 40)) for number in range(6)]
    penalties = LogitAdjustments(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4)
    for number in (1, 4):
        params = msgspec.structs.replace(asked[number].params, adjustments=penalties)
        asked[number] = msgspec.structs.replace(asked[number], params=params)
    return [*asked, constrained(7), constrained(9)]
