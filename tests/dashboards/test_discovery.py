"""The replica registry: who is a target, who is gone and why, and what the dead have counted."""

import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.health import Cause
from dashboards.discovery import (
    SHOWN_DOWN_S,
    UNLISTED_AFTER_S,
    VANISHED_AFTER_S,
    DiscoveryServer,
    ReplicaRegistry,
    ScrapeTarget,
)
from dashboards.metrics import CAUSES, DISCOVERY_METRICS, RETIRED
from dashboards.page_server import TICK_S
from dashboards.series import Counts
from engine.errors import ConfigError
from tests.support.loopback import LOOPBACKS, stop

pytestmark = pytest.mark.pure

ONE = ScrapeTarget("quartet", "Quartet", "r1", "10.0.0.1", "nano-31b", "127.0.0.1:9001")
TWO = ONE._replace(replica="r2", address="127.0.0.1:9002")
TOKENS = "quartet_generation_tokens_total"
WHERE = {"application": "quartet", "deployment": "Quartet"}


def counts(tokens: float, stopped: float = 0) -> Counts:
    return {(TOKENS, ()): tokens, ("quartet_requests_total", ("stop",)): stopped}


class Time:
    """A clock, and a registry that is ticked as it passes."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.registry = ReplicaRegistry(lambda: self.now)

    def passes(self, seconds: float, *beating: ScrapeTarget) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for target in beating:
                self.registry.heartbeat(target, counts(1))
            self.registry.tick()


def figure(registry: ReplicaRegistry, name: str, **labels: str) -> float | None:
    collectors = CollectorRegistry(auto_describe=False)
    collectors.register(registry)
    families = text_string_to_metric_families(generate_latest(collectors).decode())
    values = [s.value for family in families for s in family.samples if s.name == name and s.labels == labels]
    assert len(values) <= 1, (name, labels, values)
    return values[0] if values else None


def retired_tokens(registry: ReplicaRegistry) -> float | None:
    return figure(registry, RETIRED[TOKENS].name, **WHERE)


def restarts(registry: ReplicaRegistry) -> dict[str, float]:
    values = {cause: figure(registry, "quartet_group_restarts_total", **WHERE, cause=cause) for cause in CAUSES}
    return {cause: value for cause, value in values.items() if value}


def addresses(registry: ReplicaRegistry) -> list[str]:
    return [address for group in registry.targets() for address in group["targets"]]


def test_a_replica_is_a_target_with_its_labels() -> None:
    """From its first heartbeat on, as Prometheus' http_sd wants it."""
    registry = ReplicaRegistry()
    assert registry.targets() == []
    registry.heartbeat(TWO, counts(0))
    registry.heartbeat(ONE, counts(0))
    labels = {**WHERE, "replica": "r1", "node": "10.0.0.1", "model": "nano-31b"}
    assert registry.targets()[0] == {"targets": ["127.0.0.1:9001"], "labels": labels}
    assert addresses(registry) == ["127.0.0.1:9001", "127.0.0.1:9002"]
    assert figure(registry, "quartet_groups", **WHERE) == 2
    assert figure(registry, "quartet_group_up", **labels) == 1


def test_a_deregistered_replica_is_gone_at_once_and_stays_counted() -> None:
    """Target, group_up and the number of groups change with the call; cause and counts stay; nobody else's do. A second goodbye and
    a beat behind the first change nothing. An end in order has no cause, and is counted alike."""
    registry = ReplicaRegistry()
    registry.heartbeat(ONE, counts(40, 3))
    registry.heartbeat(TWO, counts(5, 1))
    assert retired_tokens(registry) == 0, "at zero before the first death, for `increase` to see it"
    for _ in range(2):
        registry.deregister(ONE, "killed", counts(50, 4))
        registry.heartbeat(ONE, counts(60))
    assert addresses(registry) == ["127.0.0.1:9002"]
    assert restarts(registry) == {"killed": 1}
    assert figure(registry, "quartet_groups", **WHERE) == 1
    assert figure(registry, "quartet_group_up", **ONE.labels) == 0
    assert figure(registry, "quartet_group_up", **TWO.labels) == 1
    assert retired_tokens(registry) == 50
    assert figure(registry, "quartet_retired_requests_total", **WHERE, outcome="stop") == 4
    registry.deregister(TWO, None, counts(6, 1))
    assert restarts(registry) == {"killed": 1}
    assert retired_tokens(registry) == 56
    assert figure(registry, "quartet_groups", **WHERE) == 0, "scaled to zero is a number, not an absence"


