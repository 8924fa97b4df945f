"""A scheduler in virtual time: ranks whose steps take what a measured table says, and requests that arrive when they do."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import quantiles

from engine.core.scheduler import Scheduler
from engine.core.step_budget import DecodeRows, StepEstimate
from engine.lifeline import StepTimes
from engine.plan import DEPTH, ResultRow, StepPlan, StepResult
from engine.protocol import GenerateRequest
from tests.support.engine.plans import decode_slots, result_of
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of, two_groups

GROUPS = two_groups(1024, 32, kv_heads=4)
ATTEND_MS = 4e-7  # what each token behind a prompt token adds: ten full layers at 400 TFLOP/s a rank
BASE_MS, DECODE_MS, PREFILL_MS = 5.1, 0.093, 0.022  # 31B, TP=4, bf16: a step, and what each row adds (kernel model and 4 x H200)
TILE = 128  # rows of large products: those of a step with chunks cost as if rounded up to whole tiles (measured on 4 x H200)
TIMES = StepTimes(
    tuple((rows, BASE_MS + DECODE_MS * rows) for rows in (1, 32, 128, 256)),
    tuple((rows, BASE_MS + PREFILL_MS * rows) for rows in (1, 128, 512, 2048)),
    tuple((rows, (DECODE_MS - PREFILL_MS) * rows) for rows in (1, 32, 128, 256)),
    context_ms=0.0,
    read_ms=0.0,
    attend_ms=ATTEND_MS,
    tile=TILE,
)


def step_ms(plan: StepPlan) -> float:
    """What a step of 31B takes."""
    decodes = len(plan.rows)
    prefill = -(-(plan.prompt_tokens + decodes) // TILE) * TILE - decodes if plan.chunks else 0
    return BASE_MS + DECODE_MS * decodes + PREFILL_MS * prefill + ATTEND_MS * _behind(plan)


def work_ms(plan: StepPlan) -> float:
    """What its tokens add to a step: the work that gets done, whatever their prompts' lengths."""
    decodes = len(plan.rows)
    return DECODE_MS * decodes + PREFILL_MS * plan.prompt_tokens + ATTEND_MS * _behind(plan)


def _behind(plan: StepPlan) -> int:
    return sum((end - start) * start for _, start, end, *_ in plan.chunks)


@dataclass
class Clocks:
    """Of one request, in milliseconds: when it came, its first and last token, and how many it has."""

    prompt: int
    came: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(1, self.tokens - 1)


@dataclass
class ModelledRanks:
    """Ranks that always give the same token; a step takes what `step_ms` says."""

    _numbers: dict[int, int] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> tuple[StepResult, float]:
        """A plan's result, and the milliseconds of its step."""
        self._numbers |= {admission.slot: admission.number for admission in plan.admissions}
        rows = [ResultRow(slot, self._numbers[slot], (7,)) for slot in plan.result_slots]
        return result_of(plan.step, rows), step_ms(plan)


@dataclass
class EstimatedRanks:
    """The same with steps that take what the policy expects of a rank's measured times."""

    times: StepTimes
    _ranks: ModelledRanks = field(default_factory=ModelledRanks)
    _lengths: dict[int, int] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> tuple[StepResult, float]:
        """A plan's result, and the milliseconds of its step."""
        decodes = DecodeRows(len(plan.rows), sum(self._lengths[slot] for slot in decode_slots(plan)))
        expected = StepEstimate(self.times, decodes)
        for slot, start, end, *_ in plan.chunks:
            expected.add(end - start, start)
            self._lengths[slot] = end
        self._lengths |= {slot: self._lengths[slot] + 1 for slot in decode_slots(plan)}
        return self._ranks.run(plan)[0], expected.ms() if plan.chunks else expected.decode_ms


@dataclass
class Pace:
    """Drives a scheduler with two plans out at a time. `arrive` puts a request on the way; `run` goes on until a time.

    `execute` gives a plan's result and the milliseconds of its step.
    """

    scheduler: Scheduler
    execute: Callable[[StepPlan], tuple[StepResult, float]] = field(default_factory=lambda: ModelledRanks().run)
    now: float = 0.0
    clocks: dict[int, Clocks] = field(default_factory=dict)
    prefilled: int = 0
    worked_ms: float = 0.0
    _arrivals: list[tuple[float, int, GenerateRequest]] = field(default_factory=list)
    _out: deque[tuple[StepPlan, StepResult, float]] = field(default_factory=deque)
    _free_at: float = 0.0

    def arrive(self, at: float, prompt: int, tokens: int, priority: int = 0) -> int:
        """A request of its own content; returns its id."""
        number = len(self.clocks)
        self.clocks[number] = Clocks(prompt, at)
        request = request_of(number, [number + 5] * prompt, tokens, priority=priority)
        heapq.heappush(self._arrivals, (at, number, request))
        return number

    def run(self, until: float, refill: Callable[["Pace"], None] = lambda pace: None) -> None:
        """Go on until then, or until nothing is left to do. `refill` may let more arrive after each step."""
        while self.now < until:
            refill(self)
            while self._arrivals and self._arrivals[0][0] <= self.now:
                self.scheduler.requests.add(heapq.heappop(self._arrivals)[2])
            while len(self._out) < DEPTH and (plan := self.scheduler.schedule()) is not None:
                result, milliseconds = self.execute(plan)
                self._free_at = max(self._free_at, self.now) + milliseconds
                self._out.append((plan, result._replace(took_us=round(1e3 * milliseconds)), self._free_at))
            if self._out:
                self._finish()
            elif self._arrivals:
                self.now = self._arrivals[0][0]
            else:
                return

    def _finish(self) -> None:
        plan, result, self.now = self._out.popleft()
        self.scheduler.commit(result)
        self.prefilled += plan.prompt_tokens
        self.worked_ms += work_ms(plan)
        for output in self.scheduler.requests.drain():
            clock = self.clocks[output.id]
            if output.tokens:
                clock.first = clock.first or self.now
                clock.last = self.now
                clock.tokens += len(output.tokens)


def pace(policy: str, *, budget: int = 2048, tpot_target_ms: float | None = None, slots: int = 64) -> Pace:
    """31B with room for a dozen 100k prompts."""
    pages = (slots * 34 + 2 * budget // 32 + 1, 12 * 3200 + slots * 64)
    times = TIMES if tpot_target_ms else None
    config = SchedulerConfig(GROUPS, pages, slots, 131_072, budget, policy=policy, step_times=times, tpot_target_ms=tpot_target_ms)
    return Pace(scheduler_of(config))


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return quantiles(values, n=100, method="inclusive")[98]
