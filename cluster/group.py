"""One engine group: shared memory, and processes from boot to end.

    Group.boot(config)   memory -> spawn the ranks and the core -> handshake -> ready; or an error, with nothing left over
    group.front_socket, group.media   where an EngineClient attaches
    group.adapter_sockets   where RankLinks attaches, one a rank
    group.close()        orderly; group.kill() at once

Everything shared, torch.distributed's rendezvous included, is an anonymous file that the children inherit, so an end leaves no
name.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cluster import children
from cluster.attention_choice import AttentionChoice, attention_here
from cluster.children import Child, Command, ExitStatus, child_command
from cluster.handshake import Handshake
from engine.channel import create_shared, map_shared, ring_bytes
from engine.config import EngineConfig
from engine.lifeline import Allocate, BootArgs, Configure, Loaded, RanksReady, Ready, slowest
from engine.memory import longest_sequence, pages_of
from engine.quantisation import read_quantisation
from engine.rank_status import STATUS_BYTES, RankStatus, StatusBlock
from engine.step_masks import masks_capacity

REDUCE_BYTES = 64 << 20  # sparse: pages that no rank touches cost nothing
SPIN_POLLS = 2000
CLOSE_WAIT_S = 10.0

logger = logging.getLogger(__name__)


class Group:
    """Boot it from a thread that outlives the group: children die with it."""

    def __init__(self, config: EngineConfig, attention: AttentionChoice, front: socket.socket, shared: Mapping[str, int]) -> None:
        self.config = config
        self.attention = attention
        self.front_socket = front
        self.media = os.dup(shared["media"])
        self.adapter_sockets: list[socket.socket] = []
        self.children: list[Child] = []
        self.pages: tuple[int, ...] = ()
        self._memory = map_shared(shared["status"])
        self._status = StatusBlock(self._memory)
        self._last: list[RankStatus] | None = None
        self._lock = threading.Lock()

    @classmethod
    def boot(cls, config: EngineConfig, command: Command = child_command) -> "Group":
        """ConfigError: it can never boot like this. EngineDead: this boot failed."""
        started = time.monotonic()
        attention = attention_here(config)
        config = msgspec.structs.replace(config, attention_decode=attention.decode, attention_extend=attention.extend)
        with _shared(config) as shared:
            front, core = socket.socketpair()
            group = cls(config, attention, front, shared)
            try:
                with core:
                    group._spawn(shared, core, command)
                group._handshake()
            except BaseException:
                group.kill()
                raise
        took_s = time.monotonic() - started
        weights = read_quantisation(Path(config.model), config.weights)
        for sentence in weights.notes:
            logger.info("weights: %s", sentence)
        logger.info("weights: %s", weights.name)
        logger.info("group of %d ready in %.1f s, pages %s; %s", config.tp, took_s, group.pages, group.attention)
        return group

    def _spawn(self, shared: Mapping[str, int], core: socket.socket, command: Command) -> None:
        tp = self.config.tp
        files: dict[str, Any] = {**shared, "store": f"/proc/self/fd/{shared['store']}"}
        for index in range(tp + 1):
            parent_end, child_end = socket.socketpair()
            with child_end, contextlib.ExitStack() as ends:
                own = self._adapter_socket(index, ends)
                args = BootArgs(
                    index=index,
                    tp=tp,
                    parent=os.getpid(),
                    lifeline=child_end.fileno(),
                    front=core.fileno() if index == tp else -1,
                    adapters=max(own, default=-1),
                    spin=spin_polls(tp, len(os.sched_getaffinity(0))),
                    **files,
                )
                inherited = [args.lifeline, *own, *shared.values(), *([args.front] if index == tp else [])]
                try:
                    self.children.append(children.spawn(args, parent_end, inherited, self.config.device, command))
                except BaseException:
                    parent_end.close()
                    raise

    def _adapter_socket(self, index: int, ends: contextlib.ExitStack) -> list[int]:
        """Returns the descriptor of a rank's socket for adapters that are loaded later. `ends` closes it."""
        if index == self.config.tp or not self.config.max_adapters:
            return []
        ours, theirs = socket.socketpair()
        self.adapter_sockets.append(ours)
        return [ends.enter_context(theirs).fileno()]

    def _handshake(self) -> None:
        ranks = self.children[: self.config.tp]
        handshake = Handshake(self.children, self.config.boot_timeout_s)
        handshake.send(Configure(self.config))
        self.pages = pages_of(self.config, min(loaded.kv_bytes for loaded in handshake.gather(ranks, Loaded)))
        longest = longest_sequence(self.config.kv_groups, self.pages)
        if longest < self.config.max_len:
            logger.warning("the KV pools hold %d tokens of one request, not max_len's %d", longest, self.config.max_len)
        handshake.send(Allocate(self.pages))
        ready = handshake.gather(ranks, Ready)
        self.attention = self.attention._replace(fallbacks=ready[0].fallbacks)  # every rank leaves the same out
        for sentence in self.attention.fallbacks:
            logger.warning("self-check: %s", sentence)
        core = self.children[self.config.tp]
        measured = [message.step_times for message in ready if message.step_times is not None]
        times = slowest(measured) if measured else None
        logger.info("steps were measured as %s", times)
        core.send(RanksReady(times))
        ready += handshake.gather([core], Ready)
        for child, message in zip(self.children, ready, strict=True):
            logger.info("%s ready (pid %d) %s", child.name, child.process.pid, message.note)

    def status(self) -> list[RankStatus]:
        """Ranks, then the core; kept after the end."""
        if self._last is not None:  # without the lock: `kill` holds it while it waits
            return self._last
        with self._lock:
            return self._last or self._read()

    def _read(self) -> list[RankStatus]:
        return [self._status.read(index) for index in range(self.config.tp + 1)]

    def running(self) -> list[bool]:
        return [child.process.poll() is None for child in self.children]

    def exits(self) -> list[ExitStatus | None]:
        with self._lock:
            return [child.exit_status() for child in self.children]

    def close(self, timeout_s: float = CLOSE_WAIT_S) -> bool:
        """Waits for the end after `client.stop()`, then kills; True if all ended in time."""
        deadline = time.monotonic() + timeout_s
        orderly = all(child.wait(deadline - time.monotonic()) for child in self.children)
        self.kill()
        return orderly

    def kill(self) -> None:
        """SIGKILL every child and wait; idempotent, from any thread."""
        with self._lock:
            if self._last is not None:
                return
            self._last = self._read()
            still_running = children.kill(self.children)
            self.front_socket.close()
            os.close(self.media)
            for sock in self.adapter_sockets:
                sock.close()
            self._memory.release()
        if still_running:
            logger.error("still running %g s after SIGKILL: %s", children.KILL_WAIT_S, ", ".join(still_running))


def spin_polls(tp: int, cores: int) -> int:
    if tp + 2 > cores:
        return 0
    return SPIN_POLLS


@contextlib.contextmanager
def _shared(config: EngineConfig) -> Iterator[Mapping[str, int]]:
    tp = config.tp
    vocabulary = config.geometry.vocab
    sizes = {
        "plan": ring_bytes(tp),
        "masks": ring_bytes(tp, masks_capacity(config.max_seqs * config.widest, vocabulary)),
        "media": 0,
        "result": ring_bytes(1),
        "status": (tp + 1) * STATUS_BYTES,
        "reduce": REDUCE_BYTES,
        "store": 0,
    }
    descriptors = {name: create_shared(f"quartet-{name}", size) for name, size in sizes.items()}
    try:
        yield descriptors
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
