"""The replica's side of the boot handshake, within a deadline.

    Configure -> all    Loaded <- every rank    Allocate -> all    Ready <- every rank    RanksReady -> core    Ready <- core

A child's failure ends the boot: ConfigError if it is for the user, else EngineDead.
"""

import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any, NoReturn

from cluster.children import Child, root_cause
from engine.errors import ConfigError, EngineDead
from engine.lifeline import BootMessage, Failed, M

SETTLE_S = 0.15  # a peer that lost its channel may be seen before the one that died: let the others report


class Handshake:
    def __init__(self, children: Sequence[Child], timeout_s: float) -> None:
        self._children = children
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._sources: dict[Any, Child] = {
            source: child
            for child in children
            for source in (child.lifeline.sock, child.pidfd)
        }

    def send(self, message: BootMessage) -> None:
        for child in self._children:
            child.send(message)

    def gather(self, children: Sequence[Child], kind: type[M]) -> list[M]:
        answers: dict[Child, M] = {}
        while len(answers) < len(children):
            for child in self._readable([child.name for child in children if child not in answers], kind.__name__):
                message = child.receive()
                if not isinstance(message, kind) or child not in children or child in answers:
                    self._give_up(child, message)
                answers[child] = message
        return [answers[child] for child in children]

    def _readable(self, missing: list[str], awaited: str) -> list[Child]:
        """EngineDead at the deadline, or if a child has ended."""
        ready = wait(self._sources, max(0.0, self._deadline - time.monotonic()))
        if not ready:
            raise EngineDead(f"boot took longer than boot_timeout_s, {self._timeout_s:g} s: no {awaited} from {', '.join(missing)}")
        for source in ready:
            if isinstance(source, int):
                self._give_up(self._sources[source], None)
        return [self._sources[source] for source in ready]

    def _give_up(self, child: Child, message: BootMessage | None) -> NoReturn:
        """Raises after a moment in which others may report their causes."""
        if message is not None and not isinstance(message, Failed):
            raise EngineDead(f"{child.name} sent {type(message).__name__} out of turn")
        time.sleep(SETTLE_S)
        cause = root_cause(other.exit_status() for other in self._children)
        if cause is None:
            raise EngineDead(f"{child.name} closed its lifeline")
        if cause.last_error is not None and cause.last_error.user and not cause.killed:
            raise ConfigError(cause.last_error.error)
        raise EngineDead(f"boot: {cause}")
