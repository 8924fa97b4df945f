"""Ray on two machines, by `quartet env`, `ray start` and `serve deploy`: an update, and a node that is lost and returns."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stack.machines import CAN_MAKE, REASON, Machine, machines
from tests.support.stack.ray_cluster import RayCluster, Stream, fetch
from tests.support.stack.serve_process import wait

pytestmark = [pytest.mark.serve, pytest.mark.alone, pytest.mark.slow, pytest.mark.skipif(not CAN_MAKE, reason=REASON)]

LONG = 500
ONE_EACH: dict[str, Any] = {
    "num_replicas": 2,
    "max_replicas_per_node": 1,
    "ray_actor_options": {"num_cpus": 0.5, "num_gpus": 0},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with machines(tmp_path_factory.mktemp("machines"), 2) as made:
        found = RayCluster(made, {}, ONE_EACH)
        found.start_head()
        found.start_node(found.nodes[0])
        found.deploy()
        print(f"\ntwo replicas after {found.wait_replicas(2):.1f} s")
        wait(lambda: all(map(found.answers, made.machines)), 60)
        yield found


def how(streams: list[Stream]) -> Counter[str]:
    """How they ended; all have."""
    for stream in streams:
        stream.thread.join(120)
    return Counter(str(stream.how) for stream in streams)


def began(streams: list[Stream]) -> bool:
    return all(stream.events > 2 for stream in streams)


def node_of(cluster: RayCluster, machine: Machine) -> list[str]:
    """Where the replicas of a machine are scraped."""
    return [target["targets"][0] for target in cluster.targets() if target["labels"]["node"] == machine.address]


def test_each_node_has_a_replica_that_the_head_can_scrape(cluster: RayCluster) -> None:
    """Each address of discovery's list gives metrics on the head. Planted: the node's port on loopback."""
    (other,) = node_of(cluster, cluster.nodes[0])
    for address in (*node_of(cluster, cluster.head), other):
        assert "quartet_generation_tokens_total" in cluster.on_head(fetch(f"http://{address}/metrics"))
    with pytest.raises(AssertionError, match="refused"):
        cluster.on_head(fetch(f"http://127.0.0.1:{other.rpartition(':')[2]}/metrics"))


def test_a_rolling_update_cuts_nothing(cluster: RayCluster) -> None:
    """Streams that go on while each replica is replaced end as they should, and new ones are answered by both ingresses."""
    before = {target["labels"]["replica"] for target in cluster.targets()}
    streams = [stream for machine in cluster.machines.machines for stream in cluster.streams(machine, 3, LONG)]
    wait(lambda: began(streams), 60)
    cluster.deploy(build="2")
    while {target["labels"]["replica"] for target in cluster.targets()} & before or len(cluster.targets()) < 2:
        more = [stream for machine in cluster.machines.machines for stream in cluster.streams(machine, 1, 20)]
        assert how(more) == Counter(finish=2)
        streams += more
    assert how(streams) == Counter(finish=len(streams))
    print(f"\n{len(streams)} streams, the longest gap {max(stream.longest_gap for stream in streams):.1f} s")


def test_a_node_that_loses_its_network_hangs_nobody(cluster: RayCluster) -> None:
    """Its streams end within ten seconds, those of the other node go on, the ingress answers, Ray calls the node dead, and no
    engine of it lives on when the network is back."""
    lost = cluster.nodes[0]
    streams = cluster.streams(cluster.head, 8, LONG)
    wait(lambda: began(streams), 60)
    lost.unplug()
    at = time.monotonic()
    answered = wait(lambda: cluster.answers(cluster.head), 30)
    dead = wait(lambda: "DEAD" in cluster.on_head("ray list nodes 2>/dev/null"), 40)
    found = how(streams)
    cut = [stream.ended - at for stream in streams if stream.how != "finish"]
    print(f"\nanswers after {answered:.1f} s, cut after {max(cut):.1f} s, dead after {dead:.1f} s, {dict(found)}")
    assert found["finish"] > 0
    assert cut
    assert max(cut) < 10
    assert dead < 20  # asking takes seconds, too
    lost.plug()
    gone = wait(lambda: not lost.processes("engine."), 90)
    print(f"no engine on the node {gone:.1f} s after its network was back")


def test_a_node_that_returns_gets_its_replica(cluster: RayCluster) -> None:
    """Its Ray is started anew, and both ingresses answer. The head has never had two replicas."""
    node = cluster.nodes[0]
    wait(lambda: not node.processes("raylet/raylet"), 90)
    assert len(node_of(cluster, cluster.head)) == 1
    cluster.start_node(node)
    print(f"\ntwo replicas after {cluster.wait_replicas(2):.1f} s")
    wait(lambda: cluster.answers(node), 60)


def test_discovery_ends_with_its_application(cluster: RayCluster) -> None:
    """After `serve shutdown` no actor listens at its port any more. Planted: before, it does."""
    cluster.targets()
    cluster.on_head("serve shutdown -y --address http://127.0.0.1:8265 2>&1")
    with pytest.raises(AssertionError, match="refused"):
        wait(lambda: cluster.targets() is None, 60)
