"""The scheduler against a machine that remembers what every page slot holds, on random worlds; beside it, faults that must show."""

import os
import random
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.channel import MAX_RECORD
from engine.core import results
from engine.core.allocator import Allocator
from engine.core.masks import MaskState
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.geometry import KVGroup
from engine.plan import MAX_SCORED, StepPlan, largest_plan, largest_result, most_appends
from engine.protocol import (
    MAX_ALTERNATIVES,
    MAX_STOP_IDS,
    AbortReason,
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
    SamplingParams,
    decode_front_message,
    encode_message,
    pack_tokens,
)
from tests.support.engine.kvmachine import KVFault, KVMachine
from tests.support.engine.plans import PageAppend, listed
from tests.support.engine.scheduling import SchedulerConfig, finish, request_of, scheduler_of, step, two_groups
from tests.support.engine.world_faults import caught
from tests.support.engine.worlds import World, run_worlds, simulate

pytestmark = pytest.mark.pure

WORLDS = 300
MANY = int(os.environ.get("QUARTET_TEST_WORLDS", "20000"))


def test_random_worlds() -> None:
    """No row reads K and V that is not its own, pages balance at every step, each masked row has its own mask of its next token,
    and each request gets the model's own answer, once."""
    seen = run_worlds(range(WORLDS))
    print(f"{WORLDS} worlds: {dict(seen)}")
    names = ["preemptions", "refused", "aborted", "failed", "rejected", "masked", "draft_masks", "forked", "hit_tokens", "evicted"]
    names += ["prompt_logprobs", "late_masks", "slow_masks", "dropped_masks", "grammar_failures", "forced_ends"]
    assert min(seen[name] for name in names) > WORLDS // 20, seen
    assert seen["dropped_ends"] > WORLDS // 100, seen


