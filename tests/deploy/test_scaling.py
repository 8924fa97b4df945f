"""The autoscaling policy under Serve's own bounds and delays, over simulated replicas; and what a replica tells of itself."""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig

from deploy import scaling
from deploy.scaling import SUMMED_FIGURES, TTFT_WINDOW_S, Demand, Scaling
from engine.events import EngineLoad, FirstToken, RequestFinished, RequestStarted, to_each
from tests.support.engine.load_figures import load, pool

pytestmark = pytest.mark.cpu

TICK_S = 1.0
BOOT_S = 20.0
SLOTS = 16
QUEUE = 32  # a replica's; more are refused
SERVICE_S = 10.0  # of a request in a slot
CONFIG = AutoscalingConfig(
    min_replicas=0,
    max_replicas=8,
    look_back_period_s=15.0,
    upscale_delay_s=3.0,
    downscale_delay_s=30.0,
    downscale_to_zero_delay_s=60.0,
)


@dataclass
class Context:
    """As Serve's, of one tick."""

    current_num_replicas: int
    target_num_replicas: int
    policy_state: dict[str, Any]
    current_time: float
    config: AutoscalingConfig
    aggregated_metrics: dict[str, dict[str, float]]
    total_queued_requests: float = 0.0

    @property
    def total_num_requests(self) -> float:
        return self.total_queued_requests


@dataclass
class Fleet:
    """Replicas of SLOTS slots, one queue, and Serve's loop around the policy."""

    policy: Callable[[Any], tuple[int, dict[str, Any]]]
    config: AutoscalingConfig = field(default_factory=lambda: CONFIG)
    seed: int = 0
    now: float = 0.0
    target: int = 0
    ready: list[float] = field(default_factory=list)  # when each replica is there
    running: list[float] = field(default_factory=list)  # when each request leaves its slot
    waiting: deque[float] = field(default_factory=deque)  # since when
    state: dict[str, Any] = field(default_factory=dict)
    past: deque[dict[str, float]] = field(default_factory=deque)
    targets: list[int] = field(default_factory=list)
    ttfts: list[tuple[float, float]] = field(default_factory=list)
    asked: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.decide = _apply_autoscaling_config(self.policy)

    def run(self, seconds: float, rate: float) -> None:
        """So long, at `rate` requests a second."""
        for _ in range(int(seconds / TICK_S)):
            self.now += TICK_S
            arrivals = int(rate * TICK_S) + (self.rng.random() < rate * TICK_S % 1)
            taken = min(arrivals, QUEUE * max(1, self.up) - len(self.waiting))
            self.waiting.extend([self.now] * taken)
            self.asked += taken
            self.refused += arrivals - taken
            self._serve()
            self._scale()

    @property
    def up(self) -> int:
        return sum(ready <= self.now for ready in self.ready)

    def _serve(self) -> None:
        self.running = [end for end in self.running if end > self.now]
        while self.waiting and len(self.running) < self.up * SLOTS:
            since = self.waiting.popleft()
            self.ttfts.append((self.now, self.now - since))
            self.running.append(self.now + SERVICE_S * self.rng.uniform(0.8, 1.2))

    def _figures(self) -> dict[str, float]:
        recent = [ttft for at, ttft in self.ttfts if at > self.now - TTFT_WINDOW_S]
        late = max([*recent, *(self.now - since for since in self.waiting)], default=0.0)
        sizes = ((len(self.running) + len(self.waiting)) / SLOTS, 0.5 * len(self.running) / SLOTS, 100.0 * len(self.waiting))
        return dict(zip(SUMMED_FIGURES, sizes, strict=True)) | {"late": late}

    def _scale(self) -> None:
        self.past.append(self._figures())
        while len(self.past) > self.config.look_back_period_s / TICK_S:
            self.past.popleft()
        told = {} if not self.up else {name: {"all": sum(f[name] for f in self.past) / len(self.past)} for name in self.past[0]}
        queued = 0 if self.up else len(self.waiting)
        context = Context(self.up, self.target, dict(self.state), self.now, self.config, told, queued)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ray.serve.autoscaling_policy.time.time", lambda: self.now)
            patch.setattr(scaling, "monotonic", lambda: self.now)
            wanted, self.state = self.decide(context)
        self.target = max(self.config.min_replicas, min(self.config.max_replicas, wanted))
        self.targets.append(self.target)
        while len(self.ready) < self.target:
            self.ready.append(self.now + BOOT_S)
        while len(self.ready) > self.target:
            self.ready.remove(max(self.ready))


def turns(targets: list[int]) -> int:
    """How often the direction of scaling changed."""
    steps = [after - before for before, after in pairwise(targets) if after != before]
    return sum((before > 0) != (after > 0) for before, after in pairwise(steps))


