"""How many drafts a step has, on devices whose times are known: nearly as fast as the best number, whatever is right, and never
slower than without drafts; each beside the same without what it is for."""

import random
from collections.abc import Callable

import pytest

from engine.core import draft_policy
from engine.core.draft_policy import DraftPolicy, RowTimes
from tests.support.engine.drafting_world import (
    MEASURED,
    OPTIONS,
    SIZES,
    Served,
    Times,
    Traffic,
    best_fixed,
    dense,
    experts,
    padded,
    points,
    serve,
    small,
)

pytestmark = pytest.mark.pure

Fault = Callable[[pytest.MonkeyPatch], None]


def auto(times: Times, traffic: Traffic, seed: int = 0) -> Served:
    return serve(DraftPolicy(OPTIONS, SIZES, points(times), traffic.token_ms), times, traffic, seed)


def steady(rows: int, chance: float, steps: int = 8000) -> Traffic:
    return Traffic(lambda step: rows, lambda sequence, step: chance, steps=steps)


def relative(times: Times, traffic: Traffic) -> float:
    """To the run with the best number throughout."""
    return auto(times, traffic).rate / best_fixed(times, traffic).rate


def no_reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftPolicy, "_review", lambda self, rows: None)


def no_times(times: Times) -> tuple[()]:
    return ()


def no_hysteresis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_policy, "SWITCH_THRESHOLD", 0.001)
    monkeypatch.setattr(draft_policy, "MIN_GAIN", 0.0)


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known for long once there are no drafts."""
    monkeypatch.setattr(draft_policy, "IDLE_ROWS", 0.1)
    monkeypatch.setattr(draft_policy, "SWITCH_THRESHOLD", 0.1)


@pytest.mark.parametrize("times", [dense, experts, small])
@pytest.mark.parametrize(("rows", "chance"), [(1, 0.0), (1, 0.8), (8, 0.3), (32, 0.0), (32, 0.8), (100, 0.3)])
def test_nearly_the_best_number(times: Times, rows: int, chance: float) -> None:
    """What start, trials and noise take is at most two and a half percent of a short run, none the best number or not."""
    ahead = {drafts: rows * sum(chance**right for right in range(drafts + 1)) / times(padded(rows), drafts) for drafts in OPTIONS}
    assert auto(times, steady(rows, chance, 4000)).rate > 0.975 * max(ahead.values())


def test_a_long_run_loses_one_percent_at_most() -> None:
    """Where a trial is dear: drafts are never right, and double the time."""
    traffic = steady(100, 0.0, 6000)
    assert auto(small, traffic).rate > 0.99 * 100 / small(padded(100), 0)


def test_it_follows_what_is_right() -> None:
    """Acceptance that changes every two thousand steps: faster than any number throughout."""
    traffic = Traffic(lambda step: 8, lambda sequence, step: (0.9, 0.0, 0.5)[step // 2000 % 3], steps=9000)
    assert relative(experts, traffic) > 1.05


@pytest.mark.parametrize("fault", [no_reviews, forgetful])
def test_without_bounded_trials_it_is_slow(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Planted faults: the first number is in force for good; or drafts are tried again all the time."""
    fault(monkeypatch)
    assert min(relative(experts, steady(8, 0.0, 4000)), relative(dense, steady(1, 0.95, 4000))) < 0.9


def test_dear_numbers_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafts or more take six times as long, and rows change all the time: what was measured at boot keeps them apart. Planted
    fault: boot took all to be alike."""
    def cliff(rows: int, drafts: int) -> float:
        return small(rows, drafts) * (1 if drafts < 2 else 6)

    draw = random.Random(1)
    rows = [draw.choice(SIZES) for _ in range(40)]
    traffic = Traffic(lambda step: rows[step // 60], lambda sequence, step: 0.8, steps=2400)
    kept = relative(cliff, traffic)
    assert kept > 0.9
    monkeypatch.setitem(globals(), "points", no_times)
    assert relative(cliff, traffic) < 0.8 * kept


def crowd(requests: int = 400, slots: int = 100, budget: int = 2048) -> list[tuple[int, int]]:
    """Rows and prompt tokens of each step of a benchmark's mixed load: prompts and replies of 1 to 1024 tokens, all at once."""
    draw, running, steps = random.Random(0), list[int](), list[tuple[int, int]]()
    waiting = [(draw.randint(1, 1024), draw.randint(1, 1024)) for _ in range(requests)]
    while waiting or running:
        prompts = 0
        while waiting and len(running) < slots and prompts < budget:
            prompt, reply = waiting.pop()
            prompts += prompt
            running.append(reply)
        steps.append((len(running), prompts))
        running = [left - 1 for left in running if left > 1]
    return steps


