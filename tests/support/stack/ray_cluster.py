"""Ray on machines of their own, started as docs/deployment.md says: `quartet env`, `ray start`, `serve deploy`.

The head has no GPU, and each node has one, as Ray counts them. A replica takes one, so a node has at most one engine. Its ranks
only wait (paced_app): a stream lasts as long as a test needs, whatever else the machine does.
"""

import csv
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from tests.support.repo_rules import ROOT
from tests.support.stack.machines import Machine, Machines, machines
from tests.support.stack.node_stream import BODY, Stream
from tests.support.stack.paced_app import PACE_VARIABLE
from tests.support.stack.serve_process import wait

PORT = 8000
BOOT_S = 300.0
CORE = "engine.core.loop"  # one process of an engine has it in its command line
ONE_GPU: dict[str, Any] = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5, "num_gpus": 1}}
PACED = "sed s/deploy.app:build/tests.support.stack.paced_app:build/ /tmp/cluster.yaml > /tmp/paced.yaml"
DEPLOY = "serve deploy --address http://127.0.0.1:8265"
STORAGE = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": "/tmp/gcs"}


class RayCluster:
    """A head, the first machine, and nodes, the others; each may start and end for itself. `told`: by `quartet env`."""

    def __init__(self, machines: Machines, head_environ: dict[str, str], step_s: float, *, told: bool = True) -> None:
        self._told = told
        self.machines = machines
        self.head, *self.nodes = machines.machines
        self.config = yaml.safe_load((ROOT / "deploy" / "nano.yaml").read_text())
        self.config["http_options"] |= {"host": "0.0.0.0", "port": PORT}
        self.config["proxy_location"] = "EveryNode"
        self.args["tp"] = 1
        self.deployment.update(ONE_GPU)
        self._head_environ = head_environ
        binaries = Path(sys.executable).parent
        self.environ = {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/root"),
            PACE_VARIABLE: str(step_s),
        }
        if told:
            self.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        else:
            self.environ["HOME"] = "/tmp"  # the machine's own: Ray asks for a token where ~/.ray has one

    @property
    def args(self) -> dict[str, Any]:
        """The application's, in the config."""
        args: dict[str, Any] = self.config["applications"][0]["args"]
        return args

    @property
    def deployment(self) -> dict[str, Any]:
        """Serve's options of the deployment, in the config."""
        options: dict[str, Any] = self.config["applications"][0]["deployments"][0]
        return options

    def start_head(self) -> None:
        """Ray's head on the first machine."""
        address = f"--head --port=6379 --node-ip-address={self.head.address} --include-dashboard=true --num-gpus=0"
        self._start(self.head, "head", address, self._head_environ)

    def start_node(self, machine: Machine) -> None:
        """Ray on another machine."""
        address = f"--address={self.head.address}:6379 --node-ip-address={machine.address} --num-gpus=1"
        self._start(machine, "node", address, {})

    def _start(self, machine: Machine, kind: str, address: str, environ: dict[str, str]) -> None:
        self._write(machine)
        sizes = "--num-cpus=2 --object-store-memory=100000000 --disable-usage-stats"
        more = "".join(f"export {name}={value} && " for name, value in environ.items())
        start = f"{self._settings(kind)} && {more}ray start {address} {sizes}"
        machine.run(f"{start} > /tmp/start.log 2>&1 || {{ cat /tmp/start.log; exit 1; }}", self.environ, BOOT_S)

    def _settings(self, kind: str) -> str:
        """The script that takes the environment of `quartet env`, as docs/deployment.md has it."""
        if not self._told:
            return "true"
        return f'settings="$(python -m deploy.cli env --for {kind} /tmp/cluster.yaml)" && eval "$settings"'

    def _write(self, machine: Machine) -> None:
        (machine.folder / "tmp" / "cluster.yaml").write_text(yaml.safe_dump(self.config))

    def on_head(self, script: str, timeout_s: float = BOOT_S) -> str:
        """What `script` prints on the head, in the environment of its Ray."""
        return self.head.run(f"{self._settings('head')} && {script}", self.environ, timeout_s)

    def deploy(self, replicas: int = 2, *, paced: bool = True, **args: Any) -> None:
        """`serve deploy` of the config with so many replicas and other `args`. paced: its ranks have no model."""
        self.deployment["num_replicas"] = replicas
        self.args.update(args)
        self._write(self.head)
        deploy = f"{PACED} && {DEPLOY} /tmp/paced.yaml" if paced else f"{DEPLOY} /tmp/cluster.yaml"
        self.on_head(f"{deploy} 2>&1")

    def drain(self, machine: Machine, seconds: int) -> None:
        """`ray drain-node` of a machine that will end so many seconds later."""
        nodes = json.loads(self.on_head("ray list nodes --filter state=ALIVE --format json 2>/dev/null"))
        (node,) = [entry["node_id"] for entry in nodes if entry["node_ip"] == machine.address]
        words = f"--reason DRAIN_NODE_REASON_PREEMPTION --reason-message maintenance --deadline-remaining-seconds {seconds}"
        self.on_head(f"ray drain-node --address {self.head.address}:6379 --node-id {node} {words} 2>&1")

    def url(self, machine: Machine) -> str:
        """Its ingress."""
        return f"http://{machine.address}:{PORT}"

    def targets(self) -> list[dict[str, Any]]:
        """Discovery's list, read on the head."""
        page = self.head.run(fetch("http://127.0.0.1:9464/targets"), self.environ, 20)
        found: list[dict[str, Any]] = json.loads(page)
        return found

    def has_discovery(self) -> bool:
        """Whether discovery's port is not closed: a connection that is reset, as the actor ends, was taken."""
        try:
            self.targets()
        except AssertionError as error:
            return "refused" not in str(error)
        return True

    def scraped(self, machine: Machine) -> list[str]:
        """Where the replicas of a machine are scraped."""
        return [target["targets"][0] for target in self.targets() if target["labels"]["node"] == machine.address]

    def answers(self, machine: Machine) -> bool:
        """Whether a chat is answered by its ingress."""
        try:
            return self.machines.from_client(lambda: self._chat(machine)).status_code == 200
        except httpx.TransportError:
            return False

    def _chat(self, machine: Machine) -> httpx.Response:
        return httpx.post(f"{self.url(machine)}/v1/chat/completions", json=BODY | {"max_tokens": 1}, timeout=5)

    def wait_replicas(self, count: int, timeout_s: float = BOOT_S) -> float:
        """Seconds until discovery lists so many."""
        return wait(lambda: _quietly(lambda: len(self.targets()) == count), timeout_s)

    def routed(self, machine: Machine) -> int:
        """To how many replicas its HAProxy sends requests, by its admin socket."""
        folders = (machine.folder / "tmp" / "haproxy-serve").glob("*/")  # one for each time that it has joined
        folder = max(folders, key=lambda path: path.stat().st_mtime)
        handle = os.open(folder, os.O_RDONLY)  # the path of a socket has 107 bytes at most
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"/proc/self/fd/{handle}/admin.sock")
                connection.sendall(b"show stat\n")
                table = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        finally:
            os.close(handle)
        rows = csv.DictReader(table.removeprefix("# ").splitlines())
        return sum(row["svname"].startswith("SERVE_REPLICA") and row["status"] == "UP" for row in rows)

    def settle(self) -> float:
        """Seconds until there are two replicas, and each ingress sends requests to both."""
        begun = time.monotonic()
        self.wait_replicas(2)
        wait(lambda: all(_quietly(lambda m=machine: self.routed(m) == 2) for machine in self.machines.machines), 60)
        return time.monotonic() - begun

    def with_engine(self) -> list[Machine]:
        """The nodes on which an engine runs."""
        return [node for node in self.nodes if node.processes(CORE)]

    def streams(self, machine: Machine, count: int, tokens: int) -> list[Stream]:
        """Streams by its ingress, each a conversation of its own on a thread of its own."""
        return [Stream(self.machines.switch, self.url(machine), tokens) for _ in range(count)]