@pytest.mark.slow
@pytest.mark.timeout(max(3600, MANY // 10))
def test_many_random_worlds() -> None:
    """The same over as many worlds as QUARTET_TEST_WORLDS says, from a fresh seed."""
    start = random.SystemRandom().randrange(1 << 40)
    print(f"{MANY} worlds from seed {start}: {dict(run_worlds(range(start, start + MANY)))}")


def test_a_mask_lost_with_its_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a sequence that is preempted while a masked row is in flight waits for a mask that has come already."""
    honest = MaskState.update_wait

    def forgetful(self: MaskState) -> None:
        if self.sequence.running or not self.sequence.waits:
            honest(self)

    monkeypatch.setattr(MaskState, "update_wait", forgetful)
    monkeypatch.setattr("tests.support.engine.worlds._MAX_STEPS", 1000)
    assert caught(100, 3, World.all_masked)


def test_a_first_that_stands_still_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: nobody is preempted for the first in order, which then sits out whenever pages are short."""
    monkeypatch.setattr(Scheduler, "_preempt_for", lambda self, sequence, count: self.allocator.fitting(sequence, count) >= count)
    assert caught(100, 5)


def test_a_result_fits_its_record_whatever_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large its budget, a step has no more tokens of prompts whose logprobs are told than fit; without the bound it has."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=MAX_ALTERNATIVES)

    def scored() -> list[int]:
        scheduler = scheduler_of(SchedulerConfig(two_groups(1024, 16), (5000, 5000), 8, 30_000, 60_000))
        for number in range(3):
            scheduler.requests.add(request_of(number, [5] * 20_000, params))
        plans = [scheduler.schedule() for _ in range(2)]
        return [plan.prompt_tokens + len(plan.rows) for plan in plans if plan is not None]

    assert scored() == [MAX_SCORED] * 2
    assert largest_result(4096, 1) <= MAX_RECORD
    monkeypatch.setattr(Sequence, "reports_prompt", False)
    assert scored()[0] > MAX_SCORED


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "read from the prefix cache": lambda patch: patch.setattr(Sequence, "reusable", property(lambda self: len(self.tokens) - 1)),
    "told once more after a preemption": lambda patch: patch.setattr(PromptLogprobs, "after", lambda self, position: self),
    "lost with a row": lambda patch: patch.setattr("engine.core.results.has_numbers", lambda logprobs: logprobs.first < 20),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_prompt_logprobs_lost_or_doubled_are_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Planted faults: logprobs of prompt tokens whose positions come out of the cache, or come twice, or are lost."""
    FAULTS[fault](monkeypatch)
    assert caught(200, 3)


def wrong_page(group: int):  # noqa: ANN201
    """A plant that names, once, another page than the scheduler chose."""
    done = []

    def plant(plan: StepPlan) -> StepPlan:
        for at, append in enumerate(plan.appends):
            if append.group == group and append.page > 1 and not done and plan.step > 2:
                done.append(append)
                appends = list(plan.appends)
                appends[at] = PageAppend(append.group, append.slot, append.index, append.page - 1)
                return msgspec.structs.replace(plan, appends=appends)
        return plan

    return plant, done


@pytest.mark.parametrize("group", [0, 1], ids=["sliding", "full"])
def test_machine_notices_one_wrong_page(group: int) -> None:
    """Planted fault: one wrong page number in one append is caught wherever two sequences share the pool."""
    planted = found = 0
    for seed in range(300):
        plant, done = wrong_page(group)
        try:
            simulate(World(seed), plant)
        except KVFault:
            found += 1
        planted += bool(done)
    print(f"{found} of {planted} planted pages caught")
    assert planted > 30
    assert found > planted * 0.25


def test_an_early_release_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a window believed one token shorter than it is frees a page too early, and a row reads another's entry."""
    honest = KVGroup.pages_for

    def hasty(self: KVGroup, start: int, end: int) -> range:
        pages = honest(self, start, end)
        return range((max(0, start - self.window + 2) // self.page) if self.window else pages.start, pages.stop)

    monkeypatch.setattr(KVGroup, "pages_for", hasty)
    monkeypatch.setattr("tests.support.engine.worlds.check_windows", lambda scheduler: None)
    assert caught(300, 10, run=simulate, fault=KVFault)


def test_a_page_held_past_its_window_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: pages are given back one page later than the window has left them."""
    honest = Allocator.release

    def late(self: Allocator, sequence: Sequence, plan: StepPlan) -> None:
        low, sequence.low = sequence.low, max(0, sequence.low - self.pools[0].group.page)
        honest(self, sequence, plan)
        sequence.low = low

    monkeypatch.setattr(Allocator, "release", late)
    assert caught(100, 30)


def test_a_release_by_what_is_planned_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: pages go by the upper bound, as if no draft could be rejected, and a rejected row's window is torn."""
    honest = Allocator.release

    def by_high(self: Allocator, sequence: Sequence, plan: StepPlan) -> None:
        low, sequence.low = sequence.low, sequence.high
        honest(self, sequence, plan)
        sequence.low, sequence.release_at = low, 0

    monkeypatch.setattr(Allocator, "release", by_high)
    monkeypatch.setattr("tests.support.engine.worlds.check_windows", lambda scheduler: None)

    def uncached(world: World) -> World:
        world.config = replace(world.config, prefix_cache=False)
        return world

    assert caught(300, 10, uncached, simulate, KVFault)


def test_tokens_behind_a_stop_id_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a row of several tokens is taken whole, though one of them ends the request."""
    honest = results._cut

    def uncut(sequence: Sequence, tokens: tuple[int, ...]) -> tuple[list[int], FinishReason | None]:
        return list(tokens), honest(sequence, tokens)[1]

    monkeypatch.setattr(results, "_cut", uncut)
    assert caught(300, 10)


def test_decode_rows_beside_the_budget_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: decode rows do not count in the budget of a step with chunks."""
    monkeypatch.setattr(Sequence, "decodable", False)
    assert caught(100, 30)


def test_results_matched_by_slot_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: an admission number that a sequence keeps, so that rows of before its preemption are taken for new ones."""
    admit, leave = Sequence.admit, Sequence.leave

    def readmit(self: Sequence, slot: int, number: int, groups: int) -> None:
        admit(self, slot, self.number or number, groups)

    def keep(self: Sequence) -> int:
        number = self.number
        slot = leave(self)
        self.number = number
        return slot

    monkeypatch.setattr(Sequence, "admit", readmit)
    monkeypatch.setattr(Sequence, "leave", keep)
    monkeypatch.setattr("tests.support.engine.worlds._MAX_STEPS", 1000)
    assert caught(600, 3)


def test_a_mask_taken_for_the_wrong_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a mask that was made for an earlier token lets the next row go."""
    monkeypatch.setattr(MaskState, "update_wait", lambda self: self.sequence.waits.clear())
    assert caught(300, 10)


def test_no_plan_is_larger_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of random worlds, and of many long cached prompts at once, stay below the bound that the settings are checked by;
    planted fault: admissions are not counted, and a plan exceeds it."""
    for seed in range(100):
        world = World(seed)
        assert simulate(world).machine.largest <= bound_of(world.config)
    monkeypatch.setattr("engine.core.admit.MAX_ADMITTED", 1500)
    monkeypatch.setattr("engine.plan.MAX_ADMITTED", 1500)
    largest, bound = cached_at_once()
    assert 4 * 1200 < largest <= bound
    monkeypatch.setattr("engine.core.admit.admission_size", lambda *sizes: 0)
    largest, bound = cached_at_once()
    assert largest > bound


def test_appends_are_bounded_and_come_near_the_bound() -> None:
    """Three decode rows that all begin a page beside a chunk of what the budget leaves: a page in each group less than the bound,
    and more than one without a page a row allows."""
    groups = two_groups(64)
    scheduler = scheduler_of(SchedulerConfig(groups, (400, 400), 4, 1000, 64))
    machine = KVMachine(groups, (400, 400), 4, 1000, lambda prefix, position, seed: position)
    for number, prompt in enumerate((4, 4, 4, 900)):
        scheduler.requests.add(request_of(number, [1] * prompt, 20))
    appended = []
    while scheduler.requests.unfinished:
        appended.append(len(step(scheduler, machine).appends))
    bound = most_appends(4, 64, 4, 2, 1)
    assert max(appended) == bound - 2 > most_appends(0, 64, 4, 2, 1)


def bound_of(config: SchedulerConfig) -> int:
    page, width = config.groups[0].page, config.widest
    return largest_plan(config.max_seqs, config.max_len, config.prefill_budget, page, 2, width=width)


def cached_at_once() -> tuple[int, int]:
    """Bytes of the largest plan, and the bound, when 64 prompts of 301 tokens come that are all cached."""
    config = SchedulerConfig(two_groups(), (1000, 12000), 64, 512, 64, prefix_cache=True)
    scheduler = scheduler_of(config)
    machine = KVMachine(config.groups, config.pages, 64, 512, lambda prefix, position, seed: position)
    for number in range(128):
        scheduler.requests.add(request_of(number, [number % 64] * 301, 2))
        if number == 63:
            finish(scheduler, machine)
    finish(scheduler, machine)
    assert scheduler.requests.counters.hit_tokens == 64 * 300
    return machine.largest, bound_of(config)


def small_scheduler(full_pages: int = 9) -> Scheduler:
    return scheduler_of(SchedulerConfig(two_groups(), (20, full_pages), 4, 64, 16))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "clip", "refused"),
    [(63, 1, False, False), (64, 1, False, True), (64, 1, True, True), (20, 13, False, False), (20, 14, False, True)],
)
def test_refuses_only_what_can_never_run(prompt: int, max_tokens: int, clip: bool, refused: bool) -> None:
    """prompt + 1 must fit the context, and the worst case the empty pools; anything else is accepted."""
    scheduler = small_scheduler(full_pages=17 if prompt > 40 else 9)
    scheduler.requests.add(request_of(1, [1] * prompt, max_tokens, clip=clip))
    assert [output.invalid for output in scheduler.requests.drain()] == ([True] if refused else [])


def test_default_max_tokens_is_clipped_to_what_fits() -> None:
    """A default max_tokens is lowered to the empty pools instead of being refused."""
    scheduler = small_scheduler()
    scheduler.requests.add(request_of(1, [1] * 20, 1000, clip=True))
    assert not scheduler.requests.drain()
    assert scheduler.requests.waiting[0].limit == 8 * 4 + 1


def test_abort_is_idempotent_and_a_stop_string_is_a_success() -> None:
    """An abort of an unknown or ended request changes nothing; a stop string counts as finished."""
    scheduler = small_scheduler()
    scheduler.requests.add(request_of(1, [1] * 4, 4))
    scheduler.requests.abort(1, AbortReason.stop_string)
    scheduler.requests.abort(1, AbortReason.client_gone)
    scheduler.requests.abort(99, AbortReason.client_gone)
    assert [output.finish for output in scheduler.requests.drain()] == [FinishReason.stop]
    assert (scheduler.requests.counters.finished, scheduler.requests.counters.aborted) == (1, 0)


def test_all_may_wait_for_the_host() -> None:
    """Requests whose masks have not come are not planned, nor called stuck; each mask lets one token through."""
    scheduler = small_scheduler()
    machine = KVMachine(two_groups(), (20, 9), 4, 64, lambda prefix, position, seed: position)
    scheduler.requests.add(request_of(1, [1], 3))
    sequence, tokens = scheduler.requests.waiting[0], []
    for _ in range(3):
        sequence.waits.add("mask")
        assert scheduler.schedule() is None
        assert not scheduler.stuck
        sequence.waits.clear()
        machine.submit(scheduler.schedule())
        sequence.waits.add("mask")
        assert scheduler.schedule() is None
        scheduler.commit(machine.result())
        tokens += [token for output in scheduler.requests.drain() for token in output.tokens]
    assert tokens == [1, 2, 3]
    assert not scheduler.requests.unfinished


def test_a_prompt_is_computed_up_to_its_last_token_while_its_mask_is_made() -> None:
    """All but the last position of a masked prompt run at once; the last one, which gives a token, follows the mask."""
    scheduler = small_scheduler()
    scheduler.requests.add(request_of(1, [1] * 10, 3))
    scheduler.requests.waiting[0].waits.add("mask")
    first = scheduler.schedule()
    assert [(chunk.start, chunk.end, chunk.samples) for chunk in listed(first).chunks] == [(0, 9, False)]
    assert scheduler.schedule() is None
    scheduler.requests.running[0].waits.clear()
    second = scheduler.schedule()
    assert [(chunk.start, chunk.end, chunk.samples) for chunk in listed(second).chunks] == [(9, 10, True)]


def test_a_request_is_said_to_have_started_once() -> None:
    """At its first admission, and not when it comes back after a preemption; those refused or aborted in the queue never."""
    started = total = preempted = 0
    for seed in range(100):
        world = World(seed)
        run = simulate(world)
        named = run.started
        assert len(named) == len(set(named))
        assert {output.id for output in run.outputs if output.tokens} <= set(named)
        started, total = started + len(named), total + len(world.requests)
        preempted += run.scheduler.requests.counters.preemptions
    assert preempted > 20
    assert total // 2 < started < total


@pytest.mark.parametrize("stop_ids", [MAX_STOP_IDS, MAX_STOP_IDS + 1])
def test_more_stop_ids_than_the_ranks_can_hold_are_refused(stop_ids: int) -> None:
    """As many as their table is wide fit, end ids included."""
    scheduler = small_scheduler()
    params = SamplingParams(max_tokens=2, stop_ids=tuple(range(stop_ids)))
    scheduler.requests.add(request_of(1, [1], params))
    assert [output.invalid for output in scheduler.requests.drain()] == ([True] if stop_ids > MAX_STOP_IDS else [])


def test_a_torn_prompt_is_refused() -> None:
    """A prompt whose bytes are not whole token ids fails its own request."""
    scheduler = small_scheduler()
    scheduler.requests.add(GenerateRequest(id=1, prompt=b"abcde", params=SamplingParams(max_tokens=2)))
    assert [output.invalid for output in scheduler.requests.drain()] == [True]


def test_a_queued_prompt_takes_eight_bytes_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ids as int32 and the keys of its pages; as Python's numbers it takes several times that."""

    def size(count: int = 40_000) -> float:
        scheduler = scheduler_of(SchedulerConfig(two_groups(1024, 32), (100, 2000), 4, count + 9, 64, prefix_cache=True))
        message = encode_message(request_of(1, range(1000, 1000 + count)))
        tracemalloc.start()
        scheduler.requests.add(decode_front_message(message))
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(scheduler.requests.unfinished) == 1
        return taken / count

    assert size() < 8
    monkeypatch.setattr(GenerateRequest, "tokens", property(lambda self: Numbers(array("i", self.prompt))))
    assert size() > 32


class Numbers(list[int]):
    """Tokens, each an object."""

    def tobytes(self) -> bytes:
        return pack_tokens(self)

    def __getitem__(self, at: Any) -> Any:
        return Numbers(super().__getitem__(at)) if isinstance(at, slice) else super().__getitem__(at)

    @property
    def itemsize(self) -> int:
        return 4
