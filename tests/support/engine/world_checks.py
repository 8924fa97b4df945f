"""What must hold in a random world: pages, windows, masks and hits at every step, and each request's answer at its end."""

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from engine.core.allocator import first_page
from engine.core.masks import Masks
from engine.core.requests import MEDIA_LOST
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.core.step_budget import MOST_PASSED
from engine.plan import ROW_MASKED, StepPlan, largest_plan
from engine.protocol import FinishReason, GenerateRequest, Output
from tests.support.engine.kvmachine import contents, identity, logprob_of, root_of
from tests.support.engine.plans import decode_rows, decode_slots
from tests.support.engine.scheduling import SchedulerConfig
from tests.support.engine.worlds import World

if TYPE_CHECKING:
    from tests.support.engine.world_runs import Run


def check_masks(masks: Masks, plan: StepPlan) -> None:
    """Unless masks are late, a masked row that gives a token has no other such row in flight before it, and waits behind it."""
    sampling = set(plan.result_slots)
    for state in masks._states:
        sequence = state.sequence
        if sequence.masked and not state.late and sequence.slot in sampling:
            assert sequence.planned == len(sequence.tokens), "a row was planned before its mask could be known"
            assert sequence.waits


def first_of(scheduler: Scheduler) -> Sequence | None:
    """The first in order of those who run, if it has a row to be planned, and no result to wait for that may free its pages."""
    first = scheduler.requests.running[0] if scheduler.requests.running and not scheduler.in_flight else None
    return first if first is not None and (first.ready > 0 or first.decodable) else None


def check_first(first: Sequence | None, plan: StepPlan, passed: Counter[int]) -> None:
    """The first in order has a row after so many plans at most; `passed`: how many it has had none in."""
    if first is None:
        return
    passed[first.number] += first.slot not in {*decode_slots(plan), *(slot for slot, *_ in plan.chunks)}
    assert passed[first.number] <= 16 * (MOST_PASSED + 1), (first, plan)
    if first.planned > first.committed:
        passed[first.number] = 0


def check_widths(scheduler: Scheduler, plan: StepPlan) -> None:
    """A row is no wider than may be, ends within its sequence's limit, and is one token wide where it may not draft."""
    running = {sequence.slot: sequence for sequence in scheduler.requests.running}
    for slot, width, flags in decode_rows(plan):
        sequence = running[slot]
        assert 1 <= width <= 1 + plan.drafts
        assert sequence.planned <= sequence.limit - 1
        assert flags == ROW_MASKED * sequence.masked
        assert sequence.drafts.allowed or width == 1


def check_pages(scheduler: Scheduler) -> None:
    """Each page of a pool is free, held or idle, once; its holders are counted; a shared page is full and committed in all; the
    cache's tree is sound."""
    kept = check_tree(scheduler)
    for index, pool in enumerate(scheduler.allocator.pools):
        held = Counter(page for sequence in scheduler.requests.running for page in sequence.pages.runs[index].pages)
        free, idle = set(pool._free), kept[index] - held.keys()
        assert 0 not in held
        assert (len(held), len(idle), len(free)) == (pool.used, pool.idle, pool.free)
        assert free.isdisjoint(held), "a page is free, and held"
        assert free.isdisjoint(idle), "a page is free, and cached"
        assert all(pool.holders[page] == count for page, count in held.items())
        shared = {page for page, count in held.items() if count > 1}
        for sequence in scheduler.requests.running if shared else ():
            run = sequence.pages.runs[index]
            ends = [(at + 1) * pool.group.page for at, page in enumerate(run.pages, run.first) if page in shared]
            assert all(end <= sequence.committed for end in ends), "a page that is still written has two owners"


def check_tree(scheduler: Scheduler) -> list[set[int]]:
    """The pages of each pool that the cache names. A segment comes before the one above it; each leads to a tail."""
    full = []
    tails = set()
    seen = set()
    for segment in scheduler.allocator.cache._order:
        assert segment.parent not in seen, "a segment would be evicted before what is below it"
        seen.add(segment)
        assert segment.children or segment.tail is not None, "pages that no hit can use"
        full += segment.pages
        tails.update(segment.tail or ())
    kept = set(full)
    assert len(kept) == len(full), "a full page is cached under two keys"
    return [tails, kept] if len(scheduler.allocator.pools) > 1 else [kept]


