"""Ray on a head and two nodes, by `quartet env`, `ray start` and `serve deploy`: updates, a drain, and nodes that are lost."""

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.stack.machines import CAN_MAKE, REASON, Machine
from tests.support.stack.node_stream import Stream, how, longest_gap, wait_begun
from tests.support.stack.ray_cluster import RayCluster, fetch, ray_cluster
from tests.support.stack.serve_process import wait

pytestmark = [pytest.mark.nodes, pytest.mark.skipif(not CAN_MAKE, reason=REASON)]

STEP_S = 0.05
KEPT = 'quartet_conversation_requests_total{home="kept"}'
LONG = 400  # tokens
ROUNDS = 10
LOST_S = 10.0
STOP_S = 610  # graceful_shutdown_timeout_s of a replica
BOOT_S = 120
WAIT_S = 3.0
CLIENTS = 4  # at each of two ingresses
DEATHS = 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("machines"), STEP_S, {}) as found:
        yield found


def renew(cluster: RayCluster, node: Machine) -> None:
    """The machine boots again, with its Ray, and there are two replicas."""
    node.kill()
    node.boot()
    cluster.start_node(node)
    cluster.deploy(2)
    print(f"the node has its replica {cluster.settle():.1f} s after its Ray was up")


def with_one_replica(cluster: RayCluster) -> Machine:
    """The node that has it, where there is one alone."""
    cluster.deploy(1)
    wait(lambda: len(cluster.with_engine()) == 1 and cluster.routed(cluster.head) == 1, 60)
    (node,) = cluster.with_engine()
    return node


def drained(cluster: RayCluster, seconds: int) -> float:
    """The longest silence of a stream, new or old, while the node with the one replica is drained; all have finished."""
    node = with_one_replica(cluster)
    streams = cluster.streams(cluster.head, 6, LONG)
    wait_begun(streams)
    begun = time.monotonic()
    cluster.drain(node, seconds)
    while node in cluster.with_engine():
        assert time.monotonic() - begun < 120
        streams += cluster.streams(cluster.head, 1, 20)
        time.sleep(0.5)
    took = time.monotonic() - begun
    assert how(streams) == Counter(finish=len(streams))
    print(f"\ndrained in {took:.1f} s, {len(streams)} streams, the longest gap {longest_gap(streams):.1f} s")
    renew(cluster, node)
    return longest_gap(streams)


def test_each_node_has_a_replica_that_the_head_can_scrape(cluster: RayCluster) -> None:
    """Each address of discovery's list gives metrics on the head. Planted: the port of a node on the head's loopback."""
    for node in cluster.nodes:
        (address,) = cluster.scraped(node)
        assert "quartet_generation_tokens_total" in cluster.on_head(fetch(f"http://{address}/metrics"))
        with pytest.raises(AssertionError, match="refused"):
            cluster.on_head(fetch(f"http://127.0.0.1:{address.rpartition(':')[2]}/metrics"))


def kept(cluster: RayCluster) -> int:
    """Requests that HAProxy sent to the replica of their conversation."""
    pages = [cluster.on_head(fetch(f"http://{address}/metrics")) for node in cluster.nodes for address in cluster.scraped(node)]
    return sum(int(float(line.split()[-1])) for page in pages for line in page.splitlines() if line.startswith(KEPT))


def test_a_conversation_stays_whichever_ingress_is_asked(cluster: RayCluster) -> None:
    """Ten that begin at the head's are kept at those of both nodes. Planted: others that begin there are not."""
    before = kept(cluster)
    sessions = [f"at home {number}" for number in range(10)]
    for ingress in (cluster.head, *cluster.nodes):
        assert how([Stream(cluster.machines.switch, cluster.url(ingress), 1, name) for name in sessions]) == Counter(finish=10)
        time.sleep(1)
    assert kept(cluster) - before == 20
    assert how(cluster.streams(cluster.nodes[0], 10, 1)) == Counter(finish=10)
    assert kept(cluster) - before == 20


@pytest.mark.parametrize("blow", ["unplug", "kill"])
def test_a_lost_node_hangs_nobody(cluster: RayCluster, blow: str) -> None:
    """Its streams end within ten seconds, those of the other node go on, the ingress answers, and its replica is back with it.

    unplug  its link goes down. Ray calls it dead, and no engine of it lives on when the network is back
    kill    every process of it ends at once
    """
    lost = cluster.nodes[0]
    streams = cluster.streams(cluster.head, 8, LONG)
    wait_begun(streams)
    getattr(lost, blow)()
    at = time.monotonic()
    soon = cluster.streams(cluster.head, 4, 20)
    answered = wait(lambda: cluster.answers(cluster.head), 30)
    listed = cluster.wait_replicas(1, 40)
    new = how(soon)
    found = how(streams)
    cut = [stream.ended - at for stream in streams if stream.how != "finish"]
    print(f"\nanswers after {answered:.1f} s, new {dict(new)}, of discovery after {listed:.1f} s, {dict(found)} {cut}")
    assert found["finish"] > 0
    assert cut
    assert max(cut) < LOST_S
    assert set(new) <= {"finish", "refused: 503 5"}
    assert longest_gap(soon) < LOST_S
    if blow == "unplug":
        lost.plug()
        gone = wait(lambda: not lost.processes("engine."), 90)
        print(f"no engine on the node {gone:.1f} s after its network was back")
    renew(cluster, lost)


