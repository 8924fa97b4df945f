"""Around Serve's own proxy: while a lost replica is replaced, a request gets 503 with Retry-After instead of waiting for it.

Serve holds every request that it has no replica for. That is right where a replica starts because somebody wants it: a new setting,
the first request after none. A deployment that has lost its replicas Serve calls UNHEALTHY, or DEPLOY_FAILED where none can start.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.edge import limits
from deploy.edge.error_response import response_of
from engine.errors import EngineDead

PERIOD_S = 0.5  # between two looks at a request that waits, and at what Serve says of the deployments
_PROXY = "SERVE_PROXY_ACTOR"
_LOST = ("UNHEALTHY", "DEPLOY_FAILED")


class Recovery:
    """Wraps Serve's proxy. `routes`: of each application its prefix, and whether it has lost its replicas; it may block."""

    def __init__(self, app: ASGIApp, routes: Callable[[], dict[str, bool]]) -> None:
        self._app = app
        self._routes = routes
        self._asked = float("-inf")
        self._said: asyncio.Future[dict[str, bool]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is answered, or waits for a replica that is to come."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        work = asyncio.ensure_future(self._app(scope, receive, noted))
        try:
            while not (begun or work.done()):
                await asyncio.wait({work}, timeout=PERIOD_S)
                if not (begun or work.done()) and await self._is_lost(scope["path"]) and not begun:
                    break
            if begun or work.done():
                await work
                return
        finally:
            work.cancel()
            await asyncio.wait({work})
        await response_of(EngineDead("the replica is gone"), scope["path"])(scope, receive, send)

    async def _is_lost(self, path: str) -> bool:
        """As Serve said it, at most PERIOD_S ago; False where it does not say."""
        now = asyncio.get_running_loop().time()
        if now - self._asked >= PERIOD_S:
            self._asked = now
            self._said = asyncio.ensure_future(asyncio.to_thread(self._routes))
        with contextlib.suppress(TimeoutError, RayError):  # the controller itself may be starting again
            routes = await asyncio.wait_for(asyncio.shield(self._said), PERIOD_S)
            return routes.get(max((route for route in routes if _leads(route, path)), key=len, default=""), False)
        return False


def _leads(route: str, path: str) -> bool:
    return path == route or path.startswith(route.rstrip("/") + "/")


def routes() -> dict[str, bool]:
    """As Serve's controller says: some deployment of the application is without a replica that runs, and should have one."""
    applications = _get_global_client().get_serve_details()["applications"].values()
    return {each["route_prefix"] or "/": any(map(_is_lost, each["deployments"].values())) for each in applications}


def _is_lost(deployment: dict[str, Any]) -> bool:
    return deployment["status"] in _LOST and all(replica["state"] != "RUNNING" for replica in deployment["replicas"])


def outermost() -> list[Middleware]:
    """What RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names, in replicas and in Serve's proxies; the last one stands outermost."""
    is_proxy = (ray.get_runtime_context().get_actor_name() or "").startswith(_PROXY)
    return [*([Middleware(Recovery, routes=routes)] if is_proxy else []), *limits.outermost()]
