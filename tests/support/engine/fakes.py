"""Fakes of the engine: the core at the far end of a client's socket, and the client itself, each with the real interface."""

import asyncio
import itertools
import json
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig, engine_config
from engine.errors import EngineDead, InvalidRequest
from engine.front.stream import Clock, Stream
from engine.protocol import (
    Abort,
    AbortReason,
    DecodedItem,
    FinishReason,
    FrameReader,
    FrontMessage,
    GenerateRequest,
    Load,
    MediaEnd,
    Output,
    SamplingParams,
    TokenBatch,
    decode_front_message,
    encode_message,
    frame,
    pack_tokens,
)
from tests.nano.model_shapes import config
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.load_figures import load
from tests.support.engine.media import MediaMemory


def fake_config(folder: Path, member: str = "31b", **settings: object) -> EngineConfig:
    """Settings for a group of fake ranks: a nano shape's config.json in `folder`, no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(SHAPES[member], "bfloat16")))
    usual = {"tp": 2, "device": "cpu", "dtype": "float32", "max_len": 512, "boot_timeout_s": 30.0}
    return engine_config(model=str(folder), **{**usual, **settings})


class FakeCore:
    """The core's end of a front socket, driven by the test: read what the client sent, answer what the test wants."""

    def __init__(self) -> None:
        self.front, self._sock = socket.socketpair()
        self._sock.setblocking(False)
        self._frames = FrameReader()
        self.memory = MediaMemory()
        self.reads_media = True  # else requests have the places of theirs
        self._decoded: dict[int, tuple[DecodedItem, ...]] = {}  # by the begin of their memory
        self._pending: list[FrontMessage] = []
        self._step = 0
        self._sending = asyncio.Lock()

    async def receive_or_end(self) -> FrontMessage | None:
        """The next message from the client; None once it has closed its end."""
        while not self._pending:
            data = await asyncio.get_running_loop().sock_recv(self._sock, 1 << 20)
            if not data:
                return None
            for raw in self._frames.feed(data):
                self._take(decode_front_message(raw))
        return self._pending.pop(0)

    def _take(self, message: FrontMessage) -> None:
        """Queue a message for the test; a request has its media with it."""
        match message:
            case MediaEnd():
                self._decoded.pop(message.begin, None)
                self.memory.free(message.begin, message.end)
            case GenerateRequest(media=[first, *_]) if self.reads_media:
                if first.place not in self._decoded:
                    self._decoded[first.place] = tuple(map(self.memory.decoded, message.media))
                self._pending.append(msgspec.structs.replace(message, media=self._decoded[first.place]))
            case _:
                self._pending.append(message)

    async def receive(self) -> FrontMessage:
        """The next message from the client, within some seconds."""
        message = await asyncio.wait_for(self.receive_or_end(), 20)
        assert message is not None, "the client closed its socket"
        return message

    async def receive_request(self) -> GenerateRequest:
        """The next message, which is a request."""
        message = await self.receive()
        assert isinstance(message, GenerateRequest), message
        return message

    async def receive_abort(self) -> Abort:
        """The next message, which is an abort."""
        message = await self.receive()
        assert isinstance(message, Abort), message
        return message

    async def silent(self) -> bool:
        """True when the client says nothing for a moment."""
        try:
            message = await asyncio.wait_for(self.receive(), 0.05)
        except TimeoutError:
            return True
        self._pending.insert(0, message)
        return False

    async def send(self, *outputs: Output, started: Sequence[int] = ()) -> None:
        """One TokenBatch."""
        await self.send_raw(encode_message(TokenBatch(outputs=list(outputs), started=list(started), load=self.load())))

    def load(self) -> Load:
        """The figures that go with a batch: a new step each time."""
        self._step += 1
        return load(self._step)

    async def send_raw(self, message: bytes) -> None:
        """One message, whatever it is."""
        async with self._sending:  # a socket has one writer at a time
            await asyncio.get_running_loop().sock_sendall(self._sock, frame(message))

    def close(self) -> None:
        """The core ends."""
        self._sock.close()
        self.memory.close()


Answer = Callable[[list[int], SamplingParams], Iterable[int]]


def count_up(prompt: list[int], params: SamplingParams) -> Iterable[int]:
    """The default answer: the ids that follow the prompt's last one."""
    return itertools.count(prompt[-1] + 1)


class FakeEngineClient:
    """`generate`, `abort` and `health` without an engine: `answer(prompt, params)` gives the token ids, one an Output.

    Ends by `stop_ids` or max_tokens as the core does. `requests` and `aborted` record what was asked;
    `refuse` set: every request is refused with that sentence. `step_s` is slept before each token.
    """

    def __init__(self, answer: Answer = count_up, *, step_s: float = 0.0) -> None:
        self.requests: list[GenerateRequest] = []
        self.aborted: list[tuple[int, AbortReason]] = []
        self.refuse: str | None = None
        self.dead: str | None = None
        self.load: Load | None = load()
        self._answer = answer
        self._step_s = step_s
        self._open: dict[int, tuple[Stream, asyncio.Task[None]]] = {}

    def generate(self, prompt: Sequence[int], params: SamplingParams, **fields: Any) -> Stream:
        """As EngineClient.generate."""
        stream = Stream(len(self.requests) + 1, self.abort, Clock(0.0, scheduled=0.0))
        self.requests.append(GenerateRequest(id=stream.id, prompt=pack_tokens(prompt), params=params, **fields))
        if self.dead is not None:
            stream.fail(EngineDead(self.dead))
        elif self.refuse is not None:
            stream.fail(InvalidRequest(self.refuse))
        else:
            tokens = self._answer(prompt, params)
            self._open[stream.id] = stream, asyncio.get_running_loop().create_task(self._feed(stream, tokens, params))
        return stream

    async def _feed(self, stream: Stream, tokens: Iterable[int], params: SamplingParams) -> None:
        for count, token in enumerate(tokens, 1):
            await asyncio.sleep(self._step_s)
            stopped = token in params.stop_ids and count > params.min_tokens
            full = count >= params.max_tokens
            finish = FinishReason.stop if stopped else FinishReason.length if full else None
            stream.push(Output(id=stream.id, tokens=[token], finish=finish))
            if finish:
                break
        else:
            stream.push(Output(id=stream.id, finish=FinishReason.stop))
        del self._open[stream.id]

    def abort(self, request: int, reason: AbortReason) -> None:
        """As EngineClient.abort."""
        if request in self._open:
            self.aborted.append((request, reason))
            self._open.pop(request)[1].cancel()

    def health(self) -> None:
        """As EngineClient.health."""
        if self.dead is not None:
            raise EngineDead(self.dead)

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def fail(self, reason: str) -> None:
        """As EngineClient.fail."""
        self.dead = reason
        for stream, task in self._open.values():
            task.cancel()
            stream.fail(EngineDead(reason))
        self._open.clear()
