"""The scheduler against a machine that remembers whose K and V every page slot holds, on random workloads."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.geometry import KVGroup
from engine.plan import PageAppend, StepPlan
from engine.protocol import AbortReason, FinishReason, GenerateRequest, Output, SamplingParams
from tests.support.engine.kvmachine import KVFault, KVMachine

pytestmark = pytest.mark.pure

STOP = 7
WORKLOADS = 10_000


@dataclass
class Workload:
    """A random small world: pools from two windows up, prompts from one token to beyond what fits, aborts, surprise ends."""

    seed: int
    requests: list[GenerateRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        page = rng.choice((2, 4, 8))
        window = rng.randint(2, 4) * page - rng.randint(0, page - 1)
        max_len = rng.choice((24, 48, 96))
        self.groups = (
            KVGroup(0, "sliding", (0,), 1, 256, window, page),
            KVGroup(1, "full", (1,), 1, 512, None, page),
        )
        two_windows = 2 * self.groups[0].worst_pages(max_len)
        pages = (two_windows + rng.choice((0, 1, 8)) + 1, -(-max_len // page) * rng.randint(1, 2) + rng.randint(-2, 3) + 1)
        self.config = SchedulerConfig(self.groups, pages, rng.randint(1, 6), max_len, rng.choice((3, 8, 32)))
        for number in range(rng.randint(1, 8)):
            params = SamplingParams(max_tokens=rng.randint(1, max_len), stop_ids=(STOP,), min_tokens=rng.choice((0, 0, 3)))
            prompt = [1] * rng.randint(1, max_len + 2 if rng.random() < 0.1 else max_len // rng.choice((2, 8)))
            self.requests.append(GenerateRequest(id=number, prompt=prompt, params=params, clip=rng.random() < 0.5))
        self.depth = rng.choice((2, 2, 2, 4))  # plans out at a time; the core keeps two
        self.stop_chance = rng.choice((0.0, 0.05, 0.2))
        self.abort_chance = rng.choice((0.0, 0.02, 0.1))

    def token(self, number: int, position: int) -> int:
        """The 'model': surprise ends, the same for the same admission and position."""
        return STOP if random.Random(f"{self.seed} {number} {position}").random() < self.stop_chance else 100 + position


@dataclass
class Run:
    """One workload run to its end."""

    outputs: list[Output]
    scheduler: Scheduler
    machine: KVMachine
    steps: int


def simulate(workload: Workload, plant=lambda plan: plan) -> Run:  # noqa: ANN001
    """Drive scheduler and machine some steps apart, as the core does, checking pages and progress at every step."""
    scheduler = Scheduler(workload.config)
    config = workload.config
    machine = KVMachine(config.groups, config.pages, config.max_seqs, config.max_len, workload.token)
    machine.plant = plant
    waiting, outputs, steps = list(workload.requests), [], 0
    while waiting or scheduler.unfinished or scheduler.in_flight:
        while waiting and workload.rng.random() < 0.5:
            scheduler.add(0, waiting.pop(0))
        if workload.rng.random() < workload.abort_chance:
            scheduler.abort(0, workload.rng.choice(workload.requests).id, AbortReason.client_gone)
        planned = False
        while scheduler.in_flight < workload.depth and (plan := scheduler.schedule()) is not None:
            machine.submit(plan)
            planned = True
        check_pages(scheduler)
        assert planned or scheduler.in_flight or not scheduler.unfinished, "requests wait, but nothing can run"
        if scheduler.in_flight:
            scheduler.commit(machine.result())
        outputs += [output for _, output in scheduler.drain()]
        steps += 1
        assert steps < 20_000, "no end in sight"
    return Run(outputs, scheduler, machine, steps)


def check_pages(scheduler: Scheduler) -> None:
    """Free + held pages are the whole pool, and no page has two owners."""
    for index, pool in enumerate(scheduler.pools):
        held = [page for sequence in scheduler.running for page in sequence.runs[index].pages]
        assert len(held) == len(set(held)), "a page has two owners"
        assert len(held) + pool.free == pool.total
        assert 0 not in held


def check_ends(workload: Workload, run: Run) -> None:
    """Every request ended exactly once, the books balance, and everything was given back."""
    ends = Counter(output.id for output in run.outputs if output.finish)
    assert ends == Counter(request.id for request in workload.requests)
    counters = run.scheduler.counters
    assert counters.received == counters.finished + counters.refused + counters.aborted + counters.failed
    assert all(pool.used == 0 for pool in run.scheduler.pools)
    for request in workload.requests:
        check_request(workload, request, [output for output in run.outputs if output.id == request.id])


def check_request(workload: Workload, request: GenerateRequest, outputs: list[Output]) -> None:
    """Lengths and reasons are what was asked for."""
    tokens = [token for output in outputs for token in output.tokens]
    last = outputs[-1]
    first = 100 + len(request.prompt)
    for at, token in enumerate(tokens):
        may_stop = at < request.params.min_tokens or at == len(tokens) - 1  # the fake does not mask stop ids
        assert token == first + at or (token == STOP and may_stop), "a token of another position, or another's"
    room = min(request.params.max_tokens, workload.config.max_len - len(request.prompt))
    assert len(tokens) <= max(room, 0)
    if last.finish is FinishReason.stop:
        assert tokens[-1] == STOP
        assert len(tokens) > request.params.min_tokens
    if last.finish is FinishReason.length and not request.clip:
        assert len(tokens) == room, (len(tokens), room)


def run_workloads(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        workload = Workload(seed)
        run = simulate(workload)
        check_ends(workload, run)
        seen["steps"] += run.steps
        seen["reads"] += run.machine.reads
        seen["preemptions"] += run.scheduler.counters.preemptions
        seen["refused"] += run.scheduler.counters.refused
        seen["aborted"] += run.scheduler.counters.aborted
    return seen


def test_random_workloads() -> None:
    """No row ever reads K and V that is not its own, no page leaks, every request ends exactly once."""
    seen = run_workloads(range(WORKLOADS))
    print(f"{WORKLOADS} workloads: {dict(seen)}")
    assert min(seen["preemptions"], seen["refused"], seen["aborted"]) > 500, "the workloads exercise too little"


@pytest.mark.slow
def test_many_random_workloads() -> None:
    """The same over 12 000 workloads from a fresh seed."""
    start = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {start}: {dict(run_workloads(range(start, start + 12_000)))}")


def wrong_page(group: int):  # noqa: ANN201
    """A plant that names, once, another page than the scheduler chose."""
    done = []

    def plant(plan: StepPlan) -> StepPlan:
        for at, append in enumerate(plan.appends):
            if append.group == group and append.page > 1 and not done and plan.step > 2:
                done.append(append)
                appends = list(plan.appends)
                appends[at] = PageAppend(append.group, append.slot, append.index, append.page - 1)
                return replace(plan, appends=appends)
        return plan

    return plant, done


@pytest.mark.parametrize("group", [0, 1], ids=["sliding", "full"])
def test_machine_notices_one_wrong_page(group: int) -> None:
    """Planted fault: one wrong page number in one append is caught wherever two sequences share the pool."""
    planted = caught = 0
    for seed in range(300):
        plant, done = wrong_page(group)
        try:
            simulate(Workload(seed), plant)
        except KVFault:
            caught += 1
        planted += bool(done)
    print(f"{caught} of {planted} planted pages caught")
    assert planted > 30
    assert caught > planted * 0.25


def test_machine_notices_an_early_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a window believed one token shorter than it is frees a page too early, and is caught."""
    honest = KVGroup.pages_for

    def hasty(self: KVGroup, start: int, end: int) -> range:
        pages = honest(self, start, end)
        return range((max(0, start - self.window + 2) // self.page) if self.window else pages.start, pages.stop)

    monkeypatch.setattr(KVGroup, "pages_for", hasty)
    caught = 0
    for seed in range(100):
        try:
            simulate(Workload(seed))
        except KVFault:
            caught += 1
    assert caught > 10, caught


def test_results_matched_by_slot_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a result row is taken for the slot's present tenant, whatever admission it was computed for."""
    monkeypatch.setattr("engine.core.results.Row.stale", property(lambda row: not row.sequence.running))
    caught = 0
    for seed in range(600):
        workload = Workload(seed)
        workload.depth = 4
        try:
            check_ends(workload, simulate(workload))
        except (AssertionError, StopIteration):
            caught += 1
    print(f"{caught} workloads went wrong")
    assert caught > 5


def request(number: int, prompt: int, max_tokens: int, **settings: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(id=number, prompt=[1] * prompt, params=params, **settings)


def small_scheduler(full_pages: int = 9, max_len: int = 64) -> Scheduler:
    groups = (KVGroup(0, "sliding", (0,), 1, 256, 8, 4), KVGroup(1, "full", (1,), 1, 512, None, 4))
    return Scheduler(SchedulerConfig(groups, (20, full_pages), 4, max_len, 16))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "clip", "refused"),
    [(63, 1, False, False), (64, 1, False, True), (64, 1, True, True), (20, 13, False, False), (20, 14, False, True)],
)
def test_refuses_only_what_can_never_run(prompt: int, max_tokens: int, clip: bool, refused: bool) -> None:
    """prompt + 1 must fit the context, and the worst case the empty pools; anything else is accepted."""
    scheduler = small_scheduler(full_pages=17 if prompt > 40 else 9)
    scheduler.add(0, request(1, prompt, max_tokens, clip=clip))
    assert [output.invalid for _, output in scheduler.drain()] == ([True] if refused else [])


def test_default_max_tokens_is_clipped_to_what_fits() -> None:
    """A default max_tokens is lowered to the empty pools instead of being refused."""
    scheduler = small_scheduler()
    scheduler.add(0, request(1, 20, 1000, clip=True))
    assert not list(scheduler.drain())
    assert scheduler.waiting[0].limit == 8 * 4 + 1


def test_abort_is_idempotent_and_a_stop_string_is_a_success() -> None:
    """An abort of an unknown or ended request changes nothing; a stop string counts as finished."""
    scheduler = small_scheduler()
    scheduler.add(0, request(1, 4, 4))
    scheduler.abort(0, 1, AbortReason.stop_string)
    scheduler.abort(0, 1, AbortReason.client_gone)
    scheduler.abort(0, 99, AbortReason.client_gone)
    assert [output.finish for _, output in scheduler.drain()] == [FinishReason.stop]
    assert (scheduler.counters.finished, scheduler.counters.aborted) == (1, 0)


def test_nan_ends_only_its_own_request() -> None:
    """A row whose logits were not finite ends its request in error; its neighbour goes on."""
    scheduler = small_scheduler()
    machine = KVMachine(scheduler.config.groups, scheduler.config.pages, 4, 64, lambda number, position: position)
    scheduler.add(0, request(1, 4, 3))
    scheduler.add(0, request(2, 4, 3))
    machine.submit(scheduler.schedule())
    result = machine.result()
    result.rows[0] = result.rows[0]._replace(tokens=(), nan=True)
    scheduler.commit(result)
    outputs = [output for _, output in scheduler.drain()]
    assert [(output.id, output.finish) for output in outputs] == [(1, FinishReason.error), (2, None)]
    assert scheduler.counters.failed == 1
