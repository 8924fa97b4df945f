"""One request's outputs on their way to their one reader.

The writer (an EngineClient, or a fake of it) pushes Outputs; what the reader has not taken piles up as one. The reader iterates, or
is called when there is something to `take`. It leaves by `abort`, by leaving the iteration for whatever cause, or by the end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import TracebackType
from typing import Self

from engine.protocol import AbortReason, FinishReason, Logprobs, Output, PromptLogprobs


class Stream:
    """One request as its one reader sees it: an async iterable of Output, the last of which has `finish`.

    Iterating raises InvalidRequest (refused), GenerationFailed (this request, or its reader was too slow) or EngineDead. After
    `abort` it ends without a word. `on_ready` is called, in the writer's turn, whenever there is more to take; the reader sets it.
    """

    def __init__(self, request: int, abort: Callable[[int, AbortReason], None]) -> None:
        self.id = request
        self._abort = abort
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._cached = 0
        self._finish: FinishReason | None = None
        self._error: Exception | None = None
        self._left = False
        self.on_ready: Callable[[], None] = _nobody_waits

    def push(self, output: Output) -> int:
        """The writer's side: more for the reader. Returns how many tokens it has not read; nothing piles up once it has left."""
        if self._left or self._error:
            return 0
        self._tokens += output.tokens
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs
        self._cached += output.cached
        self._finish = output.finish
        self.on_ready()
        return len(self._tokens)

    def fail(self, error: Exception) -> None:
        """The writer's side: nothing more comes. What has come may still be read, then `error` is raised."""
        if self._finish is None and self._error is None:
            self._error = error
            self.on_ready()

    def drop(self) -> None:
        """The writer's side: forget what has piled up."""
        self._tokens.clear()
        self._logprobs.clear()
        self._prompt_logprobs.clear()

    def abort(self, reason: AbortReason) -> None:
        """The reader leaves; the core is told, unless the request has ended. Idempotent: the first reason counts."""
        if self._left:
            return
        self._left = True
        self.on_ready()
        self._abort(self.id, reason)

    async def __aiter__(self) -> AsyncIterator[Output]:
        try:
            while not self._left and (output := await self.next()) is not None:
                yield output
                if output.finish is not None:
                    return
        finally:
            self.abort(AbortReason.client_gone)  # of one that has ended: no more than a flag

    async def next(self) -> Output | None:
        """What has come since the last call, for a reader that iterates; None once it has left. Raises as iterating does."""
        while not self.ready:
            waiter = asyncio.get_running_loop().create_future()
            self.on_ready = partial(_resolve, waiter)
            await waiter
        return self.take()

    @property
    def ready(self) -> bool:
        """Whether `take` gives something, or raises. Logprobs of the prompt wait for the first tokens, to come as a whole."""
        return bool(self._tokens or self._finish or self._left or self._error)

    def take(self) -> Output | None:
        """What has come since the last call, once it is `ready`; None once the reader has left. Raises as iterating does."""
        if self._left:
            return None
        if self._error and not self._tokens:
            raise self._error
        output = Output(
            id=self.id,
            tokens=self._tokens,
            logprobs=self._logprobs,
            finish=self._finish,
            cached=self._cached,
            prompt_logprobs=self._prompt_logprobs,
        )
        self._tokens, self._logprobs, self._prompt_logprobs, self._cached = [], [], [], 0
        return output

    async def aclose(self) -> None:
        """Leave, as contextlib.aclosing asks for it."""
        self.abort(AbortReason.client_gone)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort(AbortReason.client_gone)


def _nobody_waits() -> None:
    """What `on_ready` is while the reader is busy with something else: it will look."""


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
