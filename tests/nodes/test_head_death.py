"""The head of a cluster dies, with Ray's storage on disk and without: what nodes go on with, and what is there once it is back."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.stack.machines import CAN_MAKE, REASON
from tests.support.stack.node_stream import Stream, how, longest_gap, wait_begun
from tests.support.stack.ray_cluster import CORE, STORAGE, RayCluster, ray_cluster, strike
from tests.support.stack.serve_process import wait

pytestmark = [pytest.mark.nodes, pytest.mark.skipif(not CAN_MAKE, reason=REASON)]

STEP_S = 0.1
LONG = 1500  # tokens
AWAY_S = 75.0  # longer than the 60 s for which Ray's processes wait by default


@pytest.fixture
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A cluster whose head keeps its state on disk."""
    with ray_cluster(tmp_path_factory.mktemp("machines"), STEP_S, STORAGE) as found:
        yield found


@pytest.fixture
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A cluster whose head keeps its state in memory, as Ray does by default."""
    with ray_cluster(tmp_path_factory.mktemp("machines"), STEP_S, {}) as found:
        yield found


def engines(cluster: RayCluster) -> set[int]:
    """The processes of the engines' cores."""
    return {pid for node in cluster.nodes for pid in node.processes(CORE)}


def ask_for(cluster: RayCluster, seconds: float) -> list[Stream]:
    """New requests at the ingress of each node, one after the other; all have ended."""
    streams = list[Stream]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        more = [stream for node in cluster.nodes for stream in cluster.streams(node, 1, 20)]
        how(more)
        streams += more
        time.sleep(0.5)
    return streams


def test_a_head_with_storage_returns_to_its_cluster(kept: RayCluster) -> None:
    """Streams go on and nodes answer while the controller, then GCS, then the whole head is dead. The head finds the replicas and
    engines that there were, and can replace them."""
    before = engines(kept)
    long = [stream for node in kept.nodes for stream in kept.streams(node, 3, LONG)]
    wait_begun(long)
    strike(kept.head, "ServeController")
    answered = ask_for(kept, 5)
    strike(kept.head, "gcs_server")
    answered += ask_for(kept, 5)
    kept.head.kill()
    gone = time.monotonic()
    answered += ask_for(kept, AWAY_S)
    kept.head.boot()
    kept.start_head()
    print(f"\nthe head's Ray is up {time.monotonic() - gone:.1f} s after its death")
    took = kept.settle()
    print(f"both replicas are known {took:.1f} s later, {len(answered)} answers, {longest_gap(answered):.1f} s of silence at most")
    assert engines(kept) == before
    assert how(answered) == Counter(finish=len(answered))
    assert how(long) == Counter(finish=6)
    kept.deploy(build="after the head's death")
    wait(lambda: len(engines(kept) - before) == 2 and not engines(kept) & before, 180)
    kept.settle()


def test_a_head_without_storage_leaves_no_orphan(forgetful: RayCluster) -> None:
    """Streams go on and nodes answer until it is back. Then it knows no node: Ray and the engines end there, and nodes that join
    anew get replicas."""
    before = engines(forgetful)
    long = [stream for node in forgetful.nodes for stream in forgetful.streams(node, 2, LONG)]
    wait_begun(long)
    forgetful.head.kill()
    answered = ask_for(forgetful, 10)
    assert how(answered) == Counter(finish=len(answered))
    assert engines(forgetful) == before
    forgetful.head.boot()
    forgetful.start_head()
    gone = wait(lambda: not engines(forgetful), 90)
    ended = how(long)
    print(f"\nno engine {gone:.1f} s after the head was back, {dict(ended)}")
    assert set(ended) <= {"finish", "error", "cut: RemoteProtocolError"}
    for node in forgetful.nodes:
        wait(lambda node=node: not node.processes("raylet/raylet"), 90)
        forgetful.start_node(node)
    forgetful.deploy()
    print(f"two replicas after {forgetful.settle():.1f} s")