def test_requests_while_a_node_dies_five_times_all_end(cluster: RayCluster) -> None:
    """A thousand, at the ingress of the head and of the other node. Each finishes, is cut, or gets 503 with Retry-After, and none
    is silent for ten seconds."""
    lost, other = cluster.nodes
    over = threading.Event()
    streams = list[Stream]()

    def ask(machine: Machine) -> None:
        while not over.is_set():
            (stream,) = cluster.streams(machine, 1, 20)
            stream.thread.join()
            streams.append(stream)

    clients = [threading.Thread(target=ask, args=(machine,)) for machine in (cluster.head, other) * CLIENTS]
    for client in clients:
        client.start()
    try:
        for death in range(DEATHS):
            cluster.settle()
            time.sleep(2)  # it has requests again
            if death % 2:
                lost.unplug()
                time.sleep(LOST_S)
            lost.kill()
            lost.plug()
            lost.boot()
            cluster.start_node(lost)
        cluster.settle()
        wait(lambda: len(streams) >= 1000, 300)
    finally:
        over.set()
        for client in clients:
            client.join(100)
    found = how(streams)
    print(f"\n{len(streams)} requests, {dict(found)}, the longest silence {longest_gap(streams):.1f} s")
    assert set(found) <= {"finish", "error", "cut: RemoteProtocolError", "refused: 503 5"}
    assert 0.9 * len(streams) < found["finish"] < len(streams)
    assert longest_gap(streams) < LOST_S


@pytest.mark.parametrize("blow", ["unplug", "kill"])
def test_the_only_replica_comes_back_elsewhere(cluster: RayCluster, blow: str) -> None:
    """Until then each new request gets 503 with Retry-After. It waits no longer than Ray takes to call the node dead, 9 s."""
    lost = with_one_replica(cluster)
    getattr(lost, blow)()
    begun = time.monotonic()
    streams = list[Stream]()
    while not any(stream.how == "finish" for stream in streams):
        assert time.monotonic() - begun < 120, how(streams)
        streams += cluster.streams(cluster.head, 1, 20)
        time.sleep(0.5)
    took = time.monotonic() - begun
    found = how(streams)
    print(f"\nback after {took:.1f} s, {dict(found)}, the longest silence {longest_gap(streams):.1f} s")
    lost.plug()
    assert set(found) == {"finish", "refused: 503 5"}
    assert longest_gap(streams) < LOST_S
    renew(cluster, lost)


def test_a_drained_node_cuts_nothing_and_nobody_waits(cluster: RayCluster) -> None:
    """The one replica goes on until another has started, and then until its streams have ended.

    Planted: a deadline that leaves no time for the start. Serve stops the replica at once, and new requests wait.
    """
    planted = drained(cluster, STOP_S - 10)
    assert drained(cluster, STOP_S + BOOT_S) < min(WAIT_S, planted / 2)


def test_rolling_updates_cut_nothing(cluster: RayCluster) -> None:
    """Streams that go on while each replica is replaced end as they should, and each ingress answers new ones."""
    for update in range(ROUNDS):
        before = {target["labels"]["replica"] for target in cluster.targets()}
        streams = [stream for machine in cluster.machines.machines for stream in cluster.streams(machine, 2, LONG)]
        wait_begun(streams)
        begun = time.monotonic()
        cluster.deploy(build=f"update {update}")
        while {target["labels"]["replica"] for target in cluster.targets()} & before or len(cluster.targets()) < 2:
            more = [stream for machine in cluster.machines.machines for stream in cluster.streams(machine, 1, 20)]
            assert how(more) == Counter(finish=3)
            streams += more
        took = time.monotonic() - begun
        assert how(streams) == Counter(finish=len(streams))
        print(f"\n{len(streams)} streams, the longest gap {longest_gap(streams):.1f} s, update in {took:.1f} s")


def test_discovery_ends_with_its_application(cluster: RayCluster) -> None:
    """After `serve shutdown` no actor listens at its port any more. Planted: before, it does."""
    assert cluster.has_discovery()
    cluster.on_head("serve shutdown -y --address http://127.0.0.1:8265 2>&1")
    wait(lambda: not cluster.has_discovery(), 60)
