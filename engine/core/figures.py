"""The core's log of steps: at level debug a line a step, at level info a line a second for each class of step.

    prefill   steps of prompt chunks alone      decode   of decode rows alone      mixed   of both
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.plan import StepPlan
from engine.protocol import Load

PERIOD_S = 1.0

logger = logging.getLogger(__name__)


@dataclass
class ClassFigures:
    """Counts of the steps of one class since the last line."""

    steps: int = 0
    prefill: int = 0
    decode: int = 0

    def add(self, prefill: int, decode: int) -> None:
        self.steps += 1
        self.prefill += prefill
        self.decode += decode


@dataclass
class StepFigures:
    """Collects plans as they go out; `report` when one is `due`. Times in seconds, monotonic."""

    classes: dict[str, ClassFigures] = field(default_factory=dict)
    _since: float | None = None
    _last: Load | None = None

    def planned(self, plan: StepPlan, now: float, load: Callable[[], Load]) -> None:
        """A plan went out; `load()` gives the current figures."""
        prefill, decode = plan.prompt_tokens, len(plan.decodes)
        name = "mixed" if prefill and decode else "prefill" if prefill else "decode"
        self.classes.setdefault(name, ClassFigures()).add(prefill, decode)
        if self._since is None:
            self._since = now
        if logger.isEnabledFor(logging.DEBUG):
            cached = sum(admission.cached for admission in plan.admissions)
            about = (plan.step, name, prefill, cached, decode, len(plan.admissions), self._state(load()))
            logger.debug("step %d %s: prefill %d, cached %d, decode %d, admitted %d; %s", *about)

    def due(self, now: float) -> bool:
        """A second of work has passed."""
        return self._since is not None and now - self._since >= PERIOD_S

    def report(self, load: Load, now: float) -> None:
        """Log a line for each class, and reset. Counts are since the last report."""
        assert self._since is not None
        seconds, state = now - self._since, self._state(load)
        cached = load.hit_tokens - (self._last.hit_tokens if self._last else 0)
        for name, figures in sorted(self.classes.items()):
            about = (seconds, figures.steps, name, figures.prefill, figures.decode, cached, state)
            logger.info("%.1f s: %d %s steps, prefill %d, decode %d; cached %d, %s", *about)
        self.classes.clear()
        self._since, self._last = None, load

    def _state(self, load: Load) -> str:
        """Preemptions are since the last report."""
        preempted = load.preemptions - (self._last.preemptions if self._last else 0)
        pools = ", ".join(f"{pool.name} {pool.used}+{pool.cached} of {pool.total}" for pool in load.pools)
        return f"running {load.running}, waiting {load.waiting}, preempted {preempted}, pages {pools}"
