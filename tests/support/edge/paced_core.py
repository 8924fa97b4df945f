"""A scripted core that says when it begins with a request."""

import asyncio
import socket
from dataclasses import dataclass

from engine.protocol import GenerateRequest, TokenBatch
from tests.support.edge.http_edge import LOAD, FakeCore


@dataclass
class PacedCore(FakeCore):
    """Lets a request wait `queue_s`, says that it has begun, and takes `prefill_s` to its first token."""

    queue_s: float = 0.0
    prefill_s: float = 0.0

    async def _answer(self, request: GenerateRequest, sock: socket.socket) -> None:
        await asyncio.sleep(self.queue_s)
        await self._send(sock, TokenBatch(outputs=[], started=[request.id], load=LOAD))
        await asyncio.sleep(self.prefill_s)
        await super()._answer(request, sock)