def test_a_step_of_load_up_and_down_to_zero_and_back() -> None:
    """Replicas follow a step up, stay through the plateau, go down to zero when nobody asks, and come back for one request."""
    fleet = Fleet(Scaling())
    fleet.run(60, 0.0)
    assert fleet.target == 0
    fleet.run(300, 5.0)
    plateau = fleet.targets[-150:]
    print(f"plateau {set(plateau)}, 5 requests a second of {SERVICE_S} s need {5 * SERVICE_S / SLOTS / 0.8:.1f} replicas")
    assert len(set(plateau)) == 1
    assert 4 <= plateau[0] <= 6
    assert max(ttft for at, ttft in fleet.ttfts if at > fleet.now - 100) <= 1.0
    fleet.run(240, 0.0)
    assert fleet.target == 0
    assert turns(fleet.targets) == 1
    fleet.waiting.append(fleet.now)
    fleet.asked += 1
    fleet.run(60, 0.0)
    assert fleet.asked == len(fleet.ttfts), "a request is still waiting"
    assert fleet.ttfts[-1][1] <= BOOT_S + 2 * TICK_S


@settings(max_examples=40, deadline=None)
@given(rate=st.floats(0.2, 9.0), seed=st.integers(0, 1000))
def test_a_steady_load_does_not_flap(rate: float, seed: int) -> None:
    """Whatever the steady load, the number of replicas stands still once it has been found."""
    fleet = Fleet(Scaling(), seed=seed)
    fleet.run(240, rate)
    fleet.targets.clear()
    fleet.run(600, rate)
    assert turns(fleet.targets) == 0, fleet.targets
    assert len(set(fleet.targets)) <= 2, fleet.targets


def test_without_the_downscale_threshold_it_flaps() -> None:
    """The same test with a policy that gives up a replica as soon as the rest could just do: it flaps."""
    eager = AutoscalingConfig(**(CONFIG.model_dump(exclude={"policy"}) | {"downscale_delay_s": 3.0, "look_back_period_s": 11.0}))

    def flapping(downscale_threshold: float) -> int:
        total = 0
        for seed in range(8):
            fleet = Fleet(Scaling(downscale_threshold=downscale_threshold), eager, seed=seed)
            fleet.run(240, 3.9)
            fleet.targets.clear()
            fleet.run(600, 3.9)
            total += turns(fleet.targets)
        return total

    downscale_threshold, planted = flapping(0.8), flapping(1.0)
    print(f"turns: downscale_threshold {downscale_threshold}, planted {planted}")
    assert downscale_threshold == 0
    assert planted >= 4


def replicas(
    now: int, figures: dict[str, float], running: int | None = None, settled: float | None = None, wall_s: float = 1000.0
) -> int:
    """How many the policy asks for where there are to be `now`. `wall_s`: what Serve's clock shows."""
    told = {name: {"a": value} for name, value in figures.items()}
    state = {} if settled is None else {"settled": settled}
    context = Context(now if running is None else running, now, state, wall_s, CONFIG, told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "monotonic", lambda: 1000.0)
        wanted, _ = Scaling()(context)
    return wanted


@pytest.mark.parametrize(
    ("figures", "wanted"),
    [
        ({"slots": 1.7}, 3),
        ({"kv": 0.81}, 2),
        ({"waiting_tokens": 8193}, 2),
        ({"waiting_tokens": 40000.0}, 5),
        ({"slots": 0.5, "kv": 0.3}, 1),
        ({"slots": 0.0}, 0),
    ],
)
def test_each_figure_asks_for_replicas(figures: dict[str, float], wanted: int) -> None:
    """The figure that needs most decides."""
    assert replicas(1, figures) == wanted


def test_late_first_tokens_ask_for_more() -> None:
    """TTFT over its objective while something waits adds replicas, twice as many at most, and not while any is starting."""
    late = {"slots": 0.5, "waiting_tokens": 10.0}
    long_ago = 1000.0 - TTFT_WINDOW_S - CONFIG.look_back_period_s
    assert replicas(2, {**late, "late": 1.2}, settled=long_ago) == 3
    assert replicas(2, {**late, "late": 9.0}, settled=long_ago) == 4
    assert replicas(2, {**late, "late": 9.0}, settled=long_ago + 1) == 2 - 1
    assert replicas(2, {**late, "late": 9.0}, running=1, settled=long_ago) == 2 - 1
    assert replicas(2, {"slots": 0.5, "waiting_tokens": 0.0, "late": 9.0}, settled=long_ago) == 2 - 1
    assert replicas(2, {**late, "late": 0.9}, settled=long_ago) == 2 - 1


def test_missing_figures_do_not_scale_down() -> None:
    """Replicas that run and have told nothing stay; those that say they have nothing to do go."""
    assert replicas(3, {}) == 3
    assert replicas(3, {"slots": 0.0}) == 0
    assert replicas(0, {}) == 0
    assert replicas(3, {}, running=0) == 3, "replicas that are starting have told nothing yet"
    assert replicas(3, {"slots": 0.0}, running=0) == 0, "the same, if they had told that there is nothing to do"


