"""Clients that ask about pictures, one request after the other, at a scheduler in virtual time; encoders run beside its steps."""

from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.core.scheduler import Scheduler
from engine.geometry import KVGroup
from engine.lifeline import StepTimes
from engine.plan import ResultRow, StepPlan, StepResult
from engine.protocol import PlacedItem
from tests.support.engine.paced_steps import Clocks, Pace
from tests.support.engine.plans import result_of
from tests.support.engine.scheduling import ANY_MEDIA, request_of

GROUPS = (KVGroup(0, "sliding", (0,), 1, 256, 1024, 32, bidirectional=True), KVGroup(1, "full", (1,), 1, 512, None, 32))
PROMPT, PICTURE, TOKENS = 1110, 527, 10  # tokens of a prompt with two pictures, of a picture, and of an answer
ENCODE_MS, STEP_MS, TOKEN_MS = 7.5, 8.0, 0.028  # 26B on an H200: a picture, a step, and a prompt token in it
TIMES = StepTimes(
    ((1, STEP_MS), (100, STEP_MS)), ((1, STEP_MS), (8192, STEP_MS + 8192 * TOKEN_MS)), ((1, 0.0),), 0.0, 0.0, 0.0, 128
)


@dataclass
class EncodingRanks:
    """Ranks that encode one batch after the other beside their steps."""

    now: float = 0.0
    text: list[tuple[float, int]] = field(default_factory=list)  # ms and decode rows of each step
    _ends: list[float] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> tuple[StepResult, float]:
        """A plan's result, and the milliseconds of its step."""
        self._numbers |= {admission.slot: admission.number for admission in plan.admissions}
        if plan.encodes:
            began = max([self.now, *self._ends[-1:]])
            self._ends.append(began + ENCODE_MS * len(plan.encodes))
        ms = STEP_MS + TOKEN_MS * plan.prompt_tokens
        if not plan.rows and self._ends:
            ms = max(ms, self._ends[-1] - self.now)  # nobody decodes: the step waits for what it needs
        self.now += ms
        self.text.append((ms, len(plan.rows)))
        rows = [ResultRow(slot, self._numbers[slot], (7,)) for slot in plan.result_slots]
        ended = sum(end <= self.now for end in self._ends)
        return result_of(plan.step, rows)._replace(ended=ended), ms


def requests_a_second(clients: int = 100, requests: int = 400, **settings: object) -> float:
    """Answers a second of clients that each ask again once they have theirs."""
    fixed = {"model": "", "device": "cuda", "max_seqs": clients, "max_len": 2048, "prefix_cache": False}
    config = EngineConfig(**{"prefill_budget": 8192, **fixed, **settings})
    ranks = EncodingRanks()
    world = Pace(Scheduler(config, GROUPS, (clients * 40 + 513, clients * 64 + 1), TIMES, ANY_MEDIA), ranks.run)

    def refill(world: Pace) -> None:
        open_ = len(world.clocks) - sum(clock.tokens == TOKENS for clock in world.clocks.values())
        for number in range(len(world.clocks), min(requests, len(world.clocks) + clients - open_)):
            media = tuple(PlacedItem(first, PICTURE, number.to_bytes(4) + bytes([first % 251]) * 28, ((first, first + PICTURE),),
                                    "image", (), number) for first in (20, 20 + PICTURE))  # fmt: skip
            world.clocks[number] = Clocks(PROMPT, world.now)
            world.scheduler.requests.add(request_of(number, [number + 5] * PROMPT, TOKENS, media=media))

    world.run(1e9, refill)
    assert all(clock.tokens == TOKENS for clock in world.clocks.values())
    return 1e3 * requests / world.now
