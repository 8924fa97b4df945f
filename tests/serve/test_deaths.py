"""Probes every 20 ms while a process of the stack is killed or stopped: each has its answer within a bound."""

import asyncio
import contextlib
import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.stack.serve_process import Stack, command_line, wait

pytestmark = pytest.mark.serve

BODY = {"model": "nano-31b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
PERIOD_S = 0.02
LEAD_S = 0.5  # of probes before the blow
TAIL_S = 1.0  # and after the first answer of the next replica
GIVE_UP_S = 90.0
ROUNDS = 10
KILLED_S = 10.0
STOPPED_S = 13.0  # heartbeat_timeout_s more
STOPPED_REPLICA_S = 50.0  # Serve's health checks: three of health_check_timeout_s, and the pauses between them


@dataclass(frozen=True)
class Probe:
    """A request sent `sent` seconds after the blow, and its answer's status; 0: the connection ended, or nothing came in time."""

    sent: float
    took: float
    status: int
    retry_after: bool


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    print(f"\nready after {stack.start():.1f} s")
    yield stack
    stack.clean_up()


async def ask(port: int, blow: float, bound_s: float) -> Probe:
    """One probe on a connection of its own, given up after `bound_s`."""
    body = json.dumps(BODY).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    sent = time.monotonic()
    reply = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(bound_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                reply = await reader.read()
    status = int(reply[9:12]) if reply.startswith(b"HTTP/1.1 ") else 0
    return Probe(sent - blow, time.monotonic() - sent, status, b"\r\nretry-after:" in reply.lower())


def unanswered(probes: list[Probe]) -> list[Probe]:
    """Those without an answer that a client can act on: 200, or 503 with Retry-After."""
    return [probe for probe in probes if probe.status != 200 and not (probe.status == 503 and probe.retry_after)]


async def probes_around(stack: Stack, victim: str, blow: signal.Signals, bound_s: float) -> list[Probe]:
    """All of them, from a little before the blow until the next replica has answered for a while."""
    pid = stack.find(victim)[-1]
    strike = time.monotonic() + LEAD_S
    running = list[asyncio.Task[Probe]]()
    ended = list[Probe]()
    struck = False
    back = math.inf
    while time.monotonic() < back + TAIL_S:
        assert time.monotonic() < strike + GIVE_UP_S, f"no replica came\n{stack.said()}"
        if not struck and time.monotonic() >= strike:
            os.kill(pid, blow)
            struck = True
        running.append(asyncio.create_task(ask(stack.port, strike, bound_s)))
        await asyncio.sleep(PERIOD_S)
        ended += [task.result() for task in running if task.done()]
        running = [task for task in running if not task.done()]
        lost = max((probe.sent for probe in ended if probe.status == 503), default=math.inf)
        if back == math.inf and not command_line(pid) and any(probe.status == 200 and probe.sent > lost for probe in ended):
            back = time.monotonic()
    return ended + await asyncio.gather(*running)


def rounds(stack: Stack, victim: str, blow: signal.Signals, bound_s: float, count: int) -> None:
    """So many deaths, and what the probes saw of each."""
    for _ in range(count):
        wait(lambda: stack.chat(BODY).status_code == 200, 60, stack.said)
        seen = asyncio.run(probes_around(stack, victim, blow, bound_s))
        slowest = max(seen, key=lambda probe: probe.took)
        statuses = Counter(probe.status for probe in seen)
        print(f"\n{victim} {blow.name}: {len(seen)} probes, {dict(statuses)}, the slowest {slowest}")
        assert statuses[503], "the blow was not noticed"
        assert unanswered(seen) == []


def test_every_probe_of_a_killed_rank_is_answered(stack: Stack) -> None:
    """200, or 503 with Retry-After, within KILLED_S."""
    rounds(stack, "engine.rank.worker", signal.SIGKILL, KILLED_S, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("victim", "blow", "bound_s"),
    [
        ("engine.rank.worker", signal.SIGKILL, KILLED_S),
        ("engine.rank.worker", signal.SIGSTOP, STOPPED_S),
        ("engine.core.loop", signal.SIGKILL, KILLED_S),
        ("engine.core.loop", signal.SIGSTOP, STOPPED_S),
        ("ServeReplica", signal.SIGKILL, KILLED_S),
        ("ServeReplica", signal.SIGSTOP, STOPPED_REPLICA_S),
    ],
)
def test_every_probe_is_answered(stack: Stack, victim: str, blow: signal.Signals, bound_s: float) -> None:
    """Ten deaths of each kind: 200, or 503 with Retry-After, within the bound."""
    rounds(stack, victim, blow, bound_s, ROUNDS)


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