@pytest.mark.parametrize("figure", [*SUMMED_FIGURES, "late"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_a_figure_that_is_no_number_moves_nothing(figure: str, value: float) -> None:
    """Alone it counts as not told; beside others they decide."""
    assert replicas(3, {figure: value}, settled=0.0) == 3
    told = {"slots": 1.7, "waiting_tokens": 1.0}
    assert replicas(3, told | {figure: value}, settled=0.0) == (3 if figure != "slots" else replicas(3, {"waiting_tokens": 1.0}))


@pytest.mark.parametrize(("figures", "wrong"), [({"kv": math.nan}, ValueError), ({"slots": math.inf}, OverflowError)])
def test_without_the_check_it_fails(figures: dict[str, float], wrong: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test before: figures as they are told."""
    monkeypatch.setattr(scaling, "_finite", lambda values: list(values.values()))
    with pytest.raises(wrong):
        replicas(3, figures)


@pytest.mark.parametrize("wall_s", [-1e9, 0.0, 1e12])
def test_a_jump_of_the_clock_moves_nothing(wall_s: float) -> None:
    """Late first tokens add replicas a while after the last change by the monotonic clock, whatever the time of day."""
    late = {"slots": 0.5, "waiting_tokens": 10.0, "late": 9.0}
    long_ago = 1000.0 - TTFT_WINDOW_S - CONFIG.look_back_period_s
    assert replicas(2, late, settled=long_ago, wall_s=wall_s) == 4
    assert replicas(2, late, settled=long_ago + 1, wall_s=wall_s) == 1
    assert replicas(2, late, settled=1e12, wall_s=wall_s) == 1, "a controller that was started anew on another machine"


def test_it_keeps_what_the_rest_could_hardly_do_without() -> None:
    """Between the target and the downscale_threshold share of it, nothing moves."""
    assert [replicas(3, {"slots": total}) for total in (2.5, 2.3, 1.7, 1.65, 1.1)] == [4, 3, 3, 3, 2]


def test_bad_targets_are_refused() -> None:
    """A target out of its range is named."""
    bad = [("slots", 0.0), ("kv", 1.5), ("waiting_tokens", -1), ("downscale_threshold", "x")]
    bad += [("slots", True), ("waiting_tokens", math.inf), ("kv", math.nan), ("waiting_tokens", math.nan)]
    for name, value in bad:
        with pytest.raises(ValueError, match=f"policy_kwargs.{name}"):
            Scaling(**{name: value})


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a replica's clock shows."""
    shown = [0.0]
    monkeypatch.setattr(scaling, "monotonic", lambda: shown[0])
    return shown


def test_where_nobody_asks_nothing_piles_up(now: list[float]) -> None:
    """Without autoscaling no figures are collected: a long life leaves the recent TTFTs, and no more."""
    demand = Demand(slots=4, objective_s=0.5)
    for request in range(1000):
        now[0] += 1.0
        demand(RequestStarted(request, 1))
        demand(FirstToken(request, 0.1))
        demand(RequestFinished(request, "stop", 1, 0.1, None, 0.1))
    assert len(demand._ttfts) <= TTFT_WINDOW_S + 1
    assert demand.figures()["slots"] == 0.0


def test_a_replica_tells_what_it_has(now: list[float]) -> None:
    """Slots, fullest pool, waiting tokens, and the worst of recent TTFTs and lasting waits over the objective."""
    demand = Demand(slots=4, objective_s=0.5)
    twin = Demand(slots=4, objective_s=0.5)
    sink = to_each(twin, demand)
    assert demand.figures() == {"slots": 0.0, "kv": 0.0, "waiting_tokens": 0.0, "late": 0.0}
    for request in (1, 2):
        sink(RequestStarted(request, 100))
    pools = [pool("full", 9, 10), pool("sliding", 2, 10), pool("none", 0, 0)]
    sink(EngineLoad(load(1, pools, waiting=1, running=1, waiting_tokens=100)))
    now[0] = 0.25
    sink(FirstToken(1, 0.25))
    assert demand.figures() == {"slots": 0.5, "kv": 0.9, "waiting_tokens": 100.0, "late": 0.5}
    now[0] = 2.0
    assert demand.figures()["late"] == 4.0
    sink(RequestFinished(2, "client_gone", 0, None, None, 2.0))
    assert demand.figures()["late"] == 0.5
    sink(RequestFinished(1, "stop", 5, 0.25, 0.1, 2.0))
    now[0] += TTFT_WINDOW_S
    assert (demand.figures()["slots"], demand.figures()["late"]) == (0.0, 0.0)
    assert twin.figures() == demand.figures()
