"""Autoscaling: replicas report their load (Demand), and a policy in Serve's controller (Scaling)
adds it up.

Serve averages over `look_back_period_s`, applies its bounds and delays, and itself starts one from
zero.
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
    """One replica's load. Called on the front's loop."""

    slots: int  # sequences it can run at once
    objective_s: float  # for a first token
    _open: int = 0
    _tokenless: dict[int, float] = field(default_factory=dict)  # in the order of their coming
    _ttfts: deque[tuple[float, float]] = field(default_factory=deque)
    _load: Load | None = None

    def __call__(self, event: Event) -> None:
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
        """`late`: the worst recent TTFT (without the slowest tenth) or present wait, over the
        objective."""
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
        if recent:
            return recent[math.ceil(_WORST * len(recent)) - 1]
        return 0.0


@dataclass(frozen=True)
class Scaling:
    """Wants the fewest replicas that keep every figure within its target; ValueError for a bad
    target.

    While first tokens are late and requests wait, adds replicas, at most doubling, once the last
    change took effect. Missing or infinite figures change nothing. Ages use the monotonic clock.
    """

    slots: float = 0.8  # running and waiting sequences, as a share of a replica's slots
    kv: float = 0.8  # pages in use of the fullest KV pool, as a share
    waiting_tokens: float = 8192.0  # that may wait for prefill at one replica
    downscale_threshold: float = 0.8  # replicas go only if the rest stay below this share of each target

    def __post_init__(self) -> None:
        for target in fields(self):
            value = getattr(self, target.name)
            if target.name == "waiting_tokens":
                ceiling = _MOST_TOKENS
            else:
                ceiling = 1.0
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= ceiling:
                raise ValueError(f"policy_kwargs.{target.name}: {value!r} is not a number in (0, {ceiling:g}]")

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """(replicas, state), as Serve asks every tick."""
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
        """(replicas that keep a figure within `share` of its target, its name)."""
        for name, total in sums.items():
            yield math.ceil(total / (share * getattr(self, name)) - _ROUNDING), name

    def _settled(self, context: "AutoscalingContext", now: float) -> float | None:
        """Since when all wanted replicas run; None while some start or end."""
        if context.current_num_replicas != context.target_num_replicas:
            return None
        since: float | None = context.policy_state.get("settled")
        return now if since is None else min(since, now)  # another machine's clock may be ahead of this one's

    def _log_change(self, context: "AutoscalingContext", replicas: int, why: str, figures: Mapping[str, float]) -> None:
        if replicas != context.policy_state.get("wanted", context.target_num_replicas):
            shown = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
            logger.info("scaling: %d replicas wanted, by %s (%s)", replicas, why, shown)


def _finite(values: Mapping[str, float]) -> list[float]:
    return [value for value in values.values() if 0 <= value < math.inf]
