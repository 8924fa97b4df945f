"""A group's processes as a scrape reads them: who is stalled, who idles, who is gone."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from cluster.gauges import read_gauges
from cluster.group import Group
from cluster.health import Observation, verdict
from engine.events import ScrapeGauges
from engine.rank_status import EncoderFigures, RankStatus

pytestmark = pytest.mark.pure

S = 1_000_000_000
NOW = 100 * S


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.gauges.time", SimpleNamespace(monotonic_ns=lambda: NOW))


def gauges(statuses: Sequence[RankStatus], waiting: int | None = None, up: bool = True) -> ScrapeGauges:
    """Of a group of these records, whose core alone runs unless `up`, and a front with seven open requests."""
    running = [*[up] * (len(statuses) - 1), True]
    group = SimpleNamespace(status=lambda: statuses, running=lambda: running)
    front = SimpleNamespace(open=7, waiting_since=waiting, count_by_adapter=lambda: Counter({(1, True): 3, (-1, False): 4}))
    return read_gauges(group, front, {"farm": 0, "sea": 1})


def record(launched: int, finished: int, age_s: float, beat_s: float = 0.1) -> RankStatus:
    return RankStatus(launched, finished, int(NOW - age_s * S), int(NOW - beat_s * S), 11_000)


CASES = {
    "idle": ((record(9, 9, 50), record(9, 9, 50), record(9, 9, 50)), None, (0, 0, 0)),
    "rank 1 hangs in step 10": ((record(10, 10, 6), record(10, 9, 7), record(10, 9, 6)), 1, (0, 7, 0)),
    "rank 1 never took step 10": ((record(10, 10, 6), record(9, 9, 50), record(10, 9, 5)), 1, (0, 5, 0)),
    "the core owes a commit": ((record(10, 10, 6), record(10, 10, 6), record(10, 9, 8)), 1, (0, 0, 6)),
    "the core owes a plan": ((record(9, 9, 50), record(9, 9, 50), record(9, 9, 50)), NOW - 4 * S, (0, 0, 4)),
    "a step runs": ((record(10, 9, 0.01), record(10, 9, 0.01), record(10, 9, 0.012)), 1, (0.01, 0.01, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stall_is_time_owed(case: str) -> None:
    """Since the process last did anything while a step of it is due; idling is none."""
    statuses, waiting, stalls = CASES[case]
    found = gauges(statuses, waiting).processes
    assert [process.rank for process in found] == ["0", "1", "core"]
    assert [process.stall_s for process in found] == pytest.approx(stalls)
    assert found[0].busy_s == pytest.approx(0.011)


def test_requests_count_for_their_adapter() -> None:
    """Each adapter that is served has a figure for both states; requests of the model itself count for none."""
    found = {(of.adapter, of.state): of.requests for of in gauges(CASES["idle"][0]).adapters}
    assert found == {("farm", "waiting"): 0, ("farm", "running"): 0, ("sea", "waiting"): 0, ("sea", "running"): 3}


@pytest.mark.parametrize("case", CASES)
def test_the_gauge_agrees_with_the_watcher(case: str) -> None:
    """The group is ended exactly when some process' stall is above the bound, whatever the bound."""
    statuses, waiting, stalls = CASES[case]
    for bound in (0.005, 3.0, 5.5, 6.5, 40.0):
        condemned = verdict(statuses, Observation(NOW, 0, waiting), 1e9, bound) is not None
        assert condemned == (max(process.stall_s for process in gauges(statuses, waiting).processes) > bound), bound
    assert max(stalls) != 50, "idling would be taken for a stall"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_who_lives_is_asked_of_the_kernel(child: subprocess.Popen[bytes]) -> None:
    """A killed process is down at once, and not yet waited for."""
    group = SimpleNamespace(children=[SimpleNamespace(process=child)])
    assert Group.running(group) == [True]
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Group.running(group) == [False]
    assert [process.up for process in gauges([record(9, 9, 1)] * 2, up=False).processes] == [False, True]


def test_the_scrape_gauges_of_a_group() -> None:
    """The front's open requests, and what the encoders of rank 0 did."""
    scraped = gauges([record(9, 9, 1)._replace(encoder=EncoderFigures(clips=rank)) for rank in (4, 5, 6)])
    assert (scraped.open, scraped.encoder.clips) == (7, 4)


def test_how_a_device_spent_its_step() -> None:
    """Microseconds of the status block are seconds of the gauges, each in its place."""
    status = RankStatus(9, 9, NOW, busy_us=4500, idle_us=12, late_compilations=3, encoder=EncoderFigures(2_500_000))
    (found, _) = gauges([status, record(9, 9, 1)]).processes
    assert (found.busy_s, found.idle_s, found.late_compilations, found.encoder_s) == (0.0045, 1.2e-5, 3, 2.5)
