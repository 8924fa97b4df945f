"""Every process of the stack is killed or stopped ten times under probes: each probe has its answer within a bound."""

import asyncio
import signal
import time

import pytest

from tests.support.stack.death_probes import ANSWERED_S, Probe, ask, rounds, unanswered
from tests.support.stack.serve_process import Stack

pytestmark = pytest.mark.serve

ROUNDS = 10
STOPPED_REPLICA_S = 50.0  # Serve's health checks: three of health_check_timeout_s, and the pauses between them


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("victim", "blow", "bound_s"),
    [
        ("engine.rank.worker", signal.SIGKILL, ANSWERED_S[signal.SIGKILL]),
        ("engine.rank.worker", signal.SIGSTOP, ANSWERED_S[signal.SIGSTOP]),
        ("engine.core.loop", signal.SIGKILL, ANSWERED_S[signal.SIGKILL]),
        ("engine.core.loop", signal.SIGSTOP, ANSWERED_S[signal.SIGSTOP]),
        ("ServeReplica", signal.SIGKILL, ANSWERED_S[signal.SIGKILL]),
        ("ServeReplica", signal.SIGSTOP, STOPPED_REPLICA_S),
    ],
)
def test_every_probe_is_answered(shared_stack: Stack, victim: str, blow: signal.Signals, bound_s: float) -> None:
    """Ten deaths of each kind: 200, or 503 with Retry-After, within the bound."""
    rounds(shared_stack, victim, blow, bound_s, ROUNDS)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"HTTP/1.1 500 Internal Server Error\r\n\r\n"])
def test_silence_is_caught(said: bytes) -> None:
    """The planted fault: a server that says nothing, or nothing that a client can act on."""

    async def probe() -> Probe:
        over = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if said:
                writer.write(said)
            else:
                await reader.read()  # until the client has given up
            writer.close()
            await writer.wait_closed()
            over.set()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            seen = await ask(server.sockets[0].getsockname()[1], time.monotonic(), 0.3)
            await over.wait()
            return seen

    found = asyncio.run(probe())
    assert unanswered([found]) == [found]
