"""Step times as ranks measure them at boot: of the rows that a plan has, and without a trace in what is served afterwards."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from engine.errors import ConfigError, PageViolation
from engine.lifeline import StepTimes, slowest
from engine.plan import read_plan
from engine.rank import step_times
from engine.rank.builder import Rank, build
from engine.rank.page_check import PageCheck
from engine.rank.runner import Runner
from engine.rank.stages.report_stage import Launched
from engine.rank.step_times import measure
from tests.conftest import Nano
from tests.support.engine import drafters
from tests.support.engine.plans import encoded
from tests.support.engine.ranks import single
from tests.support.engine.recording import PAGES, config_of, request, serve

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def rank(nano: Nano) -> Rank:
    return single(config_of(nano("31b"), 1, tpot_target_ms=50.0))


@pytest.fixture(autouse=True)
def cpu_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are timed by what they take of the CPU, so that a busy machine shows in none of it."""
    monkeypatch.setattr(step_times, "monotonic", time.process_time)


def measured(rank: Rank, runner: Runner) -> StepTimes:
    return measure(runner, rank.config, rank.geometry.vocab)


def grows(times: StepTimes) -> bool:
    """A row more costs what it costs on a CPU, a decode row beside a prompt less than a whole prompt, a token of context little."""
    beside = all(0 <= ms < times.prefills[-1][1] for _, ms in times.mixed)
    context = 0 < times.context_ms < 1 and 0 < times.read_ms + times.attend_ms < 1
    return beside and context and times.prefills[-1][1] > 2 * times.prefills[0][1]


