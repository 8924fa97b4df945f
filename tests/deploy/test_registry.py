"""A replica's words to discovery: it is announced again and again, whatever becomes of the registry, and says goodbye once."""

import threading
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from dashboards.discovery import ReplicaRegistry, ScrapeTarget
from dashboards.series import Counts
from deploy import registry
from deploy.registry import Discovery, HeartbeatSender, address_of, ray_exporters
from tests.support.edge.http_edge import until
from tests.support.loopback import stop

pytestmark = pytest.mark.pure

TARGET = ScrapeTarget("quartet", "Quartet", "r1", "10.0.0.1", "nano-31b", "127.0.0.1:9001")
COUNTS: Counts = {("quartet_generation_tokens_total", ()): 5.0}
PERIOD_S = 0.01


class FakeRegistryClient:
    """A registry without Ray; `broken`: every call raises what Ray raises; `answers`: calls wait for it."""

    def __init__(self) -> None:
        self.registry = ReplicaRegistry()
        self.broken = False
        self.answers = threading.Event()
        self.answers.set()
        self.beats = 0
        self.tries = 0

    def call(self, method: str, _timeout_s: float, *args: Any) -> Any:
        self.tries += 1
        self.answers.wait()
        if self.broken:
            raise GetTimeoutError
        if method == "url":
            return "http://127.0.0.1:9464/targets"
        self.beats += method == "heartbeat"
        return getattr(self.registry, method)(*args)


@pytest.fixture(autouse=True)
def _period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PERIOD_S", PERIOD_S)


def heartbeats(client: FakeRegistryClient, urls: list[str]) -> HeartbeatSender:
    return HeartbeatSender(client, TARGET, lambda: COUNTS, urls.append)


def test_heartbeats_go_on_until_deregistration() -> None:
    """The address of the list is reported once; after it deregistered the replica is no target, and its counts are kept."""
    client, urls = FakeRegistryClient(), list[str]()
    speaking = heartbeats(client, urls)
    until(lambda: client.beats >= 3, "three heartbeats")
    assert urls == ["http://127.0.0.1:9464/targets"]
    assert len(client.registry.targets()) == 1
    speaking.deregister("killed")
    speaking.deregister("killed")
    assert client.registry.targets() == []
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "heartbeats"], "the end of the thread")


def test_an_unreachable_registry_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """One complaint in the log however long it lasts; the replica is a target as soon as the registry is back."""
    client = FakeRegistryClient()
    client.broken = True
    speaking = heartbeats(client, [])
    with caplog.at_level("WARNING", logger="ray.serve"):
        until(lambda: client.tries >= 5, "five tries")
        assert client.registry.targets() == []
        client.broken = False
        until(lambda: bool(client.registry.targets()), "a target")
    speaking.deregister(None)
    assert len([record for record in caplog.records if "discovery does not answer" in record.message]) <= 1