def beside_crowds(member: str, crowds: int) -> float:
    """Tokens a second of crowds, one behind the other, whose drafts are never right, relative to none drafted."""
    steps = crowd() * crowds
    traffic = Traffic(
        lambda step: steps[step][0], lambda sequence, step: 0.0, lambda step: steps[step][1], len(steps), beside_ms=3.0
    )
    return auto(MEASURED[member], traffic).rate / serve(DraftPolicy((0,), SIZES, ()), MEASURED[member], traffic).rate


@pytest.mark.parametrize("member", MEASURED)
def test_a_mixed_load_is_not_slower_than_none(member: str) -> None:
    """Half a percent at most, also where the server has just been started."""
    assert beside_crowds(member, 1) > 0.995
    assert beside_crowds(member, 3) > 0.995


def changes(served: Served) -> int:
    return sum(before != after for before, after in zip(served.drafts, served.drafts[1:], strict=False))


@pytest.mark.parametrize("period", [60, 150])
def test_it_does_not_oscillate(monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    """Text that is easy and hard by turns: few switches in 6000 steps; without hysteresis many."""
    traffic = Traffic(lambda step: 4, lambda sequence, step: 0.9 if step // period % 2 else 0.3, steps=6000)

    def switches() -> int:
        chooses = DraftPolicy(OPTIONS, SIZES, points(small))
        serve(chooses, small, traffic)
        return sum(chooses.switches.values())

    assert (few := switches()) <= 8
    no_hysteresis(monkeypatch)
    assert switches() > 2 * few


def test_nothing_is_lost_where_two_sizes_meet() -> None:
    """Rows that alternate between two sizes from step to step: the number does not, and nothing is drafted for the waste-basket."""
    traffic = Traffic(lambda step: 32 + step % 2, lambda sequence, step: 0.7, steps=4000)
    assert relative(dense, traffic) > 0.97
    assert changes(auto(dense, traffic)) < 60


@pytest.mark.parametrize("rows", [2, 8, 32])
def test_one_that_is_never_right_slows_nobody(rows: int) -> None:
    """Its neighbours' tokens a second are those that they have beside one that does not draft, within two percent."""
    def of_others(served: Served) -> float:
        return sum(served.tokens[1:]) / served.ms

    def chance(sequence: int, step: int) -> float:
        return 0.8 if sequence else 0.0

    never = Traffic(lambda step: rows, chance, steps=6000)
    best = max(of_others(serve(DraftPolicy((drafts,), SIZES, ()), dense, never)) for drafts in OPTIONS)
    assert of_others(auto(dense, never)) > 0.98 * best


LOADS: dict[str, Callable[[int], int]] = {
    "agents": lambda step: (step * 7919) % 90 + 10 if step % 3 == 0 else 0,
    "bursts": lambda step: (step * 7919) % 700 + 50 if step % 100 < 50 else 0,
    "seldom": lambda step: 400 if step % 8 == 0 else 0,
    "always": lambda step: (step * 7919) % 700 + 50,
}


def mixed(load: str, beside_ms: float, chance: float, rows: int = 8) -> Traffic:
    return Traffic(lambda step: rows, lambda sequence, step: chance, LOADS[load], 3000, beside_ms=beside_ms)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8])
@pytest.mark.parametrize(("load", "beside_ms"), [*((load, 6.0) for load in LOADS), ("always", 0.0)])
def test_beside_prompts(load: str, beside_ms: float, chance: float) -> None:
    """Some steps compute prompt tokens too, beside which drafts may cost three times what a step does: nearly the best number, and
    never slower than without drafts."""
    assert relative(small, mixed(load, beside_ms, chance)) > 0.97


