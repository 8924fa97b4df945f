"""Round robin over the prefix cache: what it finds beside a cache that never forgets, and beside what any cache could find."""

import pytest

from engine.core.allocator import Allocator
from engine.core.sequence import Sequence
from tests.support.engine.conversations import Trace, optimum, portions, serve, unlimited

pytestmark = pytest.mark.pure

FEW = Trace(conversations=150)
LONG = Trace(conversations=200, turns=5)


def shares(trace: Trace, pages: tuple[int, int]) -> float:
    """What is found in such pools, of what a cache finds that never forgets."""
    found, scheduler = serve(trace, pages)
    assert scheduler.requests.counters.preemptions == 0
    assert [pool.free + pool.idle for pool in scheduler.allocator.pools] == [pool.total for pool in scheduler.allocator.pools]
    return found.hit / unlimited(trace).hit


@pytest.mark.parametrize(
    "trace", [FEW, pytest.param(Trace(conversations=10_000), marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_conversations_that_fit_are_found(trace: Trace) -> None:
    """At 90 % of the pools at least 90 % of an infinite cache's tokens, whichever pool is the scarce one; no collapse beyond, and
    never better than possible."""
    best = unlimited(trace).hit
    for working_set in (0.25, 0.5, 0.9, 1.5):
        pages = portions(trace, working_set)
        hit_rate, bound = shares(trace, pages), optimum(trace, pages).hit / best
        print(f"{trace.conversations} conversations at {working_set:.0%} of the pools: {hit_rate:.3f}, and {bound:.3f} at most")
        assert hit_rate <= bound + 1e-9
        assert hit_rate >= (0.9 if working_set <= 0.9 else 0.7), (working_set, hit_rate)
    sliding, full = portions(trace, 0.9)
    for name, pages in (("sliding", (sliding, 3 * full)), ("full", (3 * sliding, full))):
        hit_rate = shares(trace, pages)
        print(f"{trace.conversations} conversations, {name} scarce at 90%: {hit_rate:.3f}")
        assert hit_rate >= 0.9, name


def test_turns_of_too_many_conversations_are_found_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 125 % and 150 % most of what could be found is; planted fault: strictly the least recently used goes, which is always the
    one whose turn is next."""
    for working_set, least, strict in ((1.25, 0.8, 0.75), (1.5, 0.7, 0.65)):
        pages = portions(LONG, working_set)
        with monkeypatch.context() as patch:
            found = shares(LONG, pages)
            patch.setattr("engine.core.prefix.SPARED", 0.0)
            assert shares(LONG, pages) < strict < least < found


def test_a_cache_without_branch_points_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: tails are left at the ends of prompts and answers only, so that no first turn finds the system prompt."""
    honest = Allocator.cache_passed_points

    def ends_only(self: Allocator, sequence: Sequence) -> None:
        sequence.pages.cache_points = sequence.pages.cache_points[-1:]
        honest(self, sequence)

    monkeypatch.setattr(Allocator, "cache_passed_points", ends_only)
    assert shares(FEW, portions(FEW, 0.5)) < 0.9


@pytest.mark.parametrize(("honest", "least", "most"), [(True, 1.0, 1.0), (False, 0.9, 0.96)], ids=["honest", "planted fault"])
def test_second_conversations_find_their_tenants_system_prompt(
    honest: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three conversations of each of twenty tenants find what an infinite cache does, though paths part for the first time where
    no prompt has ended; planted fault: tails are left at the ends of prompts, and where paths have parted before."""
    if not honest:
        monkeypatch.setattr("engine.core.allocator.turn_ends", lambda sequence, page: set())
    trace = Trace(60, tenants=20)
    assert least <= shares(trace, portions(trace, 0.9)) <= most
