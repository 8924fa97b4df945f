"""What stands around Serve's HTTP servers, in the processes that Serve starts: the limits, and around its own proxy the recovery.

A deployment that has lost its replicas Serve calls UNHEALTHY, or DEPLOY_FAILED where none can start. In a redeploy, or on the way
up from zero replicas, it is UPDATING or UPSCALING.
"""

from typing import Any

import ray

from deploy import ray_private
from deploy.edge import http_protocol, limits

_LOST = ("UNHEALTHY", "DEPLOY_FAILED")


def outermost() -> list[Any]:
    """Returns the guards; RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function."""
    http_protocol.install()
    name = ray.get_runtime_context().get_actor_name() or ""
    return limits.outermost(routes if name.startswith("SERVE_PROXY_ACTOR") else None)


def routes() -> dict[str, bool]:
    """Maps each application's prefix to whether some deployment of it lacks a replica that runs, and should have one.

    Empty while Serve's controller does not answer: it may be starting again.
    """
    try:
        applications = ray_private.serve_details()["applications"].values()
    except ray_private.UNANSWERED:
        return {}
    return {app["route_prefix"] or "/": any(map(is_lost, app["deployments"].values())) for app in applications}


def is_lost(deployment: dict[str, Any]) -> bool:
    """Judges by a deployment's status and its replicas' states, as Serve names them."""
    return deployment["status"] in _LOST and all(replica["state"] != "RUNNING" for replica in deployment["replicas"])
