"""What one tenant's requests show of another's: nothing, by no figure and no time, whatever both ask."""

import random
from dataclasses import dataclass, field

import pytest

from engine.core import requests
from engine.core.prefix import root_key
from engine.protocol import AbortReason, GenerateRequest, Output, SamplingParams
from tests.support.engine.draws import mixed
from tests.support.engine.kvmachine import KVMachine
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of, two_groups
from tests.support.engine.worlds import TIMES

pytestmark = pytest.mark.pure

MAX_LEN, SLOTS, STOP = 96, 4, 7
GROUPS = two_groups(9)
REQUESTS, SHIFT = 24, 1000


@dataclass
class Seen:
    """What a tenant is told, each with the step of it; `cached`: tokens that its requests found, `hits`: that the other's did."""

    told: list[tuple[int, Output]] = field(default_factory=list)
    started: list[tuple[int, int]] = field(default_factory=list)
    cached: int = 0
    hits: int = 0
    preemptions: int = 0


def asked(seed: int, shift: int) -> list[GenerateRequest]:
    """Requests of two tenants, every second one's, with beginnings in common; `shift` is added to the first tenant's tokens."""
    rng = random.Random(seed)
    common = [[STOP if rng.random() < 0.1 else rng.randint(10, 99) for _ in range(60)] for _ in range(2)]
    found = []
    for number in range(REQUESTS):
        length = rng.choice((2, 2, 3, 9, 25, 60))
        tokens = rng.choice(common)[: rng.choice((length, length // 2))]
        tokens += [rng.randint(10, 99) for _ in range(length - len(tokens))]
        tenant = rng.randrange(2)
        shifted = [token + shift * (tenant == 0 and token != STOP) for token in tokens]
        params = SamplingParams(
            max_tokens=rng.randint(1, 20), stop_ids=(STOP,), seed=number, prompt_logprobs=rng.choice((None, 0))
        )  # fmt: skip
        again = [shifted] * rng.choice((1, 1, 2))
        found += [(tenant, params, prompt) for prompt in again]
    return [
        request_of(2 * at + tenant, prompt, params, salt=f"1:{tenant}")
        for at, (tenant, params, prompt) in enumerate(found)
    ]


def observed(seed: int, shift: int) -> Seen:
    """What the second tenant sees."""
    rng = random.Random(seed)
    pages = (rng.choice((12, 40)), rng.choice((24, 60)))
    target = rng.choice((None, 8.0))
    scheduler = scheduler_of(
        SchedulerConfig(GROUPS, pages, SLOTS, MAX_LEN, 16, prefix_cache=True, step_times=TIMES, tpot_target_ms=target)
    )
    machine = KVMachine(GROUPS, pages, SLOTS, MAX_LEN, lambda prefix, position, seed: 500 + mixed(position, seed) % 40)
    waiting, seen, step = asked(seed, shift), Seen(), 0
    while waiting or scheduler.requests.unfinished or scheduler.in_flight:
        step += 1
        if waiting and rng.random() < 0.9:
            scheduler.requests.add(waiting.pop(0))
        if rng.random() < 0.02:
            scheduler.requests.abort(rng.randrange(2 * REQUESTS), AbortReason.client_gone)
        while scheduler.in_flight < 2 and (plan := scheduler.schedule()) is not None:
            machine.submit(plan)
        if scheduler.in_flight:
            scheduler.commit(machine.result())
        for output in scheduler.requests.drain():
            if output.id % 2:
                seen.told.append((step, output))
                seen.cached += output.cached
        seen.started += [(step, request) for request in scheduler.requests.drain_started() if request % 2]
    seen.hits = scheduler.requests.counters.hit_tokens - seen.cached
    seen.preemptions = scheduler.requests.counters.preemptions
    return seen


def differences(seeds: range) -> int:
    """In how many cases the second tenant sees by its own requests whether the first has asked alike."""
    return sum(
        (alike.told, alike.started) != (other.told, other.started)
        for alike, other in ((observed(seed, 0), observed(seed, SHIFT)) for seed in seeds)
    )


def test_a_tenant_learns_nothing_of_another() -> None:
    """Its answers, their steps, what it is told of cached tokens and of its prompts' logprobs are the same, whether others ask just
    that or something else of the same lengths; both find prefixes of their own, and pages are short."""
    seeds = range(8)
    found = [observed(seed, 0) for seed in seeds]
    assert min(sum(getattr(seen, name) for seen in found) for name in ("cached", "hits", "preemptions")) > 10
    assert differences(seeds) == 0


def unsalted(salt: str, adapter: int) -> bytes:
    """Planted fault: keys without their salt."""
    return root_key("")


def test_keys_without_salts_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own requests a tenant sees then in most cases what others ask."""
    monkeypatch.setattr(requests, "root_key", unsalted)
    assert differences(range(3, 8)) > 2
