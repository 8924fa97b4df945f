"""The books of discovery: who is a target, who is gone and why, and what the dead have counted."""

import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.health import Cause
from dashboards.discovery import GONE_S, SHOWN_S, SILENT_S, TICK_S, Counts, DiscoveryServer, Fleet, ScrapeTarget
from dashboards.metrics import CAUSES, FLEET, RETIRED
from engine.errors import ConfigError

pytestmark = pytest.mark.pure

ONE = ScrapeTarget("quartet", "Quartet", "r1", "10.0.0.1", "nano-31b", "127.0.0.1:9001")
TWO = replace(ONE, replica="r2", address="127.0.0.1:9002")
TOKENS = "quartet_generation_tokens_total"
WHERE = {"application": "quartet", "deployment": "Quartet"}


def counts(tokens: float, stopped: float = 0) -> Counts:
    return {(TOKENS, ()): tokens, ("quartet_requests_total", ("stop",)): stopped}


class Time:
    """A clock, and a fleet that is ticked as it passes."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.fleet = Fleet(lambda: self.now)

    def passes(self, seconds: float, *beating: ScrapeTarget) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for target in beating:
                self.fleet.beat(target, counts(1))
            self.fleet.tick()


def figure(fleet: Fleet, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(fleet)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found = [s.value for family in families for s in family.samples if s.name == name and s.labels == labels]
    assert len(found) <= 1, (name, labels, found)
    return found[0] if found else None


def restarts(fleet: Fleet) -> dict[str, float]:
    values = {cause: figure(fleet, "quartet_group_restarts_total", **WHERE, cause=cause) for cause in CAUSES}
    return {cause: value for cause, value in values.items() if value}


def addresses(fleet: Fleet) -> list[str]:
    return [address for group in fleet.targets() for address in group["targets"]]


def test_a_replica_is_a_target_with_its_labels() -> None:
    """From its first beat on, as Prometheus' http_sd wants it."""
    fleet = Fleet()
    assert fleet.targets() == []
    assert fleet.beat(TWO, counts(0)) == fleet.beat(ONE, counts(0)) == "ok"
    labels = {**WHERE, "replica": "r1", "node": "10.0.0.1", "model": "nano-31b"}
    assert fleet.targets()[0] == {"targets": ["127.0.0.1:9001"], "labels": labels}
    assert addresses(fleet) == ["127.0.0.1:9001", "127.0.0.1:9002"]
    assert figure(fleet, "quartet_groups", **WHERE) == 2
    assert figure(fleet, "quartet_group_up", **labels) == 1


def test_who_says_goodbye_is_gone_at_once_and_stays_counted() -> None:
    """Target, group_up and the number of groups change with the call; cause and counts stay; nobody else's do."""
    fleet = Fleet()
    fleet.beat(ONE, counts(40, 3))
    fleet.beat(TWO, counts(5, 1))
    assert figure(fleet, RETIRED[TOKENS].name, **WHERE) == 0, "at zero before the first death, for `increase` to see it"
    fleet.leave(ONE, "killed", counts(50, 4))
    assert addresses(fleet) == ["127.0.0.1:9002"]
    assert restarts(fleet) == {"killed": 1}
    assert figure(fleet, "quartet_groups", **WHERE) == 1
    assert figure(fleet, "quartet_group_up", **ONE.labels) == 0
    assert figure(fleet, "quartet_group_up", **TWO.labels) == 1
    assert figure(fleet, RETIRED[TOKENS].name, **WHERE) == 50
    assert figure(fleet, "quartet_retired_requests_total", **WHERE, outcome="stop") == 4


def test_an_orderly_end_is_no_restart() -> None:
    """It is counted as drained, and its counts are kept alike."""
    fleet = Fleet()
    fleet.beat(ONE, counts(40))
    fleet.leave(ONE, None, counts(41))
    assert restarts(fleet) == {}
    assert figure(fleet, "quartet_groups_drained_total", **WHERE) == 1
    assert figure(fleet, RETIRED[TOKENS].name, **WHERE) == 41
    assert figure(fleet, "quartet_groups", **WHERE) == 0, "scaled to zero is a number, not an absence"


