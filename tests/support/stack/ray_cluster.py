"""Ray on machines of their own, started as docs/deployment.md says: `quartet env`, `ray start`, `serve deploy`."""

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.repo_rules import ROOT
from tests.support.stack.machines import Machine, Machines, enter_network
from tests.support.stack.serve_process import wait

PORT = 8000
MODEL = "nano-31b"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
BOOT_S = 180.0


class RayCluster:
    """A head, the first machine, and nodes, the others; each may start and end for itself."""

    def __init__(self, machines: Machines, args: dict[str, Any], deployment: dict[str, Any]) -> None:
        self.machines = machines
        self.head, *self.nodes = machines.machines
        self.config = yaml.safe_load((ROOT / "deploy" / "nano.yaml").read_text())
        self.config["http_options"] |= {"host": "0.0.0.0", "port": PORT}
        self.config["proxy_location"] = "EveryNode"
        self.args["tp"] = 1
        self.args.update(args)
        self.config["applications"][0]["deployments"][0].update(deployment)
        binaries = Path(sys.executable).parent
        self._environ = {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/root"),
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }

    @property
    def args(self) -> dict[str, Any]:
        """The application's, in the config."""
        args: dict[str, Any] = self.config["applications"][0]["args"]
        return args

    def start_head(self, **environ: str) -> None:
        """Ray's head on the first machine. `environ`: more variables."""
        address = f"--head --port=6379 --node-ip-address={self.head.address}"
        self._start(self.head, "head", f"{address} --include-dashboard=true", environ)

    def start_node(self, machine: Machine) -> None:
        """Ray on another machine."""
        self._start(machine, "node", f"--address={self.head.address}:6379 --node-ip-address={machine.address}", {})

    def _start(self, machine: Machine, kind: str, address: str, environ: dict[str, str]) -> None:
        self._write(machine)
        sizes = "--num-cpus=2 --object-store-memory=100000000 --disable-usage-stats"
        more = "".join(f"export {name}={value} && " for name, value in environ.items())
        start = f'eval "$(python -m deploy.cli env --for {kind} /tmp/cluster.yaml)" && {more}ray start {address} {sizes}'
        machine.run(f"{start} > /tmp/start.log 2>&1 || {{ cat /tmp/start.log; exit 1; }}", self._environ, 90)

    def _write(self, machine: Machine) -> None:
        (machine.folder / "tmp" / "cluster.yaml").write_text(yaml.safe_dump(self.config))

    def on_head(self, script: str, timeout_s: float = 90) -> str:
        """What `script` prints on the head, in the environment of its Ray."""
        environ = 'eval "$(python -m deploy.cli env --for head /tmp/cluster.yaml)"'
        return self.head.run(f"{environ} && {script}", self._environ, timeout_s)

    def deploy(self, **args: Any) -> None:
        """`serve deploy` of the config with other `args`."""
        self.args.update(args)
        self._write(self.head)
        self.on_head("serve deploy /tmp/cluster.yaml --address http://127.0.0.1:8265 2>&1")

    def status(self) -> dict[str, Any]:
        """`serve status`."""
        return dict(yaml.safe_load(self.on_head("serve status --address http://127.0.0.1:8265 2>/dev/null")))

    def url(self, machine: Machine) -> str:
        """Its ingress."""
        return f"http://{machine.address}:{PORT}"

    def get(self, url: str) -> httpx.Response:
        """The reply, as the tests' clients see it."""
        return self.machines.from_client(lambda: httpx.get(url, timeout=5))

    def targets(self) -> list[dict[str, Any]]:
        """Discovery's list, read on the head."""
        page = self.head.run(fetch("http://127.0.0.1:9464/targets"), self._environ, 20)
        found: list[dict[str, Any]] = json.loads(page)
        return found

    def answers(self, machine: Machine) -> bool:
        """Whether a chat is answered by its ingress."""
        try:
            return self.machines.from_client(lambda: self._chat(machine)).status_code == 200
        except httpx.TransportError:
            return False

    def _chat(self, machine: Machine) -> httpx.Response:
        return httpx.post(f"{self.url(machine)}/v1/chat/completions", json=BODY | {"max_tokens": 1}, timeout=5)

    def wait_replicas(self, count: int, timeout_s: float = BOOT_S) -> float:
        """Seconds until discovery lists so many, and each ingress answers."""
        return wait(lambda: _quietly(lambda: len(self.targets()) == count), timeout_s)

    def streams(self, machine: Machine, count: int, tokens: int) -> "list[Stream]":
        """Streams by its ingress, each on a thread of its own."""
        return [Stream(self.machines.switch, self.url(machine), tokens) for _ in range(count)]


def fetch(url: str) -> str:
    """The script that prints a page."""
    return f"python -c 'import urllib.request as u; print(u.urlopen(\"{url}\", timeout=5).read().decode())'"


def _quietly(asked: Callable[[], bool]) -> bool:
    """False where it cannot be asked yet."""
    try:
        return asked()
    except AssertionError:
        return False


class Stream:
    """One streamed chat. `how`: finish, error, cut or refused; None while it goes on."""

    def __init__(self, network: str, url: str, tokens: int) -> None:
        self.how: str | None = None
        self.events = 0
        self.ended = 0.0
        self.longest_gap = 0.0
        self._last = time.monotonic()
        self._network = network
        self._url = url
        self._body = BODY | {"stream": True, "max_tokens": tokens}
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        enter_network(self._network)
        try:
            with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=self._body, timeout=90) as reply:
                self.how = self._read(reply)
        except httpx.TransportError as error:
            self.how = f"cut: {type(error).__name__}"
        self.ended = time.monotonic()

    def _read(self, reply: httpx.Response) -> str:
        if reply.status_code != 200:
            reply.read()
            return f"refused: {reply.status_code} {reply.headers.get('retry-after')}"
        how = "cut: no end"
        for line in reply.iter_lines():
            now = time.monotonic()
            self.longest_gap = max(self.longest_gap, now - self._last)
            self._last = now
            self.events += line.startswith("data:")
            if '"error"' in line:
                how = "error"
            if '"finish_reason":"length"' in line:
                how = "finish"
        return how
