"""The prefix cache: what is found, what is kept, what goes first; beside it, faults that must show."""

import random
from array import array
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from engine.core.allocator import Allocator, turn_ends
from engine.core.pages import PagePool
from engine.core.prefix import PrefixCache, equal_keys, extend_keys, root_key
from engine.core.scheduler import Scheduler
from engine.geometry import KVGroup
from engine.plan import StepPlan
from engine.protocol import AbortReason, GenerateRequest, SamplingParams
from tests.support.engine.kvmachine import KVFault, KVMachine
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of, step, two_groups
from tests.support.engine.world_faults import caught
from tests.support.engine.worlds import World, check_pages, simulate

pytestmark = pytest.mark.pure

PAGE, WINDOW = 4, 9
GROUPS = two_groups(WINDOW, PAGE)


def tokens(*values: int) -> list[int]:
    """A page of each value."""
    return [value for value in values for _ in range(PAGE)]


class Bench:
    """A scheduler with a prefix cache over the KV machine."""

    def __init__(
        self, pages: tuple[int, ...] = (40, 60), groups: tuple[KVGroup, ...] = GROUPS, **settings: float | None
    ) -> None:
        self.config = SchedulerConfig(groups, pages, 4, 200, 16, **{"prefix_cache": True, **settings})
        self.scheduler = scheduler_of(self.config)
        self.machine = KVMachine(groups, pages, 4, 200, lambda prefix, position, seed: 50 + prefix % 40)
        self.plans: list[StepPlan] = []
        self.errors: list[tuple[str, bool]] = []
        self._asked = 0

    def ask(self, prompt: list[int], count: int = 1, salt: str = "", stop_ids: tuple[int, ...] = ()) -> list[int]:
        """What a request that is alone gives; `cached` says what it found."""
        self._asked += 1
        before = self.scheduler.requests.counters.hit_tokens
        params = SamplingParams(max_tokens=count, stop_ids=stop_ids)
        (given,) = self.serve([request_of(self._asked, prompt, params, salt=salt)])
        self.cached = self.scheduler.requests.counters.hit_tokens - before
        return given

    def serve(self, requests: list[GenerateRequest]) -> list[list[int]]:
        """What each gives of requests that come at once."""
        given: dict[int, list[int]] = {request.id: [] for request in requests}
        for request in requests:
            self.scheduler.requests.add(request)
        while self.scheduler.requests.unfinished:
            while self.scheduler.in_flight < 2 and (plan := self.scheduler.schedule()) is not None:
                self.plans.append(plan)
                self.machine.submit(plan)
            check_pages(self.scheduler)
            self.scheduler.commit(self.machine.result())
            for output in self.scheduler.requests.drain():
                given[output.id] += output.tokens
                self.errors += [(output.error, output.invalid)] if output.error else []
        self.drain()
        return list(given.values())

    def drain(self) -> None:
        """Commit what is in flight."""
        while self.scheduler.in_flight:
            self.scheduler.commit(self.machine.result())


def test_a_prompt_asked_again_is_found_up_to_its_last_page() -> None:
    """At least one token is computed; the answer is the same, and so many tokens fewer were computed."""
    bench = Bench()
    prompt = tokens(*range(10, 20))
    first = bench.ask(prompt, 5)
    computed = bench.scheduler.requests.counters.prefill_tokens
    assert (computed, bench.cached) == (len(prompt), 0)
    assert bench.ask(prompt, 5) == first
    assert bench.cached == len(prompt) - PAGE
    assert bench.scheduler.requests.counters.prefill_tokens == computed + PAGE


def test_the_next_turn_goes_on_behind_the_answer() -> None:
    """A prompt that holds the last prompt and its answer finds both, to the page."""
    bench = Bench()
    prompt = tokens(*range(10, 20))
    turn = prompt + bench.ask(prompt, 9) + [7, 7, 7]
    bench.ask(turn, 2)
    assert bench.cached == (len(prompt) + 8) // PAGE * PAGE


def test_a_branch_point_is_a_hit_from_its_third_visitor_on() -> None:
    """The second to come learns from the full pages where the paths part and leaves a tail there; the third finds it."""
    bench = Bench()
    system = tokens(*range(10, 20))
    found = []
    for branch in range(30, 34):
        bench.ask(system + tokens(branch, branch + 40))
        found.append(bench.cached)
    assert found == [0, 0, len(system), len(system)]


