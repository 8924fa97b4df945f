"""The child's end of its lifeline, a socket pair to the replica: boot handshake, and exit at end of
file.

    replica -> child   Configure; Allocate, once every rank has loaded; RanksReady to the core, once every rank is ready
    child -> replica   Loaded (ranks), Ready; at any time Failed with the reason, and the child exits
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from engine.channel import map_shared
from engine.config import EngineConfig
from engine.errors import QuartetError
from engine.protocol import FrameReader, FrozenStruct, frame
from engine.rank_status import StatusBlock

HEARTBEAT_S = 0.25
_PR_SET_PDEATHSIG = 1


class BootArgs(FrozenStruct, kw_only=True):
    """argv[1] of a child, as JSON: descriptors by purpose; -1: absent.

    `result`: ring rank 0 -> core; `media`: the media memory; `reduce`: memory of the CPU's collectives; `front`: the core's
    message socket; `adapters`: a rank's socket for `engine.adapter_commands`; `store`: torch.distributed's rendezvous. `spin`:
    polls of a ring before a sleep.
    """

    index: int
    tp: int
    parent: int
    lifeline: int
    status: int  # its record; the core's follows the ranks'
    plan: int  # ring core -> ranks, as masks
    masks: int
    media: int
    result: int
    reduce: int
    front: int
    adapters: int = -1
    store: str
    spin: int

    @property
    def name(self) -> str:
        if self.index == self.tp:
            return "core"
        return f"rank {self.index}"


class TaggedMessage(FrozenStruct, tag=True):
    pass


class Configure(TaggedMessage):
    config: EngineConfig


class Loaded(TaggedMessage):
    """Bytes left for KV pages."""

    kv_bytes: int


class Allocate(TaggedMessage):
    """Null page included."""

    pages: tuple[int, ...]


Points = tuple[tuple[float, float], ...]  # ascending


class StepTimes(FrozenStruct):
    """(rows, milliseconds), ascending in rows."""

    decodes: Points  # steps of decode rows alone, with short contexts
    prefills: Points  # of prompt tokens alone
    mixed: Points  # extra cost of decode rows over equally many prompt tokens, in a step with prompts
    context_ms: float  # a token of context in a step of decode rows
    read_ms: float  # a token of context in a chunk's step
    attend_ms: float  # for each token of the chunk
    tile: int  # rows of a tile in large products: a part costs as much as the whole
    drafts: tuple[tuple[int, Points], ...] = ()  # each draft length, and its steps as in decodes; empty for a single one
    drafting: Points = ()  # extra cost of the most drafts in a step with prompts, beyond their rows, by sequences
    sizes: tuple[int, ...] = ()  # that a step's prompt tokens are padded to, ascending


def slowest(measured: Sequence[StepTimes]) -> StepTimes:
    """The slowest rank's times at each point, since a step ends with its last rank."""
    return StepTimes(*_greatest(list(map(msgspec.structs.astuple, measured))))


def _greatest(figures: Sequence[Any]) -> Any:
    if isinstance(figures[0], tuple):
        return tuple(map(_greatest, zip(*figures, strict=True)))
    return max(figures)


class Ready(TaggedMessage):
    """Ready for the first plan. `note`: for the log; `fallbacks`: sentences."""

    note: str = ""
    step_times: StepTimes | None = None
    fallbacks: tuple[str, ...] = ()


class RanksReady(TaggedMessage):
    step_times: StepTimes | None


class Failed(TaggedMessage):
    """The child exits. `user`: the message is fit for the user (a QuartetError)."""

    error: str
    user: bool


BootMessage = Configure | Loaded | Allocate | Ready | RanksReady | Failed
M = TypeVar("M", bound=BootMessage)
_decode = msgspec.msgpack.Decoder(BootMessage).decode
_encode = msgspec.msgpack.Encoder().encode


class BootSocket:
    """Blocking, with the socket's timeout."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._frames = FrameReader()
        self._pending: list[BootMessage] = []

    def send(self, message: BootMessage) -> None:
        self.sock.sendall(frame(_encode(message)))

    def receive(self) -> BootMessage | None:
        """None when the other end is closed, even with unread data. TimeoutError."""
        while not self._pending:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:  # it left something of ours unread
                return None
            if not data:
                return None
            self._pending = [_decode(message) for message in self._frames.feed(data)]
        return self._pending.pop(0)


class Lifeline:
    """A child's side: ends with the replica and sends heartbeats."""

    def __init__(self, args: BootArgs) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # sent when the thread that spawned us ends
        if os.getppid() != args.parent:  # it already has
            os._exit(0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.args = args
        self.status = StatusBlock(map_shared(args.status))
        self._boot = BootSocket(socket.socket(fileno=args.lifeline))
        self._boot.sock.setblocking(True)
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def send(self, message: BootMessage) -> None:
        self._boot.send(message)

    def receive(self, kind: type[M]) -> M:
        message = self._boot.receive()
        if message is None:
            os._exit(0)
        assert isinstance(message, kind), message
        return message

    def fail(self, error: BaseException) -> NoReturn:
        """Report an error to the replica, which ends the group, and exit; from any thread."""
        user = isinstance(error, QuartetError)
        if user:
            text = str(error)
        else:
            text = f"{type(error).__name__}: {error}"
        if user:
            trace = text
        else:
            trace = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):  # the disk of the log may be full
            sys.stderr.write("".join(f"{self.args.name}: {line}\n" for line in trace.splitlines()))
            sys.stderr.flush()
        with contextlib.suppress(OSError):  # the replica may be gone too
            self.send(Failed(text, user))
        os._exit(1)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._boot.sock, select.POLLRDHUP)
        while not poll.poll(HEARTBEAT_S * 1000):
            self.status.heartbeat(self.args.index, time.monotonic_ns())
        os._exit(0)


def run(body: Callable[[Lifeline], None]) -> NoReturn:
    """Run a child. An exception is reported to the replica, which ends the group."""
    lifeline = Lifeline(msgspec.json.decode(sys.argv[1], type=BootArgs))
    try:
        body(lifeline)
    except BaseException as error:  # noqa: BLE001 - crash only
        lifeline.fail(error)
    os._exit(0)
