"""Who is served when: the shares of a step's budget, and what they make of first tokens and running streams in virtual time."""

import random
from dataclasses import dataclass
from statistics import mean

import pytest

from engine.core.policy import POLICIES, StepTimes, in_order, shortest_beside_oldest
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.geometry import KVGroup
from engine.plan import ResultRow, StepResult
from engine.protocol import GenerateRequest, SamplingParams, pack_tokens
from tests.support.engine.paced_steps import BASE_MS, DECODE_MS, TIMES, Pace, p99, pace

pytestmark = pytest.mark.pure

STREAMS = 32
QUIET_TPOT_MS = BASE_MS + DECODE_MS * STREAMS


@pytest.mark.parametrize("name", list(POLICIES))
def test_shares_are_within_what_is_asked_and_there(name: str) -> None:
    """Nobody gets more than it can use, all together no more than the budget, and the first half of it if it can use that."""
    rng = random.Random(1)
    for _ in range(3000):
        remaining = [rng.choice((1, 5, 100, 3000)) + rng.randint(0, 9) for _ in range(rng.randint(0, 6))]
        budget, queued = rng.choice((1, 7, 64, 2048)), rng.random() < 0.5
        shares = POLICIES[name].shares(remaining, budget, queued)
        assert len(shares) == len(remaining)
        assert all(0 <= share <= wanted for share, wanted in zip(shares, remaining, strict=True))
        assert sum(shares) <= budget
        if not remaining:
            continue
        assert shares[0] >= min(remaining[0], budget // 2), "the oldest advances"
        if not queued and name == "arrival":
            assert sum(shares) == min(budget, sum(remaining))


def test_the_shortest_go_beside_the_oldest() -> None:
    """Half of the budget is the oldest's while others want the rest, shortest first; newcomers have a quarter."""
    assert shortest_beside_oldest([10_000, 5000, 100, 300], 1000, False) == [500, 100, 100, 300]
    assert shortest_beside_oldest([10_000, 5000, 100, 300], 1000, True) == [500, 0, 100, 150]
    assert shortest_beside_oldest([10_000], 1000, True) == [750]
    assert shortest_beside_oldest([10_000], 1000, False) == [1000]
    assert shortest_beside_oldest([100, 200], 1000, True) == [100, 200]
    assert in_order([10_000, 100], 1000, True) == [1000, 0]


def test_the_budget_keeps_a_step_below_its_target() -> None:
    """The most tokens that fit, between measured points and beyond them; never fewer than a sixteenth, never more than all."""
    times = StepTimes(((1, 5.0), (101, 15.0)), ((1, 5.0), (101, 7.0), (1101, 27.0)))
    assert times.prefill_budget(1, 7.0, 2048) == 128  # a sixteenth: 101 would be in time
    assert times.prefill_budget(1, 7.0, 64) == 64
    assert times.prefill_budget(1, 17.0, 2048) == 601
    assert times.prefill_budget(51, 22.0, 2048) == 601
    assert times.prefill_budget(1, 1000.0, 2048) == 2048
    assert times.prefill_budget(500, 10.0, 2048) == 128


@dataclass(frozen=True)
class Latencies:
    """First tokens of short prompts and pace of running streams, ms; prompt tokens computed."""

    ttft_p99: float
    tpot: float
    prefilled: int
    answered: int


def latencies(policy: str, *, longs: bool, tpot_target_ms: float | None, seconds: float = 30.0) -> Latencies:
    """Thirty-two streams run; 100-token prompts come at random; with `longs` three 100k prompts are always on their way."""
    rng, world = random.Random(7), pace(policy, tpot_target_ms=tpot_target_ms)
    streams = [world.arrive(0, 200, 10**5) for _ in range(STREAMS)]
    at, shorts, long = 2000.0, [], []
    while at < 1000 * seconds:
        at += rng.expovariate(1 / 250)
        shorts.append(world.arrive(at, 100, 20))

    def refill(world: Pace) -> None:
        while longs and world.now > 1000 and sum(not world.clocks[each].tokens for each in long) < 3:
            long.append(world.arrive(world.now, 100_000, 5))

    world.run(1000 * seconds, refill)
    answered = [world.clocks[each] for each in shorts if world.clocks[each].tokens]
    tpot = mean(world.clocks[each].tpot for each in streams)
    return Latencies(p99([clock.ttft for clock in answered]), tpot, world.prefilled, len(answered))


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    """At 31B's step times and a TPOT target: TTFT p99 at most 3 x quiet, TPOT 1.5 x, throughput within 3 % of arrival order's."""
    target = 1.5 * QUIET_TPOT_MS
    quiet = latencies("fair", longs=False, tpot_target_ms=target)
    busy = latencies("fair", longs=True, tpot_target_ms=target)
    ordered = latencies("arrival", longs=True, tpot_target_ms=target)
    print(f"quiet {quiet}\nbusy {busy}\nin order of arrival {ordered}")
    assert busy.ttft_p99 <= 3 * quiet.ttft_p99
    assert busy.tpot <= 1.5 * quiet.tpot
    assert busy.prefilled >= 0.97 * ordered.prefilled
    assert ordered.ttft_p99 > 30 * quiet.ttft_p99, "the fault beside it: in order of arrival they wait for seconds"


def test_without_a_target_streams_stall() -> None:
    """The fault beside it: with the whole budget in every step running streams take several times their quiet pace."""
    assert latencies("fair", longs=True, tpot_target_ms=None, seconds=10).tpot > 4 * QUIET_TPOT_MS


def test_priorities_come_first_and_are_preempted_last() -> None:
    """Of those who wait the lowest number goes first, whatever the order of arrival."""
    world = pace("fair", slots=1)
    numbers = [world.arrive(0, 3000, 3, priority) for priority in (0, 5, -1, 2)]
    world.run(1e6)
    first = sorted(numbers, key=lambda number: world.clocks[number].first)
    assert first == [numbers[2], numbers[0], numbers[3], numbers[1]]


def small(policy: str) -> Scheduler:
    """Full pages for sixteen; nothing is cached."""
    groups = (KVGroup(0, "sliding", (0,), 1, 256, 8, 4), KVGroup(1, "full", (1,), 1, 512, None, 4))
    return Scheduler(SchedulerConfig(groups, (60, 17), 4, 64, 16, policy=policy))


@pytest.mark.parametrize("policy", ["fair", "arrival"])
def test_a_head_without_pages_blocks_nobody_for_long(policy: str) -> None:
    """While one that needs most of the pool waits, small ones pass it, a bounded number of times; in order of arrival none does."""
    scheduler, started, count = small(policy), [], 0

    def ask(prompt: int, tokens: int) -> None:
        nonlocal count
        count += 1
        scheduler.add(0, GenerateRequest(id=count, prompt=pack_tokens([count] * prompt), params=SamplingParams(max_tokens=tokens)))

    ask(20, 40)
    started += step(scheduler)
    ask(50, 2)  # the big one: thirteen pages, while the first has five of sixteen
    passed = 0
    for _ in range(400):
        ask(3, 2)
        started += step(scheduler)
        if 2 in started:
            break
    passed = started.index(2) - 1
    print(f"{policy}: {passed} passed it")
    assert passed <= POLICIES[policy].overtaking + 4
    assert (passed > 5) == (policy == "fair")


def step(scheduler: Scheduler) -> list[int]:
    """One plan and its result; who started."""
    plan = scheduler.schedule()
    numbers = {sequence.slot: sequence.number for sequence in scheduler.running}
    if plan is not None:
        scheduler.commit(StepResult(plan.step, [ResultRow(slot, numbers[slot], (7,)) for slot in plan.result_slots]))
    for _ in scheduler.drain():
        pass
    return [request for _, request in scheduler.drain_started()]


def test_times_are_the_simulations_own() -> None:
    """The table that the policy reads says what the virtual ranks take."""
    assert TIMES.prefill_budget(STREAMS, QUIET_TPOT_MS + 22 * 0.022, 2048) == pytest.approx(128)
