"""An engine's stream as an async iterator, as tests and benchmarks read it; leaving the iteration aborts the request."""

import asyncio
from collections.abc import AsyncGenerator

from engine.front.stream import Stream
from engine.protocol import AbortReason, Output


async def outputs(stream: Stream) -> AsyncGenerator[Output]:
    """What has come since the last one, as one Output, up to the one with `finish`; raises what the stream raises."""
    try:
        while (output := await _next(stream)) is not None:
            yield output
            if output.finish is not None:
                return
    finally:
        stream.abort(AbortReason.client_gone)


async def _next(stream: Stream) -> Output | None:
    while not stream.ready:
        ready = asyncio.Event()
        stream.on_ready = ready.set
        await ready.wait()
    return stream.take()