@contextmanager
def ray_cluster(folder: Path, step_s: float, head_environ: dict[str, str]) -> Iterator[RayCluster]:
    """A head and two nodes with a replica each, whose steps take `step_s`. No GPU has had two engines at once meanwhile."""
    with machines(folder, 3) as made:
        found = RayCluster(made, head_environ, step_s)
        found.start_head()
        for node in found.nodes:
            found.start_node(node)
        found.deploy()
        print(f"\ntwo replicas after {found.settle():.1f} s")
        with EngineCount(found.nodes) as count:
            yield found
        assert max(count.most.values()) == 1, count.most


class EngineCount:
    """The most engines that each machine had at once, looked for ten times a second."""

    def __init__(self, nodes: list[Machine]) -> None:
        self.most = {node.address: 0 for node in nodes}
        self._nodes = nodes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _count(self) -> None:
        while not self._over.wait(0.1):
            for node in self._nodes:
                self.most[node.address] = max(self.most[node.address], len(node.processes(CORE)))


def strike(machine: Machine, words: str) -> None:
    """SIGKILL to its processes whose command line has `words`; there is one at least."""
    victims = machine.processes(words)
    assert victims, f"{machine.address} has no {words}"
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


def fetch(url: str) -> str:
    """The script that prints a page."""
    return f"python -c 'import urllib.request as u; print(u.urlopen(\"{url}\", timeout=5).read().decode())'"


def _quietly(asked: Callable[[], bool]) -> bool:
    """False where it cannot be asked yet."""
    try:
        return asked()
    except (AssertionError, OSError, ValueError):
        return False
