"""Random small worlds for the scheduler: who asks what, and what the model would answer.

The model is a function of the prefix, so that what each request must give is known beforehand, with the mask of each of its tokens
(`World.answer`): no scheduling, no preemption, no rejected draft may show in it. `world_runs.simulate` runs a world.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from zlib import crc32

import msgspec
import numpy as np

from engine.adapters import NO_ADAPTER
from engine.core.draft_policy import DraftPolicy
<<<<<<< HEAD
=======
from engine.core.masks import Masks
from engine.core.requests import MEDIA_LOST
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.core.step_budget import MOST_PASSED
>>>>>>> defects
from engine.geometry import KVGroup
from engine.lifeline import StepTimes
from engine.plan import DEPTH
from engine.protocol import FinishReason, GenerateRequest, Grammar, MediaItem, SamplingParams, pack_tokens
from engine.step_shapes import buckets
from tests.support.engine.drafting_world import AnyDrafts
from tests.support.engine.draws import chance, mixed
from tests.support.engine.kvmachine import contents, identity, root_of
from tests.support.engine.scheduling import SchedulerConfig
from tests.support.engine.world_masks import Consumed, Grammars, mask_of
from tests.support.engine.world_media import show_media
from tests.support.engine.world_thoughts import draw_budget, end_mask, forced_token

STOP = 7
_MAX_REQUESTS = 14
TIMES = StepTimes(((1, 5.0), (6, 6.0)), ((1, 5.0), (8, 7.0), (32, 20.0)), ((1, 0.1), (6, 0.6)), 0.05, 0.02, 0.01, 4)

# What a world may have, and the share of worlds that have it. Each is drawn by itself, so any two meet.
FEATURES = {
    "drafts": 0.4, "prefix cache": 0.75, "fp8 KV": 0.3, "fair": 0.67, "token target": 0.3, "longest step": 0.3, "choices": 0.3,
    "adapters": 0.3, "media": 0.4, "grammars": 0.3, "all masked": 0.1, "thoughts": 0.3, "NaN": 0.33, "aborts": 0.67,
}  # fmt: skip


def features_of(seed: int) -> frozenset[str]:
    """Those of a world."""
    return frozenset(name for name, share in FEATURES.items() if chance(share, seed, crc32(name.encode())))



def drafting_times(drafts: int) -> StepTimes:
    """TIMES with those of steps with drafts, which are dear enough beside prompts to be left out."""
    points = tuple((count, ((1, 5.0 + count), (6, 6.0 + 2 * count))) for count in sorted({0, drafts}))
    return msgspec.structs.replace(TIMES, drafts=points if drafts else (), drafting=((1, 1.0), (6, 9.0)) if drafts else ())


@dataclass
class World:
    """Pools from two windows up, prompts from one token to beyond what fits, salts and priorities, surprise ends, rows of any
    width, logprobs of prompts, and FEATURES. In fp8 pages the scheduler must do what it does in others."""

    seed: int
    requests: list[GenerateRequest] = field(default_factory=list)
    answers: dict[int, "Answer"] = field(default_factory=dict)
    forked: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.features = features_of(self.seed)
        dtype = "float8_e4m3fn" if "fp8 KV" in self.features else "bfloat16"
        page = rng.choice((2, 4, 8))
        window = rng.randint(2, 4) * page - rng.randint(0, page - 1)
        max_len = rng.choice((24, 48, 96))
        self.groups = (
            KVGroup(0, "sliding", (0,), 1, 256, window, page, dtype, bidirectional=True),
            KVGroup(1, "full", (1,), 1, 512, None, page, dtype),
        )
        drafts = rng.choice((1, 3)) if "drafts" in self.features else 0
        caches = "prefix cache" in self.features
        two_windows = 2 * self.groups[0].worst_pages(max_len)
        pages = (two_windows + rng.choice((0, 1, 8)) + 1, -(-max_len // page) * rng.randint(1, 2) + rng.randint(-2, 3) + 1)
        self.config = SchedulerConfig(self.groups, pages, rng.randint(1, 6), max_len, rng.choice((3, 8, 32)), drafts, caches)
        self.config = replace(self.config, kv_events="collected", policy="fair" if "fair" in self.features else "arrival")
        if "token target" in self.features:
            self.config = replace(self.config, step_times=TIMES, tpot_target_ms=rng.choice((1.0, 8.0, 30.0)))
        if "longest step" in self.features:
            longest_ms = rng.choice((1.0, 7.0, 15.0))
            self.config = replace(self.config, step_times=drafting_times(drafts), longest_step_ms=longest_ms)
        self._ask(max_len)
        self.media: dict[int, tuple[MediaItem, ...]] = {}  # by the seeds of their requests
        if "media" in self.features:
            self.config = replace(self.config, encoder_rows=rng.choice((1, 8, 100)))
            show_media(self)
        self.depth = rng.choice((2, 2, 2, 4))  # plans out at a time; the core keeps two
        self.stop_chance = rng.choice((0.0, 0.05, 0.2))
        self.abort_chance = rng.choice((0.02, 0.1)) if "aborts" in self.features else 0.0
        self.guess_chance = rng.choice((0.0, 0.3, 0.8, 1.0))
        self.nan_chance = 0.02 if "NaN" in self.features else 0.0
        self.follow_chance = rng.choice((0.0, 0.5, 0.9))  # an answer is followed by a next turn
        failing, complete, slow = rng.choice((0.0, 0.0, 0.03)), rng.choice((0.1, 0.5)), rng.choice((0.0, 0.03, 0.5))
        self.grammars = Grammars(self.seed, failing, complete, slow)
        if "grammars" in self.features:
            self._constrain(lambda number: rng.random() < 0.7, triggers=0.4)
        if "all masked" in self.features:
            self.all_masked()
        if "thoughts" in self.features:
            self._limit_thoughts()

    def all_masked(self) -> "World":
        """The same with a mask for every token of every request, and pages so few that some are preempted."""
        page, max_len = self.groups[0].page, self.config.max_len
        pages = (2 * self.groups[0].worst_pages(max_len) + 2, -(-max_len // page) + 2)
        self.config = replace(self.config, pages=pages, max_seqs=6)
        self._constrain(lambda number: True, triggers=0.0)
        return self

    def _constrain(self, chosen: Callable[[int], bool], triggers: float) -> None:
        """Grammars, each request its own; so many of them begin at a trigger, which every fifth token is."""
        for number, request in enumerate(self.requests):
            if chosen(number):
                trigger = 100 + number % 5 if chance(triggers, self.seed, number, 6) else None
                self.requests[number] = with_grammar(request, Grammar(str(number), trigger))

    def _limit_thoughts(self) -> None:
        """Budgets for two requests in three. Where a thought ends is known as many plans ahead as the core keeps out."""
        self.depth = min(self.depth, DEPTH)
        for number, request in enumerate(self.requests):
            if chance(0.7, self.seed, number, 7):
                grammar = request.params.grammar
                budget = draw_budget(self.seed, number, grammar and grammar.trigger)
                params = msgspec.structs.replace(request.params, thought=budget)
                self.requests[number] = msgspec.structs.replace(request, params=params)

    def _ask(self, max_len: int) -> None:
        """Prompts share beginnings now and then, the ends of turns in them."""
        rng = self.rng
        common = [STOP if rng.random() < 0.1 else rng.randint(10, 99) for _ in range(max_len)]
        for number in range(rng.randint(1, 8)):
            length = rng.randint(1, max_len + 2 if rng.random() < 0.1 else max_len // rng.choice((2, 8)))
            shared = rng.choice((0, length // 2, length - 1, length))
            prompt = common[:shared] + [rng.randint(10, 99) for _ in range(length - shared)]
            params = SamplingParams(
                max_tokens=rng.randint(1, max_len), stop_ids=(STOP,), min_tokens=rng.choice((0, 0, 3)), seed=rng.choice((0, number))
            )
            priority, salt = rng.choice((0, 0, 0, -1, 2)), rng.choice(("", "", "", "other"))
            params = msgspec.structs.replace(params, prompt_logprobs=0 if chance(0.25, self.seed, number, 0) else None)
            adapter = rng.choice((NO_ADAPTER, 0, 0, 1)) if "adapters" in self.features else NO_ADAPTER
            asked = {"clip": rng.random() < 0.5, "priority": priority, "salt": salt, "adapter": adapter}
            self.requests.append(GenerateRequest(id=number, prompt=pack_tokens(prompt), params=params, **asked))
        if "choices" in self.features:
            self._fork()

    def _fork(self) -> None:
        """Choices: the last prompt once more, or a few times, each with its own seed; they come right behind it."""
        last = self.requests[-1]
        for _ in range(self.rng.randint(1, 4)):
            params = msgspec.structs.replace(last.params, seed=1000 + len(self.requests))
            self.requests.append(msgspec.structs.replace(last, id=len(self.requests), params=params))
        self.forked = len(self.requests) - 1 - last.id

    def follow(self, request: GenerateRequest, tokens: list[int]) -> GenerateRequest | None:
        """The next turn of a conversation, now and then, while it fits."""
        turn = [*request.tokens, *tokens, *(self.rng.randint(10, 99) for _ in range(self.rng.randint(1, 6)))]
        if self.rng.random() >= self.follow_chance or len(turn) >= self.config.max_len or len(self.requests) >= _MAX_REQUESTS:
            return None
        params = msgspec.structs.replace(request.params, max_tokens=self.rng.randint(1, self.config.max_len))
        following = msgspec.structs.replace(request, id=len(self.requests), prompt=pack_tokens(turn), params=params)
        if (grammar := params.grammar) is not None:
            following = with_grammar(following, Grammar(str(following.id), grammar.trigger))
        self.requests.append(following)
        return following

    def drafting(self) -> DraftPolicy:
        """Any number for a step, or in every other world what the core chooses."""
        options, sizes = range(self.config.widest), buckets(self.config.max_seqs)
        return DraftPolicy(options, sizes, ()) if self.seed % 2 else AnyDrafts(options, sizes, self.seed)

    def nan(self, prefix: int) -> bool:
        """Whether the logits behind a prefix are not finite."""
        return chance(self.nan_chance, self.seed, prefix, 2)

    def token(self, prefix: int, position: int, seed: int) -> int:
        """The model: now and then a stop id."""
        drawn = mixed(self.seed, prefix, position, seed)
        return STOP if drawn % 1000 < 1000 * self.stop_chance else 100 + drawn % 5

    def guess(self, prefix: int, position: int) -> bool:
        """Whether a draft is right."""
        return chance(self.guess_chance, self.seed, prefix, position, 1)

    def answer(self, request: GenerateRequest) -> "Answer":
        """What the request must give, from the model, its grammar and its budget of thought alone."""
        if request.id not in self.answers:
            self.answers[request.id] = self._answer(request)
        return self.answers[request.id]

    def mask(self, number: int, position: int) -> np.ndarray | None:
        """What the mask of a request's token must be; None: there must be none."""
        request = self.requests[number]
        masks, at = self.answer(request).masks, position - len(request.tokens)
        return masks[at] if at < len(masks) else None

    def _answer(self, request: GenerateRequest) -> "Answer":
        answer, prefix, prompt, rules = Answer(), root_of(request.adapter), len(request.tokens), request.params.grammar
        for content in contents(request.tokens, request.media):
            prefix = identity(prefix, content)
        consumed = None if rules is None or rules.trigger is not None else Consumed()
        while True:
            if consumed is not None and self.grammars.fails(request.id, consumed):
                return answer
            mask = end_mask(request.params.thought, answer.tokens, None if consumed is None else mask_of(request.id, consumed))
            answer.masks.append(mask)
            if self.nan(prefix):
                return answer
            forced = forced_token(mask)
            token = self.token(prefix, prompt + len(answer.tokens), request.params.seed) if forced is None else forced
            answer.tokens.append(token)
            prefix = identity(prefix, token)
            if token == STOP and len(answer.tokens) > request.params.min_tokens:
                return replace(answer, finish=FinishReason.stop)
            if len(answer.tokens) >= min(request.params.max_tokens, self.config.max_len - prompt):
                return replace(answer, finish=FinishReason.length)
            consumed = None if rules is None else self._consumed(request.id, rules, consumed, token)

    def _consumed(self, number: int, rules: Grammar, before: Consumed | None, token: int) -> Consumed | None:
        """What a request's grammar has consumed behind one more token; None: tokens are free."""
        if before is None:
            return Consumed() if token == rules.trigger else None
        after = before.then(token)
        return None if rules.trigger is not None and self.grammars.ends(number, after) else after


def with_grammar(request: GenerateRequest, grammar: Grammar) -> GenerateRequest:
    """The request under a grammar."""
    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, grammar=grammar))


@dataclass(frozen=True)
class Answer:
    """Of a request; `masks`: int32 [words] of each of its tokens, None where it is free."""

    tokens: list[int] = field(default_factory=list)
    masks: list[np.ndarray | None] = field(default_factory=list)
    finish: FinishReason = FinishReason.error
<<<<<<< HEAD
=======


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
    return Run(outputs, scheduler, machine, steps, started, index)


def come(world: World, host: Host, waiting: list[GenerateRequest]) -> bool:
    """Requests, aborts and what threads have made, now and then; whether there was any. Where thoughts are about to end, more
    requests are aborted, and those."""
    came = False
    while waiting and world.rng.random() < 0.5:
        came = True
        host.add(waiting.pop(0))
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
    assert passed[first.number] <= 32 * (MOST_PASSED + 1), (first, plan)
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


def check_ends(world: World, run: Run) -> None:
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
    before, wanted = identity(0, first), []
    for content in rest:
        before = identity(before, content)
        wanted.append(logprob_of(before))
    assert found == wanted[: len(found)], "a logprob of another position, or another's"


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
>>>>>>> defects