def test_what_was_open_is_lost_with_its_replica() -> None:
    """Whoever falls silent leaves a book that closes: what it had received and not ended is dead and lost, no more."""
    clock = Time()
    received = ("quartet_requests_received_total", ())
    last: Counts = {received: 52, ("quartet_requests_total", ("length",)): 47, ("quartet_requests_total", ("dead",)): 2}
    clock.fleet.beat(ONE, last)
    clock.passes(GONE_S + 1, TWO)
    assert restarts(clock.fleet) == {"vanished": 1}
    assert figure(clock.fleet, "quartet_retired_requests_total", **WHERE, outcome="dead") == 2 + 3
    assert figure(clock.fleet, "quartet_retired_requests_lost_total", **WHERE) == 3
    assert figure(clock.fleet, "quartet_retired_requests_received_total", **WHERE) == 52
    assert last[received] == 52, "the last beat itself is nobody's to change"
    clock.fleet.leave(TWO, None, {received: 4, ("quartet_requests_total", ("length",)): 4})
    assert figure(clock.fleet, "quartet_retired_requests_lost_total", **WHERE) == 3


def test_totals_neither_fall_nor_count_twice() -> None:
    """Over beats, silence, return and death, a counter of all replicas ever goes up by what is counted, and stays otherwise."""
    clock, ever = Time(), f"quartet_ever_{TOKENS.removeprefix('quartet_')}"
    seen = []
    for tokens in (0, 20, 40):
        clock.fleet.beat(ONE, counts(tokens))
        seen.append(figure(clock.fleet, ever, **WHERE))
    assert seen == [0, 20, 40]
    for _ in range(round((GONE_S + 4) / TICK_S)):
        clock.passes(TICK_S, TWO)  # it counts one token, once
        assert figure(clock.fleet, ever, **WHERE) == 41
    assert restarts(clock.fleet) == {"vanished": 1}
    clock.fleet.beat(ONE, counts(60))
    clock.fleet.leave(TWO, None, counts(3))
    assert figure(clock.fleet, ever, **WHERE) == 43


def test_nothing_is_counted_twice() -> None:
    """A second goodbye, and beats that arrive after the first, change nothing."""
    fleet = Fleet()
    fleet.beat(ONE, counts(40))
    for _ in range(2):
        fleet.leave(ONE, "killed", counts(50))
        assert fleet.beat(ONE, counts(60)) == "gone"
    assert addresses(fleet) == []
    assert restarts(fleet) == {"killed": 1}
    assert figure(fleet, RETIRED[TOKENS].name, **WHERE) == 50


def test_totals_add_up_over_deaths() -> None:
    """What the living and the retired have counted is what all have, at every moment of twenty lives."""
    fleet, total = Fleet(), 0
    for life in range(20):
        target = replace(ONE, replica=f"life-{life}")
        for tokens in (0, 7, 30 + life):
            fleet.beat(target, counts(tokens))
            assert (figure(fleet, RETIRED[TOKENS].name, **WHERE) or 0) + tokens == total + tokens
        total += 30 + life
        fleet.leave(target, "failed", counts(30 + life))
        assert figure(fleet, RETIRED[TOKENS].name, **WHERE) == total


def test_who_falls_silent_is_dropped_then_vanished() -> None:
    """No target after SILENT_S, back with a beat; after GONE_S a restart whose last counts are those of its last beat."""
    clock = Time()
    clock.fleet.beat(ONE, counts(40))
    clock.passes(SILENT_S, TWO)
    assert len(addresses(clock.fleet)) == 2
    clock.passes(2 * TICK_S, TWO)
    assert addresses(clock.fleet) == ["127.0.0.1:9002"]
    assert figure(clock.fleet, "quartet_group_up", **ONE.labels) == 0
    assert restarts(clock.fleet) == {}
    clock.fleet.beat(ONE, counts(44))
    clock.passes(TICK_S, TWO)
    assert len(addresses(clock.fleet)) == 2
    clock.passes(GONE_S + TICK_S, TWO)
    assert restarts(clock.fleet) == {"vanished": 1}
    assert figure(clock.fleet, RETIRED[TOKENS].name, **WHERE) == 44
    assert clock.fleet.beat(ONE, counts(45)) == "gone"


def test_a_pause_of_the_endpoint_is_nobodys_silence() -> None:
    """Suspended as a whole for a minute, it drops nobody; a replica that really died is found out afterwards."""
    clock = Time()
    clock.passes(1, ONE, TWO)
    clock.now += 60
    clock.fleet.tick()
    assert len(addresses(clock.fleet)) == 2
    clock.passes(GONE_S + 1, TWO)
    assert addresses(clock.fleet) == ["127.0.0.1:9002"]
    assert restarts(clock.fleet) == {"vanished": 1}


