"""`ray start` and `serve run` without `quartet env`: what works, what a replica says of it, and what a second node refuses."""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.support.stack.machines import CAN_MAKE, REASON, Machines, machines
from tests.support.stack.node_stream import BODY, Stream, how, longest_gap, wait_begun
from tests.support.stack.ray_cluster import CORE, DEPLOY, PACED, RayCluster
from tests.support.stack.serve_process import wait

pytestmark = [pytest.mark.nodes, pytest.mark.skipif(not CAN_MAKE, reason=REASON)]

URL = "http://127.0.0.1:8000"
LONG = 200  # tokens, of 0.05 s each
WARNING = "Ray was started without"
COMMAND = "quartet env --for head CONFIG"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A head on which `serve run` serves one replica at loopback, and a node that has not joined."""
    with machines(tmp_path_factory.mktemp("machines"), 2) as made:
        cluster = RayCluster(made, {}, 0.05, told=False)
        cluster.config["http_options"]["host"] = "127.0.0.1"
        cluster.deployment.update(num_replicas=1, ray_actor_options={"num_cpus": 0.5, "num_gpus": 0})
        cluster.start_head()
        cluster.head.run(PACED, dict(os.environ))
        run = cluster.head.command("serve run /tmp/paced.yaml > /tmp/run.log 2>&1")
        with subprocess.Popen(run, env=cluster.environ) as served:
            wait(lambda: status(inside(cluster)) == 200, 120)
            yield cluster
            served.kill()


def inside(cluster: RayCluster) -> Machines:
    """The head, with clients of its own."""
    return Machines(cluster.head.namespace, [cluster.head])


def status(there: Machines, content: object = None) -> int:
    """Of the answer to a chat; 0: there was none."""
    more = {"json": BODY | {"max_tokens": 1}} if content is None else {"content": content}
    headers = {"content-type": "application/json"}
    try:
        return there.from_client(lambda: httpx.post(f"{URL}/v1/chat/completions", headers=headers, timeout=20, **more)).status_code
    except httpx.TransportError:
        return 0


def streams(cluster: RayCluster, count: int, tokens: int) -> list[Stream]:
    return [Stream(cluster.head.namespace, URL, tokens) for _ in range(count)]


def logged(cluster: RayCluster) -> list[str]:
    """The warnings of each replica's log."""
    files = (cluster.head.folder / "tmp" / "ray").glob("session_2*/logs/serve/replica_*.log")
    return [line for file in files for line in file.read_text().splitlines() if WARNING in line]


def test_serve_run_serves_and_its_replica_says_once_what_ray_lacks(plain: RayCluster) -> None:
    """Sixteen streams at once finish, a large body is refused, `serve status` is right, and a line names the command."""
    together = streams(plain, 16, 20)
    assert how(together) == Counter(finish=16)
    assert status(inside(plain), b" " * 80_000_000) == 413
    assert status(inside(plain), iter([b" " * 1_000_000] * 80)) == 413
    assert "status: RUNNING" in plain.on_head("serve status")
    (line,) = logged(plain)
    assert COMMAND in line
    assert "RAY_SERVE_ENABLE_HA_PROXY" in line


def test_the_application_outlives_serve_run(plain: RayCluster) -> None:
    """SIGTERM ends `serve run`. Its streams finish, and the application goes on in the cluster."""
    open_streams = streams(plain, 4, LONG)
    wait_begun(open_streams)
    (pid,) = plain.head.processes("bin/serve run")
    os.kill(pid, signal.SIGTERM)
    wait(lambda: not plain.head.processes("bin/serve run"), 30)
    assert how(open_streams) == Counter(finish=4)
    assert status(inside(plain)) == 200


def test_an_update_of_one_replica_cuts_nothing(plain: RayCluster) -> None:
    """Its streams finish. New requests wait for the new replica."""
    (before,) = plain.head.processes(CORE)
    open_streams = streams(plain, 4, LONG)
    wait_begun(open_streams)
    plain.deploy(1, build="another")
    late = streams(plain, 2, 5)
    wait(lambda: before not in plain.head.processes(CORE), 120)
    found = [*open_streams, *late]
    assert how(found) == Counter(finish=6)
    print(f"\nthe longest silence {longest_gap(late):.1f} s")


def test_an_application_on_loopback_is_refused_on_a_second_node(plain: RayCluster) -> None:
    """In one line, and the replica goes on. Planted: before the node joins it is deployed."""
    plain.deploy(1, paced=False)
    wait(lambda: "status: RUNNING" in plain.on_head("serve status"), 120)
    before = plain.head.processes(CORE)
    plain.start_node(plain.nodes[0])
    plain.on_head(f"sed -i s/nano-31b/other/ /tmp/cluster.yaml && {DEPLOY} /tmp/cluster.yaml 2>&1")
    wait(lambda: "DEPLOY_FAILED" in plain.on_head("serve status"), 60)
    said = " ".join(plain.on_head("serve status").split())
    assert "http_options.host: 127.0.0.1: this cluster has 2 nodes" in said
    assert "set 0.0.0.0" in said
    assert plain.head.processes(CORE) == before
    assert status(inside(plain)) == 200


def test_serve_shutdown_leaves_nothing(plain: RayCluster) -> None:
    """No engine, and nobody listens at discovery's port. Planted: before, somebody does."""
    assert plain.has_discovery()
    plain.on_head("serve shutdown -y --address http://127.0.0.1:8265 2>&1")
    wait(lambda: not plain.head.processes(CORE), 60)
    wait(lambda: not plain.has_discovery(), 60)
