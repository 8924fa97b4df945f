"""Runs of random worlds, checked at every step."""

from collections import Counter
from dataclasses import dataclass

from engine.core.scheduler import Scheduler
from engine.protocol import AbortReason, FinishReason, GenerateRequest, Output
from tests.support.engine.draws import chance
from tests.support.engine.kv_index import KvIndex
from tests.support.engine.scheduling import scheduler_of
from tests.support.engine.world_checks import (
    check_ends,
    check_first,
    check_hits,
    check_masks,
    check_pages,
    check_widths,
    check_windows,
    first_of,
)
from tests.support.engine.world_masks import FAILED, Host, WorldRanks
from tests.support.engine.world_media import check_budget, check_freed, memory_of
from tests.support.engine.worlds import World

_MAX_STEPS = 20_000


@dataclass
class Run:
    """One world, run to its end."""

    outputs: list[Output]
    scheduler: Scheduler
    machine: WorldRanks
    steps: int
    started: list[int]
    index: KvIndex


def simulate(world: World) -> Run:
    """Drive scheduler, masks and machine some steps apart, as the core does, checking pages and progress at every step."""
    config = world.config
    scheduler = scheduler_of(config)
    index = KvIndex()
    assert scheduler.cache_events is not None
    scheduler._draft_policy = scheduler._results._draft_policy = world.drafting()
    machine = WorldRanks(config.groups, config.pages, config.max_seqs, config.max_len, world.token)
    machine.media, machine.slow = world.media, lambda step: chance(0.6, world.seed, step, 13)
    machine.reads_late = lambda step: chance(0.6, world.seed, step, 14)
    machine.guess, machine.nan, machine.wanted = world.guess, world.nan, world.mask
    host = Host(scheduler, machine, world.grammars, world.rng)
    given = {request.id: [] for request in world.requests}
    waiting, steps = list(world.requests), 0
    outputs = []
    started = []
    passed = Counter()
    resting = False  # nothing was planned, and nothing is in flight: only what comes from outside can change that
    while waiting or scheduler.requests.unfinished or scheduler.in_flight:
        if come(world, host, waiting) or not resting:
            planned = plan_all(world, host, passed)
            check_pages(scheduler)
            if index.follow(scheduler.cache_events):
                index.check(scheduler)
            check_windows(scheduler)
            check_hits(scheduler)
            assert planned or not scheduler.stuck, "requests wait, but nothing can run"
            resting = not (planned or scheduler.in_flight)
        if machine.ready:
            scheduler.commit(machine.result()._replace(took_us=(100, 4000, 9000, 60_000)[steps % 4]))
            host.committed()
        machine.free_from(scheduler.requests.media)
        for output in scheduler.requests.drain():
            outputs.append(output)
            given.setdefault(output.id, []).extend(output.tokens)
            ended = output.finish in (FinishReason.stop, FinishReason.length)
            if ended and (turn := world.follow(world.requests[output.id], given[output.id])):
                waiting.append(turn)
        started += scheduler.requests.drain_started()
        steps += 1
        assert steps < _MAX_STEPS, "no end in sight"
    host.close()
    check_freed(machine, scheduler.requests.media)
    return Run(outputs, scheduler, machine, steps, started, index)


def come(world: World, host: Host, waiting: list[GenerateRequest]) -> bool:
    """Requests, aborts and what threads have made, now and then; whether there was any. Where thoughts are about to end, more
    requests are aborted, and those."""
    came = False
    while waiting and world.rng.random() < 0.5:
        came = True
        request = waiting.pop(0)
        host.add(request)
        if request.media:
            host.scheduler.requests.media.end(memory_of(request.media))
    running = host.scheduler.requests.running
    ending = [sequence.id for sequence in running if sequence.masked and sequence.params.grammar is None]
    if world.rng.random() < world.abort_chance * (3 if ending else 1):
        host.scheduler.requests.abort(world.rng.choice(ending or range(len(world.requests))), AbortReason.client_gone)
        came = True
    return host.work() or came


def plan_all(world: World, host: Host, passed: Counter[int]) -> bool:
    """As many plans as may be out at a time, each checked; whether there was one."""
    planned, scheduler = False, host.scheduler
    host.before_plans()
    while scheduler.in_flight < world.depth:
        first = first_of(scheduler)
        plan = scheduler.schedule()
        if plan is None:
            assert first is None, f"{first} could have had a row"
            break
        check_first(first, plan, passed)
        check_budget(scheduler, plan)
        check_widths(scheduler, plan)
        host.planned(plan)
        check_masks(host.masks, plan)
        planned = True
    return planned


def run_worlds(seeds: range) -> Counter[str]:
    """Run and check a world a seed; what happened in all of them together."""
    seen = Counter()
    for seed in seeds:
        world = World(seed)
        try:
            run = simulate(world)
            check_ends(world, run)
        except Exception as error:
            error.add_note(f"in world {seed}")
            raise
        counters = run.scheduler.requests.counters
        seen.update(
            steps=run.steps,
            reads=run.machine.reads,
            preemptions=counters.preemptions,
            refused=counters.refused,
            aborted=counters.aborted,
            rejected=run.machine.rejected,
            masked=sum(request.params.grammar is not None for request in world.requests),
            adapted=sum(request.adapter >= 0 for request in world.requests),
            shown_thinking=sum(request.params.thought is not None and bool(request.media) for request in world.requests),
            thinking=sum(request.params.thought is not None for request in world.requests),
            grammar_failures=sum(output.error == FAILED for output in run.outputs),
            **run.machine.seen,
            forked=world.forked,
            prompt_logprobs=sum(len(output.prompt_logprobs) for output in run.outputs),
            encodes=run.machine.encodes,
            spans=run.machine.spans,
            hit_tokens=counters.hit_tokens,
            evicted=run.scheduler.load().evicted_pages,
            failed=counters.failed,
        )
    return seen
