"""The prefix cache: what is found, what is kept, what goes first; beside it, faults that must show."""

import random

import pytest

from engine.core.allocator import Allocator, turn_ends
from engine.core.prefix import PrefixCache, equal_keys
from engine.core.scheduler import Scheduler
from engine.geometry import KVGroup
from engine.plan import StepPlan
from engine.protocol import AbortReason, GenerateRequest, SamplingParams
from tests.support.engine.kvmachine import KVMachine
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of, step, two_groups
from tests.support.engine.world_checks import check_pages

pytestmark = pytest.mark.pure

PAGE, WINDOW = 4, 9
GROUPS = two_groups(WINDOW, PAGE)


def tokens(*values: int) -> list[int]:
    """A page of each value."""
    return [value for value in values for _ in range(PAGE)]


class Bench:
    """A scheduler with a prefix cache over the KV machine."""

    def __init__(self, pages: tuple[int, ...] = (40, 60), groups: tuple[KVGroup, ...] = GROUPS) -> None:
        self.scheduler = scheduler_of(SchedulerConfig(groups, pages, 4, 200, 16, prefix_cache=True))
        self.machine = KVMachine(groups, pages, 4, 200, lambda prefix, position, seed: 50 + prefix % 40)
        self.plans: list[StepPlan] = []
        self.errors: list[tuple[str, bool]] = []
        self._asked = 0

    def ask(self, prompt: list[int], count: int = 1, stop_ids: tuple[int, ...] = ()) -> list[int]:
        """What a request that is alone gives; `cached` says what it found."""
        self._asked += 1
        before = self.scheduler.requests.counters.hit_tokens
        params = SamplingParams(max_tokens=count, stop_ids=stop_ids)
        (given,) = self.serve([request_of(self._asked, prompt, params)])
        self.cached = self.scheduler.requests.counters.hit_tokens - before
        return given

    def serve(self, requests: list[GenerateRequest]) -> list[list[int]]:
        """What each gives of requests that come at once."""
        given = {request.id: [] for request in requests}
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
def test_a_prompt_asked_again_is_found_up_to_its_last_page(length: int) -> None:
    """Whatever the length: a hit is whole pages, and shorter than the prompt; the answer is the same, and so many tokens fewer were
    computed."""
    bench, prompt = Bench(), [10 + at % 7 for at in range(length)]
    first = bench.ask(prompt, 3)
    assert bench.cached == 0
    assert bench.ask(prompt, 3) == first
    assert bench.cached == (length - 1) // PAGE * PAGE
    assert bench.scheduler.requests.counters.prefill_tokens == 2 * length - bench.cached


def choices(count: int, length: int = 101) -> list[GenerateRequest]:
    """The choices of one request."""
    prompt = [10 + at % 13 for at in range(length)]
    return [request_of(choice, prompt, SamplingParams(max_tokens=3, seed=choice)) for choice in range(count)]


def test_choices_of_a_request_cost_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beyond the first computes the tokens of the last page only, and all give what they give alone. Planted fault: each
    begins at once, and most of the prompt is computed several times."""

    def served(count: int) -> tuple[int, list[list[int]]]:
        bench = Bench((60, 100))
        answers = bench.serve(choices(count))
        return bench.scheduler.requests.counters.prefill_tokens, answers

    (alone, answer), together = served(1), served(4)
    assert alone == 101
    assert together == (101 + 3 * (101 % PAGE), answer * 4)
    monkeypatch.setattr(Allocator, "being_computed", lambda self, sequence, hit, running, gain: False)
    assert served(4)[0] > 2 * 101


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
    assert [sequence.pages.first_cached for sequence in bench.scheduler.requests.running] == [48]


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


def test_a_prompt_with_nan_is_not_cached() -> None:
    """Neither its end nor that of a turn in it that the same step computed: asked again, all of it is computed."""
    bench, end, seen = Bench(), 9, []
    for first in (True, False, False):
        bench.machine.nan = lambda prefix, first=first: first
        bench.ask([10, 10, 10, 10, 11, 11, 11, end, 12, 12, 12, end, 8], stop_ids=(end,))
        seen.append(bench.cached)
    assert bench.scheduler.requests.counters.failed == 1
    assert seen == [0, 0, 12]


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
