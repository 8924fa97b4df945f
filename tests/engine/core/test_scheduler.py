"""The scheduler against a machine that remembers what every page slot holds, on random worlds; and what these do not hold."""

import os
import random
import tracemalloc
from array import array

import pytest

from engine.channel import MAX_RECORD
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.plan import MAX_SCORED, ResultRow, StepPlan, largest_result, most_appends
from engine.protocol import (
    MAX_ALTERNATIVES,
    MAX_STOP_IDS,
    AbortReason,
    FinishReason,
    GenerateRequest,
    Output,
    SamplingParams,
    decode_front_message,
    encode_message,
)
from tests.support.engine.kvmachine import KVFault, KVMachine
from tests.support.engine.plans import decode_rows, listed, result_of
from tests.support.engine.scheduling import SchedulerConfig, finish, one_token_each, request_of, scheduler_of, step, two_groups
from tests.support.engine.world_checks import bound_of
from tests.support.engine.world_runs import run_worlds
from tests.support.engine.worlds import STOP

pytestmark = pytest.mark.pure

WORLDS = 300
MANY = int(os.environ.get("QUARTET_TEST_WORLDS", "20000"))


def test_random_worlds() -> None:
    """No row reads K and V that is not its own, pages balance at every step, each masked row has its own mask of its next token,
    and each request gets the model's own answer, once."""
    seen = run_worlds(range(WORLDS))
    print(f"{WORLDS} worlds: {dict(seen)}")
    names = ["preemptions", "refused", "aborted", "failed", "rejected", "masked", "draft_masks", "forked", "hit_tokens", "evicted"]
    names += ["prompt_logprobs", "late_masks", "slow_masks", "dropped_masks", "grammar_failures", "forced_ends", "encodes", "spans"]
    names += ["adapted", "shown_thinking"]
    assert min(seen[name] for name in names) > WORLDS // 20, seen
    assert seen["dropped_ends"] > WORLDS // 100, seen


