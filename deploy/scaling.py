"""How many replicas there should be: each replica tells what it has on its hands, and a policy in Serve's controller adds it up.

    Demand    a sink of the replica's events; `figures` is what Serve collects of it every few seconds
    Scaling   the policy: `policy_function: deploy.scaling:Scaling` in the YAML, its targets in `policy_kwargs`

Serve averages the figures over `look_back_period_s` and holds what the policy wants to its bounds (min_replicas, max_replicas) and
delays (upscale_delay_s, downscale_delay_s, downscale_to_zero_delay_s). At zero replicas Serve itself wants one for whoever waits.
"""

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from time import monotonic
from typing import TYPE_CHECKING, Any

from engine.events import EngineLoad, Event, FirstToken, RequestFinished, RequestStarted
from engine.protocol import Load

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

POLICY = "deploy.scaling:Scaling"
TTFT_WINDOW_S = 15.0
SUMMED_FIGURES = ("slots", "kv", "waiting_tokens")
_ROUNDING = 1e-9
_MOST_TOKENS = 1e9
_WORST = 0.9  # of the recent TTFTs, in order: the one at this place

logger = logging.getLogger("ray.serve")


@dataclass
class Demand:
    """What one replica has on its hands. Called on the front's loop, as its `figures` are.

    slots        sequences it can run at once
    objective_s  what a first token may take
    """

    slots: int
    objective_s: float
    _open: int = 0
    _tokenless: dict[int, float] = field(default_factory=dict)  # in the order of their coming
    _ttfts: deque[tuple[float, float]] = field(default_factory=deque)
    _load: Load | None = None

    def __call__(self, event: Event) -> None:
        """Fold one event in."""
        match event:
            case RequestStarted():
                self._open += 1
                self._tokenless[event.request] = monotonic()
            case FirstToken():
                self._tokenless.pop(event.request, None)
                self._ttfts.append((monotonic(), event.ttft_s))
                self._drop_old()  # here, too: without autoscaling nobody asks for figures
            case RequestFinished():
                self._open -= 1
                self._tokenless.pop(event.request, None)
            case EngineLoad():
                self._load = event.load

    def figures(self) -> dict[str, float]:
        """Return a figure by the name of each of Scaling's targets, a share or a sum that adds up over replicas; and `late`.

        late: the worst of the recent TTFTs (the slowest tenth left out) and of the waits that still last, over the objective.
        """
        now = monotonic()
        longest_wait = now - next(iter(self._tokenless.values()), now)
        return {
            "slots": self._open / self.slots,
            "kv": self._load.kv_usage if self._load else 0.0,
            "waiting_tokens": float(self._load.waiting_tokens) if self._load else 0.0,
            "late": max(self._slow_ttft(), longest_wait) / self.objective_s,
        }

    def _drop_old(self) -> None:
        while self._ttfts and self._ttfts[0][0] < monotonic() - TTFT_WINDOW_S:
            self._ttfts.popleft()

    def _slow_ttft(self) -> float:
        self._drop_old()
        recent = sorted(ttft for _, ttft in self._ttfts)
        return recent[math.ceil(_WORST * len(recent)) - 1] if recent else 0.0


@dataclass(frozen=True)
class Scaling:
    """Wants the least number of replicas that keeps every figure within its target; ValueError for a target out of its range.

    slots                running and waiting sequences, as a share of the slots of one replica
    kv                   pages in use of the fullest KV pool, as a share
    waiting_tokens       tokens that may wait for their prefill at one replica
    downscale_threshold  replicas go only if the rest then stay below this share of each target: between both nothing moves

    While first tokens come later than the objective, and something does wait, replicas are added in proportion: twice as many at
    most, and only once what the last change brought can be seen. While no replica tells figures, nothing moves. A figure that is
    no finite number counts as not told. Ages are of the monotonic clock: that of the context may jump.
    """

    slots: float = 0.8
    kv: float = 0.8
    waiting_tokens: float = 8192.0
    downscale_threshold: float = 0.8

    def __post_init__(self) -> None:
        for target in fields(self):
            value = getattr(self, target.name)
            ceiling = _MOST_TOKENS if target.name == "waiting_tokens" else 1.0
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= ceiling:
                raise ValueError(f"policy_kwargs.{target.name}: {value!r} is not a number in (0, {ceiling:g}]")

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """Decide on (replicas, state), as Serve asks every tick."""
        told = {name: _finite(values) for name, values in (context.aggregated_metrics or {}).items()}
        target = context.target_num_replicas
        sums = {name: sum(told.get(name, ())) for name in SUMMED_FIGURES}
        late = max(told.get("late", ()), default=0.0)
        now = monotonic()
        settled = self._settled(context, now)
        if target and not any(told.get(name) for name in SUMMED_FIGURES):
            return target, {"wanted": target, "settled": settled}
        replicas, why = max(self._needed(sums, 1.0))
        seen_s = TTFT_WINDOW_S + context.config.look_back_period_s  # from here on figures speak of the replicas of now alone
        if late > 1 and sums["waiting_tokens"] and settled is not None and now - settled >= seen_s:
            replicas, why = max((replicas, why), (math.ceil(target * min(late, 2.0)), "late"))
        if replicas < target:
            replicas, why = max(self._needed(sums, self.downscale_threshold))
            replicas = min(replicas, target)
        if not replicas:
            replicas, why = (1, "requests at no replica") if context.total_queued_requests else (0, "idleness")
        self._log_change(context, replicas, why, sums | {"late": late})
        return replicas, {"wanted": replicas, "settled": settled}

    def _needed(self, sums: Mapping[str, float], share: float) -> Iterator[tuple[int, str]]:
        """Yield (replicas at which a figure just stays within `share` of its target, its name)."""
        for name, total in sums.items():
            yield math.ceil(total / (share * getattr(self, name)) - _ROUNDING), name

    def _settled(self, context: "AutoscalingContext", now: float) -> float | None:
        """Return since when all wanted replicas run; None while some are starting or ending."""
        if context.current_num_replicas != context.target_num_replicas:
            return None
        since: float | None = context.policy_state.get("settled")
        return now if since is None else min(since, now)  # another machine's clock may be ahead of this one's

    def _log_change(self, context: "AutoscalingContext", replicas: int, why: str, figures: Mapping[str, float]) -> None:
        """Log one line at each change of the decision."""
        if replicas != context.policy_state.get("wanted", context.target_num_replicas):
            shown = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
            logger.info("scaling: %d replicas wanted, by %s (%s)", replicas, why, shown)


def _finite(values: Mapping[str, float]) -> list[float]:
    """Returns the figures that are finite numbers and not negative."""
    return [value for value in values.values() if 0 <= value < math.inf]
