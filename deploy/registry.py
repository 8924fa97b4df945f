"""The Ray side of dashboards/discovery: one detached actor on the head node, and the thread by which a replica calls it.

The actor outlives every replica, so that the dead stay counted. It needs nothing but the heartbeats: where it is started anew, they
register everybody again within a second, and its counters begin at zero, as a restarted process's do.
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
from deploy.edge.edge_settings import WILDCARDS, url_host
from deploy.edge.keys.key_file import Quota
from deploy.edge.keys.shared_use import Beat, OpenRequest, Refusal, SharedUse
from deploy.settings import DiscoverySettings
from engine.errors import ConfigError

NAME = "quartet-discovery"
PERIOD_S = 1.0
END_CHECK_S = 5.0
LAST_S = 1.0

logger = logging.getLogger("ray.serve")


class Discovery(ReplicaRegistry):
    """The actor: the replica registry, and its HTTP endpoint.

    `end` is called once no replica is left and Serve has none of their applications.
    """

    def __init__(self, host: str, port: int, end: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._use = SharedUse()
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
        """Whether no replica is left, and Serve has given up every application whose replicas there were."""
        applications = self.left_applications() | self._use.applications
        if self._use.replicas or not applications:
            return False
        present = ray_private.application_names()
        return present is not None and not applications & present

    def url(self) -> str:
        """Return the address of the http_sd list."""
        return self._server.url

    def open(self, replica: str, number: int, holder: str, quota: Quota) -> Refusal | None:
        """As SharedUse."""
        return self._use.open(replica, number, holder, quota)

    def reserve(self, replica: str, number: int, tokens: int) -> Refusal | None:
        """As SharedUse."""
        return self._use.reserve(replica, number, tokens)

    def close(self, replica: str, number: int, used: int) -> None:
        """As SharedUse."""
        self._use.close(replica, number, used)

    def beat(self, replica: str, application: str, requests: dict[int, OpenRequest], begun: dict[str, int]) -> Beat:
        """As SharedUse."""
        return self._use.beat(replica, application, requests, begun)


def end_this_actor() -> None:
    """Ends the actor that calls it for good: Ray would start one anew that only exits."""
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


@dataclass
class RayRegistryClient:
    """The actor of this cluster, which is started where there is none."""

    settings: DiscoverySettings
    actor: Any = None

    def call(self, method: str, timeout_s: float, *args: object) -> Any:
        """Return what that method of Discovery does. RayError, within the timeout."""
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
    """Tells `registry` once a second, from a thread of its own, that the replica lives and what it has counted.

    Registry failures never affect serving: what fails is logged once, and tried again. `on_url` hears where the list is.
    """

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
                    self.on_url(self.registry.call("url", 20.0))  # starts the actor, where there is none: that may take a while
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
        """Send the end's cause (None: in order) and the last counts, once. Blocks for a second at most: while the head is dead, Ray
        takes a minute to say that it finds no actor."""
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
    """Makes the http_sd list of Ray's own exporters: each living node's that has one, by address, with or without Ray's dashboard.
    ConfigError: no reply."""
    try:
        nodes = ray.nodes()
    except RayError as error:
        raise ConfigError(f"Ray does not say which nodes there are: {error}") from error
    addresses = [(node["NodeManagerAddress"], node.get("MetricsExportPort", 0)) for node in nodes if node["Alive"]]
    return [{"targets": [f"{url_host(node)}:{port}"], "labels": {"node": node}} for node, port in sorted(addresses) if port > 0]


def target_here(model: str, metrics_url: str) -> ScrapeTarget:
    """Describes this replica, as Serve and Ray call it, with the exporter at `metrics_url`."""
    from ray import serve  # whose import takes a second, which the actor can do without

    context = serve.get_replica_context()
    node = ray.util.get_node_ip_address()
    address = address_of(metrics_url, node)
    return ScrapeTarget(context.app_name, context.deployment, context.replica_id.unique_id, node, model, address)


def address_of(metrics_url: str, node: str) -> str:
    """Returns host:port as Prometheus reaches it: an exporter on all interfaces is called by its node's address."""
    url = urlsplit(metrics_url)
    return f"{url_host(node)}:{url.port}" if url.hostname in WILDCARDS else url.netloc
