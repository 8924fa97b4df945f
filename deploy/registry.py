"""Runs dashboards/discovery in Ray: one detached actor, and a replica's thread that calls it.

The actor outlives replicas, so the dead stay counted. After a restart its counters start at zero.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError

from dashboards.discovery import DiscoveryServer, HttpSdList, ReplicaRegistry, ScrapeTarget
from dashboards.series import Counts
from deploy import ray_private
from deploy.edge.adapters.adapter_centre import AdapterCentre
from deploy.edge.edge_settings import WILDCARDS, url_host
from deploy.edge.keys.shared_use import SharedUse
from deploy.settings import DiscoverySettings
from engine.errors import ConfigError

NAME = "quartet-discovery"
PERIOD_S = 1.0
END_CHECK_S = 5.0
LAST_S = 1.0  # while the head is dead, Ray takes a minute to say that it finds no actor

logger = logging.getLogger("ray.serve")


class Discovery(ReplicaRegistry):
    """`end` is called once no replica and no application is left."""

    def __init__(self, host: str, port: int, end: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._use = SharedUse()
        self._adapters = AdapterCentre()
        for address in ((host, port), (host, 0), ("127.0.0.1", 0)):  # an actor that cannot be made would be made again and again
            try:
                self._server = DiscoveryServer(self, *address, ray_exporters)
                break
            except ConfigError as error:
                logger.warning("%s: another is tried", error)

        if end is not None:
            threading.Thread(target=self._end_after_applications, args=(end,), name="end of discovery", daemon=True).start()

    def _end_after_applications(self, end: Callable[[], None]) -> None:
        while not self._is_over():
            time.sleep(END_CHECK_S)
        end()

    def _is_over(self) -> bool:
        applications = self.left_applications() | self._use.applications
        if self._use.replicas or not applications:
            return False
        present = ray_private.application_names()
        return present is not None and not applications & present

    def url(self) -> str:
        return self._server.url

    def ask(self, method: str, *args: object) -> object:
        centre = self._use if hasattr(self._use, method) else self._adapters
        return getattr(centre, method)(*args)


def end_this_actor() -> None:
    """End the calling actor for good: Ray would restart it."""
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


@dataclass
class RayRegistryClient:
    """This cluster's actor, started if missing."""

    settings: DiscoverySettings
    actor: Any = None

    def call(self, method: str, timeout_s: float, *args: object) -> Any:
        """RayError, within the timeout."""
        try:
            if self.actor is None:
                options = {"name": NAME, "namespace": "quartet", "lifetime": "detached", "get_if_exists": True, "max_restarts": -1}
                actor_class = ray.remote(Discovery).options(num_cpus=0, resources={"node:__internal_head__": 0.001}, **options)
                self.actor = actor_class.remote(self.settings.host, self.settings.port, end_this_actor)
            return ray.get(getattr(self.actor, method).remote(*args), timeout=timeout_s)
        except RayError:
            self.actor = None  # it may have been killed: the next call looks for it, or starts another
            raise


@dataclass
class HeartbeatSender:
    """Reports once a second that the replica lives, with its counts. `on_url` gets the list's
    address."""

    registry: RayRegistryClient
    target: ScrapeTarget
    counts: Callable[[], Counts]
    on_url: Callable[[str], None]

    def __post_init__(self) -> None:
        self._over = threading.Event()
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def _run(self) -> None:
        known = complained = False
        while True:
            try:
                if not known:
                    self.on_url(self.registry.call("url", 20.0))  # starts a missing actor, which may take a while
                    known = True
                self.registry.call("heartbeat", 2.0, self.target, self.counts())
                complained = False
            except RayError as error:
                if not complained and not self._over.is_set():
                    logger.warning("discovery does not answer (%s); Prometheus may not see this replica", type(error).__name__)
                complained = True
            if self._over.wait(PERIOD_S):
                return

    def deregister(self, cause: str | None) -> None:
        """Send the end's cause (None: in order) and last counts, once, in LAST_S at most."""
        if self._over.is_set():
            return
        self._over.set()
        last = threading.Thread(target=self._send_last, args=(cause,), name="last heartbeat", daemon=True)
        last.start()
        last.join(LAST_S)
        if last.is_alive():
            logger.warning("discovery did not hear of the end (no answer)")

    def _send_last(self, cause: str | None) -> None:
        try:
            self.registry.call("deregister", 0.5, self.target, cause, self.counts())
        except RayError as error:
            logger.warning("discovery did not hear of the end (%s)", type(error).__name__)


def ray_exporters() -> HttpSdList:
    """The http_sd list of Ray's exporters on living nodes. ConfigError: no reply."""
    try:
        nodes = ray.nodes()
    except RayError as error:
        raise ConfigError(f"Ray does not say which nodes there are: {error}") from error
    addresses = [(node["NodeManagerAddress"], node.get("MetricsExportPort", 0)) for node in nodes if node["Alive"]]
    return [{"targets": [f"{url_host(node)}:{port}"], "labels": {"node": node}} for node, port in sorted(addresses) if port > 0]


def target_here(model: str, metrics_url: str) -> ScrapeTarget:
    from ray import serve  # whose import takes a second, which the actor can do without

    context = serve.get_replica_context()
    node = ray.util.get_node_ip_address()
    address = address_of(metrics_url, node)
    return ScrapeTarget(context.app_name, context.deployment, context.replica_id.unique_id, node, model, address)


def address_of(metrics_url: str, node: str) -> str:
    """host:port for Prometheus; an exporter on all interfaces gets its node's address."""
    url = urlsplit(metrics_url)
    if url.hostname in WILDCARDS:
        return f"{url_host(node)}:{url.port}"
    return url.netloc
