"""Whether a cluster can hold a group, which lives on one node."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deploy.edge.edge_settings import LOOPBACK_NAMES, url_host
from deploy.settings import DEPLOYMENT, ServeConfig, Settings, deployments
from engine.errors import ConfigError


def gpus_of(nodes: Iterable[Mapping[str, Any]]) -> list[int]:
    return [int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]]


def check_nodes(settings: Settings, gpus: Sequence[int]) -> None:
    """ConfigError of one line. `gpus`: of each node."""
    largest = max(gpus, default=0)
    if largest < (tp := settings.tp) and settings.needs_gpus and not settings.wait_for_nodes:
        raise ConfigError(
            f"tp {tp} needs {tp} GPUs on one node; the largest of {len(gpus)} node(s) has {largest}. "
            "Without GPUs, deploy/nano.yaml runs the embedded nano model on CPU; "
            "for a cluster that starts GPU nodes on demand, set wait_for_nodes: true"
        )


def check_host_of_nodes(host: str, nodes: int) -> None:
    if url_host(host) in LOOPBACK_NAMES:
        raise ConfigError(
            f"http_options.host: {host}: this cluster has {nodes} nodes, and a replica on loopback is reached from its own alone: "
            "set 0.0.0.0, and keys, as anybody who reaches the port may use it (docs/cluster.md)"
        )


def replica_resources(settings: Settings) -> dict[str, float]:
    if settings.needs_gpus:
        return {"num_gpus": settings.tp, "num_cpus": 1}
    return {"num_gpus": 0, "num_cpus": 0.5}


def check_replicas(config: ServeConfig, settings: Settings, resources: Mapping[str, float]) -> None:
    """ConfigError if the initial replicas need more than `resources`: Ray would only wait."""
    for _, options in deployments(config):
        if options.get("name", DEPLOYMENT) == DEPLOYMENT:
            own = replica_resources(settings)
        else:
            own = {}
        scaling = options.get("autoscaling_config")
        actor = options.get("ray_actor_options", own)
        if scaling:
            count = scaling.get("min_replicas", 1)
        else:
            count = options.get("num_replicas") or 1
        amounts = {"CPU": actor.get("num_cpus", 1), "GPU": actor.get("num_gpus"), **actor.get("resources", {})}
        for resource, amount in amounts.items():
            needed = float(amount or 0) * (1 if count == "auto" else int(count))
            if needed > (total := resources.get(resource, 0.0)) and not settings.wait_for_nodes:
                raise ConfigError(f"{count} replica(s) of {amount} {resource}s each need {needed:g}; this machine has {total:g}")
