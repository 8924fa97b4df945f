"""A scripted core that tells its load as the real one does, so that the front learns when it begins with a request."""

import asyncio
import socket
from dataclasses import dataclass

import msgspec

from engine.protocol import GenerateRequest, TokenBatch
from tests.support.edge.http_edge import LOAD, FakeCore


@dataclass
class PacedCore(FakeCore):
    """Lets a request wait `queue_s`, says that it has begun, and takes `prefill_s` to its first token."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    begun: int = 0

    async def _answer(self, request: GenerateRequest, sock: socket.socket) -> None:
        await asyncio.sleep(self.queue_s)
        self.begun += 1
        await self._send(sock, TokenBatch(outputs=[], load=LOAD))
        await asyncio.sleep(self.prefill_s)
        await super()._answer(request, sock)

    async def _send(self, sock: socket.socket, batch: TokenBatch) -> None:
        received = len(self.requests)
        load = msgspec.structs.replace(batch.load, received=received, waiting=received - self.begun)
        await super()._send(sock, TokenBatch(outputs=batch.outputs, load=load))
