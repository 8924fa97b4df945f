"""Around Serve's proxy: requests get 503 with Retry-After while a lost replica is replaced, but
wait for one that starts on purpose (deploy/serve_guard.py)."""

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.edge.apis import error_shape_of
from deploy.edge.http.error_response import refuse
from engine.errors import EngineDead

logger = logging.getLogger("ray.serve")

Routes = dict[str, bool]  # of each application its prefix, and whether it has lost its replicas, as far as is known
PERIOD_S = 0.5  # between two looks at a request that waits, and at what Serve says of the deployments


@dataclass
class Recovery:
    """`routes` may block."""

    app: ASGIApp
    routes: Callable[[], Routes]
    _looked: float = 0.0
    _look: asyncio.Future[Routes] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = refused = False
        left = asyncio.get_running_loop().create_future()

        async def received() -> Message:
            coming = asyncio.ensure_future(receive())
            try:
                return (await asyncio.wait({coming, left}, return_when=asyncio.FIRST_COMPLETED))[0].pop().result()
            finally:
                coming.cancel()

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            if not refused:
                await send(message)

        work = asyncio.ensure_future(self.app(scope, received, noted))
        try:
            while not (begun or work.done()):
                await asyncio.wait({work}, timeout=PERIOD_S)
                if not (begun or work.done()) and await self._is_lost(scope["path"]) and not (begun or work.done()):
                    refused = True
                    left.set_result({"type": "http.disconnect"})  # cancelled itself, Serve leaves its handle's error to nobody
                    await asyncio.wait({work}, timeout=PERIOD_S)
                    break
            if not refused:
                await work
        finally:
            work.cancel()
            await asyncio.wait({work}, timeout=PERIOD_S)  # the client has its answer even if Serve does not let go
            work.add_done_callback(partial(_log_failure, sys.exception()))
        if refused:
            await refuse(EngineDead("the replica is gone"), error_shape_of(scope), scope, receive, send)

    async def _is_lost(self, path: str) -> bool:
        """Whether Serve reported it lost, at most PERIOD_S ago."""
        now = asyncio.get_running_loop().time()
        if self._look is None or (self._look.done() and now - self._looked >= PERIOD_S):
            self._looked = now
            self._look = asyncio.ensure_future(self._read_routes())
        look = self._look
        await asyncio.wait({look}, timeout=PERIOD_S)
        routes = look.result() if look.done() else {}
        prefixes = [route for route in routes if f"{path}/".startswith(route.rstrip("/") + "/")]
        return routes.get(max(prefixes, key=len, default=""), False)

    async def _read_routes(self) -> Routes:
        """A failure is logged and counts as no report."""
        try:
            return await asyncio.to_thread(self.routes)
        except Exception:
            logger.exception("Serve's state could not be read")
            return {}


def _log_failure(known: BaseException | None, work: asyncio.Future[None]) -> None:
    if not work.cancelled() and (error := work.exception()) not in (None, known):
        logger.error("a request that was given up failed", exc_info=error)