def test_the_dead_are_forgotten_in_the_end() -> None:
    """Ten minutes as down, then no series; the counts stay."""
    clock = Time()
    clock.fleet.beat(ONE, counts(40))
    clock.fleet.leave(ONE, "killed", counts(40))
    clock.passes(SHOWN_S - 1, TWO)
    assert figure(clock.fleet, "quartet_group_up", **ONE.labels) == 0
    clock.passes(2, TWO)
    assert figure(clock.fleet, "quartet_group_up", **ONE.labels) is None
    assert restarts(clock.fleet) == {"killed": 1}


def test_every_cause_of_a_death_is_counted_as_itself() -> None:
    """What the watcher may call a death is a label value; a cause that nobody knows is counted as `other`."""
    assert set(get_args(Cause)) < set(CAUSES)
    fleet = Fleet()
    for place, cause in enumerate((*get_args(Cause), "unheard of")):
        target = replace(ONE, replica=f"r{place}")
        fleet.beat(target, {})
        fleet.leave(target, cause, {})
    assert restarts(fleet) == {cause: 1.0 for cause in CAUSES if cause != "vanished"}


def test_every_row_is_shown() -> None:
    """Once a replica has counted everything there is to count."""
    fleet = Fleet()
    everything = {(name, tuple("x" for _ in row.labels[2:])): 1.0 for name, row in RETIRED.items()}
    fleet.beat(ONE, everything)
    assert {family.name for family in fleet.collect() if family.samples} == {row.stem for row in FLEET}


def fetch(url: str) -> tuple[int, str, str]:
    with urllib.request.urlopen(url, timeout=5) as reply:
        return reply.status, reply.headers["Content-Type"], reply.read().decode()


def listing(nodes: list[list[dict[str, object]]]) -> list[dict[str, object]]:
    if not nodes:
        raise ConfigError("nobody knows")
    return nodes[-1]


def test_the_endpoint_over_loopback() -> None:
    """/targets is JSON, an empty list when there is nobody; /ray lists nodes, or 503; /metrics is an exposition; all else 404."""
    fleet = Fleet()
    nodes: list[list[dict[str, object]]] = []
    server = DiscoveryServer(fleet, "127.0.0.1", 0, lambda: listing(nodes))
    base = server.url.removesuffix("/targets")
    assert fetch(server.url) == (200, "application/json", "[]")
    fleet.beat(ONE, counts(4))
    assert json.loads(fetch(server.url)[2]) == fleet.targets()
    assert 'quartet_groups{application="quartet",deployment="Quartet"} 1.0' in fetch(f"{base}/metrics")[2]
    with pytest.raises(urllib.error.HTTPError, match="503"):
        fetch(f"{base}/ray")
    nodes.append([{"targets": ["10.0.0.1:8080"]}])
    assert fetch(f"{base}/ray") == (200, "application/json", json.dumps(nodes[0]))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(f"{base}/")
    port = int(base.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"metrics.discovery: cannot listen on 127.0.0.1:{port}"):
        DiscoveryServer(fleet, "127.0.0.1", port)
    server.close()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_a_scraper_that_leaves_is_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever resets the connection before the page is written leaves nothing on stderr, where a launcher's user would read it."""
    asked, left = threading.Event(), threading.Event()

    def slow() -> list[dict[str, object]]:
        asked.set()
        left.wait(5)
        return [{"targets": ["10.0.0.1:8080"] * 200_000}]

    server = DiscoveryServer(Fleet(), "127.0.0.1", 0, slow)
    address = urllib.parse.urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(b"GET /ray HTTP/1.0\r\n\r\n")
        assert asked.wait(5)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left.set()
    assert fetch(server.url)[0] == 200
    server.close()
    assert capfd.readouterr().err == ""


def test_the_endpoint_ticks_by_itself() -> None:
    """A replica that fell silent leaves the list though nobody asks."""
    fleet = Fleet()
    server = DiscoveryServer(fleet, "127.0.0.1", 0)
    try:
        fleet.beat(ONE, counts(4))
        before = fleet._ticked
        deadline = time.monotonic() + 10
        while fleet._ticked == before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert fleet._ticked > before
    finally:
        server.close()
