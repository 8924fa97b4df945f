"""The ranks as the core sees them: what any executor does, and the one over mapped rings."""

from typing import Protocol

from engine.channel import RingReader, RingWriter, Waiter, map_shared
from engine.lifeline import BootArgs
from engine.plan import StepPlan, StepResult, decode_result, encode_plan


class Executor(Protocol):
    """Plans go in, results come out in the same order."""

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to every rank; returns at once."""

    def submit_masks(self, masks: bytes) -> None:
        """Hand the masks of a `masked` plan to every rank, before or after the plan itself; masks come in the order of plans."""

    def poll(self) -> StepResult | None:
        """The next result, if there is one."""


class RingExecutor:
    """The real one: a ring to all ranks, a ring back from rank 0."""

    def __init__(self, args: BootArgs) -> None:
        waiter = Waiter(args.spin)
        self._plans = RingWriter(map_shared(args.plan), args.tp, waiter)
        self._masks = RingWriter(map_shared(args.masks), args.tp, waiter)
        self._masked = 0  # steps so far that had masks
        self._results = RingReader(map_shared(args.result), 1, 0)

    def submit(self, plan: StepPlan) -> None:
        """Write to the ring of plans."""
        self._plans.write(plan.step, encode_plan(plan))

    def submit_masks(self, masks: bytes) -> None:
        """Write to the ring of masks."""
        self._masked += 1
        self._masks.write(self._masked, masks)

    def poll(self) -> StepResult | None:
        """Read the result ring once."""
        record = self._results.poll()
        return None if record is None else decode_result(record[1])
