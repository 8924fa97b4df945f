"""Who is served when: the shares of a step's budget, and what they make of first tokens and running streams in virtual time."""

import random
from dataclasses import dataclass
from statistics import mean

import pytest

from engine.core.policy import POLICIES, in_order, prefill_tokens, shortest_beside_oldest
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.core.sequence import Sequence
from engine.geometry import KVGroup
from engine.lifeline import StepTimes
from engine.plan import PrefillChunk, ResultRow, StepPlan, StepResult
from engine.protocol import GenerateRequest, SamplingParams, pack_tokens
from tests.support.engine.paced_steps import BASE_MS, DECODE_MS, TIMES, Pace, p99, pace, step_ms

pytestmark = pytest.mark.pure

STREAMS = 32
QUIET_TPOT_MS = BASE_MS + DECODE_MS * STREAMS


@pytest.mark.parametrize("name", list(POLICIES))
def test_shares_are_within_what_is_asked_and_there(name: str) -> None:
    """Nobody gets more than it wants, all together the budget if they want that, and the first a quarter of it if it wants that."""
    rng = random.Random(1)
    for _ in range(3000):
        wanted = [rng.choice((1, 5, 100, 3000)) + rng.randint(0, 9) for _ in range(rng.randint(0, 6))]
        budget = rng.choice((1, 7, 64, 2048))
        shares = POLICIES[name].shares(wanted, budget)
        assert len(shares) == len(wanted)
        assert all(0 <= share <= each for share, each in zip(shares, wanted, strict=True))
        assert sum(shares) == min(budget, sum(wanted))
        if wanted:
            assert shares[0] >= min(wanted[0], max(1, budget // 4)), "the oldest advances"


def test_the_shortest_go_beside_the_oldest() -> None:
    """A quarter of the budget is the oldest's, and what shorter ones leave of the rest."""
    assert shortest_beside_oldest([10_000, 5000, 100, 300], 1000) == [250, 350, 100, 300]
    assert shortest_beside_oldest([10_000, 12_000, 100, 300], 1000) == [600, 0, 100, 300]
    assert shortest_beside_oldest([10_000], 1000) == [1000]
    assert shortest_beside_oldest([100, 10_000, 200], 1000) == [100, 700, 200]
    assert shortest_beside_oldest([], 1000) == []
    assert in_order([10_000, 100], 1000) == [1000, 0]


def test_the_budget_keeps_a_step_below_its_target() -> None:
    """The most tokens that fit, between measured points and beyond them; never fewer than one in 32, never more than all."""
    times = StepTimes(((1, 5.0), (101, 15.0)), ((1, 5.0), (101, 7.0), (1101, 27.0)))
    assert prefill_tokens(times, 1, 0, 0, 6.0, 2048) == 64  # one in 32: 50 would be in time
    assert prefill_tokens(times, 1, 0, 0, 7.0, 64) == 64
    assert prefill_tokens(times, 1, 0, 0, 17.0, 2048) == 600
    assert prefill_tokens(times, 51, 0, 0, 22.0, 2048) == 600
    assert prefill_tokens(times, 1, 0, 0, 1000.0, 2048) == 2048
    assert prefill_tokens(times, 500, 0, 0, 10.0, 2048) == 64
    longer = StepTimes(times.decodes, times.prefills, context_ms=0.001)
    assert prefill_tokens(longer, 51, 5000, 0, 22.0, 2048) == 350  # 5 ms of context are 250 tokens


def test_the_budget_fills_whole_tiles() -> None:
    """At 31B's times a step takes its target at most, and with a tile more it would take longer; no tile is begun in vain."""
    rng = random.Random(3)
    for _ in range(2000):
        decodes, behind, target = rng.randint(0, 200), rng.choice((0, 0, 30_000, 100_000)), rng.uniform(5, 60)
        tokens = prefill_tokens(TIMES, decodes, 0, behind, target, 2048 - decodes)
        assert tokens <= 2048 - decodes
        if tokens < 2048 - decodes:
            assert step_ms(filled(decodes, tokens + TIMES.tile, behind)) > target
        if tokens > (2048 - decodes) // 32:
            assert step_ms(filled(decodes, tokens, behind)) <= target + 1e-6
            assert (decodes + tokens) % TIMES.tile == 0 or tokens == 2048 - decodes


def filled(decodes: int, tokens: int, behind: int) -> StepPlan:
    """A step of so many rows, and so many tokens behind its chunk."""
    end = behind + tokens
    return StepPlan(1, decodes=list(range(decodes)), chunks=[PrefillChunk(decodes, behind, end, end)])


@dataclass(frozen=True)
class Latencies:
    """First tokens of short prompts (of those without one, how long they have waited) and pace of running streams, ms."""

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
    clocks = [world.clocks[each] for each in shorts]
    waited = [(clock.first or world.now) - clock.came for clock in clocks]
    tpot = mean(world.clocks[each].tpot for each in streams)
    return Latencies(p99(waited), tpot, world.prefilled, sum(clock.tokens > 0 for clock in clocks))


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    """At 31B's step times and a TPOT target: TTFT p99 at most 2 x quiet, TPOT 1.5 x, throughput within 3 % of arrival order's."""
    target = 1.5 * QUIET_TPOT_MS
    quiet = latencies("fair", longs=False, tpot_target_ms=target)
    busy = latencies("fair", longs=True, tpot_target_ms=target)
    ordered = latencies("arrival", longs=True, tpot_target_ms=target)
    print(f"quiet {quiet}\nbusy {busy}\nin order of arrival {ordered}")
    assert busy.ttft_p99 <= 2 * quiet.ttft_p99
    assert busy.tpot <= 1.5 * quiet.tpot
    assert busy.prefilled >= 0.97 * ordered.prefilled
    assert ordered.ttft_p99 > 30 * quiet.ttft_p99, "the fault beside it: in order of arrival they wait for seconds"


def test_without_a_target_streams_stall() -> None:
    """The fault beside it: with the whole budget in every step running streams take several times their quiet pace."""
    assert latencies("fair", longs=True, tpot_target_ms=None, seconds=10).tpot > 4 * QUIET_TPOT_MS


def prompt_ms(streams: int) -> float:
    """Milliseconds a prompt token, while so many streams run beside prompts of 5000 tokens, one behind the other."""
    world = pace("fair")
    for _ in range(streams):
        world.arrive(0, 1, 10**4)
    world.run(500)
    began, before = world.now, world.prefilled
    for _ in range(45):
        world.arrive(world.now, 5000, 5)
    world.run(began + 5000)
    return (world.now - began) / (world.prefilled - before)


def test_decode_rows_count_in_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty streams beside a prompt fill the budget's tiles with it, not one more; counted apart each step pays for one more."""
    shared = prompt_ms(50)
    monkeypatch.setattr(Sequence, "decodable", False)
    apart = prompt_ms(50)
    print(f"a prompt token beside 50 streams: {1e3 * shared:.2f} us, {1e3 * apart:.2f} with decode rows beside the budget")
    assert shared < 0.98 * apart


def test_prompts_have_a_quarter_of_the_budget() -> None:
    """Where decode rows alone are more than the budget, prompts still advance by a quarter of it."""
    world = pace("fair", budget=32, slots=64)
    for _ in range(60):
        world.arrive(0, 1, 10**4)
    world.run(1000)
    world.arrive(world.now, 800, 5)
    began, before = world.scheduler.load().step, world.prefilled
    while world.prefilled < before + 800:
        world.run(world.now + 1)
    assert 100 <= world.scheduler.load().step - began <= 104


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
        scheduler.commit(StepResult.of(plan.step, [ResultRow(slot, numbers[slot], (7,)) for slot in plan.result_slots]))
    for _ in scheduler.drain():
        pass
    return [request for _, request in scheduler.drain_started()]
