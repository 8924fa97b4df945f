"""A rank with a fault planted in it: `python -m tests.support.engine.faulty_rank FAULT '<BootArgs>'`, the real worker otherwise.

    page      one page of the full group: an append names the page before it, whose tokens are overwritten
    reduce    one sum over the ranks is left out: this rank keeps its own part
    token     one row's token is reported as another than the one that was sampled, on this rank alone

The fault falls once: `page` in the first sequence of two pages, the others in the PURE-th step that only decodes, when every
request is running.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from cluster.children import child_command
from engine.lifeline import BootArgs
from engine.plan import PlanView, StepPlan, encode_plan, read_plan
from engine.rank import runner, worker
from engine.rank.sampler import Sampler
from kernels.allreduce import MappedCollectives
from tests.support.engine.plans import PageAppend, decode_plan

FAULTS = ("page", "reduce", "token")
PURE = 5
FULL = 1  # the group
SUM = 4  # of the step's sums: the embedding's is 0


def faulty(fault: str, rank: int = 1) -> "Plant":
    """For `Group.boot`: rank `rank` has `fault`, every other process is the real one."""
    return Plant(fault, rank)


@dataclass(frozen=True)
class Plant:
    """A Command of `Group.boot`."""

    fault: str
    rank: int

    def __call__(self, args: BootArgs) -> Sequence[str]:
        """The child's command line."""
        if args.index != self.rank:
            return child_command(args)
        return [sys.executable, "-m", "tests.support.engine.faulty_rank", self.fault, child_command(args)[-1]]


@dataclass
class _Fault:
    """What the patched functions know between calls. `last`: the full group's last page of each slot."""

    name: str
    pure: int = 0
    planted: bool = False
    countdown: int = -1
    last: dict[int, int] = field(default_factory=dict)

    def read(self, data: bytes) -> PlanView:
        """In place of read_plan."""
        plan = decode_plan(data)
        self.pure += not plan.chunks
        if self.name == "page" and not self.planted:
            plan = self._misplace(plan)
        elif self.pure >= PURE and not self.planted and self.name == "reduce":
            self.planted, self.countdown = True, SUM
        return read_plan(encode_plan(plan))

    def _misplace(self, plan: StepPlan) -> StepPlan:
        for at, append in enumerate(plan.appends):
            if append.group == FULL and append.index:
                self.planted = True
                wrong = PageAppend(FULL, append.slot, append.index, self.last[append.slot])
                return replace(plan, appends=[*plan.appends[:at], wrong, *plan.appends[at + 1 :]])
            if append.group == FULL:
                self.last[append.slot] = append.page
        return plan

    def sampled(self, chosen: Tensor) -> None:
        """Behind the sampling of a step: token and flags of each row."""
        if self.name == "token" and self.pure >= PURE and not self.planted:
            self.planted = True
            chosen[0, 0] += 1

    def skips(self, x: Tensor) -> bool:
        """Whether this sum is the one to be left out."""
        due = self.countdown == 0
        self.countdown -= x.dim() == 2
        return due


def main() -> None:
    """Patch, then be the worker."""
    fault = _Fault(sys.argv.pop(1))
    assert fault.name in FAULTS, fault.name
    whole = MappedCollectives.all_reduce

    def all_reduce(self: MappedCollectives, x: Tensor) -> Tensor:
        own = x.clone()
        total = whole(self, x)
        return own if fault.skips(x) else total

    sample = Sampler.sample

    def sampled(self: Sampler, *given: Any) -> Any:
        chosen, logprobs = sample(self, *given)
        fault.sampled(chosen)
        return chosen, logprobs

    Sampler.sample = sampled  # type: ignore[method-assign]
    runner.read_plan = fault.read  # type: ignore[attr-defined]
    MappedCollectives.all_reduce = all_reduce  # type: ignore[method-assign]
    worker.main()


if __name__ == "__main__":
    main()
