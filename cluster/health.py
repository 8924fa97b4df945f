"""Whether a group is alive: a verdict on its status records, and a watcher.

a process ends        its pidfd, at once
it is stopped         its heartbeat, written by its lifeline thread every 0.25 s, is too old
it hangs in a step    it owes steps, and its finished step does not advance
the core stalls       ranks have finished a step that it does not commit, or requests wait and it makes no plan
ranks differ          their state hashes after one step differ
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from cluster.children import child_name, root_cause
from cluster.group import Group
from cluster.handshake import SETTLE_S
from engine.rank_status import RankStatus

PERIOD_S = 0.25
_NEARLY = 0.9
_NS = 1_000_000_000

logger = logging.getLogger(__name__)

Statuses = Sequence[RankStatus]  # of the ranks and, last, the core
Cause = Literal["killed", "failed", "unscheduled", "rank_stalled", "core_stalled", "diverged", "raylet"]


@dataclass(frozen=True)
class Death:
    cause: Cause
    sentence: str


@dataclass(frozen=True)
class Observation:
    """CLOCK_MONOTONIC nanoseconds."""

    now: int
    since: int = 0  # start of the uninterrupted watch, the earliest start of an age, so a suspended machine is no hang
    waiting: int | None = None  # since when a request has been open, or None

    def age_s(self, *stamps: int) -> float:
        """Seconds since the latest of `stamps` and `since`."""
        return (self.now - max(self.since, *stamps)) / _NS


def verdict(statuses: Statuses, moment: Observation, heartbeat_s: float, step_s: float) -> Death | None:
    """Why the group must end, or None. Pure. `heartbeat_s`, `step_s`: the largest ages."""
    return (
        _diverged(statuses)
        or _unscheduled(statuses, moment, heartbeat_s)
        or _stalled(statuses, stalls(statuses, moment), step_s)
    )


def stalls(statuses: Statuses, moment: Observation) -> list[float]:
    """Seconds for which each process (ranks, then the core) has owed a step.

    The core owes a commit once all ranks have finished a step, and a plan while requests wait
    without one. A rank owes every launched step, unless the core owes a commit, since it may wait
    for masks.
    """
    *ranks, core = statuses
    due = max(status.launched for status in statuses)
    owes_commit = core.finished < min(rank.finished for rank in ranks)
    owes_plan = moment.waiting is not None and core.launched == core.finished
    since = (*(status.progress_ns for status in statuses), moment.waiting or 0)
    if owes_commit or owes_plan:
        core_s = moment.age_s(*since)
    else:
        core_s = 0.0
    return [*(0.0 if owes_commit else _rank_stall_s(rank, core, due, moment) for rank in ranks), core_s]


def _rank_stall_s(rank: RankStatus, core: RankStatus, due: int, moment: Observation) -> float:
    """Counts from the rank's own progress if it has begun a due step, else also from the core's."""
    if rank.finished >= due:
        return 0.0
    if rank.launched > rank.finished:
        due_since = 0
    else:
        due_since = core.progress_ns
    return moment.age_s(rank.progress_ns, due_since)


def _diverged(statuses: Statuses) -> Death | None:
    """Names the first common step that differs, and the ranks with the rarest state first."""
    ranks = statuses[:-1]
    for step in sorted(set.intersection(*(set(rank.hashes) for rank in ranks))):
        holders: dict[int, list[int]] = {}
        for index, rank in enumerate(ranks):
            holders.setdefault(rank.hashes[step], []).append(index)
        if len(holders) > 1:
            rarest_first = sorted(holders.items(), key=lambda item: len(item[1]))
            states = " against ".join(f"{_names(indices, statuses)} ({state:08x})" for state, indices in rarest_first)
            return Death("diverged", f"ranks hold different states after step {step}: {states}")
    return None


def _unscheduled(statuses: Statuses, moment: Observation, bound_s: float) -> Death | None:
    ages = [moment.age_s(status.heartbeat_ns) for status in statuses]
    late = [index for index, age in enumerate(ages) if age > bound_s]
    if not late:
        return None
    return Death("unscheduled", f"{_names(late, statuses)}: not scheduled for {max(ages):.1f} s (stopped, or host hung)")


def _stalled(statuses: Statuses, stalled_s: Sequence[float], bound_s: float) -> Death | None:
    """Blame ranks before the core, and those with the fewest steps."""
    *ranks, core = statuses
    if (age := max(stalled_s[:-1])) > bound_s:
        progress = [(rank.finished, rank.launched) for rank in ranks]
        slowest = [index for index, steps in enumerate(progress) if steps == min(progress)]
        return Death("rank_stalled", f"{_names(slowest, statuses)} made no progress in step {min(progress)[0] + 1} for {age:.0f} s")
    if stalled_s[-1] > bound_s:
        return Death("core_stalled", f"the core made no progress after step {core.finished} for {stalled_s[-1]:.0f} s")
    return None


def _names(indices: Sequence[int], statuses: Statuses) -> str:
    return ", ".join(child_name(index, len(statuses) - 1) for index in indices)


@dataclass
class Watcher:
    """Calls `on_death(death)` exactly once, unless closed first."""

    group: Group
    on_death: Callable[[Death], None]
    waiting: Callable[[], int | None]  # monotonic ns since when requests have been open, or None
    raylet: int  # process id of this replica's raylet, with which the group ends

    def __post_init__(self) -> None:
        self._watch = ExitStack()
        self._closed = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._looked_ns = self._since_ns = time.monotonic_ns()
        for child in self.group.children:
            self._read(child.pidfd, self._ended)
        self._timer = self._loop.call_later(PERIOD_S, self._look)
        self._watch.callback(lambda: self._timer.cancel())  # noqa: PLW0108 - the timer of that moment
        try:
            raylet = os.pidfd_open(self.raylet)
        except ProcessLookupError:
            self._loop.call_soon(self._die, Death("raylet", "the raylet is gone"))
        else:
            self._watch.callback(os.close, raylet)
            self._read(raylet, lambda: self._die(Death("raylet", "the raylet ended")))

    def _read(self, fd: int, callback: Callable[[], None]) -> None:
        self._loop.add_reader(fd, callback)
        self._watch.callback(self._loop.remove_reader, fd)

    def _ended(self) -> None:
        """A child not killed by a signal may only have lost a peer."""
        self._watch.close()
        if (death := self._death()).cause == "killed":
            self._die(death)
        else:
            self._loop.call_later(SETTLE_S, self._settle)

    def _settle(self) -> None:
        """Blame a hung rank if another gave up waiting, else the child that ended."""
        death = self._death()
        hung = None if death.cause == "killed" else self._verdict(_NEARLY)
        self._die(hung or death)

    def _death(self) -> Death:
        cause = root_cause(self.group.exits())
        return Death("killed" if cause and cause.killed else "failed", str(cause or "a process of the group ended"))

    def _look(self) -> None:
        now = time.monotonic_ns()
        if now - self._looked_ns > (PERIOD_S + self.group.config.heartbeat_timeout_s / 2) * _NS:
            self._since_ns = now  # this process itself did not run: ages do not count from before that
        self._looked_ns = now
        self._timer = self._loop.call_later(PERIOD_S, self._look)
        if death := self._verdict(1.0):
            self._die(death)

    def _verdict(self, share: float) -> Death | None:
        config = self.group.config
        moment = Observation(time.monotonic_ns(), self._since_ns, self.waiting())
        return verdict(self.group.status(), moment, share * config.heartbeat_timeout_s, share * config.step_timeout_s)

    def _die(self, death: Death) -> None:
        if self._closed:
            return
        self.close()
        logger.error("group ended: %s", death.sentence)
        self.on_death(death)

    def close(self) -> None:
        """Idempotent; call it before an orderly end."""
        self._closed = True
        self._watch.close()