def test_times_grow_with_rows(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point up to the most rows there can be; in the best of three tries, for a busy neighbour takes of our caches what it
    takes. Planted: a prompt is timed by its first row."""
    runner = build(rank, PAGES)
    times = measured(rank, runner)
    print(times)
    assert [rows for rows, _ in times.decodes] == [1, 4]
    assert [rows for rows, _ in times.prefills] == [1, 64]
    assert [rows for rows, _ in times.mixed] == [1, 3]
    assert times.tile == 1
    assert grows(times) or any(grows(measured(rank, runner)) for _ in range(2))
    prefill_ms = step_times._Probe.prefill_ms
    monkeypatch.setattr(step_times._Probe, "prefill_ms", lambda probe, rows, context=0: prefill_ms(probe, 1, context))
    assert not all(grows(measured(rank, runner)) for _ in range(3))


def test_times_are_those_of_steps(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes 50 ms longer, and the first of each kind half a second, which does not count."""
    runner, launch, seen, longer = build(rank, PAGES), Runner.launch, set(), 0.0
    honest = measured(rank, runner)

    def slow(self: Runner, data: bytes) -> Launched:
        nonlocal longer
        plan = read_plan(data)
        kind = (len(plan.rows), int(plan.chunks[:, 2].sum()))
        longer += 0.05 if kind in seen else 0.5
        seen.add(kind)
        return launch(self, data)

    monkeypatch.setattr(Runner, "launch", slow)
    monkeypatch.setattr(step_times, "monotonic", lambda: time.process_time() + longer)
    found = measured(rank, runner)
    for before, after in zip(honest.decodes + honest.prefills, found.decodes + found.prefills, strict=True):
        assert 25 < after[1] - before[1] < 200


def served(rank: Rank, before: Callable[[Runner], object] = lambda runner: None) -> tuple[object, int]:
    """What a fresh runner gives to a few requests, and its state hash, when something was done to it before."""
    runner = build(rank, PAGES)
    before(runner)
    results = serve(runner, rank.config, [[request(number) for number in range(3)]]).results
    return encoded(results), runner.state_hash


@pytest.fixture(scope="module")
def untouched(rank: Rank) -> tuple[object, int]:
    return served(rank)


def test_measuring_leaves_no_trace(rank: Rank, untouched: tuple[object, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages, tables and lengths are zero again, and what is served gives the same tokens, logprobs and state hash; planted fault:
    nothing is cleared, pages hold what was written, and the hash tells."""

    def clean(runner: Runner) -> None:
        measured(rank, runner)
        assert not any(cache.pool.any() or cache.table.any() for cache in runner.slots.cache)
        assert not runner.slots.lengths.any()

    def written(runner: Runner) -> None:
        measured(rank, runner)
        assert all(torch.count_nonzero(cache.pool[:, 1:]) > 0 for cache in runner.slots.cache)

    assert served(rank, clean) == untouched
    monkeypatch.setattr(step_times._Probe, "clear", lambda self: None)
    assert served(rank, written) != untouched


def test_steps_with_drafts_are_measured(nano: Nano, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each number of drafts that the core may choose, and without a target nothing else; what is served afterwards is as if
    nothing had been measured. Planted fault: nothing is cleared."""
    folder = nano("31b")
    drafter = str(drafters.write(folder, tmp_path))
    rank = single(config_of(folder, 1, mtp={"model": drafter, "drafts": "auto"}, load_format="dummy"))
    found = []
    plain = served(rank)
    assert served(rank, lambda runner: found.append(measured(rank, runner))) == plain
    (times,) = found
    assert [[rows for rows, _ in points] for _, points in times.drafts] == [[1, 4]] * len(rank.config.drafts)
    assert tuple(count for count, _ in times.drafts) == rank.config.drafts
    assert times.drafts[-1][1][-1][1] > times.drafts[0][1][0][1] > 0
    assert (times.decodes, times.prefills, times.mixed) == ((), (), ())
    monkeypatch.setattr(step_times._Probe, "clear", lambda self: None)
    assert served(rank, lambda runner: measured(rank, runner)) != plain


def test_steps_are_measured_with_pages_checked(
    rank: Rank, untouched: tuple[object, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With debug_pages measuring finds nothing, and what is served afterwards is checked and the same; planted fault: the check
    still expects the pages that were measured with."""
    checked = replace(rank, config=msgspec.structs.replace(rank.config, debug_pages=True))
    assert served(checked, lambda runner: measured(checked, runner)) == untouched
    monkeypatch.setattr(PageCheck, "clear", lambda self: None)
    with pytest.raises(PageViolation, match="names page 0, expected page"):
        served(checked, lambda runner: measured(checked, runner))


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    """Point by point, whoever is slower there."""
    drafts = [((0, ((1, 2.0), (4, 3.0))), (2, ((1, 4.0), (4, 5.0)))), ((0, ((1, 1.0), (4, 3.5))), (2, ((1, 4.5), (4, 4.0))))]
    made = [((1, 3.0), (3, 5.0)), ((1, 2.0), (3, 6.0))]
    one = StepTimes(((1, 5.0), (4, 6.0)), ((1, 5.0), (64, 9.0)), ((1, 0.0), (3, 0.5)), 0.1, 0.3, 0.02, 128, drafts[0], made[0])
    other = StepTimes(((1, 4.0), (4, 7.0)), ((1, 5.5), (64, 8.0)), ((1, 0.1), (3, 0.4)), 0.2, 0.4, 0.01, 128, drafts[1], made[1])
    slow, making = ((0, ((1, 2.0), (4, 3.5))), (2, ((1, 4.5), (4, 5.0)))), ((1, 3.0), (3, 6.0))
    both = StepTimes(((1, 5.0), (4, 7.0)), ((1, 5.5), (64, 9.0)), ((1, 0.1), (3, 0.5)), 0.2, 0.4, 0.02, 128, slow, making)
    assert slowest([one, other]) == both


def test_a_target_that_cannot_be_measured_for_is_refused(nano: Nano) -> None:
    """No context to measure in, or no time at all."""
    for name in ("tpot_target_ms", "longest_step_ms"):
        with pytest.raises(ConfigError, match=f"{name} needs a max_len of at least 16"):
            config_of(nano("31b"), 1, max_len=15, **{name: 50.0})
    with pytest.raises(ConfigError, match="tpot_target_ms"):
        config_of(nano("31b"), 1, tpot_target_ms=0.0)