@pytest.mark.parametrize(("honest", "found"), [(True, [0, 40, 40]), (False, [0, 0, 40])], ids=["honest", "planted fault"])
def test_the_second_conversation_finds_the_system_prompt(honest: bool, found: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a turn ends in the first one's prompt the second goes on, to the page; without those ends the third does."""
    if not honest:
        monkeypatch.setattr("engine.core.allocator.turn_ends", lambda sequence, page: set())
    bench, end, system = Bench(), 9, tokens(*range(10, 20))
    seen = []
    for message in (30, 31, 32):
        bench.ask([*system, end, *tokens(message, message + 40), end, 8], stop_ids=(end,))
        seen.append(bench.cached)
    assert seen == found


@pytest.mark.parametrize(("honest", "found"), [(True, 60), (False, 40)], ids=["honest", "planted fault"])
def test_another_last_message_finds_all_before_it(honest: bool, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system prompt, an example and a message, then another message: the example is found, to the page."""
    if not honest:
        monkeypatch.setattr("engine.core.allocator.turn_ends", lambda sequence, page: {10})
    bench, end = Bench(), 9
    examples = [*tokens(*range(10, 20)), end, *tokens(*range(20, 24)), end, 8, 8, end]
    for message in (30, 31):
        bench.ask([*examples, *tokens(message, message + 40), end, 8], stop_ids=(end,))
    assert bench.cached == found


def test_turns_that_end_nowhere_leave_no_tails() -> None:
    """A prompt of one turn, or of none, has no likely branch point; stop ids in what was generated are none."""
    bench, end = Bench(), 9
    for prompt, stop_ids, wanted in (
        ([*tokens(10, 11, 12), end, 8], (end,), set()),
        ([*tokens(10, 11, 12), end, *tokens(13), end, 8], (), set()),
        ([*tokens(10, 11, 12), end, *tokens(13), end, 8], (end, 77), {3}),
        ([end, *tokens(10, 11), end, *tokens(13), end, 8], (end,), {0, 2}),
    ):
        bench.scheduler.requests.add(request_of(1, prompt, SamplingParams(max_tokens=1, stop_ids=stop_ids)))
        sequence = bench.scheduler.requests.unfinished[1]
        sequence.tokens.extend([end, end])
        assert turn_ends(sequence, PAGE) == wanted
        bench.scheduler.requests.abort(1, AbortReason.client_gone)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, WINDOW, 3 * PAGE, 3 * PAGE + 1, 40])
def test_hits_end_on_page_edges(length: int) -> None:
    """Whatever the length: a hit is whole pages, and shorter than the prompt."""
    bench = Bench()
    prompt = [10 + at % 7 for at in range(length)]
    bench.ask(prompt, 3)
    bench.ask(prompt, 3)
    assert bench.cached == (length - 1) // PAGE * PAGE


def test_another_salt_finds_nothing() -> None:
    """Equal prompts of two salts share no page, in either direction."""
    bench = Bench()
    prompt = tokens(*range(10, 20))
    for salt, cached in (("", 0), ("a", 0), ("b", 0), ("a", 36), ("", 36)):
        bench.ask(prompt, salt=salt)
        assert bench.cached == cached, salt


def test_a_key_without_its_salt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: with one root for all salts the same questions find another's prompt."""
    monkeypatch.setattr("engine.core.requests.root_key", lambda salt: root_key(""))
    bench = Bench()
    prompt = tokens(*range(10, 20))
    bench.ask(prompt, salt="a")
    bench.ask(prompt, salt="b")
    assert bench.cached == 36


def test_keys_tell_salts_and_every_token_apart() -> None:
    """A page's key depends on all tokens before it, on its own, and on the salt; and on nothing else."""
    def keys(values: list[int], salt: str = "") -> list[bytes]:
        found: list[bytes] = []
        for count in range(len(values) // PAGE + 1):  # a page at a time, as they are asked for
            extend_keys(found, root_key(salt), array("i", values), PAGE, count)
        return found

    prompt = list(range(12))
    assert keys(prompt) == keys([*prompt, 99])
    assert len({*keys(prompt), *keys(prompt, "1"), *keys(prompt, "0")}) == 9
    for at in range(12):
        changed = keys([*prompt[:at], 77, *prompt[at + 1 :]])
        assert [a == b for a, b in zip(keys(prompt), changed, strict=True)] == [page < at // PAGE for page in range(3)]


def choices(count: int, length: int = 101) -> list[GenerateRequest]:
    """The choices of one request."""
    prompt = [10 + at % 13 for at in range(length)]
    return [request_of(choice, prompt, SamplingParams(max_tokens=3, seed=choice)) for choice in range(count)]


def test_choices_of_a_request_cost_one_prefill() -> None:
    """Each beyond the first computes the tokens of the last page only, and all give what they give alone."""
    alone, together = Bench((60, 100)), Bench((60, 100))
    answer, answers = alone.serve(choices(1)), together.serve(choices(4))
    assert alone.scheduler.requests.counters.prefill_tokens == 101
    assert together.scheduler.requests.counters.prefill_tokens == 101 + 3 * (101 % PAGE)
    assert answers == answer * 4


def test_choices_that_do_not_wait_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: each begins at once, and most of the prompt is computed several times."""
    monkeypatch.setattr(Allocator, "being_computed", lambda self, sequence, hit, running, gain: False)
    bench = Bench((60, 100))
    bench.serve(choices(4))
    assert bench.scheduler.requests.counters.prefill_tokens > 2 * 101


def test_nobody_waits_for_a_prefill_that_ended() -> None:
    """When the one that computes a shared prompt is aborted halfway, those that waited for it go on behind what it left."""
    bench = Bench((60, 100))
    first, second = choices(2)
    bench.scheduler.requests.add(first)
    bench.scheduler.requests.add(second)
    for _ in range(3):
        step(bench.scheduler, bench.machine)
    assert [sequence.id for sequence in bench.scheduler.requests.running] == [0]
    bench.scheduler.requests.abort(0, AbortReason.client_gone)
    bench.machine.submit(bench.scheduler.schedule())
    assert [sequence.first_cached for sequence in bench.scheduler.requests.running] == [48]


def test_admissions_of_a_plan_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many long prompts are found whole, they fit a ring record together; one alone may exceed the bound."""
    monkeypatch.setattr("engine.core.admit.MAX_ADMITTED", 150)
    bench = Bench((60, 100))
    bench.ask([10 + at % 13 for at in range(101)])
    for request in choices(4):
        bench.scheduler.requests.add(msgspec.structs.replace(request, id=100 + request.id))
    sizes = []
    while bench.scheduler.requests.waiting:
        plan = step(bench.scheduler, bench.machine)
        sizes.append(sum(len(admission.tokens) for admission in plan.admissions))
    assert sizes[:4] == [101] * 4
    monkeypatch.setattr("engine.core.admit.MAX_ADMITTED", 1000)
    for request in choices(4):
        bench.scheduler.requests.add(msgspec.structs.replace(request, id=200 + request.id))
    bench.drain()
    for sequence in list(bench.scheduler.requests.running):
        bench.scheduler.requests.abort(sequence.id, AbortReason.client_gone)
    assert len(bench.scheduler.schedule().admissions) == 4, "the fault beside it: without the bound all come at once"


def test_equal_keys_are_counted_as_one_by_one() -> None:
    """The bisection finds what a comparison key by key finds, at every offset and length."""
    rng = random.Random(3)
    for _ in range(2000):
        whole = [bytes([at]) for at in range(rng.randint(1, 40))]
        offset = rng.randint(0, len(whole))
        split = rng.randint(offset, len(whole))
        part = whole[offset:split] + [b"other"] * rng.randint(0, 5)
        naive = next((at for at, (a, b) in enumerate(zip(part, whole[offset:], strict=False)) if a != b), None)
        expected = min(len(part), len(whole) - offset) if naive is None else naive
        assert equal_keys(part, whole, offset) == expected


def side_by_side() -> Scheduler:
    """Four sequences that share a prefix, in pools that do not hold it twice."""
    config = SchedulerConfig(GROUPS, (40, 24), 4, 80, 64, prefix_cache=True)
    scheduler = scheduler_of(config)
    machine = KVMachine(GROUPS, config.pages, 4, 80, lambda prefix, position, seed: 50)
    prefix = tokens(*range(10, 24))
    for number in range(4):
        scheduler.requests.add(request_of(number, [*prefix, number], 4))
        if number == 0:
            step(scheduler, machine)
    machine.submit(scheduler.schedule())
    assert len(scheduler.requests.running) == 4
    assert scheduler.requests.counters.hit_tokens == 3 * len(prefix)
    return scheduler


def test_a_hit_is_charged_to_nobody_else() -> None:
    """Sequences that share a prefix run side by side."""
    check_pages(side_by_side())


@pytest.mark.parametrize("spoil", [
    lambda pool, pages: pool._free.append(pool._free[0]),
    lambda pool, pages: pool._free.append(pages[-1]),
    lambda pool, pages: pool._free.pop(),
    lambda pool, pages: pool.holders.__setitem__(pages[-1], 2),
    lambda pool, pages: pages.__setitem__(-1, pages[0]),
], ids=["free twice", "free and held", "lost", "miscounted", "another's"])  # fmt: skip
def test_books_that_are_wrong_are_noticed(spoil: Callable[[PagePool, list[int]], object]) -> None:
    """Planted: each way in which what pools and sequences say of a page may differ."""
    scheduler = side_by_side()
    spoil(scheduler.allocator.pools[1], scheduler.requests.running[0].runs[1].pages)
    with pytest.raises(AssertionError):
        check_pages(scheduler)


@pytest.mark.parametrize(("honest", "found"), [(True, 5 * PAGE), (False, 0)], ids=["honest", "planted fault"])
def test_superseded_tails_go_first(honest: bool, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sliding pages are scarce, a conversation's earlier turns lose their tails before another conversation's last one."""
    if not honest:
        monkeypatch.setattr(PrefixCache, "_supersede", lambda self, segment: None)
    bench = Bench(pages=(14, 60))
    bench.ask(tokens(*range(60, 66)))
    conversation = tokens(*range(10, 16))
    for _ in range(4):
        conversation += bench.ask(conversation) + tokens(6, 7, 8, 9)[1:]
    bench.ask(conversation)
    assert bench.cached == len(conversation) - 4 * PAGE, "the turn before"
    bench.ask(tokens(*range(60, 66)))
    assert bench.cached == found, "the other conversation"
    assert bench.scheduler.allocator.cache.evicted_pages > 0


@pytest.mark.parametrize("pages", [(12, 60), (40, 24)], ids=["sliding scarce", "full scarce"])
def test_a_pool_under_pressure_loses_cached_pages_only(pages: tuple[int, int]) -> None:
    """Many conversations through pools that hold a few: all answers are right, nobody is preempted, nothing leaks."""
    bench = Bench(pages)
    rng = random.Random(1)
    for _ in range(60):
        start = rng.randint(0, 5)
        bench.ask(tokens(*range(10 * start, 10 * start + rng.randint(2, 9))), rng.randint(1, 6))
    scheduler = bench.scheduler
    assert scheduler.requests.counters.preemptions == 0
    assert scheduler.requests.counters.hit_tokens > 200
    assert scheduler.allocator.cache.evicted_pages > 100
    assert [pool.free + pool.idle for pool in scheduler.allocator.pools] == [pool.total for pool in scheduler.allocator.pools]


def test_evicted_pages_count_on_when_nothing_is_cached() -> None:
    """The figure is since boot: a prompt that takes all pages, and is aborted in mid-air, empties the cache and not the figure."""
    bench = Bench(pages=(40, 24))
    bench.ask(tokens(*range(10, 20)))
    bench.scheduler.requests.add(request_of(99, tokens(*range(50, 73))))
    while bench.scheduler.allocator.cache._order:
        step(bench.scheduler, bench.machine)
    assert bench.scheduler.load().evicted_pages == 10 + 3, "full pages, and the window's"
    bench.scheduler.requests.abort(99, AbortReason.client_gone)


def test_a_model_of_full_layers_alone_has_a_cache_too() -> None:
    """Without sliding layers a prefix is its full pages, found where prompts and answers end, and evicted when needed."""
    bench = Bench((24,), (KVGroup(0, "full", (0,), 1, 512, None, PAGE),))
    prompt = tokens(*range(10, 20))
    first = bench.ask(prompt, 5)
    assert bench.ask(prompt, 5) == first
    assert bench.cached == 36
    for start in range(100, 400, 50):
        bench.ask(tokens(*range(start, start + 12)))
    bench.ask(prompt, 5)
    assert bench.cached == 0
    assert bench.scheduler.allocator.cache.evicted_pages > 0


def test_pages_that_held_nan_are_not_found_and_are_zeroed() -> None:
    """Requests whose logits are not finite leave nothing, and take away what they began with; their pages are zeroed before use."""
    bench = Bench()
    other, prompt = tokens(5, 6, 7), tokens(*range(10, 20))
    bench.ask(other)
    bench.ask(prompt)
    bench.machine.nan = lambda prefix: True
    found = []
    for _ in range(3):
        bench.ask(prompt, 4)
        found.append(bench.cached)
    assert found == [36, 36, 0], "the answer's end goes first, then the prompt's"
    assert bench.scheduler.requests.counters.failed == 3
    bench.machine.nan = lambda prefix: False
    bench.ask(other)
    assert bench.cached == 8, "its neighbours keep theirs"
    zeroed = sum(len(plan.zeros) for plan in bench.plans)
    bench.ask(prompt, 4)
    assert bench.cached == 0
    assert sum(len(plan.zeros) for plan in bench.plans) > zeroed


def test_a_row_that_may_give_nothing_ends_its_request_alone() -> None:
    """Where every id is forbidden the request is at fault: its prompt stays in the cache, as often as it comes."""
    bench, prompt = Bench(), tokens(*range(10, 20))
    bench.ask(prompt)
    bench.machine.empty = lambda prefix: True
    for _ in range(3):
        assert bench.ask(prompt, 4) == []
        assert bench.cached == 36
    assert bench.errors == 3 * [("the request's constraints together forbid every token", True)]
    bench.machine.empty = lambda prefix: False
    assert len(bench.ask(prompt, 4)) == 4


def test_an_unzeroed_page_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: pages that held NaN are handed on as they are."""
    monkeypatch.setattr(PagePool, "take_not_finite", lambda self, pages: [])
    assert caught(400, 10, run=simulate, fault=KVFault, where=lambda world: world.nan_chance)


def with_cache(world: World) -> World:
    """A world with a cache and follow-up turns."""
    world.config, world.follow_chance = replace(world.config, prefix_cache=True), 0.9
    return world


def test_worlds_with_a_cache_are_sound() -> None:
    """The same worlds as the planted faults below, without one."""
    assert not caught(100, 0, with_cache)


def test_a_lookup_that_is_kept_too_long_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: what a waiting request was said to find counts as found, though segments have come or gone since."""
    monkeypatch.setattr(PrefixCache, "version", property(lambda self: 0, lambda self, version: None), raising=False)
    assert caught(60, 2, with_cache)


def test_a_tail_one_page_short_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the first page of a window's tail is another page than the one that was computed there."""
    honest = PrefixCache.insert

    def short(self: PrefixCache, keys: list[bytes], full: list[int], tail: list[int], **options: bool) -> None:
        honest(self, keys, full, [*tail[-1:], *tail[1:]], **options)

    monkeypatch.setattr(PrefixCache, "insert", short)
    assert caught(100, 10, with_cache)


def test_a_page_freed_while_shared_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the first of two holders to go frees the page."""
    honest = PagePool.give

    def hasty(self: PagePool, pages: list[int]) -> None:
        pages = list(pages)
        honest(self, pages)
        self._free.extend(page for page in pages if self.holders[page] and page not in self._free)

    monkeypatch.setattr(PagePool, "give", hasty)
    assert caught(100, 10, with_cache)


def test_the_first_output_says_how_much_was_found() -> None:
    """`cached` comes once, with the first tokens, and counts what the prompt found; the figures agree with it."""
    bench = Bench()
    prompt = tokens(*range(10, 20))
    bench.ask(prompt)
    bench.scheduler.requests.add(request_of(99, prompt, 3))
    cached = []
    while bench.scheduler.requests.unfinished:
        step(bench.scheduler, bench.machine)
        cached += [output.cached for output in bench.scheduler.requests.drain()]
    assert cached == [36, 0, 0]
    load = bench.scheduler.load()
    assert (load.queried_tokens, load.hit_tokens, load.evicted_pages) == (80, 36, 0)
    assert load.prefill_tokens == load.queried_tokens - load.hit_tokens
    assert [pool.cached for pool in load.pools] == [pool.idle for pool in bench.scheduler.allocator.pools] != [0, 0]
