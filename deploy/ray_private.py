"""Ray Serve's private API, as used by Quartet, for the tested minor version."""

from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

VERSION = "2.60."
UNANSWERED = (RayError, RayServeException)


def serve_details() -> dict[str, Any]:
    """The controller's view of applications. UNANSWERED: none, or no answer."""
    details: dict[str, Any] = _client().get_serve_details()
    return details


def http_host() -> str:
    """The address of HAProxy and the replicas. UNANSWERED."""
    return str(_client().http_config.host)


def application_names() -> frozenset[str] | None:
    """Application names; empty once the controller has ended; None while it does not answer."""
    try:
        return frozenset(serve_details()["applications"])
    except (ActorDiedError, RayServeException):
        return frozenset()
    except RayError:
        return None


def _client() -> Any:
    assert ray.__version__.startswith(VERSION), f"Ray is {ray.__version__}; its private API was tried with {VERSION}x"
    return _get_global_client()
