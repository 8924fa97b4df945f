"""Small schedulers in tests: their two KV groups, requests, results of one token a row, and plans run to the end of what waits."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

from engine.config import EngineConfig, KvEvents, Mtp
from engine.core.scheduler import Scheduler
from engine.geometry import KVGroup
from engine.lifeline import StepTimes
from engine.media_geometry import MediaGeometries
from engine.memory import ENCODER_ROWS
from engine.plan import ResultRow, StepPlan, StepResult
from engine.protocol import GenerateRequest, MediaItem, MediaKind, SamplingParams, pack_tokens
from tests.support.engine.kvmachine import KVMachine
from tests.support.engine.plans import result_of


class Unchecked:
    """An encoder that takes any item."""

    def check(self, item: MediaItem) -> None:
        """It fits."""


ANY_MEDIA: Any = dict.fromkeys(get_args(MediaKind), Unchecked())


@dataclass(frozen=True)
class SchedulerConfig:
    """What `scheduler_of` makes a scheduler of, without a model."""

    groups: tuple[KVGroup, ...]
    pages: tuple[int, ...]
    max_seqs: int
    max_len: int
    prefill_budget: int
    drafts: int = 0
    prefix_cache: bool = False
    kv_events: str | None = None
    policy: Any = "fair"
    step_times: StepTimes | None = None
    tpot_target_ms: float | None = None
    longest_step_ms: float | None = None
    encoder_rows: int = ENCODER_ROWS
    adapters: int = 2
    max_adapters: int = 0
    encoders: MediaGeometries = field(default_factory=lambda: ANY_MEDIA)

    @property
    def widest(self) -> int:
        """Tokens that a decode row computes at most."""
        return 1 + self.drafts


def scheduler_of(config: SchedulerConfig) -> Scheduler:
    """A scheduler with these settings."""
    settings = EngineConfig(
        model="",
        device="cpu",
        max_seqs=config.max_seqs,
        max_len=config.max_len,
        prefill_budget=config.prefill_budget,
        mtp=Mtp(model="" if config.drafts else None, drafts=config.drafts),
        prefix_cache=config.prefix_cache,
        kv_events=KvEvents(endpoint=config.kv_events),
        policy=config.policy,
        tpot_target_ms=config.tpot_target_ms,
        longest_step_ms=config.longest_step_ms,
        adapters={f"a{number}": "/a" for number in range(config.adapters)},
        max_adapters=config.max_adapters,
    )
    scheduler = Scheduler(settings, config.groups, config.pages, config.step_times, config.encoders)
    scheduler.encoder_rows = config.encoder_rows
    return scheduler


def two_groups(window: int = 8, page: int = 4, kv_heads: int = 1) -> tuple[KVGroup, KVGroup]:
    """A layer with a window, and one without."""
    return KVGroup(0, "sliding", (0,), kv_heads, 256, window, page), KVGroup(1, "full", (1,), 1, 512, None, page)


def request_of(number: int, prompt: Iterable[int], params: SamplingParams | int = 1, **fields: Any) -> GenerateRequest:
    """Of these tokens; `params` as a number: at most so many tokens."""
    sampling = SamplingParams(max_tokens=params) if isinstance(params, int) else params
    return GenerateRequest(id=number, prompt=pack_tokens(prompt), params=sampling, **fields)


def one_token_each(scheduler: Scheduler, plan: StepPlan, token: int = 7) -> StepResult:
    """A result in which every row of a plan, whose sequences still run, gives this token."""
    numbers = {sequence.slot: sequence.number for sequence in scheduler.requests.running}
    return result_of(plan.step, [ResultRow(slot, numbers[slot], (token,)) for slot in plan.result_slots])


def step(scheduler: Scheduler, machine: KVMachine) -> StepPlan:
    """Plan a step, run it, and commit its result."""
    plan = scheduler.schedule()
    assert plan is not None
    machine.submit(plan)
    scheduler.commit(machine.result())
    return plan


def finish(scheduler: Scheduler, machine: KVMachine) -> None:
    """Serve what waits, to its end."""
    while (plan := scheduler.schedule()) is not None:
        machine.submit(plan)
        scheduler.commit(machine.result())
