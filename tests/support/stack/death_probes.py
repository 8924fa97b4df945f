"""Probes every 20 ms while a process of a stack is killed or stopped: each must have its answer within a bound."""

import asyncio
import contextlib
import json
import math
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass

from tests.support.stack.serve_process import Stack, command_line, wait

BODY = {"model": "nano-31b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
PERIOD_S = 0.02
LEAD_S = 0.5  # of probes before the blow
TAIL_S = 1.0  # and after the first answer of the next replica
GIVE_UP_S = 90.0
# Within which every probe is answered: heartbeat_timeout_s more for a process that is stopped.
ANSWERED_S = {signal.SIGKILL: 10.0, signal.SIGSTOP: 13.0}


@dataclass(frozen=True)
class Probe:
    """A request sent `sent` seconds after the blow, and its answer's status; 0: the connection ended, or nothing came in time."""

    sent: float
    took: float
    status: int
    retry_after: bool


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


async def probes_around(stack: Stack, victim: str, blow: signal.Signals, bound_s: float) -> tuple[float, list[Probe]]:
    """The time of the blow (monotonic), and all probes: from a little before it until a replica has answered for a while."""
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
    return strike, ended + await asyncio.gather(*running)


def rounds(stack: Stack, victim: str, blow: signal.Signals, bound_s: float, count: int) -> None:
    """So many deaths, and what the probes saw of each."""
    for _ in range(count):
        wait(lambda: stack.chat(BODY).status_code == 200, 60, stack.said)
        _, seen = asyncio.run(probes_around(stack, victim, blow, bound_s))
        slowest = max(seen, key=lambda probe: probe.took)
        statuses = Counter(probe.status for probe in seen)
        print(f"\n{victim} {blow.name}: {len(seen)} probes, {dict(statuses)}, the slowest {slowest}")
        assert statuses[503], "the blow was not noticed"
        assert unanswered(seen) == []