def check_windows(scheduler: Scheduler) -> None:
    """Up to the last plan, nobody holds a page that its window has left, nor lacks one that is planned to be written."""
    for sequence in scheduler.requests.running:
        assert sequence.committed <= sequence.planned
        for pool, run in zip(scheduler.allocator.pools, sequence.pages.runs, strict=True):
            assert run.first == first_page(pool.group, sequence.committed), "a page is held past its window, or was given back"
            assert run.end * pool.group.page >= sequence.planned, "a position is planned without a page"


def check_hits(scheduler: Scheduler) -> None:
    """What a waiting sequence is said to find in the cache is what it would find now."""
    for sequence in scheduler.requests.waiting:
        if sequence.pages.hit is not None and sequence.pages.hit.version == scheduler.allocator.cache.version:
            page = scheduler.allocator.page
            known, sequence.pages.hit = sequence.pages.hit, None
            hit = scheduler.allocator.find(sequence)
            assert known == hit, "what was looked up is out of date"
            assert sequence.media.last_end(hit.count * page) == hit.count * page, "a hit ends in a span"


def bound_of(config: SchedulerConfig) -> int:
    """Bytes of the largest plan."""
    return largest_plan(config.max_seqs, config.max_len, config.prefill_budget, config.groups[0].page, 2, width=config.widest)


def check_ends(world: World, run: "Run") -> None:
    """Every request ended exactly once, and was said to have started once if it gave tokens, never if it was refused; the counters
    balance, everything was given back, and no plan was larger than the settings are checked by."""
    ends = Counter(output.id for output in run.outputs if output.finish)
    assert ends == Counter(request.id for request in world.requests)
    started = set(run.started)
    assert len(started) == len(run.started)
    assert {output.id for output in run.outputs if output.tokens} <= started
    assert started.isdisjoint(output.id for output in run.outputs if output.invalid)
    assert run.machine.largest <= bound_of(world.config)
    counters = run.scheduler.requests.counters
    assert counters.received == counters.finished + counters.refused + counters.aborted + counters.failed
    assert all(pool.used == 0 for pool in run.scheduler.allocator.pools)
    for request in world.requests:
        check_request(world, request, [output for output in run.outputs if output.id == request.id])


def check_request(world: World, request: GenerateRequest, outputs: list[Output]) -> None:
    """Its tokens are the model's own, up to its end; it ends as the model says unless it was aborted or clipped."""
    tokens = [token for output in outputs for token in output.tokens]
    check_prompt_logprobs(request, outputs)
    last = outputs[-1]
    if last.invalid:
        assert not tokens
        return
    answer = world.answer(request)
    assert tokens == answer.tokens[: len(tokens)], "a token of another position, or another's"
    if last.finish is FinishReason.length and request.clip:
        return
    if last.finish is not FinishReason.abort and last.error != MEDIA_LOST:
        assert (len(tokens), last.finish) == (len(answer.tokens), answer.finish)


def check_prompt_logprobs(request: GenerateRequest, outputs: list[Output]) -> None:
    """They are those of its own prompt, in order and each once: all of them, before the first token; none that is not asked for."""
    found = []
    for output in outputs:
        assert not (output.prompt_logprobs and output.tokens), output
        for piece in output.prompt_logprobs:
            assert piece.first == len(found) + 1, (piece.first, len(found))
            found += np.frombuffer(piece.words, "<f4")[::2].tolist()
        if output.tokens and request.params.prompt_logprobs is not None:
            assert len(found) == len(request.tokens) - 1, (len(found), len(request.tokens))
    if request.params.prompt_logprobs is None:
        assert not found
        return
    first, *rest = contents(request.tokens, request.media) or [0]
    before, wanted = identity(root_of(request.adapter), first), []
    for content in rest:
        before = identity(before, content)
        wanted.append(logprob_of(before))
    assert found == wanted[: len(found)], "a logprob of another position, or another's"
