"""The verdict on a group's status records, and the watcher around it, without any process."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.children import ExitStatus
from cluster.health import Death, Observation, Watcher, verdict
from engine.config import EngineConfig
from engine.lifeline import Failed
from engine.rank_status import RankStatus
from tests.support.engine.fakes import fake_config

pytestmark = pytest.mark.pure

S = 1_000_000_000
NOW = 1000 * S
BOUNDS = (3.0, 60.0)  # seconds: of a heartbeat, and of a step
MOMENT = Observation(NOW)


def statuses(tp: int = 4, step: int = 811) -> list[RankStatus]:
    """A group at rest after `step`, every heart beating; the last is the core."""
    return [RankStatus(launched=step, finished=step, progress_ns=NOW - 500 * S, heartbeat_ns=NOW - S // 5)] * (tp + 1)


def with_record(records: list[RankStatus], index: int, **changes: int) -> list[RankStatus]:
    return [record._replace(**changes) if at == index else record for at, record in enumerate(records)]


def judged(records: list[RankStatus], moment: Observation = MOMENT) -> Death | None:
    return verdict(records, moment, *BOUNDS)


def launched(records: list[RankStatus], step: int, at: int) -> list[RankStatus]:
    """All ranks and the core have launched `step` at time `at`."""
    return [record._replace(launched=step, progress_ns=at) for record in records]


def test_a_group_at_rest_is_well() -> None:
    """Idle for minutes with beating hearts is no fault, with requests waiting or not, as long as they have not waited long."""
    assert judged(statuses()) is None
    assert judged(statuses(), Observation(NOW, waiting=NOW - 59 * S)) is None
    assert judged(launched(statuses(), 812, NOW - 59 * S)) is None


@pytest.mark.parametrize(("index", "name"), [(0, "rank 0"), (2, "rank 2"), (4, "the core")])
def test_an_old_heartbeat_names_its_process(index: int, name: str) -> None:
    """One heartbeat just over the bound is reported with its owner's name; one just under it is not."""
    late = judged(with_record(statuses(), index, heartbeat_ns=NOW - 31 * S // 10))
    assert late == Death("unscheduled", f"{name}: not scheduled for 3.1 s (stopped, or host hung)")
    assert judged(with_record(statuses(), index, heartbeat_ns=NOW - 29 * S // 10)) is None


def test_all_heartbeats_stop_at_once() -> None:
    """Several stopped processes are all named."""
    records = [record._replace(heartbeat_ns=NOW - 5 * S) for record in statuses(tp=1)]
    expected = Death("unscheduled", "rank 0, the core: not scheduled for 5.0 s (stopped, or host hung)")
    assert judged(records) == expected


def test_a_suspended_machine_is_no_death() -> None:
    """Heartbeats from before the watcher itself was stopped count only from when it looks again."""
    records = [record._replace(heartbeat_ns=NOW - 100 * S) for record in launched(statuses(), 812, NOW - 100 * S)]
    assert judged(records, Observation(NOW, since=NOW - S)) is None
    assert judged(records, Observation(NOW, since=NOW - 4 * S)) is not None


HANGS = [
    # three ranks wait in step 812's collective for rank 1, which never launched it
    (812, 61, 1, {"launched": 811, "progress_ns": NOW - 62 * S}, "rank 1 made no progress in step 812 for 61 s"),
    # one that finished less than its peers, however long these have waited for it
    (813, 70, 3, {"launched": 812, "finished": 810, "progress_ns": NOW - 61 * S}, "rank 3 made no progress in step 811 for 70 s"),
    # ranks that are equally far are named together
    (812, 61, 4, {}, "rank 0, rank 1, rank 2, rank 3 made no progress in step 812 for 61 s"),
]


@pytest.mark.parametrize(("step", "age_s", "index", "behind", "sentence"), HANGS)
def test_a_hang_blames_who_is_behind(step: int, age_s: int, index: int, behind: dict[str, int], sentence: str) -> None:
    """With the step."""
    records = with_record(launched(statuses(), step, NOW - age_s * S), index, **behind)
    assert judged(records) == Death("rank_stalled", sentence)


def test_a_fresh_plan_after_a_long_rest_is_no_hang() -> None:
    """After minutes of rest the core publishes step 812: ranks that have not picked it up get the whole bound from there."""
    fresh = with_record(statuses(), 4, launched=812, progress_ns=NOW - S)
    assert judged(fresh) is None
    stale = with_record(statuses(), 4, launched=812, progress_ns=NOW - 61 * S)
    expected = Death("rank_stalled", "rank 0, rank 1, rank 2, rank 3 made no progress in step 812 for 61 s")
    assert judged(stale) == expected


def test_a_core_that_does_not_commit_is_named() -> None:
    """All ranks finished step 812 long ago and the core has not taken it in: the core is named."""
    records = [record._replace(launched=812, finished=812, progress_ns=NOW - 61 * S) for record in statuses()]
    expected = Death("core_stalled", "the core made no progress after step 811 for 61 s")
    assert judged(with_record(records, 4, finished=811)) == expected
    assert judged(records) is None


def test_a_core_whose_masks_the_ranks_wait_for_is_named() -> None:
    """It hangs as it makes the masks of step 813 from the tokens of 812: no rank can go on, and none is blamed. Once it has
    committed 812 it owes nothing more."""
    records = [record._replace(finished=812) for record in launched(statuses(), 813, NOW - 70 * S)]
    last = with_record(records, 2, progress_ns=NOW - 61 * S)
    expected = Death("core_stalled", "the core made no progress after step 811 for 61 s")
    assert judged(with_record(last, 4, finished=811)) == expected
    assert verdict(with_record(last, 4, finished=811), MOMENT, 3.0, 62.0) is None
    blamed = judged(last)
    assert blamed == Death("rank_stalled", "rank 0, rank 1, rank 2, rank 3 made no progress in step 813 for 70 s")


def test_a_core_that_plans_nothing_for_those_who_wait_is_named() -> None:
    """Requests have waited over the bound and no step was started: the core is named; a step in between starts the clock anew."""
    waiting = Observation(NOW, waiting=NOW - 61 * S)
    assert judged(statuses(), waiting) == Death("core_stalled", "the core made no progress after step 811 for 61 s")
    assert judged(with_record(statuses(), 4, progress_ns=NOW - 5 * S), waiting) is None


def test_ranks_of_different_states_are_named() -> None:
    """Of the last steps that all ranks show, the first after which one has another state is reported with that rank, whoever is
    ahead; steps that not all of them show are not compared, and neither is the core."""
    hashes = {step: 0xABC0 + step for step in range(804, 812)}
    well = [record._replace(hashes=hashes) for record in statuses()[:-1]] + statuses()[-1:]
    assert judged(well) is None
    ahead = [*well[:2], well[2]._replace(finished=812, hashes={**hashes, 812: 7}), *well[3:]]
    assert judged(ahead) is None
    other = [*ahead[:1], well[1]._replace(hashes={**hashes, 810: 0xBAD, 811: 0xBAD1}), *ahead[2:]]
    sentence = "ranks hold different states after step 810: rank 1 (00000bad) against rank 0, rank 2, rank 3 (0000aeea)"
    assert judged(other) == Death("diverged", sentence)


class FakeGroup:
    """What a watcher sees, with pipes for pidfds."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.ends = [os.pipe() for _ in range(2)]
        self.found: list[ExitStatus] = []
        self.last_beat: int | None = None  # of hearts that have stopped
        self.records = [RankStatus()] * 3

    @property
    def children(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(pidfd=read) for read, _ in self.ends]

    def status(self) -> list[RankStatus]:
        beat = self.last_beat or time.monotonic_ns()
        return [record._replace(heartbeat_ns=beat) for record in self.records]

    def exits(self) -> list[ExitStatus]:
        return self.found

    def end(self, index: int, *exits: ExitStatus) -> None:
        os.write(self.ends[index][1], b"x")
        self.found += exits

    def close(self) -> None:
        for fd in (end for pair in self.ends for end in pair):
            os.close(fd)


Story = Callable[[FakeGroup, Watcher], None]


def watch(
    tmp_path: Path, story: Story, *, raylet: int = os.getpid(), quiet_s: float = 0.0, heartbeat_s: float = 0.8, step_s: float = 0.4
) -> list[Death]:
    """What a watcher reports when `story` happens to its group, soon after the first report; `quiet_s`: within so long, where there
    may be none."""
    group = FakeGroup(fake_config(tmp_path, heartbeat_timeout_s=heartbeat_s, step_timeout_s=step_s))
    deaths = []

    async def main() -> None:
        watcher = Watcher(group, deaths.append, waiting=lambda: None, raylet=raylet)
        watcher.start()
        story(group, watcher)
        async with asyncio.timeout(60):
            while not (deaths or quiet_s):  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.01)
        await asyncio.sleep(quiet_s or 0.3)
        watcher.close()

    asyncio.run(main())
    group.close()
    return deaths


def test_the_watcher_blames_the_signal_not_the_first_to_end(tmp_path: Path) -> None:
    """Rank 0 ends first because it lost rank 1, which a signal killed: rank 1 is named, once."""

    def story(group: FakeGroup, watcher: Watcher) -> None:
        group.end(0, ExitStatus("rank 0", 1))
        asyncio.get_running_loop().call_later(0.05, group.end, 1, ExitStatus("rank 1", -9))

    assert watch(tmp_path, story) == [Death("killed", "rank 1 was killed by SIGKILL")]


@pytest.mark.parametrize(
    ("ended", "sentence"),
    [
        (ExitStatus("rank 0", 1, Failed("CUDA out of memory", user=False)), "rank 0 failed: CUDA out of memory"),
        (ExitStatus("rank 0", 3), "rank 0 ended with exit code 3"),
    ],
)
def test_the_watcher_names_whoever_ended_alone(tmp_path: Path, ended: ExitStatus, sentence: str) -> None:
    """Where no signal explains it, by what it said before it ended, or by its exit code; `failed` is the cause."""
    assert watch(tmp_path, lambda group, _: group.end(0, ended)) == [Death("failed", sentence)]


@pytest.mark.parametrize(("step_s", "blamed"), [(0.4, "rank 1 made no progress in step 1"), (60, "rank 0 ended with exit code 1")])
def test_a_rank_that_gave_up_waiting_is_not_blamed(tmp_path: Path, step_s: float, blamed: str) -> None:
    """Rank 0 ends because rank 1 never joined the step: near the step bound rank 1 is named, and in a fresh step rank 0."""

    def story(group: FakeGroup, watcher: Watcher) -> None:
        at = time.monotonic_ns()
        group.records = [RankStatus(launched=1, progress_ns=at), RankStatus(), RankStatus(launched=1, progress_ns=at)]
        asyncio.get_running_loop().call_later(0.25, group.end, 0, ExitStatus("rank 0", 1))

    [death] = watch(tmp_path, story, step_s=step_s)
    assert death.sentence.startswith(blamed)


def test_the_watcher_reports_stopped_heartbeats_once(tmp_path: Path) -> None:
    """Hearts that stop are reported once, and not before the bound."""

    def story(group: FakeGroup, watcher: Watcher) -> None:
        group.last_beat = 1

    deaths = watch(tmp_path, story)
    assert len(deaths) == 1
    assert deaths[0].cause == "unscheduled"
    assert "rank 0, rank 1, the core: not scheduled" in deaths[0].sentence
    assert watch(tmp_path, story, quiet_s=0.6, heartbeat_s=60) == []


@pytest.mark.parametrize("resumed", [True, False])
def test_a_suspended_watcher_gives_the_group_its_time(tmp_path: Path, resumed: bool) -> None:
    """The machine, and with it the watcher, stands still for longer than a heartbeat may: hearts that beat again a moment later are
    well, and those that do not are reported."""

    def story(group: FakeGroup, watcher: Watcher) -> None:
        def suspend() -> None:
            time.sleep(1.2)
            if resumed:
                asyncio.get_running_loop().call_later(0.3, setattr, group, "last_beat", None)

        group.last_beat = time.monotonic_ns()
        asyncio.get_running_loop().call_soon(suspend)

    deaths = watch(tmp_path, story, quiet_s=2.7 * resumed)
    assert [death.cause for death in deaths] == ([] if resumed else ["unscheduled"])


def test_a_closed_watcher_is_silent(tmp_path: Path) -> None:
    """After close nothing is reported, whatever ends."""

    def story(group: FakeGroup, watcher: Watcher) -> None:
        watcher.close()
        group.end(0, ExitStatus("rank 0", -9))

    assert watch(tmp_path, story, quiet_s=0.6) == []


def test_a_raylet_that_is_gone_ends_the_group(tmp_path: Path) -> None:
    """A process id that no longer exists is reported as the raylet's end, once."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert watch(tmp_path, lambda *_: None, raylet=pid) == [Death("raylet", "the raylet is gone")]