def test_what_was_open_is_lost_with_its_replica() -> None:
    """Whoever falls silent leaves a retired that closes: what it had received and not ended is dead, no more."""
    clock = Time()
    received = ("quartet_requests_received_total", ())
    last = {received: 52, ("quartet_requests_total", ("length",)): 47, ("quartet_requests_total", ("dead",)): 2}
    clock.registry.heartbeat(ONE, last)
    clock.passes(VANISHED_AFTER_S + 1, TWO)
    assert restarts(clock.registry) == {"vanished": 1}
    assert figure(clock.registry, "quartet_retired_requests_total", **WHERE, outcome="dead") == 2 + 3
    assert figure(clock.registry, "quartet_retired_requests_received_total", **WHERE) == 52
    assert last[received] == 52, "the last heartbeat itself is nobody's to change"
    clock.registry.deregister(TWO, None, {received: 4, ("quartet_requests_total", ("length",)): 4})
    assert figure(clock.registry, "quartet_retired_requests_total", **WHERE, outcome="dead") == 2 + 3


def test_totals_neither_fall_nor_count_twice() -> None:
    """Over heartbeats, silence, return and death, a deployment total rises by what is counted, and never falls."""
    clock, total = Time(), f"quartet_deployment_{TOKENS.removeprefix('quartet_')}"
    seen = []
    for tokens in (0, 20, 40):
        clock.registry.heartbeat(ONE, counts(tokens))
        seen.append(figure(clock.registry, total, **WHERE))
    assert seen == [0, 20, 40]
    for _ in range(round((VANISHED_AFTER_S + 4) / TICK_S)):
        clock.passes(TICK_S, TWO)  # it counts one token, once
        assert figure(clock.registry, total, **WHERE) == 41
    assert restarts(clock.registry) == {"vanished": 1}
    for _ in range(2):
        clock.registry.heartbeat(ONE, counts(60))
        assert figure(clock.registry, total, **WHERE) == 61
    clock.registry.deregister(TWO, None, counts(3))
    assert figure(clock.registry, total, **WHERE) == 63
    clock.registry.deregister(ONE, "killed", counts(70))
    assert figure(clock.registry, total, **WHERE) == 73


def test_a_silent_replica_is_dropped_then_vanished() -> None:
    """No target after a while, back with a heartbeat; later a restart, whose counts are those of its last heartbeat. One that wakes
    even later is a target again, and up."""
    clock = Time()
    clock.registry.heartbeat(ONE, counts(40))
    clock.passes(UNLISTED_AFTER_S, TWO)
    assert len(addresses(clock.registry)) == 2
    clock.passes(2 * TICK_S, TWO)
    assert addresses(clock.registry) == ["127.0.0.1:9002"]
    assert figure(clock.registry, "quartet_group_up", **ONE.labels) == 0
    assert restarts(clock.registry) == {}
    clock.registry.heartbeat(ONE, counts(44))
    clock.passes(TICK_S, TWO)
    assert len(addresses(clock.registry)) == 2
    clock.passes(VANISHED_AFTER_S + TICK_S, TWO)
    assert restarts(clock.registry) == {"vanished": 1}
    assert retired_tokens(clock.registry) == 44
    clock.registry.heartbeat(ONE, counts(45))
    assert len(addresses(clock.registry)) == 2
    assert figure(clock.registry, "quartet_group_up", **ONE.labels) == 1
    assert retired_tokens(clock.registry) == 44


def test_a_pause_of_the_endpoint_makes_no_replica_silent() -> None:
    """Suspended as a whole for a minute, it drops nobody; a replica that really died is found out afterwards."""
    clock = Time()
    clock.passes(1, ONE, TWO)
    clock.now += 60
    clock.registry.tick()
    assert len(addresses(clock.registry)) == 2
    clock.passes(VANISHED_AFTER_S + 1, TWO)
    assert addresses(clock.registry) == ["127.0.0.1:9002"]
    assert restarts(clock.registry) == {"vanished": 1}


def test_gone_replicas_are_forgotten_in_the_end() -> None:
    """Ten minutes as down, then no series; the counts stay."""
    clock = Time()
    clock.registry.heartbeat(ONE, counts(40))
    clock.registry.deregister(ONE, "killed", counts(40))
    clock.passes(SHOWN_DOWN_S - 1, TWO)
    assert figure(clock.registry, "quartet_group_up", **ONE.labels) == 0
    clock.passes(2, TWO)
    assert figure(clock.registry, "quartet_group_up", **ONE.labels) is None
    assert restarts(clock.registry) == {"killed": 1}


