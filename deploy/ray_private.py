"""What Quartet calls of Ray Serve's private API, for the one minor version that it was tried with."""

from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

VERSION = "2.60."
UNANSWERED = (RayError, RayServeException)


def serve_details() -> dict[str, Any]:
    """Returns what Serve's controller says of its applications. UNANSWERED: there is none, or it does not answer now."""
    details: dict[str, Any] = _client().get_serve_details()
    return details


def http_host() -> str:
    """Returns the address at which HAProxy and the replicas listen. UNANSWERED as `serve_details`."""
    return str(_client().http_config.host)


def application_names() -> frozenset[str] | None:
    """Returns the names of Serve's applications; none once its controller has ended; None while it does not answer."""
    try:
        return frozenset(serve_details()["applications"])
    except (ActorDiedError, RayServeException):
        return frozenset()
    except RayError:
        return None


def _client() -> Any:
    assert ray.__version__.startswith(VERSION), f"Ray is {ray.__version__}; its private API was tried with {VERSION}x"
    return _get_global_client()