def test_prompts_that_are_not_told_apart_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: one time for steps with prompt tokens and those without."""
    add = RowTimes.add
    monkeypatch.setattr(RowTimes, "add", lambda self, ms, prompt_ms: add(self, ms - prompt_ms, 0.0))
    assert min(relative(small, mixed(load, 6.0, 0.3)) for load in ("agents", "seldom")) < 0.93


def test_what_a_prompt_token_adds_is_known() -> None:
    """Prompts of 50 to 750 tokens in each step, 0.06 ms a token, and drafts mostly right: as fast as the best number. Planted
    fault: nobody measured what a token adds, and what it takes is taken for the drafts'."""
    traffic = Traffic(lambda step: 8, lambda sequence, step: 0.8, LOADS["always"], 3000, token_ms=0.06)
    best = best_fixed(small, traffic).rate
    assert auto(small, traffic).rate > 0.98 * best
    assert serve(DraftPolicy(OPTIONS, SIZES, points(small)), small, traffic).rate < 0.95 * best


def beside_agents(member: str, rows: int, chance: float) -> float:
    """Tokens a second, relative to none drafted, at an H200's measured times: replies of some 65 tokens, each behind 50 to 200
    new tokens of its prompt, whose steps take 3 ms more with drafts."""
    prompts = [50 + step * 7919 % 151 if step * 7919 % 65 < rows else 0 for step in range(max(3000, 16_000 // rows))]
    traffic = Traffic(lambda step: rows, lambda sequence, step: chance, lambda step: prompts[step], len(prompts), beside_ms=3.0)
    return auto(MEASURED[member], traffic).rate / serve(DraftPolicy((0,), SIZES, ()), MEASURED[member], traffic).rate


BATCHES = (1, 4, 5, 8, 16, 48, 100)


@pytest.mark.parametrize("member", MEASURED)
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8])
def test_never_slower_than_none(member: str, chance: float) -> None:
    """At any batch and acceptance, with agents' small increments: two percent at most."""
    assert [rows for rows in BATCHES if beside_agents(member, rows, chance) < 0.98] == []


def test_a_fixed_start_is_slower_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: all drafts are taken to be right, whatever was, and no other number than the first is ever tried."""
    no_reviews(monkeypatch)
    monkeypatch.setattr(DraftPolicy, "_tokens", lambda self, drafting: [1.0 + right for right in range(8)])
    assert [rows for rows in BATCHES if beside_agents("26b-a4b", rows, 0.0) > 0.9] == []


def test_few_that_may_draft_do_not_pad_all() -> None:
    """Where one row of 64 may draft, and the step would take twice as long for it, none does."""
    traffic = Traffic(lambda step: 64, lambda sequence, step: 0.9, steps=3000, drafting=lambda rows: 1)
    assert auto(small, traffic).drafts[-500:].count(0) > 450


def test_a_single_number_is_always_chosen() -> None:
    """A setting that names a number is no advice."""
    assert set(serve(DraftPolicy((3,), SIZES, ()), small, steady(100, 0.0, 200)).drafts) == {3}


def test_a_new_number_is_measured_by_its_median() -> None:
    """Of steps without prompt tokens and of those with some, each kind apart."""
    rows = RowTimes([10.0, 12.0], 1)
    for ms in (20.0, 90.0, 30.0):
        rows.add(ms, 0.0)
    rows.add(50.0, 5.0)
    assert rows.ms.tolist() == [[0.0, 30.0], [0.0, 45.0]]


def test_switches_are_counted_from_none() -> None:
    """By cause; a single number is never switched."""
    assert DraftPolicy(OPTIONS, SIZES, points(small)).switches == {"better": 0, "off": 0, "on": 0}
    assert DraftPolicy((3,), SIZES, ()).switches == {}


def test_times_at_boot_are_of_whole_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """129 rows, the most there are, run as 144: a step of these is expected to take what was measured. Planted fault: 26 ms."""
    times = [((1, 8.0), (128, 10.0), (129, 11.0))] * len(OPTIONS)

    def expected() -> float:
        return DraftPolicy(OPTIONS, (1, 128, 144), times)._rows(2).expected[0]

    assert expected() == 11.0
    monkeypatch.setattr(draft_policy, "min", max, raising=False)
    assert expected() == 26.0