def test_the_end_waits_for_no_registry(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """While the head is dead Ray's calls block. Planted: more patience, with which the last word is heard once it is back."""
    monkeypatch.setattr(registry, "LAST_S", 0.05)
    client = FakeRegistryClient()
    speaking = heartbeats(client, [])
    until(lambda: client.beats >= 1, "a heartbeat")
    client.answers.clear()
    with caplog.at_level("WARNING", logger="ray.serve"):
        speaking.deregister("killed")
    assert "discovery did not hear of the end (no answer)" in caplog.messages
    assert len(client.registry.targets()) == 1
    caplog.clear()
    monkeypatch.setattr(registry, "LAST_S", 10.0)
    patient = heartbeats(client, [])
    threading.Timer(0.2, client.answers.set).start()
    patient.deregister("killed")
    assert client.registry.targets() == []
    assert not caplog.messages


def test_a_new_registry_learns_every_replica() -> None:
    """An actor that was started anew knows no replica: the next heartbeat registers it."""
    client = FakeRegistryClient()
    speaking = heartbeats(client, [])
    until(lambda: client.beats >= 1, "a heartbeat")
    client.registry = ReplicaRegistry()
    until(lambda: bool(client.registry.targets()), "a target")
    speaking.deregister(None)


def test_a_replica_given_up_is_found_again() -> None:
    """A replica that was paused for so long that it was given up speaks on, and is a target again."""
    client = FakeRegistryClient()
    now = 0.0
    client.registry = ReplicaRegistry(lambda: now)
    client.registry.heartbeat(TARGET, COUNTS)
    for _ in range(30):
        now += 0.5
        client.registry.tick()
    assert client.registry.targets() == []
    speaking = heartbeats(client, [])
    until(lambda: bool(client.registry.targets()), "a target")
    speaking.deregister(None)


def test_an_exporter_on_all_interfaces_is_called_by_its_node() -> None:
    """What is bound to one address keeps it."""
    assert address_of("http://0.0.0.0:9001/metrics", "10.0.0.1") == "10.0.0.1:9001"
    assert address_of("http://127.0.0.1:9001/metrics", "10.0.0.1") == "127.0.0.1:9001"
    assert address_of("http://[::1]:9001/metrics", "10.0.0.1") == "[::1]:9001"
    assert address_of("http://[::]:9001/metrics", "fd00::1") == "[fd00::1]:9001"


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_where_discovery_cannot_listen_another_address_is_taken(host: str, caplog: pytest.LogCaptureFixture) -> None:
    """Two clusters on one machine: the second's endpoint is elsewhere, and says where. So is that at an address of another machine:
    its actor would end as it begins, and every heartbeat would start one."""
    first = Discovery("127.0.0.1", 0)
    port = int(first.url().rpartition(":")[2].partition("/")[0])
    with caplog.at_level("WARNING", logger="ray.serve"):
        second = Discovery(host, port)
    try:
        assert second.url() != first.url()
        assert second.url().startswith("http://127.0.0.1:")
        assert f"cannot listen on {host}:{port}: " in caplog.messages[0]
    finally:
        stop(first._server)
        stop(second._server)


@pytest.mark.parametrize(
    ("present", "is_over"), [({"quartet"}, False), (None, False), (set(), True), ({"another"}, True)], ids=str
)
def test_discovery_ends_with_its_applications(present: set[str] | None, is_over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once no replica is left and Serve has no application of theirs; not while it does not answer, nor at zero replicas."""
    monkeypatch.setattr("deploy.ray_private.application_names", lambda: None if present is None else frozenset(present))
    monkeypatch.setattr(registry, "END_CHECK_S", PERIOD_S)
    ended = threading.Event()
    found = Discovery("127.0.0.1", 0, ended.set)
    try:
        assert not found._is_over(), "a registry that was started anew knows nobody yet"
        found.heartbeat(TARGET, COUNTS)
        assert not found._is_over(), "a replica lives"
        found.deregister(TARGET, None, COUNTS)
        assert found._is_over() is is_over
        assert ended.wait(10 if is_over else 10 * PERIOD_S) is is_over
    finally:
        monkeypatch.setattr("deploy.ray_private.application_names", frozenset)
        found.deregister(TARGET, None, COUNTS)
        assert ended.wait(10)
        stop(found._server)


def test_rays_exporters_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of living nodes that export; not of one that is gone or has no exporter."""
    first = {"NodeManagerAddress": "10.0.0.2", "Alive": True, "MetricsExportPort": 8080}
    second = {**first, "NodeManagerAddress": "10.0.0.1"}
    third = {**first, "NodeManagerAddress": "fd00::1"}
    nodes = [third, first, second, {**first, "Alive": False}, {**first, "MetricsExportPort": -1}]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    addresses = {"10.0.0.1": "10.0.0.1:8080", "10.0.0.2": "10.0.0.2:8080", "fd00::1": "[fd00::1]:8080"}
    assert ray_exporters() == [{"targets": [target], "labels": {"node": node}} for node, target in addresses.items()]
