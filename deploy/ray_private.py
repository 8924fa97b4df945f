"""Ray Serve's private API, as far as Quartet uses it, for the tested minor version."""

from typing import Any

import ray
from ray._private import utils
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.exceptions import ActorDiedError, RayError
from ray.serve._private import api
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

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


def keep_signal_handlers() -> None:
    """Call before `ray.init`: on SIGTERM Ray would end the process with its own code."""
    _check_version()
    utils.set_sigterm_handler = lambda _handler: None


def deploy(config: dict[str, Any]) -> None:
    _check_version()
    schema = ServeDeploySchema.model_validate(config)
    client = api.serve_start(
        http_options=schema.http_options.model_dump(),
        proxy_location=schema.proxy_location,
        grpc_options=schema.grpc_options.model_dump(),
        controller_options=schema.controller_options,
    )
    client.deploy_apps(schema)


def silence_workers() -> None:
    for name, _ in list(global_worker_stdstream_dispatcher.handlers):
        global_worker_stdstream_dispatcher.remove_handler(name)


def shut_serve(timeout_s: float) -> None:
    ray.get(_client()._controller.graceful_shutdown.remote(wait=False), timeout=timeout_s)


def _client() -> Any:
    _check_version()
    return _get_global_client()


def _check_version() -> None:
    assert ray.__version__.startswith(VERSION), f"Ray is {ray.__version__}; its private API was tried with {VERSION}x"
