"""A launcher's ports are its own, though Serve's proxies would share theirs."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext
from typing import NoReturn

import pytest

from deploy import environment
from deploy.ports import HAPROXY_PORTS, PROXY_PORTS, REPLICA_RANGE, Ports, check_port
from engine.errors import ConfigError
from tests.support.stack.serve_process import free_port

pytestmark = pytest.mark.pure


@pytest.fixture
def two() -> Iterator[tuple[Ports, Ports]]:
    with closing(Ports()) as one, closing(Ports()) as other:
        yield one, other


def shared(one: Ports, other: Ports) -> set[int]:
    """Ports of HAProxy, Serve's proxies and replicas that both launchers have, of the same process id (in two containers, say)."""
    chosen = [ports.choose(seed=7) for ports in (one, other)]
    first, second = ({*each.values(), *range(*(each[name] for name in REPLICA_RANGE))} for each in chosen)
    return first & second


def test_two_launchers_share_no_port(two: tuple[Ports, Ports], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens yet, and each has its own. Planted: launchers that keep none have HAProxy's and the replicas' in common."""
    assert shared(*two) == set()
    monkeypatch.setattr(Ports, "_keep", lambda self, port: port or 8500)
    assert 8500 in (both := shared(*two))
    assert len(both) > 90


def test_a_kept_port_is_for_who_shares_it(two: tuple[Ports, Ports]) -> None:
    """Serve's proxy listens there and gets the connections; another launcher, or a server that does not share, cannot bind."""
    port = two[0].choose(0)[PROXY_PORTS[0]]
    with ExitStack() as stack:
        with pytest.raises(OSError, match="in use"):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        server = stack.enter_context(socket.create_server(("127.0.0.1", port), reuse_port=True))
        stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        stack.enter_context(server.accept()[0])
        with pytest.raises(OSError, match="in use"):
            two[1]._keep(port)


def test_the_second_launcher_of_a_port_is_refused_at_once(two: tuple[Ports, Ports]) -> None:
    """Before HAProxy of the first listens there, at whatever address; another port, and this one later, are free."""
    port = free_port()
    two[0].keep_api("127.0.0.1", port)
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ConfigError, match=rf"cannot listen on {host}:{port}: another `quartet serve` is about to \(--port"):
            two[1].keep_api(host, port)
    two[1].keep_api("127.0.0.1", free_port())
    with socket.create_server(("127.0.0.1", port)):  # as HAProxy, which does not share
        two[0].close()
    two[1].keep_api("127.0.0.1", port)


def test_the_kernel_chooses_no_port_of_haproxy(two: tuple[Ports, Ports]) -> None:
    """HAProxy, which shares none, binds seconds later: a connection of this machine may have got a port of the kernel's range."""
    chosen = two[0].choose(0)
    ports = [two[1].choose(0)[name] for name in HAPROXY_PORTS]
    assert len({*ports, *chosen.values()}) == len(ports) + len(chosen)
    assert max(ports) < 32_768


def test_a_block_where_somebody_listens_is_left_out() -> None:
    """HAProxy could not start there. Planted: a listener at a replica's port changes nothing, as Serve looks for a free one."""
    first = REPLICA_RANGE[0]

    def chosen() -> dict[str, int]:
        with closing(Ports()) as ports:
            return ports.choose(0)

    usual = chosen()
    for taken, moves in ((usual[HAPROXY_PORTS[1]], True), (usual[first], False)):
        with socket.create_server(("127.0.0.1", taken)):
            assert (chosen()[first] != usual[first]) == moves


def test_port_30000_is_left_to_the_api(two: tuple[Ports, Ports], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of other servers know it: of all that a launcher keeps none is above 29 999. Planted: one block more."""
    keep, kept = Ports._keep, set[int]()
    monkeypatch.setattr(Ports, "_keep", lambda self, port: kept.add(port) or keep(self, port))
    two[0].choose(0)
    assert 20_000 <= max(kept) < 30_000
    monkeypatch.setattr("deploy.ports._BLOCKS", 101)
    two[1].choose(100)
    assert max(kept) == 30_000


def test_no_port_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that no port has names the option that gave it, as a port that is taken does, and an address of a family that the
    machine does not have. Planted: bind's own OverflowError."""
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:99999: .*--port"):
        check_port("127.0.0.1", 99999)

    def no_family(family: int) -> NoReturn:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", no_family)
    with pytest.raises(ConfigError, match=r"cannot listen on :::8000: Address family not supported by protocol \(--port"):
        check_port("::", 8000)


@pytest.mark.parametrize(("quarantine_s", "starves"), [(environment.RAY["RAY_SERVE_PORT_QUARANTINE_S"], False), ("3630", True)])
def test_a_thousand_starts_in_an_hour_find_a_port(quarantine_s: str, starves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own allocator, with as many ports as a launcher gives it, and a replica that fails as soon as it has started.

    Planted: what follows from the hour of hard-stop without the setting, by which the ninety-seventh start finds none.
    """
    from ray.serve._private import node_port_manager

    now = [0.0]
    monkeypatch.setattr(node_port_manager, "RAY_SERVE_PORT_QUARANTINE_S", float(quarantine_s))
    monkeypatch.setattr(node_port_manager.time, "monotonic", lambda: now[0])
    with closing(Ports()) as ports:
        least, most = (ports.choose(0)[name] for name in REPLICA_RANGE)
    allocator = node_port_manager.PortAllocator(least, most, "HTTP", "node")
    started = 0
    with pytest.raises(node_port_manager.NoAvailablePortError) if starves else nullcontext():
        for started in range(1000):
            allocator.release(f"r{started}", allocator.allocate(f"r{started}"))
            now[0] += 3.6
    assert started == (most - least if starves else 999)