def test_every_cause_of_a_death_is_known() -> None:
    """What the watcher may call a death is a label value."""
    assert {*get_args(Cause), "vanished"} == set(CAUSES)


def test_every_row_is_shown() -> None:
    """Once a replica has counted everything there is to count."""
    registry = ReplicaRegistry()
    everything = {(name, tuple("x" for _ in row.labels[2:])): 1.0 for name, row in RETIRED.items()}
    registry.heartbeat(ONE, everything)
    assert {family.name for family in registry.collect() if family.samples} == {row.stem for row in DISCOVERY_METRICS}


def fetch(url: str) -> tuple[int, str, str]:
    with urllib.request.urlopen(url, timeout=5) as reply:
        return reply.status, reply.headers["Content-Type"], reply.read().decode()


def listing(nodes: list[list[dict[str, object]]]) -> list[dict[str, object]]:
    if not nodes:
        raise ConfigError("nobody knows")
    return nodes[-1]


@pytest.mark.parametrize("host", LOOPBACKS)
def test_the_endpoint_over_loopback(host: str) -> None:
    """/targets is JSON, an empty list when there is nobody; /ray lists nodes, or 503; /metrics is an exposition; all else 404."""
    registry = ReplicaRegistry()
    nodes = []
    server = DiscoveryServer(registry, host, 0, lambda: listing(nodes))
    base = server.url.removesuffix("/targets")
    assert fetch(server.url) == (200, "application/json", "[]")
    registry.heartbeat(ONE, counts(4))
    assert json.loads(fetch(server.url)[2]) == registry.targets()
    assert 'quartet_groups{application="quartet",deployment="Quartet"} 1.0' in fetch(f"{base}/metrics")[2]
    with pytest.raises(urllib.error.HTTPError, match="503"):
        fetch(f"{base}/ray")
    nodes.append([{"targets": ["10.0.0.1:8080"]}])
    assert fetch(f"{base}/ray") == (200, "application/json", json.dumps(nodes[0]))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(f"{base}/")
    port = int(base.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"metrics.discovery: cannot listen on {host}:{port}"):
        DiscoveryServer(registry, host, port)
    stop(server)
    with socket.create_server((host, port), family=server.address_family):
        pass


@pytest.mark.parametrize("address", LOOPBACKS)
def test_a_name_has_the_family_of_its_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of IPv4 or of IPv6 alone; one that is of none is a ConfigError."""
    looks_up, binds = socket.getaddrinfo, socket.socket.bind
    numeric = {"box.lan": address}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: looks_up(numeric.get(host, host), *rest, **more))
    monkeypatch.setattr(socket.socket, "bind", lambda sock, to: binds(sock, (numeric.get(to[0], to[0]), *to[1:])))
    server = DiscoveryServer(ReplicaRegistry(), "box.lan", 0)
    with socket.create_connection((address, server.server_port)):
        pass
    stop(server)
    with pytest.raises(ConfigError, match=r"metrics\.discovery: cannot listen on a b:0: "):
        DiscoveryServer(ReplicaRegistry(), "a b", 0)


def test_a_scraper_that_leaves_is_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever resets the connection before the page is written leaves nothing on stderr, where a launcher's user would read it."""
    asked, left = threading.Event(), threading.Event()

    def slow() -> list[dict[str, object]]:
        asked.set()
        left.wait(5)
        return [{"targets": ["10.0.0.1:8080"] * 200_000}]

    server = DiscoveryServer(ReplicaRegistry(), "127.0.0.1", 0, slow)
    address = urllib.parse.urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(b"GET /ray HTTP/1.0\r\n\r\n")
        assert asked.wait(5)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left.set()
    assert fetch(server.url)[0] == 200
    stop(server)
    assert capfd.readouterr().err == ""


def test_the_endpoint_ticks_by_itself() -> None:
    """A replica that fell silent leaves the list though nobody asks."""
    registry = ReplicaRegistry()
    server = DiscoveryServer(registry, "127.0.0.1", 0)
    try:
        registry.heartbeat(ONE, counts(4))
        before = registry._ticked
        deadline = time.monotonic() + 10
        while registry._ticked == before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert registry._ticked > before
    finally:
        stop(server)
