"""Guards around Serve's HTTP servers: limits, and recovery around its proxy.

A deployment without replicas is UNHEALTHY or DEPLOY_FAILED if they were lost, UPDATING or UPSCALING
if they are starting.
"""

from typing import Any

import ray

from deploy import ray_private
from deploy.edge.guards import http_protocol, limits

_LOST = ("UNHEALTHY", "DEPLOY_FAILED")


def outermost() -> list[Any]:
    """RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function."""
    http_protocol.install()
    name = ray.get_runtime_context().get_actor_name() or ""
    return limits.outermost(routes if name.startswith("SERVE_PROXY_ACTOR") else None)


def routes() -> dict[str, bool]:
    """Whether each application, by prefix, has lost all replicas of a deployment; empty if unknown."""
    try:
        applications = ray_private.serve_details()["applications"].values()
    except ray_private.UNANSWERED:
        return {}
    return {app["route_prefix"] or "/": any(map(is_lost, app["deployments"].values())) for app in applications}


def is_lost(deployment: dict[str, Any]) -> bool:
    return deployment["status"] in _LOST and all(replica["state"] != "RUNNING" for replica in deployment["replicas"])
