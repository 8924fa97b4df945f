"""Carries out the replica's adapter commands (`engine.adapter_commands`) while the rank's own thread runs steps: one thread reads
folders, another places adapters in slots.
"""

import queue
import socket
import sys
import threading
from collections.abc import Callable

import torch

from engine.adapter_commands import (
    AdapterCommand,
    CommandDone,
    DropAdapter,
    PlaceAdapter,
    ReadAdapter,
    decode_command,
    encode_command,
)
from engine.errors import CheckpointError
from engine.protocol import FrameReader, frame
from engine.rank.adapter_store import AdapterStore

_SWITCH_S = 0.0005  # for how long these threads may keep Python from the thread that runs steps; by default it is ten times as long


class AdapterLoader:
    """Reads commands from `sock` until its other end closes. Errors but an adapter's own go to `fail`, which ends the process:
    ranks must hold the same adapters."""

    def __init__(self, store: AdapterStore, sock: socket.socket, fail: Callable[[BaseException], None]) -> None:
        self._store = store
        self._sock = sock
        self._fail = fail
        self._sock.setblocking(True)
        self._reads = queue.SimpleQueue[ReadAdapter]()
        self._sending = threading.Lock()

    def start(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        for body in (self._serve, self._read):
            threading.Thread(target=self._run, args=(body,), name="adapters", daemon=True).start()

    def _run(self, body: Callable[[], None]) -> None:
        torch.set_num_threads(1)  # a setting of each thread
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - crash only
            self._fail(error)

    def _serve(self) -> None:
        frames = FrameReader()
        while data := self._sock.recv(1 << 16):
            for message in frames.feed(data):
                self._do(decode_command(message))

    def _do(self, command: AdapterCommand) -> None:
        match command:
            case ReadAdapter():
                self._reads.put(command)
            case PlaceAdapter():
                self._store.place(command.id, command.slot)
                self._done(CommandDone(command.number))
            case DropAdapter():
                self._store.drop(command.id)
                self._done(CommandDone(command.number))

    def _read(self) -> None:
        while True:
            command = self._reads.get()
            try:
                self._store.read(command.id, command.name, command.folder)
            except (CheckpointError, OSError, MemoryError) as error:
                self._done(CommandDone(command.number, str(error) or type(error).__name__))
            else:
                self._done(CommandDone(command.number))

    def _done(self, done: CommandDone) -> None:
        with self._sending:
            self._sock.sendall(frame(encode_command(done)))
