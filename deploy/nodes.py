"""Whether a cluster can hold a group at all: a group lives on one node, so its largest node decides."""

from collections.abc import Iterable, Mapping
from typing import Any

from deploy.settings import Settings
from engine.errors import ConfigError

FALLBACK = "without GPUs, deploy/nano.yaml runs the embedded nano model on CPU"


def check_nodes(settings: Settings, nodes: Iterable[Mapping[str, Any]]) -> None:
    """Raises ConfigError of one line: what is missing, and what to do instead. `nodes`: as ray.nodes() gives them."""
    if not settings.needs_gpus or settings.wait_for_nodes:
        return
    sizes = [int(node.get("Resources", {}).get("GPU", 0)) for node in nodes if node.get("Alive")]
    largest = max(sizes, default=0)
    if largest < (tp := settings.tp):
        raise ConfigError(
            f"tp {tp} needs {tp} GPUs on one node; the largest of {len(sizes)} node(s) has {largest}. "
            f"{FALLBACK}; for a cluster that starts GPU nodes on demand, set wait_for_nodes: true"
        )