@pytest.mark.slow
@pytest.mark.timeout(max(3600, MANY // 10))
def test_many_random_worlds() -> None:
    """The same over as many worlds as QUARTET_TEST_WORLDS says, from a fresh seed."""
    start = random.SystemRandom().randrange(1 << 40)
    print(f"{MANY} worlds from seed {start}: {dict(run_worlds(range(start, start + MANY)))}")


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


def test_no_plan_is_larger_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of many long cached prompts at once stay below the bound that the settings are checked by; planted fault: admissions
    are not counted, and a plan exceeds it."""
    monkeypatch.setattr("engine.core.admit.MAX_ADMITTED", 1500)
    monkeypatch.setattr("engine.plan.MAX_ADMITTED", 1500)
    monkeypatch.setattr("engine.plan._ENCODES_BYTES", 0)  # these plans have no media
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
    ("request_", "full_pages", "refused"),
    [
        (request_of(1, [1] * 63), 17, False), (request_of(1, [1] * 64), 17, True), (request_of(1, [1] * 64, clip=True), 17, True),
        (request_of(1, [1] * 20, 13), 9, False), (request_of(1, [1] * 20, 14), 9, True),
        (request_of(1, [1], SamplingParams(max_tokens=2, stop_ids=tuple(range(MAX_STOP_IDS)))), 9, False),
        (request_of(1, [1], SamplingParams(max_tokens=2, stop_ids=tuple(range(MAX_STOP_IDS + 1)))), 9, True),
        (GenerateRequest(id=1, prompt=b"abcde", params=SamplingParams(max_tokens=2)), 9, True),
    ],
)  # fmt: skip
def test_refuses_only_what_can_never_run(request_: GenerateRequest, full_pages: int, refused: bool) -> None:
    """prompt + 1 must fit the context, the worst case the empty pools, the stop ids the ranks' table, and a prompt is whole token
    ids; anything else is accepted."""
    scheduler = small_scheduler(full_pages)
    scheduler.requests.add(request_)
    assert [output.invalid for output in scheduler.requests.drain()] == [True] * refused


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


def test_a_queued_prompt_takes_eight_bytes_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ids as int32 and the keys of its pages; as int64 it takes more."""

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
    monkeypatch.setattr(GenerateRequest, "tokens", property(lambda self: array("q", array("i", self.prompt))))
    assert size() > 8


def test_what_a_dropped_row_wrote_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was in flight when its sequence stepped back may have written NaN: if the sequence ends before it has computed
    that position again, the page is zeroed before its next use. Planted fault: what the row wrote is forgotten."""

    def serve_next() -> None:
        scheduler = small_scheduler()
        machine = KVMachine(two_groups(), (20, 9), 4, 64, lambda prefix, position, seed: position)
        scheduler.requests.add(request_of(1, [1] * 4, 20))
        for _ in range(2):
            machine.submit(scheduler.schedule())
        scheduler.commit(machine.result())
        scheduler.requests.running[0].step_back()
        machine.nan = lambda prefix: True
        scheduler.commit(machine.result())
        scheduler.requests.abort(1, AbortReason.client_gone)
        machine.nan = lambda prefix: False
        scheduler.requests.add(request_of(2, [1] * 20, 2))
        finish(scheduler, machine)
        assert [output.finish for output in scheduler.requests.drain()][-1] is FinishReason.length

    def forgetful(self: Sequence) -> None:
        self.number, self.planned = 0, self.committed

    serve_next()
    monkeypatch.setattr(Sequence, "step_back", forgetful)
    with pytest.raises(KVFault, match="holds NaN"):
        serve_next()


class Served:
    """One request of 6 prompt tokens, whose rows are 4 wide where they may be."""

    def __init__(self, *, drafts: bool = True) -> None:
        self.scheduler = scheduler_of(SchedulerConfig(two_groups(), (20, 20), 2, 64, 16, 3, prefix_cache=True))
        self.scheduler.requests.add(request_of(1, [1] * 6, SamplingParams(max_tokens=20, stop_ids=(STOP,), drafts=drafts)))
        self.sequence = next(iter(self.scheduler.requests.unfinished.values()))
        assert self.gives(2).tokens == [2]

    def gives(self, *tokens: int) -> Output:
        """Plan a step whose row gives these tokens; what the client hears."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.widths = [row.width for row in decode_rows(plan)]
        number = self.sequence.number
        self.scheduler.commit(result_of(plan.step, [ResultRow(slot, number, tokens) for slot in plan.result_slots]))
        (output,) = self.scheduler.requests.drain()
        return output


def test_an_output_says_what_became_of_its_drafts() -> None:
    """Accepted are those that are among its tokens, rejected the others: also where a row is cut at the end."""
    served = Served()
    about = [(output.accepted, output.rejected) for output in (served.gives(3, 4), served.gives(3), served.gives(3, STOP, 5, 6))]
    assert about == [(1, 2), (0, 3), (2, 1)]
    assert [(one.verified, one.accepted) for one in served.scheduler.load().draft_positions] == [(3, 2), (3, 1), (3, 1)]


def test_a_request_may_do_without_drafts() -> None:
    """Its rows are of one token, and in a step of such rows alone ranks draft nothing."""
    served = Served(drafts=False)
    served.gives(3)
    assert served.widths == [1]
    plan = served.scheduler.schedule()
    assert plan is not None
    assert plan.drafts == 0
    served = Served()
    plan = served.scheduler.schedule()
    assert plan is not None
    assert plan.drafts == 3


def test_a_row_shrinks_to_its_pages() -> None:
    """Drafts take no page from another sequence, though one of later precedence holds it: the row ends with its own last page."""
    scheduler = scheduler_of(SchedulerConfig(two_groups(), (20, 6), 2, 64, 16, 3))
    for number, (prompt, tokens) in enumerate(((6, 11), (2, 7))):
        scheduler.requests.add(request_of(number, [number] * prompt, tokens))
        scheduler.schedule()
    plans = [scheduler.schedule() for _ in range(2)]
    assert [[row.width for row in decode_rows(plan)] for plan in plans if plan is not None] == [[4, 2], [2]]
    assert scheduler.requests.counters.preemptions == 0


def test_a_cached_prefix_is_not_counted_for_who_lacks_pages_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight prompts that share a cached prefix lack pages behind it: no step goes through the prefix's pages for each of them."""
    scheduler = scheduler_of(SchedulerConfig(two_groups(), (200, 45), 4, 200, 64, prefix_cache=True))
    counted = []
    monkeypatch.setattr("engine.core.pages.PagePool.idle_in", lambda pool, pages: counted.append(len(pages)) or 0)
    scheduler.requests.add(request_of(0, [5] * 100, 50))
    for number in range(1, 9):
        scheduler.commit(one_token_each(scheduler, scheduler.schedule() or StepPlan(0)))
        scheduler.requests.add(request_of(number, [5] * 100 + [5 + number] * 70, 2))
    assert (len(scheduler.requests.waiting), counted) == (8, [])
