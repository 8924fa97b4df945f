"""The replica's end of the ranks' sockets for adapters. A command is done when all ranks have done
it."""

import asyncio
import socket
from collections.abc import Sequence
from typing import cast

from engine.adapter_commands import AdapterCommand, CommandDone, decode_done, encode_command
from engine.errors import CheckpointError, EngineDead
from engine.protocol import FrameReader, frame


class RankLinks:
    """Runs on one event loop, over sockets that it takes over."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = [socket.socket(fileno=sock.detach()) for sock in sockets]
        self._links: list[_Link] = []
        self._numbers = 0
        self._open: dict[int, asyncio.Future[None]] = {}
        self._answers: dict[int, list[CommandDone]] = {}
        self._dead = False

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            _, link = await loop.create_unix_connection(lambda: _Link(self), sock=sock)
            self._links.append(link)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def do(self, command: AdapterCommand) -> None:
        """Have every rank do it. CheckpointError: one cannot read the adapter; EngineDead: one is
        gone."""
        if self._dead:
            raise EngineDead("a rank is gone")
        self._open[command.number] = asyncio.get_running_loop().create_future()
        self._answers[command.number] = []
        message = frame(encode_command(command))
        for link in self._links:
            link.transport.write(message)
        await self._open[command.number]

    def done(self, answer: CommandDone) -> None:
        answers = self._answers[answer.number]
        answers.append(answer)
        if len(answers) < len(self._links):
            return
        del self._answers[answer.number]
        future = self._open.pop(answer.number)
        errors = [each.error for each in answers if each.error is not None]
        if future.done():  # who asked has gone
            return
        if errors:
            future.set_exception(CheckpointError(errors[0]))
        else:
            future.set_result(None)

    def lost(self) -> None:
        self._dead = True
        for future in self._open.values():
            if not future.done():
                future.set_exception(EngineDead("a rank is gone"))
        self._open.clear()

    def close(self) -> None:
        for link in self._links:
            link.transport.close()


class _Link(asyncio.Protocol):
    transport: asyncio.WriteTransport

    def __init__(self, links: RankLinks) -> None:
        self._links = links
        self._frames = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._links.done(decode_done(message))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's interface
        self._links.lost()
