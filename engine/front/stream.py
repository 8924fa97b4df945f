"""One request's outputs, merged until its reader takes them."""

from collections.abc import Callable

import msgspec

from engine.adapters import NO_ADAPTER
from engine.protocol import AbortReason, Output

_ADDED = ("tokens", "logprobs", "prompt_logprobs", "cached", "accepted", "rejected")  # of outputs that pile up


class Clock(msgspec.Struct):
    submitted: float
    scheduled: float | None = None
    first: float | None = None
    last: float | None = None
    aborted: float | None = None
    output_tokens: int = 0

    @property
    def queue_s(self) -> float | None:
        if self.scheduled is None:
            return None
        return self.scheduled - self.submitted


class Stream:
    """The reader sets `on_ready`, called in the writer's turn; the writer sets `aborted`. `take`
    raises InvalidRequest, GenerationFailed (also for a slow reader) or EngineDead."""

    def __init__(
        self, request: int, abort: Callable[[int, AbortReason], None], clock: Clock, adapter: int = NO_ADAPTER
    ) -> None:
        self.id = request
        self.clock = clock
        self.adapter = adapter
        self._abort = abort
        self._piled: Output | None = None
        self._error: Exception | None = None
        self._left = False
        self.aborted: AbortReason | None = None
        self.on_ready: Callable[[], None] = lambda: None  # the reader is busy with something else, and will look

    def push(self, output: Output) -> int:
        """Writer: more output. Returns the unread tokens; 0 once the reader left."""
        if self._left or self._error:
            return 0
        self._piled = piled = output if self._piled is None else _joined(self._piled, output)
        self.on_ready()
        return len(piled.tokens)

    def fail(self, error: Exception) -> None:
        """Writer: the end. `error` is raised after received output was read."""
        if self._error is None and not (self._piled and self._piled.finish):
            self._error = error
            self.on_ready()

    def abort(self, reason: AbortReason) -> None:
        """The reader leaves; the core is told unless the request has ended. The first reason
        counts."""
        if self._left:
            return
        self._left = True
        self.on_ready()
        self._abort(self.id, reason)

    @property
    def ready(self) -> bool:
        """Prompt logprobs wait for the first tokens."""
        return bool(self._left or self._error or (self._piled and (self._piled.tokens or self._piled.finish)))

    def take(self) -> Output | None:
        """None once the reader has left."""
        if self._left:
            return None
        if self._error and not (self._piled and self._piled.tokens):
            raise self._error
        output = self._piled
        self._piled = None
        return output


def _joined(first: Output, second: Output) -> Output:
    added = {name: getattr(first, name) + getattr(second, name) for name in _ADDED}
    return msgspec.structs.replace(first, finish=second.finish, **added)
